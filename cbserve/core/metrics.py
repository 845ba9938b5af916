"""What a trace says about speed and use: folds over its events, nothing else keeps statistics.

TTFT: arrival to first token. ITL: the gap between two tokens, one value for each gap. E2E: arrival to last token.
TPOT: (E2E - TTFT) / (tokens - 1), one value for each sequence; its percentiles differ from those of ITL, because one
stall is one large gap but a small change of a mean. Queue time: arrival to first admission.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import Any, ClassVar

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer
from cbserve.core.trace import Admitted, Arrived, Event, Finished, Forked, Preempted, StepEvent, Trace, TraceError

_FEW, _PARTS = 10_000, 1024  # values that are sorted at once; parts of their range that are told apart


def no_beginning(unknown: KeyError) -> TraceError:
    """A fold met a request, or a sequence, of which it has seen no beginning."""
    key = unknown.args[0]
    who = f"request {key!r}" if isinstance(key, str) else f"sequence {key!r}"
    return TraceError(
        f"{who} was under way when this trace began, so its times are unknown; begin the trace (Engine.new_trace, a "
        "listener) while no request is unfinished, and do not cut off its start. slot_utilisation and occupancy do "
        "without"
    )


class EventFold:
    """A fold that takes events one by one, each type by the method that `takes` names; others are left out."""

    __slots__ = ()
    takes: ClassVar[Mapping[type[Event], Callable[[Any, Any], None]]] = {}

    def add(self, event: Event) -> None:
        """Take in the next event. Raises TraceError when it is of a request that began before the first one."""
        take = self.takes.get(type(event))
        if take is None:
            return
        try:
            take(self, event)
        except KeyError as error:
            raise no_beginning(error) from error


@contextmanager
def beginnings_known() -> Iterator[None]:
    """Around a fold, or decorating it: raises TraceError where a request that it looks up began before the trace."""
    try:
        yield
    except KeyError as error:
        raise no_beginning(error) from error


@dataclass(slots=True)
class SequenceMetrics:
    """One sample of one request. Times in seconds; None when it never got that far."""

    request_id: str
    seq_id: int
    sample_index: int
    arrival_s: float
    num_prompt_tokens: int
    priority: int = 0
    client_id: str = ""
    admitted_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    finish_reason: str | None = None
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        times = self.token_times_s
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token, which has no gap."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@beginnings_known()
def sequence_metrics(events: Iterable[Event]) -> list[SequenceMetrics]:
    """One record for each sequence that was admitted, or aborted while it waited, in order of admission.

    Raises:
        TraceError: a request began before the trace.
    """
    arrivals: dict[str, Arrived] = {}
    records: dict[int, SequenceMetrics] = {}
    children: dict[int, list[int]] = {}  # parent -> samples forked by the step that has just ended
    last_step: StepEvent | None = None
    for event in events:
        if isinstance(event, Arrived):
            arrivals[event.request_id] = event
        elif isinstance(event, Admitted):
            if event.seq_id not in records:
                records[event.seq_id] = _record(arrivals[event.request_id], event.seq_id, 0)
                records[event.seq_id].admitted_s = event.time_s
        elif isinstance(event, StepEvent):
            last_step = event
            for row in event.rows:
                if row.num_sampled:
                    records[row.seq_id].token_times_s.append(event.end_s)
        elif isinstance(event, Forked):
            child = _record(arrivals[event.request_id], event.seq_id, event.sample_index)
            child.admitted_s = records[event.parent_id].admitted_s
            if last_step is not None:
                child.token_times_s.append(last_step.end_s)
            records[event.seq_id] = child
            children.setdefault(event.parent_id, []).append(event.seq_id)
        elif isinstance(event, Preempted):
            records[event.seq_id].num_preemptions += 1
        elif isinstance(event, Finished):
            if event.seq_id not in records:  # aborted while it waited
                records[event.seq_id] = _record(arrivals[event.request_id], event.seq_id, 0)
            records[event.seq_id].finished_s = event.time_s
            records[event.seq_id].finish_reason = event.reason
    return list(records.values())


def _record(arrived: Arrived, seq_id: int, sample_index: int) -> SequenceMetrics:
    return SequenceMetrics(
        arrived.request_id, seq_id, sample_index, arrived.time_s, arrived.num_prompt_tokens, arrived.priority,
        arrived.client_id,
    )  # fmt: skip


def slot_utilisation(trace: Trace, num_slots: int | None = None) -> float:
    """Slot-steps that gave a useful token / (slots x steps), over the whole run: sum over sum, no mean of ratios.

    The step that ends a prefill counts as one. [10, 100, 500] in one static batch: 610 / 1500 = 40.67 %.
    """
    return _share(trace, num_slots, [row.num_sampled for step in trace.steps for row in step.rows])


def occupancy(trace: Trace, num_slots: int | None = None) -> float:
    """Slot-steps that held an unfinished request / (slots x steps). A slot in mid-prefill is occupied but gives no
    token; nor does one that has no row in a step, because prefills go first."""
    rows = [[row for row in step.rows if row.kind != "padding"] for step in trace.steps]
    without = [max(0, step.num_running - len(own)) for step, own in zip(trace.steps, rows, strict=True)]
    return _share(trace, num_slots, [*without, *(max(1, row.num_sampled) for own in rows for row in own)])


def prefix_hit_rate(trace: Trace) -> float | None:
    """Prompt tokens that were found in the prefix cache / prompt tokens that were looked up. A request counts once,
    when it
    is first admitted. None when nothing was looked up, which is not the same as no hit. Raises TraceError when a
    request's `arrived` event is missing."""
    if not trace.meta.get("prefix_caching"):
        return None
    lengths = {event.request_id: event.num_prompt_tokens for event in trace.of(Arrived)}
    first = [event for event in trace.of(Admitted) if not event.resumed]
    with beginnings_known():
        queried = sum(lengths[event.request_id] for event in first)
    return sum(event.num_cached_tokens for event in first) / queried if queried else None


