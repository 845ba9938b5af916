"""From a trace to what a timeline draws: spans of equal steps, names of requests, one record for each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cbserve.core.metrics import beginnings_known
from cbserve.core.trace import Admitted, Arrived, Finished, Forked, Left, Preempted, StepEvent, Trace
from cbserve.viz.style import index_of_letter, letter


@dataclass(slots=True)
class Span:
    """Consecutive steps in which a slot did the same for the same sequence."""

    request_id: str
    seq_id: int
    slot: int
    kind: str  # "prefill", "decode", "padding", or "held": the slot is taken, but nothing was computed for it
    first: int  # steps, both included
    last: int
    num_tokens: int = 0  # computed
    num_sampled: int = 0
    recomputes: bool = False  # a prefill of what a preemption lost

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1


@dataclass(slots=True)
class Record:
    """One sequence in steps; None where it did not get so far."""

    request_id: str
    seq_id: int
    slots: list[int]
    admitted: int | None = None
    first_token: int | None = None
    finished: int | None = None
    left: int | None = None
    num_tokens: int = 0
    num_preemptions: int = 0


@beginnings_known()
def spans(trace: Trace) -> list[Span]:
    """All spans, in order of their first step. Raises TraceError when a request began before the trace."""
    found: list[Span] = []
    open_: dict[int, Span] = {}  # by slot
    owners: dict[int, str] = {}
    recomputing: set[int] = set()
    for event in trace:
        if isinstance(event, StepEvent):
            for row in event.rows:
                last = open_.get(row.slot)
                if (
                    last is not None
                    and last.seq_id == row.seq_id
                    and last.kind == row.kind
                    and last.last == event.step - 1
                ):
                    last.last = event.step
                    last.num_tokens += row.num_tokens
                    last.num_sampled += row.num_sampled
                    continue
                if last is not None and last.seq_id == row.seq_id:
                    _hold(found, last, event.step)
                span = Span(
                    owners[row.seq_id],
                    row.seq_id,
                    row.slot,
                    row.kind,
                    event.step,
                    event.step,
                    row.num_tokens,
                    row.num_sampled,
                )
                span.recomputes = row.kind == "prefill" and row.seq_id in recomputing
                open_[row.slot] = span
                found.append(span)
        elif isinstance(event, Admitted):
            owners[event.seq_id] = event.request_id
            if event.resumed and not event.num_swapped_blocks:
                recomputing.add(event.seq_id)
        elif isinstance(event, Forked):
            owners[event.seq_id] = event.request_id
        elif isinstance(event, Preempted) and event.slot in open_:
            _hold(found, open_.pop(event.slot), event.step)
        elif isinstance(event, Left):
            open_.pop(event.slot, None)
    return found


def _hold(found: list[Span], last: Span, step: int) -> None:
    """Note that a slot was held without a row from the end of `last` to `step`."""
    if last.last + 1 < step:
        found.append(Span(last.request_id, last.seq_id, last.slot, "held", last.last + 1, step - 1))


@beginnings_known()
def records(trace: Trace) -> list[Record]:
    """One record for each sequence that was admitted, in order of admission. Raises TraceError as `spans` does."""
    found: dict[int, Record] = {}
    for event in trace:
        if isinstance(event, Admitted):
            record = found.setdefault(event.seq_id, Record(event.request_id, event.seq_id, [], event.step))
            if event.slot not in record.slots:
                record.slots.append(event.slot)
        elif isinstance(event, StepEvent):
            for row in event.rows:
                if row.num_sampled:
                    _give(found[row.seq_id], event.step)
        elif isinstance(event, Forked):
            found[event.seq_id] = Record(event.request_id, event.seq_id, [event.slot], found[event.parent_id].admitted)
            _give(found[event.seq_id], event.step)
        elif isinstance(event, Preempted):
            found[event.seq_id].num_preemptions += 1
        elif isinstance(event, Finished) and event.seq_id in found:
            found[event.seq_id].finished = event.step
        elif isinstance(event, Left) and event.seq_id in found:
            found[event.seq_id].left = event.step
    return list(found.values())


def _give(record: Record, step: int) -> None:
    record.num_tokens += 1
    if record.first_token is None:
        record.first_token = step


def order_of_arrival(traces: Iterable[Trace]) -> dict[str, int]:
    """request_id -> its place in the order of arrival; a request of several traces has one place.

    Requests that already have letters for names ("A", "B", .., "A1", as `serve` gives them) keep those.
    """
    return order_of_ids(dict.fromkeys(event.request_id for trace in traces for event in trace.of(Arrived, Admitted)))


def order_of_ids(ids: Iterable[str]) -> dict[str, int]:
    """The same for ids that stand in order of arrival."""
    ids = list(ids)
    lettered = {request_id: index_of_letter(request_id) for request_id in ids}
    if all(index is not None for index in lettered.values()):
        return {request_id: index for request_id, index in lettered.items() if index is not None}
    return {request_id: index for index, request_id in enumerate(ids)}


def letters(order: Mapping[str, int], names: Mapping[str, str] | None = None) -> dict[str, str]:
    """request_id -> what stands on its bar: `names`, else a letter by order of arrival."""
    return {request_id: str((names or {}).get(request_id, letter(index))) for request_id, index in order.items()}


def cut(trace: Trace, first: int, last: int) -> Trace:
    """The part of a trace with the steps first..last, and what was decided before and in them."""
    kept = [
        event
        for event in trace
        if getattr(event, "step", -1) <= last and (not isinstance(event, StepEvent) or event.step >= first)
    ]
    return Trace(trace.meta, kept)
