"""A run folded over its events one by one, spans as they are: a million requests need no trace in memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import mul

from cbserve.core.errors import InvalidRequestError
from cbserve.core.metrics import EventFold, weighted_percentile
from cbserve.core.plan import Ramp
from cbserve.core.trace import (
    Admitted,
    Arrived,
    Finished,
    Forked,
    Preempted,
    Refused,
    StepEvent,
    TraceError,
)

LIMITS = ("ttft", "tpot", "itl", "e2e")  # what a service-level objective can bound


@dataclass(slots=True)
class _Live:
    """A sequence that has not ended: what is known of its tokens, up to the step that told it last."""

    arrival_s: float
    admitted_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    longest_gap_s: float = 0.0
    num_tokens: int = 0
    told: int = -1  # how many steps with steady rows there had been; it may be one of those since then


@dataclass(slots=True, repr=False)
class RunFold(EventFold):
    """Takes events in order, spans as they are; keeps a few numbers of each sequence that ended.

    The lists hold one value for each sequence, in order of ending: `ttft_s`, `e2e_s` (nan where it got no token),
    `tpot_s` (nan for an answer of one token), `longest_itl_s`, `queue_s`.
    """

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    longest_itl_s: array[float] = field(default_factory=lambda: array("d"))
    queue_s: array[float] = field(default_factory=lambda: array("d"))
    num_requests: int = 0
    num_refused: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_arrival_s: float = math.inf
    end_s: float = 0.0
    busy_s: float = 0.0
    peak_used_blocks: int = 0
    used_block_s: float = 0.0  # blocks x seconds; within a span as if they grew evenly
    num_rows: int = 0
    num_padding: int = 0
    num_occupied: int = 0  # slots x steps that held an unfinished request
    _arrivals: dict[str, float] = field(default_factory=dict)
    _open: dict[str, int] = field(default_factory=dict)  # unfinished samples of a request
    _live: dict[int, _Live] = field(default_factory=dict)
    _gaps_s: array[float] = field(default_factory=lambda: array("d"))
    _gap_counts: array[int] = field(default_factory=lambda: array("q"))
    _last_end_s: float = 0.0
    _peaks: list[tuple[int, float]] = field(default_factory=list)  # gaps of steady rows: (event, gap), falling
    _num_steady_events: int = 0  # in a row; a step without any ends them

    def __repr__(self) -> str:
        return f"RunFold({self.num_requests} requests, {self.num_steps} steps)"

    def _arrived(self, event: Arrived) -> None:
        self.num_requests += 1
        self.num_prompt_tokens += event.num_prompt_tokens
        self.first_arrival_s = min(self.first_arrival_s, event.time_s)
        self._arrivals[event.request_id] = event.time_s
        self._open[event.request_id] = event.num_samples

    def _refused(self, event: Refused) -> None:
        self.num_refused += 1
        self._arrivals.pop(event.request_id, None)

    def _admitted(self, event: Admitted) -> None:
        if not event.resumed or event.seq_id not in self._live:
            self._live[event.seq_id] = _Live(self._arrivals[event.request_id], event.time_s)

    def _forked(self, event: Forked) -> None:
        parent = self._live[event.parent_id]
        self._live[event.seq_id] = _Live(
            parent.arrival_s, parent.admitted_s, self._last_end_s, self._last_end_s, num_tokens=1
        )

    def _preempted(self, event: Preempted) -> None:
        self.num_preemptions += 1
        self._catch_up(self._live[event.seq_id])
        self._live[event.seq_id].told = -1

    def _computed(self, step: StepEvent) -> None:
        count, num_steady, seconds = step.count, step.num_steady, step.end_s - step.start_s
        later: list[float] = []  # seconds of the steps after the first
        first_end, longest = step.end_s, 0.0
        if count > 1:
            first, *later = Ramp(step.ramp).durations()
            first_end = step.start_s + first
            longest = max(later)
        if self._num_steady_events:
            self._regroup(step)
        if num_steady:
            gap = first_end - self._last_end_s
            self._num_steady_events += 1
            self._peak(gap if gap > longest else longest)
            self._gaps_s.append(gap)
            self._gap_counts.append(num_steady)
        else:
            self._num_steady_events = 0
            self._peaks.clear()
        sampled = occupied = num_steady
        if step.rows:
            given, held, padding = self._add_rows(step, first_end, longest)
            sampled, occupied = sampled + given, occupied + held
            self.num_padding += padding * count
            if (without := step.num_running - num_steady - len(step.rows) + padding) > 0:  # they hold a slot, and wait
                occupied += without
        if later and sampled:
            self._gaps_s.extend(later)
            self._gap_counts.extend([sampled] * (count - 1))
        self.num_steps += count
        self.num_output_tokens += sampled * count
        self.num_rows += (len(step.rows) + num_steady) * count
        self.num_occupied += occupied * count
        self._last_end_s = self.end_s = step.end_s
        self.busy_s += seconds
        first_used = step.num_used_blocks
        last_used = max(first_used, step.last_used_blocks)
        self.used_block_s += (first_used + last_used) / 2 * seconds
        if last_used > self.peak_used_blocks:
            self.peak_used_blocks = last_used

    def _regroup(self, step: StepEvent) -> None:
        """There were steady rows until now: what they got is written down for those that are none of them any more."""
        if step.num_steady:
            for row in step.rows:
                if row.kind != "padding":
                    self._catch_up(self._live[row.seq_id])
        else:  # the group breaks up, and some of it may get no row in this step
            for sequence in self._live.values():
                self._catch_up(sequence)
                sequence.told = -1

    def _add_rows(self, step: StepEvent, first_end: float, longest: float) -> tuple[int, int, int]:
        """How many tokens the rows were given in a step, how many slots they held unfinished, how many are padding."""
        sampled = occupied = padding = 0
        gaps: dict[float, int] = {}
        for row in step.rows:
            if row.kind == "padding":
                padding += 1
                continue
            given = row.num_sampled
            occupied += given or 1
            if not given:
                continue
            sampled += given
            sequence = self._live[row.seq_id]
            if sequence.num_tokens:
                gap = first_end - sequence.last_s
                gaps[gap] = gaps.get(gap, 0) + 1
                if gap > sequence.longest_gap_s:
                    sequence.longest_gap_s = gap
            else:
                sequence.first_s = first_end
            if longest > sequence.longest_gap_s:
                sequence.longest_gap_s = longest
            sequence.last_s = step.end_s
            sequence.num_tokens += step.count
            sequence.told = self._num_steady_events
        self._gaps_s.extend(gaps)
        self._gap_counts.extend(gaps.values())
        return sampled, occupied, padding

    def _peak(self, gap: float) -> None:
        """Keep only gaps that no later one exceeds: the longest since any event is then the first one behind it."""
        peaks = self._peaks
        while peaks and peaks[-1][1] <= gap:
            peaks.pop()
        peaks.append((self._num_steady_events, gap))

    def _catch_up(self, sequence: _Live) -> None:
        """It was among the steady rows of every step since it was told, if there were any."""
        if sequence.num_tokens and 0 <= sequence.told < self._num_steady_events:
            index = bisect_right(self._peaks, sequence.told, key=lambda peak: peak[0])
            sequence.longest_gap_s = max(sequence.longest_gap_s, self._peaks[index][1])
            sequence.last_s = self._last_end_s

    def _finished(self, event: Finished) -> None:
        sequence = self._live.pop(event.seq_id, None)
        arrival = self._arrivals[event.request_id]
        self._open[event.request_id] -= 1
        if not self._open[event.request_id]:
            del self._open[event.request_id], self._arrivals[event.request_id]
        if sequence is None:  # aborted while it waited
            sequence = _Live(arrival, math.nan)
        self._catch_up(sequence)
        tokens = event.num_output_tokens
        self.ttft_s.append(sequence.first_s - arrival)
        self.tpot_s.append((sequence.last_s - sequence.first_s) / (tokens - 1) if tokens > 1 else math.nan)
        self.e2e_s.append(event.time_s - arrival)
        self.longest_itl_s.append(sequence.longest_gap_s)
        self.queue_s.append(sequence.admitted_s - arrival)

    # ---- what it says -------------------------------------------------------------------------------------------

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the end of the last step. Raises TraceError when steps ran, but nothing arrived."""
        if self.num_steps and math.isinf(self.first_arrival_s):
            raise TraceError("steps ran, but no request arrived in this trace; begin it while no request is unfinished")
        return self.end_s - self.first_arrival_s if self.num_steps else 0.0

    def itl(self, q: float) -> float:
        """The q-th percentile of the gaps between tokens, of all sequences together."""
        return weighted_percentile(self._gaps_s, self._gap_counts, q)

    @property
    def itl_mean_s(self) -> float:
        """The mean gap between tokens, of all sequences together; nan when there is none."""
        count = sum(self._gap_counts)
        return sum(map(mul, self._gaps_s, self._gap_counts)) / count if count else math.nan

    def goodput(self, limits: Mapping[str, float]) -> float:
        """Requests a second that kept every limit, in seconds: "ttft", "tpot", "itl" (its longest gap), "e2e"
        (Zhong et al. 2024, DistServe, section 2). A request that was refused or got no token kept none.

        Raises:
            InvalidRequestError: a limit of another name, or no number above 0.
        """
        for name, limit in limits.items():
            if name not in LIMITS or not hasattr(limit, "__float__") or not limit > 0:
                raise InvalidRequestError(f"{name}={limit!r}: limits are {', '.join(LIMITS)}, in seconds above 0")
        kept = sum(all(value <= limit for value, limit in pairs) for pairs in self._against(limits))
        return kept / self.makespan_s if self.makespan_s > 0 else math.nan

    def _against(self, limits: Mapping[str, float]) -> Iterator[list[tuple[float, float]]]:
        """For each sequence, its values beside the limits; an answer of one token has no gaps to keep."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.longest_itl_s, "e2e": self.e2e_s}
        for index, ttft in enumerate(self.ttft_s):
            if math.isnan(ttft):
                yield [(math.inf, 0.0)]
                continue
            pairs = [(values[name][index], limit) for name, limit in limits.items()]
            yield [(0.0 if math.isnan(value) else value, limit) for value, limit in pairs]


RunFold.takes = {
    Arrived: RunFold._arrived, Refused: RunFold._refused, Admitted: RunFold._admitted, Preempted: RunFold._preempted,
    StepEvent: RunFold._computed, Forked: RunFold._forked, Finished: RunFold._finished,
}  # fmt: skip
