"""The most telling part of a run, kept while the run goes on: a million requests need no trace in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cbserve.core.metrics import EventFold
from cbserve.core.trace import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Forked,
    Left,
    Preempted,
    Refused,
    StepEvent,
    StepRow,
    Trace,
)

STEPS, BEFORE, SLOTS = 60, 20, 16  # shown; steps of them that lead to the moment
KINDS = ("preemption", "queue", "running")  # the first preemption, where most wait, where most run: as they come first


@dataclass(frozen=True)
class Part:
    """Some steps around a moment of a run, and one step more where the run goes on.

    Attributes:
        kind: one of `KINDS`.
        count: how many wait or run at the moment.
        time_s: the moment.
        first_step, last_step: what to show.
        trace: single steps, and what was decided about the sequences that have rows in them.
        slots: those with the most to show.
    """

    kind: str
    count: int
    time_s: float
    first_step: int
    last_step: int
    trace: Trace
    slots: list[int]


@dataclass(slots=True)
class _Stretch:
    """At least `STEPS` steps in a row. The first step event tells all of its rows."""

    first_step: int
    begun: list[Event] = field(default_factory=list)  # how the sequences came to run that ran before
    events: list[Event] = field(default_factory=list)
    has_steps: bool = False


@dataclass(slots=True)
class _Moment:
    count: int
    step: int
    time_s: float
    stretches: list[_Stretch]  # the one before it, its own, and the one behind
    is_open: bool = True  # its own stretch goes on


class TellingPart(EventFold):
    """Takes events in order, spans as they are; holds a few stretches of them, and what is under way."""

    __slots__ = (
        "_arrivals", "_begun", "_going", "_is_done", "_keep", "_last_step", "_moments", "_most", "_stretches", "_until",
    )  # fmt: skip

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrived] = {}  # of requests in the queue
        self._begun: dict[int, tuple[Event, ...]] = {}  # of sequences with a slot: how they came to it
        self._going: dict[int, tuple[StepRow, int]] = {}  # who got a token in the last step: as told, and in which step
        self._stretches = [_Stretch(0)]  # the last two
        self._keep, self._until = self._stretches[-1].events.append, STEPS  # of the last one: for this step on another
        self._moments: dict[str, _Moment] = {}
        self._most = {"queue": 0, "running": 0}
        self._last_step = -1
        self._is_done = False  # nothing that comes is more telling

    def add(self, event: Event) -> None:
        if getattr(event, "step", -1) >= self._until:
            self._next_stretch(event.step)  # type: ignore[attr-defined]
        if not self._is_done:
            super().add(event)

    def _next_stretch(self, step: int) -> None:
        preemption = self._moments.get("preemption")
        self._is_done = preemption is not None and not preemption.is_open
        begun = {id(event): event for events in self._begun.values() for event in events}  # samples share some
        stretch = _Stretch(step, [*begun.values()])
        self._stretches = [self._stretches[-1], stretch]
        self._keep, self._until = stretch.events.append, step + STEPS
        for moment in self._moments.values():
            if moment.is_open:
                moment.stretches.append(stretch)
                moment.is_open = False

    def _note(self, kind: str, count: int, step: int, time_s: float) -> None:
        if "preemption" not in self._moments:
            self._most[kind] = count
            self._moments[kind] = _Moment(count, step, time_s, [*self._stretches])

    def _arrived(self, event: Arrived) -> None:
        self._arrivals[event.request_id] = event

    def _refused(self, event: Refused) -> None:
        self._arrivals.pop(event.request_id, None)

    def _admitted(self, event: Admitted) -> None:
        if not event.resumed:
            arrived = self._arrivals.pop(event.request_id)
            self._begun[event.seq_id] = arrived, event
            self._keep(arrived)
        self._keep(event)

    def _forked(self, event: Forked) -> None:
        self._begun[event.seq_id] = *self._begun[event.parent_id], event
        self._keep(event)

    def _preempted(self, event: Preempted) -> None:
        self._note("preemption", 1, event.step, event.time_s)
        self._going.pop(event.seq_id, None)
        self._keep(event)

    def _finished(self, event: Finished) -> None:
        self._going.pop(event.seq_id, None)
        self._arrivals.pop(event.request_id, None)  # aborted while it waited
        self._keep(event)

    def _left(self, event: Left) -> None:
        self._begun.pop(event.seq_id, None)
        self._keep(event)

    def _computed(self, event: StepEvent) -> None:
        self._last_step = event.step + event.count - 1
        if event.num_waiting > self._most["queue"]:
            self._note("queue", event.num_waiting, event.step, event.start_s)
        if event.num_running > self._most["running"]:
            self._note("running", event.num_running, event.step, event.start_s)
        stretch = self._stretches[-1]
        if event.num_steady and not stretch.has_steps:
            self._keep(replace(event, rows=(*self._steady(event.step), *event.rows), num_steady=0))
        else:
            self._keep(event)
        stretch.has_steps = True
        if not event.num_steady:
            self._going.clear()
        for row in event.rows:
            if row.num_sampled and row.kind != "padding":
                self._going[row.seq_id] = row, event.step

    def _steady(self, step: int) -> list[StepRow]:
        return [
            row._replace(kind="decode", num_tokens=1, context_len=row.context_len + step - told)
            for row, told in self._going.values()
        ]

    def part(self, meta: Mapping[str, Any]) -> Part | None:
        """The first preemption, else where most wait, else where most run; None: no step ran.

        Args:
            meta: of the run's trace.
        """
        kind = next((kind for kind in KINDS if kind in self._moments), None)
        if kind is None:
            return None
        moment = self._moments[kind]
        first = max(0, min(moment.step - BEFORE, self._last_step + 1 - STEPS))
        last = min(first + STEPS - 1, self._last_step)
        events = [*moment.stretches[0].begun, *(event for part in moment.stretches for event in part.events)]
        trace = _shown(Trace(dict(meta), events), first, last + 1)
        return Part(kind, moment.count, moment.time_s, first, last, trace, _slots(trace, first))


TellingPart.takes = {
    Arrived: TellingPart._arrived, Refused: TellingPart._refused, Admitted: TellingPart._admitted,
    Forked: TellingPart._forked, Preempted: TellingPart._preempted, Finished: TellingPart._finished,
    Left: TellingPart._left, StepEvent: TellingPart._computed,
}  # fmt: skip


def _shown(trace: Trace, first: int, last: int) -> Trace:
    """Single steps from first to last, without what concerns only sequences that have no row in them."""
    events: list[Event] = []
    for event in trace:
        step = getattr(event, "step", -1)
        if step > last:
            break
        if not isinstance(event, StepEvent) or step >= first:
            events.append(event)
    seq_ids = {row.seq_id for event in events if isinstance(event, StepEvent) for row in event.rows}
    seq_ids |= {event.parent_id for event in events if isinstance(event, Forked) and event.seq_id in seq_ids}
    requests = {e.request_id for e in events if isinstance(e, Admitted | Forked) and e.seq_id in seq_ids}
    return Trace(
        trace.meta | {"fast_forward": False},
        [
            event
            for event in events
            if isinstance(event, StepEvent)
            or (event.request_id in requests if isinstance(event, Arrived) else getattr(event, "seq_id", -1) in seq_ids)
        ],
    )


def _slots(trace: Trace, first: int) -> list[int]:
    """At most `SLOTS`: first where somebody was preempted, then where most came and went."""
    changes = Counter({row.slot: 0 for step in trace.steps for row in step.rows})
    for event in trace.events:
        if isinstance(event, Admitted | Preempted | Left) and event.step >= first:
            changes[event.slot] += 1000 if isinstance(event, Preempted) else 1
    return sorted(sorted(changes, key=lambda slot: (-changes[slot], slot))[:SLOTS])
