"""How a run began: the part of it that a timeline has room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from cbserve.core.trace import Admitted, Arrived, Event, Forked, StepEvent, Trace

STEPS, SLOTS = 60, 16


class Beginning:
    """Takes events in order and keeps those of the first steps.

    Args:
        num_steps: one more than is shown by default, so that the part is not taken for the whole.
        num_slots: so many slots, from the first on.
    """

    def __init__(self, num_steps: int = STEPS + 1, num_slots: int = SLOTS) -> None:
        self.num_steps, self.num_slots = num_steps, num_slots
        self._events: list[Event] = []
        self._is_over = False

    def add(self, event: Event) -> None:
        self._is_over = self._is_over or not self._is_early(event)
        if not self._is_over:
            self._events.append(event)

    def _is_early(self, event: Event) -> bool:
        return getattr(event, "step", -1) < self.num_steps

    def trace(self, meta: Mapping[str, Any]) -> Trace:
        """Single steps, their rows in the first slots alone, and the events of the requests there.

        Args:
            meta: of the run's trace.
        """
        events = list(takewhile(self._is_early, Trace(dict(meta), self._events)))  # the last span may reach beyond
        began = [event for event in events if isinstance(event, Admitted | Forked)]
        elsewhere = {event.seq_id for event in began if event.slot >= self.num_slots}
        here = {event.seq_id: event.request_id for event in began if event.seq_id not in elsewhere}
        requests = set(here.values())
        kept: list[Event] = [event for event in events if isinstance(event, Arrived) and event.request_id in requests]
        slots = 1
        for event in events:
            if isinstance(event, StepEvent):
                rows = tuple(row for row in event.rows if row.seq_id in here)
                kept.append(replace(event, rows=rows))
                slots = max([slots, *(row.slot + 1 for row in rows)])
            elif getattr(event, "seq_id", None) in here:
                kept.append(event)
        return Trace({**meta, "num_slots": slots, "fast_forward": False}, kept)
