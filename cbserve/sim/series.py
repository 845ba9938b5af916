"""What a run looked like over time, folded over its events one by one: a million requests need no trace in memory."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from cbserve.core.metrics import EventFold
from cbserve.core.plan import Ramp
from cbserve.core.trace import Admitted, Arrived, Finished, Forked, Preempted, Refused, StepEvent
from cbserve.sim.over_time import OverTime


@dataclass(slots=True)
class Series(EventFold):
    """Takes events in order, spans as they are: their blocks grow evenly, as in `RunFold`. Times in seconds.

    `arrival_s` and `ttft_s` hold one value for each sequence, in order of first tokens.
    """

    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    gaps: Counter[float] = field(default_factory=Counter)  # ITL, as `five_digits` has it -> how many
    running: OverTime = field(default_factory=OverTime)
    waiting: OverTime = field(default_factory=OverTime)
    used_blocks: OverTime = field(default_factory=OverTime)
    _arrivals: dict[str, float] = field(default_factory=dict)  # of requests in the queue
    _asked: dict[int, float] = field(default_factory=dict)  # of sequences from admission to end: when they arrived
    _going: set[int] = field(default_factory=set)  # sequences that got a token in the last step
    _paused: dict[int, float] = field(default_factory=dict)  # of the others, when they got their last one
    _last_end_s: float = 0.0

    def _arrived(self, event: Arrived) -> None:
        self._arrivals[event.request_id] = event.time_s

    def _refused(self, event: Refused) -> None:
        self._arrivals.pop(event.request_id, None)

    def _admitted(self, event: Admitted) -> None:
        if not event.resumed:
            self._asked[event.seq_id] = self._arrivals.pop(event.request_id)

    def _forked(self, event: Forked) -> None:
        """Its first token came with the step that has just ended."""
        self._asked[event.seq_id] = self._asked[event.parent_id]
        self._first_token(event.seq_id, self._last_end_s)
        self._going.add(event.seq_id)

    def _preempted(self, event: Preempted) -> None:
        if event.seq_id in self._going:
            self._going.remove(event.seq_id)
            self._paused[event.seq_id] = self._last_end_s

    def _computed(self, step: StepEvent) -> None:
        start, end, going = step.start_s, step.end_s, self._going
        first, *later = Ramp(step.ramp).durations() if step.count > 1 else [end - start]
        sampled = {row.seq_id for row in step.rows if row.num_sampled}
        steady = len(going) if step.num_steady else 0  # these rows are not told one by one
        if again := steady + len(sampled & going):
            self.gaps[five_digits(start + first - self._last_end_s)] += again
        for seq_id in sampled - going:
            if (before := self._paused.pop(seq_id, None)) is None:
                self._first_token(seq_id, start + first)
            else:
                self.gaps[five_digits(start + first - before)] += 1
        if given := steady + len(sampled):
            for seconds in later:
                self.gaps[five_digits(seconds)] += given
        if not steady:
            self._paused |= dict.fromkeys(going - sampled, self._last_end_s)
            going.clear()
        going |= sampled
        self._last_end_s = end
        self.running.add(start, end, step.num_running, step.num_running)
        self.waiting.add(start, end, step.num_waiting, step.num_waiting)
        self.used_blocks.add(start, end, step.num_used_blocks, max(step.num_used_blocks, step.last_used_blocks))

    def _first_token(self, seq_id: int, time_s: float) -> None:
        arrival = self._asked[seq_id]
        self.arrival_s.append(arrival)
        self.ttft_s.append(time_s - arrival)

    def _finished(self, event: Finished) -> None:
        self._going.discard(event.seq_id)
        self._paused.pop(event.seq_id, None)
        self._asked.pop(event.seq_id, None)
        self._arrivals.pop(event.request_id, None)  # aborted while it waited


Series.takes = {
    Arrived: Series._arrived, Refused: Series._refused, Admitted: Series._admitted, Preempted: Series._preempted,
    StepEvent: Series._computed, Forked: Series._forked, Finished: Series._finished,
}  # fmt: skip


def five_digits(seconds: float) -> float:
    """Rounded, so that a run of any length has at most 90,000 different values in each power of ten."""
    return float(f"{seconds:.5g}")


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
