"""What is asked of an engine, and when: jobs in order of arrival."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer
from cbserve.core.metrics import mean, percentile
from cbserve.core.request import Request, SamplingParams

LATEST_S = 1e10  # three centuries; beyond, the gap between two doubles nears that between two steps


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload, with the length of its answer, which no scheduler sees.

    Args:
        arrival_s: seconds from the workload's start, below 1e10.
        prompt: token ids; a `range` or `Ranges` costs nothing. A simulated answer goes on from the last one, which must
            not be negative.
        num_output_tokens: length of the answer, at least 1.
        priority: lower is more urgent.
        client_id: who asks.
        cache_salt: jobs of different salts share no cached blocks.
        session: jobs of one conversation have the same, in the order of their turns.
    """

    arrival_s: float
    prompt: Sequence[int]
    num_output_tokens: int
    priority: int = 0
    client_id: str = ""
    cache_salt: str = ""
    session: Hashable = None

    def request(self, request_id: str, params: SamplingParams) -> Request:
        """The job as an engine is asked: without the length of its answer."""
        return Request(request_id, self.prompt, params, self.arrival_s, self.priority, self.client_id, self.cache_salt)


@dataclass(frozen=True)
class Workload:
    """Jobs sorted by arrival.

    Args:
        name: short, for tables and figures; says "synthetic" where nobody measured it.
        jobs: in order of arrival.
        source: where the data come from, with their licence; show it beside every figure.
        note: what was done to them.

    Raises:
        InvalidRequestError: a job is not in order, its prompt is empty or no sequence of token ids, or its answer no
            whole number of tokens, at least 1; names it.
    """

    name: str
    jobs: Sequence[Job]
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, Sequence):
            raise InvalidRequestError(f"{self.name}: jobs={str(self.jobs)[:60]}: must be a list of Job")
        before = 0.0
        for index, job in enumerate(self.jobs):
            if problem := problem_of(job):
                raise InvalidRequestError(f"{self.name}: jobs[{index}]: {problem}")
            if job.arrival_s < before:
                raise InvalidRequestError(
                    f"{self.name}: jobs[{index}]: arrival_s={job.arrival_s!r} comes after {before!r}: sort the jobs by "
                    "arrival"
                )
            before = job.arrival_s

    def __len__(self) -> int:
        return len(self.jobs)

    def __repr__(self) -> str:
        return f"Workload({self.name!r}, {len(self)} requests in {self.duration_s:.4g} s)"  # never all its jobs

    def requests(self, max_tokens: int | None = None) -> Iterator[Request]:
        """The jobs as requests "0", "1", ...: greedy, at most `max_tokens` new tokens (None: the engine's limit)."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        for index, job in enumerate(self.jobs):
            yield job.request(str(index), params)

    @property
    def answer_lengths(self) -> dict[str, int]:
        """Output tokens by request id, made anew. Only the simulated executor may know them.

        A dict, because the executor looks up every row of a step: some 130 bytes a job.
        """
        return {str(index): operator.index(job.num_output_tokens) for index, job in enumerate(self.jobs)}

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.jobs[-1].arrival_s - self.jobs[0].arrival_s if self.jobs else 0.0

    @property
    def rate(self) -> float:
        """Requests a second: one over the mean gap between arrivals; nan where all arrive at once."""
        return (len(self.jobs) - 1) / self.duration_s if self.duration_s else math.nan

    def scaled(self, rate: float) -> Workload:
        """The same jobs, arriving faster or slower: all times divided by one factor, so that `rate` is as given.

        Raises:
            InvalidRequestError: `rate` is not above 0, or all jobs arrive at once.
        """
        if not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise InvalidRequestError(f"rate={rate!r}: must be a number of requests a second above 0")
        if not self.duration_s:
            raise InvalidRequestError(f"{self.name}: {len(self)} jobs, all at once, have no rate that could be scaled")
        factor = rate / self.rate
        if not factor or not self.jobs[-1].arrival_s / factor <= LATEST_S:
            raise InvalidRequestError(f"rate={rate!r}: the last of {len(self)} requests would take centuries to come")
        jobs = [  # field by field: `replace` takes five times as long, and a slider waits for this
            Job(
                job.arrival_s / factor,
                job.prompt,
                job.num_output_tokens,
                job.priority,
                job.client_id,
                job.cache_salt,
                job.session,
            )
            for job in self.jobs
        ]
        return replace(
            self, jobs=jobs, note=_also(self.note, f"arrivals scaled from {self.rate:.4g} to {rate:.4g} a second")
        )

    def first(self, n: int) -> Workload:
        """The first `n` jobs, or all where there are fewer.

        Raises:
            InvalidRequestError: `n` is no integer of at least 1.
        """
        if (n := integer("n", n, 1)) >= len(self):
            return self
        return replace(self, jobs=self.jobs[:n], note=_also(self.note, f"first {n} of {len(self)} requests"))

    def summary(self) -> dict[str, float]:
        """Statistics by name: a table is `summary().items()`. Lengths in tokens; what has no value is nan.

        `gap_cv` is the coefficient of variation of the gaps between arrivals: 1 for a Poisson process.
        """
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(self.jobs)]
        gap = mean(gaps)
        spread = math.sqrt(mean([(g - gap) ** 2 for g in gaps])) if gaps else math.nan
        rows: dict[str, float] = {
            "requests": len(self),
            "duration_s": self.duration_s,
            "rate_per_s": self.rate,
            "gap_cv": spread / gap if gaps and gap else math.nan,
        }
        for name, lengths in (
            ("prompt", sorted(len(job.prompt) for job in self.jobs)),
            ("output", sorted(job.num_output_tokens for job in self.jobs)),
        ):
            rows[f"{name}_mean"] = mean(lengths)
            rows |= {f"{name}_p{q}": percentile(lengths, q) for q in (50, 90, 99)}
            rows[f"{name}_max"] = lengths[-1] if lengths else math.nan
            rows[f"{name}_total"] = sum(lengths)
        return rows


def problem_of(job: Job) -> str:
    """Why nothing can be simulated with `job`; nothing if it can."""
    if not isinstance(job, Job):
        return f"{str(job)[:60]!r} is no Job"
    arrival_s, prompt, length = job.arrival_s, job.prompt, job.num_output_tokens
    if not isinstance(arrival_s, int | float) or not 0 <= arrival_s < LATEST_S:
        return f"arrival_s={arrival_s!r}: must be a finite time >= 0, in seconds, below {LATEST_S:g}"
    if not hasattr(length, "__index__") or length < 1:
        return f"num_output_tokens={length!r}: must be a whole number of at least 1"
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return f"prompt={str(prompt)[:60]!r}: must be a sequence of token ids: a range or a list (an array: tolist())"
    if not prompt:
        return "its prompt is empty: give at least one token"
    if not hasattr(prompt[-1], "__index__") or prompt[-1] < 0:
        return f"its prompt ends with {prompt[-1]!r}: must be a token id, a whole number of at least 0"
    return ""


def _also(note: str, what: str) -> str:
    return f"{note}; {what}" if note else what
