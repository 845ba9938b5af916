"""Telling moments of a run: the parts of it that a timeline has room for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace

from cbserve.core.trace import Event, Preempted, StepEvent, Trace
from cbserve.viz.findings import plural
from cbserve.viz.style import number

NUM_STEPS = 120  # of a part
BEFORE = 30  # of them lead to the moment


@dataclass(frozen=True)
class Moment:
    """A part of a run in single steps, of the requests that it shows alone, and one step more, so that it is not taken
    for the whole run."""

    kind: str  # "preemption", "queue" or "start"
    name: str
    first_step: int
    trace: Trace = field(repr=False)

    @property
    def last_step(self) -> int:
        return self.first_step + NUM_STEPS - 1


def moments(trace: Trace) -> Generator[None, None, list[Moment]]:
    """The first preemption, where most wait, and the beginning: the most telling first, and those that there are.

    Takes as long as the run is, so it yields after every step; returns what it found.
    """
    found = _starts(trace)
    parts: list[list[Event]] = [[] for _ in found]
    last = max(moment.last_step for moment in found) + 1
    for event in trace:
        step = getattr(event, "step", -1)
        if step > last:
            break
        is_step = isinstance(event, StepEvent)
        for moment, part in zip(found, parts, strict=True):
            if step <= moment.last_step + 1 and (not is_step or step >= moment.first_step):
                part.append(event)
        if is_step:
            yield
    meta = trace.meta | {"fast_forward": False}
    return [
        replace(moment, trace=Trace(meta, _shown(part, moment.first_step)))
        for moment, part in zip(found, parts, strict=True)
    ]


def _starts(trace: Trace) -> list[Moment]:
    """Where the parts begin; their traces are still empty."""
    steps = [event for event in trace.events if isinstance(event, StepEvent)]
    found: list[Moment] = []

    def note(kind: str, name: str, step: int) -> None:
        found.append(Moment(kind, name, max(0, step - BEFORE), Trace()))

    preempted = next((event for event in trace.events if isinstance(event, Preempted)), None)
    if preempted is not None:
        note("preemption", f"first preemption, second {number(preempted.time_s)}", preempted.step)
    worst = max(steps, key=lambda step: step.num_waiting, default=None)
    if worst is not None and worst.num_waiting:
        name = f"most waiting: {plural(worst.num_waiting, 'request')}, second {number(worst.start_s)}"
        note("queue", name, worst.step)
    note("start", "the beginning", 0)
    return found


def _shown(events: list[Event], first_step: int) -> list[Event]:
    """Without what concerns only requests that have no row and no decision from `first_step` on."""
    shown = [event for event in events if getattr(event, "step", -1) >= first_step]
    seq_ids = {row.seq_id for event in shown if isinstance(event, StepEvent) for row in event.rows}
    seq_ids |= {event.seq_id for event in shown if hasattr(event, "seq_id")}
    here = {event.request_id for event in events if getattr(event, "seq_id", None) in seq_ids}
    return [event for event in events if isinstance(event, StepEvent) or getattr(event, "request_id", None) in here]