def tail_waste(trace: Trace) -> float:
    """Share of the used blocks' tokens that hold nothing, because a last block is not full: pooled over steps. Blocks
    that
    sequences share count once for each."""
    size = _of_meta(trace, "block_size")
    used = [(row.context_len, -(-row.context_len // size) * size) for step in trace.steps for row in step.rows]
    return 1 - sum(held for held, _ in used) / sum(room for _, room in used) if used else math.nan


def _share(trace: Trace, num_slots: int | None, counts: list[int]) -> float:
    steps = trace.steps
    slots = slots_of(trace, num_slots) if steps or num_slots is not None else 1
    return sum(counts) / (slots * len(steps)) if steps else math.nan


def slots_of(trace: Trace, num_slots: int | None) -> int:
    """`num_slots`, or the trace's own number. Raises InvalidRequestError, as `slot_utilisation` says."""
    return _of_meta(trace, "num_slots") if num_slots is None else integer("num_slots", num_slots, 1)


def _of_meta(trace: Trace, name: str) -> int:
    try:
        return int(trace.meta[name])
    except (KeyError, TypeError, ValueError):
        raise InvalidRequestError(f"the trace does not say {name}; take one that an engine has written") from None


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _require_share(q: float) -> None:
    if not 0 <= q <= 100:
        raise InvalidRequestError(f"q={q!r}: a percentile is asked for in 0..100")


def percentile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default. Raises InvalidRequestError unless `q` is in
    0..100."""
    _require_share(q)
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def weighted_percentile(values: Sequence[float], counts: Sequence[int], q: float) -> float:
    """As `percentile` of a list in which each value stands `count` times."""
    _require_share(q)
    total = sum(counts)
    if not total:
        return math.nan
    at = (total - 1) * q / 100
    low = math.floor(at)
    below = above = _at_rank(values, counts, low)
    if sum(count for value, count in zip(values, counts, strict=True) if value <= below) == low + 1:
        above = min((v for v, count in zip(values, counts, strict=True) if v > below and count), default=below)
    return below + (above - below) * (at - low)


def _at_rank(values: Sequence[float], counts: Sequence[int], rank: int) -> float:
    """The value at `rank`, from 0. Only a few are sorted: a sorted list of millions takes more than a long run."""
    while (least := min(values)) < (most := max(values)) and len(values) > _FEW:
        held = [0] * (_PARTS + 1)
        for value, count in zip(values, counts, strict=True):
            held[int(_PARTS * ((value - least) / (most - least)))] += count
        part = 0
        while rank >= held[part]:
            rank -= held[part]
            part += 1
        here = bytes(int(_PARTS * ((value - least) / (most - least))) == part for value in values)
        values, counts = array("d", compress(values, here)), array("q", compress(counts, here))
    if least == most:
        return least
    ordered = sorted(zip(values, counts, strict=True))
    ends = accumulate(count for _, count in ordered)
    return next(value for (value, _), end in zip(ordered, ends, strict=True) if rank < end)
