"""A digital twin of this machine: predict a run from the calibration, run it for real, set both side by side.

The same workload goes through the same scheduler twice: against the calibrated cost model on a virtual clock, and
against the real model on the real one. The prediction is made first, and nothing of the run flows into it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from cbserve.calibrating.measured_run import Agreement
from cbserve.calibration import Calibration
from cbserve.clock import Clock, RealClock
from cbserve.core.errors import InvalidRequestError
from cbserve.core.metrics import mean, percentile
from cbserve.core.request import Request, SamplingParams
from cbserve.core.run_fold import RunFold
from cbserve.core.trace import StepEvent, Trace
from cbserve.simulation import simulate
from cbserve.viz import lines
from cbserve.viz.figure import Figure
from cbserve.workloads import given
from cbserve.workloads.arrivals import poisson
from cbserve.workloads.tokens import own_tokens
from cbserve.workloads.workload import Job, Workload

if TYPE_CHECKING:
    from cbserve.llm import LLM

LOAD = 0.7  # of what the machine could do: there is some queueing, and no overload
OLD_DAYS = 7


@dataclass(frozen=True)
class Twin:
    """A run as predicted and as measured; `rows` is the table, `chart` the picture."""

    workload: Workload
    predicted: Trace
    measured: tuple[Trace, ...]

    def agreement(self) -> list[Agreement]:
        """The four figures; of several runs the median of each."""
        ours = figures(self.predicted)
        theirs = [figures(trace) for trace in self.measured]
        unit = {"mean TPOT": (1e3, "ms")}
        rows = []
        for name, target in TARGETS.items():
            scale, label = unit.get(name, (1.0, "s"))
            measured = median(run[name] for run in theirs)
            rows.append(Agreement(name, scale * measured, scale * ours[name], target, label))
        return rows

    def chart(self) -> Figure:
        """Tokens given over time, predicted and measured."""
        series = {"predicted": _progress(self.predicted)}
        for index, trace in enumerate(self.measured):
            series["measured" if len(self.measured) == 1 else f"measured {index + 1}"] = _progress(trace)
        makespan = self.agreement()[0]
        return lines(
            series,
            title=f"The run took {makespan.measured:.3g} s; {makespan.predicted:.3g} s were predicted",
            x_name="seconds since the first arrival",
            y_name="tokens given",
            caption=f"{self.workload.name}: {len(self.workload)} requests. {self.workload.note}",
        )


TARGETS = {"makespan": 0.10, "mean TTFT": 0.20, "p99 TTFT": 0.20, "mean TPOT": 0.10}


def chat_workload(num_requests: int = 40, seed: int = 0) -> Workload:
    """Requests with lengths like those of a chat, all at once: prompts of 16 to 384 tokens (lognormal, median 90),
    answers of 8 to 96 (median 32), so that a run takes about a minute on a slow CPU.

    Raises:
        InvalidRequestError: `num_requests` is no integer of at least 2.
    """
    num_requests, rng = given.integer("num_requests", num_requests, 2), given.generator(seed)

    def draw(middle: float, sigma: float, low: int, high: int) -> int:
        return min(high, max(low, round(middle * math.exp(rng.gauss(0.0, sigma)))))

    jobs = [Job(0.0, range(1, 1 + draw(90, 0.8, 16, 384)), draw(32, 0.6, 8, 96)) for _ in range(num_requests)]
    return Workload("chat", jobs, "synthetic: lognormal lengths", f"seed {seed}")


def paced(workload: Workload, llm: LLM, calibration: Calibration, rate: float | None = None, seed: int = 0) -> Workload:
    """The same jobs as a Poisson process of `rate` requests a second; by default at `LOAD` of what the calibrated
    machine could serve if all came at once.

    Raises:
        InvalidRequestError: `rate` is not above 0.
    """
    if rate is None:
        rate = LOAD * len(workload) / _fold(predict(workload, llm, calibration)).makespan_s
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise InvalidRequestError(f"rate={rate!r}: must be a number of requests a second above 0")
    times = poisson(len(workload), rate, seed)
    jobs = [replace(job, arrival_s=at - times[0]) for job, at in zip(workload.jobs, times, strict=True)]
    return replace(workload, jobs=jobs, note=f"{workload.note}; Poisson arrivals, {rate:.3g} requests a second")


class _AskedAsRun(Workload):
    """Each job allows as many tokens as its answer has, as in `run`: by that a static batch reserves its blocks."""

    def requests(self, max_tokens: int | None = None) -> Iterator[Request]:
        for index, job in enumerate(self.jobs):
            yield job.request(str(index), SamplingParams(max_tokens=int(job.num_output_tokens), temperature=0))


def predict(workload: Workload, llm: LLM, calibration: Calibration) -> Trace:
    """The workload through a scheduler with the settings of `llm`, in simulated time. As in `run`, prompts share
    nothing, and each request allows exactly the tokens of its answer.

    Raises:
        InvalidRequestError: a request can never be served there; or `llm` swaps, and the host link is not known.
    """
    scheduler, kv = llm.scheduler, llm.scheduler.kv
    jobs = [replace(job, prompt=own_tokens(i, len(job.prompt))) for i, job in enumerate(workload.jobs)]
    simulation = simulate(
        _AskedAsRun(workload.name, jobs),
        calibration.cost(),
        kv.pool.num_blocks,
        kv.block_size,
        scheduler.batching,
        deepcopy(scheduler.policy),
        scheduler=type(scheduler),
        enable_prefix_caching=kv.enable_prefix_caching,
        preemption=scheduler.preemption,
        num_host_blocks=kv.host_pool.num_blocks if kv.host_pool else 0,
        max_model_len=llm.max_model_len,
        meta={"model": calibration.model.name, "device": calibration.device},
    )
    if simulation.refused:
        raise InvalidRequestError(f"request {simulation.refused[0][0]}: {simulation.refused[0][1]}")
    return simulation.trace


class CpuClock(RealClock):
    """Counts the CPU time of this process, from 0: what a step takes with one thread if nobody else used the core.

    A clock for machines that others use. While nothing is to be done it jumps to the next arrival.
    """

    def restart(self) -> None:
        self._start = time.process_time()

    def now(self) -> float:
        return time.process_time() - self._start

    def wait_until(self, time_s: float) -> None:
        self._start -= max(0.0, time_s - self.now())


def run(workload: Workload, llm: LLM, clock: Clock | None = None) -> Trace:
    """The workload through the real engine, in real time: random prompts and answers, of exactly the given lengths.

    Args:
        clock: in place of the engine's own for this run, a `CpuClock` for instance.
    """
    own = llm.engine.clock
    llm.engine.clock = clock or own
    try:
        return _run(workload, llm)
    finally:
        llm.engine.clock = own


def _run(workload: Workload, llm: LLM) -> Trace:
    prompts = llm.random_prompts([len(job.prompt) for job in workload.jobs])
    return llm.serve(
        [
            Request(
                str(index),
                prompt,
                SamplingParams(max_tokens=int(job.num_output_tokens), temperature=0, ignore_eos=True),
                job.arrival_s,
            )
            for index, (prompt, job) in enumerate(zip(prompts, workload.jobs, strict=True))
        ]
    )


def figures(trace: Trace) -> dict[str, float]:
    """Makespan, mean and p99 TTFT and mean TPOT of a run, in seconds."""
    fold = _fold(trace)
    return {
        "makespan": fold.makespan_s,
        "mean TTFT": mean(fold.ttft_s),
        "p99 TTFT": percentile(fold.ttft_s, 99),
        "mean TPOT": mean([value for value in fold.tpot_s if not math.isnan(value)]),
    }


def _fold(trace: Trace) -> RunFold:
    fold = RunFold()
    for event in trace.events:
        fold.add(event)
    return fold


def why_stale(
    calibration: Calibration, llm: LLM, timer: Callable[[], float] = time.perf_counter, now: datetime | None = None
) -> str:
    """Why a calibration does not hold for `llm` here and now, timed by `timer`; nothing if it does."""
    from cbserve.calibrating.machine import device_name, environment, shape_of

    shape = shape_of(llm)
    if replace(calibration.model, source="") != replace(shape, source=""):
        return f"it is of {calibration.model.name}, not of {shape.name}"
    if calibration.block_size != llm.scheduler.kv.block_size:
        return f"its blocks have {calibration.block_size} tokens, these {llm.scheduler.kv.block_size}"
    if llm.scheduler.preemption != "recompute" and "host_link_bytes_s" not in calibration.values:
        return "it does not know the host link, and this engine swaps"
    for name, value in ({"device": device_name(llm), "timer": timer.__name__} | environment(llm)).items():
        before = calibration.device if name == "device" else calibration.environment.get(name)
        if before != value:
            return f"{name} was {before!r} and is {value!r}"
    age = (now or datetime.now(UTC)) - datetime.fromisoformat(calibration.created)
    return f"it is {age.days} days old" if age.days >= OLD_DAYS else ""


def _progress(trace: Trace) -> tuple[list[float], list[float]]:
    """(seconds, tokens given so far) at the end of every step."""
    start = _fold(trace).first_arrival_s
    times, given, total = [0.0], [0.0], 0
    for event in trace:
        if isinstance(event, StepEvent) and (count := sum(row.num_sampled for row in event.rows)):
            total += count
            times.append(event.end_s - start)
            given.append(float(total))
    return times, given
