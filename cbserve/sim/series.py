"""What a run looked like over time: one pass over its events, spans of steps taken as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from cbserve.core.metrics import beginnings_known
from cbserve.core.plan import Ramp
from cbserve.core.trace import Admitted, Arrived, Event, Finished, Forked, Preempted, StepEvent, Trace

Piece = tuple[float, float, float, float]  # from, to (seconds), value there, value there


@dataclass
class Series:
    """Times in seconds. A span's blocks grow evenly, as in `RunFold`."""

    ttft: list[tuple[float, float]] = field(default_factory=list)  # (arrival, TTFT) in order of first tokens
    gaps: Counter[float] = field(default_factory=Counter)  # ITL, to the microsecond -> how many
    running: list[Piece] = field(default_factory=list)
    waiting: list[Piece] = field(default_factory=list)
    used_blocks: list[Piece] = field(default_factory=list)


@beginnings_known()
def series(events: Iterable[Event]) -> Series:
    """Fold a trace's events. Raises TraceError when a request began before them."""
    found = Series()
    arrivals: dict[str, float] = {}
    asked: dict[int, float] = {}  # seq_id -> when its request arrived, until its first token
    going: set[int] = set()  # sequences that got a token in the last step
    paused: dict[int, float] = {}  # of the others, when they got their last one
    end = 0.0
    for event in events:
        if isinstance(event, StepEvent):
            durations = list(Ramp(event.ramp).durations()) if event.count > 1 else [event.end_s - event.start_s]
            first_end = event.start_s + durations[0]
            sampled = {row.seq_id for row in event.rows if row.num_sampled}
            steady = len(going) if event.num_steady else 0  # these rows are not told one by one
            gap = round(first_end - end, 6)
            if steady:
                found.gaps[gap] += steady
            for seq_id in sampled:
                if seq_id in going:
                    found.gaps[gap] += 1
                elif (before := paused.pop(seq_id, None)) is not None:
                    found.gaps[round(first_end - before, 6)] += 1
                else:
                    arrival = asked.pop(seq_id)
                    found.ttft.append((arrival, first_end - arrival))
            if (given := steady + len(sampled)) and event.count > 1:
                for duration in durations[1:]:
                    found.gaps[round(duration, 6)] += given
            if not steady:
                paused |= dict.fromkeys(going - sampled, end)
                going.clear()
            going |= sampled
            a, b, end = event.start_s, event.end_s, event.end_s
            found.running.append((a, b, event.num_running, event.num_running))
            found.waiting.append((a, b, event.num_waiting, event.num_waiting))
            more = max(event.num_used_blocks, event.last_used_blocks)
            found.used_blocks.append((a, b, event.num_used_blocks, more))
        elif isinstance(event, Arrived):
            arrivals[event.request_id] = event.time_s
        elif isinstance(event, Admitted):
            if not event.resumed:
                asked[event.seq_id] = arrivals[event.request_id]
        elif isinstance(event, Forked):  # its first token came with the step that has just ended
            arrival = arrivals[event.request_id]
            found.ttft.append((arrival, end - arrival))
            going.add(event.seq_id)
        elif isinstance(event, Preempted):
            if event.seq_id in going:
                going.remove(event.seq_id)
                paused[event.seq_id] = end
        elif isinstance(event, Finished):
            going.discard(event.seq_id)
            for known in (paused, asked):
                known.pop(event.seq_id, None)
    return found


def over_time(pieces: Iterable[Piece], low: float, high: float, num_bins: int) -> list[float]:
    """The mean of a value within each of `num_bins` equal parts of low..high; 0 where nothing ran."""
    width = (high - low) / num_bins
    sums = [0.0] * num_bins
    for start, end, first, last in pieces:
        slope = (last - first) / (end - start) if end > start else 0.0
        k = min(num_bins - 1, max(0, int((start - low) / width)))
        while start < end:
            until = end if k >= num_bins - 1 else min(end, low + (k + 1) * width)
            middle = (start + until) / 2
            if until > start:
                sums[k] += (until - start) * (last - slope * (end - middle))
            start, k = until, min(k + 1, num_bins - 1)
    return [total / width for total in sums]


def evenly(counts: Counter[float], most: int) -> list[float]:
    """At most `most` values that stand evenly over all ranks: a sample with the same distribution."""
    total = sum(counts.values())
    taken = min(total, most)
    ranks = iter((2 * i + 1) * total / (2 * taken) for i in range(taken)) if taken else iter(())
    values: list[float] = []
    seen, rank = 0, next(ranks, None)
    for value in sorted(counts):
        seen += counts[value]
        while rank is not None and rank <= seen:
            values.append(value)
            rank = next(ranks, None)
    return values


def beginning(trace: Trace, num_steps: int, num_slots: int) -> Trace:
    """The first steps of a run, of its first slots only: a part that a timeline has room for."""
    events = list(takewhile(lambda event: getattr(event, "step", -1) < num_steps, trace))
    elsewhere = {e.seq_id for e in events if isinstance(e, Admitted | Forked) and e.slot >= num_slots}
    here = {e.seq_id: e.request_id for e in events if isinstance(e, Admitted | Forked) and e.seq_id not in elsewhere}
    kept: list[Event] = [e for e in events if isinstance(e, Arrived) and e.request_id in set(here.values())]
    slots = 1
    for event in events:
        if isinstance(event, StepEvent):
            rows = tuple(row for row in event.rows if row.seq_id in here)
            kept.append(replace(event, rows=rows))
            slots = max([slots, *(row.slot + 1 for row in rows)])
        elif getattr(event, "seq_id", None) in here:
            kept.append(event)
    return Trace(trace.meta | {"num_slots": slots, "fast_forward": False}, kept)
