"""One run of a frontier: rates while requests arrive, and what each request saw."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import nan

from cbserve.core.run_fold import RunFold
from cbserve.core.summary import Summary, summary_of
from cbserve.core.trace import Event, Finished, StepEvent
from cbserve.explorers.setting import Setting
from cbserve.workloads.workload import Workload

WARM_UP = 0.1  # share of the requests in whose time the engine fills


@dataclass(slots=True)
class Window:
    """A fold over the part of a run in which rates are counted: from the arrival of the first request after the warm-up
    to the last arrival. An engine that fills, or has nothing more to come, gives less than it can.

    `ends_s` has the end of every sequence, in the order of `RunFold`'s lists.
    """

    start_s: float
    end_s: float
    num_tokens: int = 0  # given within
    ends_s: array[float] = field(default_factory=lambda: array("d"))

    @classmethod
    def of(cls, workload: Workload) -> Window:
        jobs = workload.jobs
        return cls(jobs[int(WARM_UP * len(jobs))].arrival_s, jobs[-1].arrival_s)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def add(self, event: Event) -> None:
        """Take in the next event, a span of steps as it is."""
        if isinstance(event, StepEvent):
            if event.end_s > self.start_s and event.start_s < self.end_s:
                is_within = self.start_s <= event.start_s and event.end_s <= self.end_s
                num_steps = event.count if is_within else sum(map(self.holds, event.ends()))
                self.num_tokens += num_steps * (event.num_steady + sum(row.num_sampled for row in event.rows))
        elif isinstance(event, Finished):
            self.ends_s.append(event.time_s)

    def holds(self, time_s: float) -> bool:
        return self.start_s < time_s <= self.end_s

    def mean(self, stays: Iterable[tuple[float, float]]) -> float:
        """How many there are at a time on average, of what is there from a start to an end each."""
        within = (min(end, self.end_s) - max(start, self.start_s) for start, end in stays)
        return sum(seconds for seconds in within if seconds > 0) / self.seconds if self.seconds else nan


@dataclass(frozen=True)
class Point:
    """One run: `num_requests` requests, `rate` a second, under `setting`.

    Rates a second, and how many are in flight, are those of the window. Latencies are of all requests of the run.
    """

    setting: Setting
    rate: float
    num_requests: int
    fold: RunFold
    window: Window

    @cached_property
    def summary(self) -> Summary:
        """Of the whole run."""
        return summary_of(self.fold, self.setting.max_num_seqs)

    @property
    def tokens_per_s(self) -> float:
        return self._a_second(self.window.num_tokens)

    @cached_property
    def num_answers(self) -> int:
        """That were complete within the window."""
        return sum(map(self.window.holds, self.window.ends_s))

    @property
    def arrival_rate(self) -> float:
        """Requests a second that arrived within the window: `rate` is the mean over the whole run."""
        return self._a_second(self.num_requests - 1 - int(WARM_UP * self.num_requests))

    @property
    def answer_rate(self) -> float:
        return self._a_second(self.num_answers)

    @cached_property
    def in_flight(self) -> float:
        """Requests in the system on average, waiting ones included."""
        pairs = zip(self.window.ends_s, self.fold.e2e_s, strict=True)
        return self.window.mean((end - e2e, end) for end, e2e in pairs)

    @cached_property
    def num_waiting(self) -> float:
        """Requests without a slot on average."""
        trios = zip(self.window.ends_s, self.fold.e2e_s, self.fold.queue_s, strict=True)
        return self.window.mean((end - e2e, end - e2e + queue) for end, e2e, queue in trios)

    @property
    def seconds_each(self) -> float:
        """Time that requests spent in the system within the window, for each answer; nan where there is none.

        Little's law holds exactly: answers a second x this = requests in flight. It is near the mean E2E unless the
        queue grows.
        """
        return self.in_flight / self.answer_rate if self.num_answers else nan

    def num_good(self, ttft_s: float, itl_s: float) -> int:
        """Answers within the window whose TTFT and every gap kept the limits."""
        fold = self.fold
        values = zip(self.window.ends_s, fold.ttft_s, fold.longest_itl_s, strict=True)
        return sum(self.window.holds(end) and ttft <= ttft_s and gap <= itl_s for end, ttft, gap in values)

    def goodput(self, ttft_s: float, itl_s: float) -> float:
        """Answers a second whose TTFT and every gap kept the limits."""
        return self._a_second(self.num_good(ttft_s, itl_s))

    def keeps(self, ttft_s: float, itl_s: float) -> bool:
        """Whether both 99th percentiles are within the limits, of those served, ITL's over all gaps together."""
        said = self.summary
        return said.ttft_p99_s <= ttft_s and not said.itl_p99_s > itl_s

    def _a_second(self, count: int) -> float:
        return count / self.window.seconds if self.window.seconds else nan
