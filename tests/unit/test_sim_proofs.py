"""The simulator against arithmetic: queueing theory, order statistics and conservation laws, on the one scheduler."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbserve.core import metrics
from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.bounds import harmonic, static_utilisation
from cbserve.core.metrics import mean, percentile, sequence_metrics, weighted_percentile
from cbserve.core.plan import Ramp, StepPlan
from cbserve.core.policies import FCFS, Priority
from cbserve.core.run_fold import LIMITS
from cbserve.core.scheduler import Scheduler
from cbserve.core.trace import Arrived, Finished, StepEvent
from cbserve.hardware.roofline import Roofline
from cbserve.simulation import Simulation, simulate
from cbserve.workloads.arrivals import ClosedLoop, poisson
from cbserve.workloads.lengths import exponential
from cbserve.workloads.synthetic import synthesize
from cbserve.workloads.workload import Job, Workload

SERVICE_S = 2**-4  # with arrivals on a grid of 2**-20 s every sum of times is exact in binary


class Constant:
    """Every step takes equally long: the D of M/D/1."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, plan: StepPlan) -> float:
        return self.seconds

    def ramp(self, plan: StepPlan, count: int) -> Ramp:
        return Ramp(((count, self.seconds, 0.0),))


LLAMA = Roofline.on("a100-80", "llama-3.1-8b")


# ---- one server: Lindley and M/D/1 ----------------------------------------------------------------------------------


def waits(num_requests: int, load: float, seed: int) -> tuple[list[float], list[float]]:
    """(simulated, by Lindley's recursion): seconds in the queue of fixed prefill-only requests, one at a time.

    Lindley 1952: W[n+1] = max(0, W[n] + S - A[n]), A[n] being the gap between arrivals n and n + 1.
    """
    arrivals = [round(t * 2**20) / 2**20 for t in poisson(num_requests, load / SERVICE_S, seed)]
    run = simulate(
        synthesize(num_requests, arrivals, prompt=8, output=1),
        Constant(SERVICE_S), num_blocks=4, batching=ContinuousBatching(max_num_seqs=1), keep_trace=False,
    )  # fmt: skip
    lindley = [0.0]
    for before, now in zip(arrivals, arrivals[1:], strict=False):
        lindley.append(max(0.0, lindley[-1] + SERVICE_S - (now - before)))
    assert run.fold.num_steps == num_requests
    assert list(run.fold.ttft_s) == [wait + SERVICE_S for wait in run.fold.queue_s]
    return list(run.fold.queue_s), lindley


@pytest.mark.parametrize("load", [0.2, 0.5, 0.9, 1.5])
def test_each_request_waits_as_lindley_says(load: float) -> None:
    simulated, lindley = waits(1500, load, seed=round(10 * load))
    assert simulated == lindley
    assert max(simulated) > 0 == min(simulated)


@pytest.mark.slow
def test_the_mean_wait_is_that_of_m_d_1() -> None:
    """Pollaczek-Khinchine for a constant service time: rho D / (2 (1 - rho))."""
    num_requests, load = 200_000, 0.5
    simulated, lindley = waits(num_requests, load, seed=1)
    assert simulated == lindley
    expected = load * SERVICE_S / (2 * (1 - load))
    assert mean(simulated) == pytest.approx(expected, rel=0.02)
    size = num_requests // 40  # waits of neighbours are correlated, means of long stretches nearly are not
    batches = [mean(simulated[i : i + size]) for i in range(0, num_requests, size)]
    error = standard_error(batches)
    assert error < 0.01 * expected  # so that 2 % says something
    assert abs(mean(simulated) - expected) < 3 * error


def standard_error(values: list[float]) -> float:
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1) / len(values))


# ---- static batching: order statistics ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 8, 32])
def test_static_batches_of_exponential_answers_use_one_in_h_b_of_their_slots(batch_size: int) -> None:
    """The longest of B exponential answers is H_B means long (Renyi 1953), so 1 / H_B of the slots is used."""
    num_batches, average = 1600 // batch_size, 1000  # rounding up to whole tokens moves the share by less than 0.05 %
    lengths = exponential(average, num_batches * batch_size, seed=3)
    run = simulate(
        synthesize(len(lengths), [0.0] * len(lengths), prompt=4, output=lengths),
        Constant(0.01), num_blocks=2 * batch_size, block_size=20_000, batching=StaticBatching(batch_size),
        max_tokens=19_000, keep_trace=False,
    )  # fmt: skip
    used = run.summary.slot_utilisation
    assert used == pytest.approx(static_utilisation(lengths, batch_size), rel=1e-12)
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    # A ratio of sums: its error is that of the residuals, in units of the slots of a mean batch (delta method)
    slots = batch_size * mean([max(batch) for batch in batches])
    error = standard_error([sum(batch) - used * batch_size * max(batch) for batch in batches]) / slots
    assert used == pytest.approx(1 / harmonic(batch_size), abs=3 * error + 1e-9)
    assert error < 0.02


# ---- conservation ---------------------------------------------------------------------------------------------------

BATCHINGS = [
    ContinuousBatching(max_num_seqs=4, max_num_batched_tokens=16),
    ContinuousBatching(max_num_seqs=4, max_num_batched_tokens=64, mixed=False, max_prefill_streak=2),
    ContinuousBatching(max_num_seqs=3, max_num_batched_tokens=64, chunked=False),
    StaticBatching(3),
]
jobs = st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=12)


def workload_of(jobs: list[tuple[float, int, int]]) -> Workload:
    arrivals, prompts, answers = (list(values) for values in zip(*sorted(jobs), strict=True))
    return synthesize(len(jobs), arrivals, prompts, answers)


def run_watched(workload: Any, num_blocks: int, block_size: int = 4, **options: Any) -> tuple[Simulation, Scheduler]:
    """The run, and the scheduler that it left behind."""
    made: list[Scheduler] = []

    class Watched(Scheduler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    run = simulate(workload, LLAMA, num_blocks, block_size, scheduler=Watched, **options)
    assert run.refused == ()
    return run, made[0]


def require_little(run: Simulation) -> None:
    """L = lambda W (Little 1961), L being integrated over the trace's own arrivals and departures."""
    changes = sorted(
        [(e.time_s, 1) for e in run.trace.events if isinstance(e, Arrived)]
        + [(e.time_s, -1) for e in run.trace.events if isinstance(e, Finished)]
    )
    area, inside, before = 0.0, 0, changes[0][0]
    for time_s, change in changes:
        area += inside * (time_s - before)
        inside, before = inside + change, time_s
    assert inside == 0
    duration = changes[-1][0] - changes[0][0]
    assert duration == pytest.approx(run.fold.makespan_s, rel=1e-9)
    rate = run.fold.num_requests / duration
    assert area / duration == pytest.approx(rate * run.summary.e2e_mean_s, rel=1e-9)


def require_conserved(run: Simulation, scheduler: Scheduler, answers: list[int], prompts: list[int]) -> None:
    scheduler.check()
    pool = scheduler.kv.pool
    assert pool.num_used == 0 and pool.num_free == pool.num_blocks
    assert not scheduler.has_unfinished
    assert run.fold.num_output_tokens == sum(answers) == run.summary.num_output_tokens
    given = Counter(e.request_id for e in run.trace.events if isinstance(e, Finished))
    assert len(given) == len(answers) and set(given.values()) == {1}
    computed = defaultdict(int)
    for step in run.trace.steps:
        for row in step.rows:
            computed[row.kind] += row.num_tokens
    if not run.fold.num_preemptions:
        assert computed["prefill"] == sum(prompts) == run.fold.num_prompt_tokens
        assert computed["decode"] == sum(answers) - len(answers)  # the first token of an answer is the prefill's
    else:
        assert computed["prefill"] > sum(prompts)


@settings(max_examples=60, deadline=None)
@given(
    jobs=jobs,
    batching=st.sampled_from(BATCHINGS),
    policy=st.sampled_from([FCFS, Priority, partial(Priority, displace=True)]),
    num_blocks=st.integers(15, 60),
)
def test_nothing_is_lost(jobs: list[Any], batching: Any, policy: Any, num_blocks: int) -> None:
    run, scheduler = run_watched(workload_of(jobs), num_blocks, batching=batching, policy=policy(), max_tokens=40)
    require_little(run)
    require_conserved(run, scheduler, [job[2] for job in jobs], [job[1] for job in jobs])


def test_a_pool_that_preempts_loses_nothing() -> None:
    workload = synthesize(40, partial(poisson, rate=200), prompt=20, output=partial(exponential, 30), seed=5)
    run, scheduler = run_watched(workload, 60, batching=ContinuousBatching(max_num_seqs=16))
    assert run.fold.num_preemptions > 5
    require_little(run)
    require_conserved(
        run, scheduler, [j.num_output_tokens for j in workload.jobs], [len(j.prompt) for j in workload.jobs]
    )


@settings(max_examples=30, deadline=None)
@given(jobs=jobs, batching=st.sampled_from(BATCHINGS[:3]))
def test_what_waits_and_runs_is_all_that_is_there(jobs: list[Any], batching: Any) -> None:
    """With all arrivals at 0 the scheduler's own counts, integrated over the steps, are the time of all requests."""
    workload = workload_of([(0.0, prompt, answer) for _, prompt, answer in jobs])
    run, _ = run_watched(workload, 200, batching=batching)
    area = sum((step.num_waiting + step.num_running) * (step.end_s - step.start_s) for step in run.trace.steps)
    assert area == pytest.approx(sum(run.fold.e2e_s), rel=1e-9)


# ---- the fold against a naive count ---------------------------------------------------------------------------------


def naive_goodput(run: Simulation, limits: dict[str, float]) -> float:
    records = sequence_metrics(run.trace)
    kept = 0
    for record in records:
        values = {
            "ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "itl": max(record.itl_s, default=0.0),
            "e2e": record.e2e_s,
        }  # fmt: skip
        kept += all(values[name] <= limit for name, limit in limits.items())
    ends = [record.finished_s for record in records]
    return kept / (max(ends) - min(record.arrival_s for record in records))


@settings(max_examples=60, deadline=None)
@given(
    jobs=jobs,
    batching=st.sampled_from(BATCHINGS),
    num_blocks=st.integers(15, 40),
    # No round numbers: the fold and the list may differ in the last bit, and a value on the limit would fall apart
    limits=st.dictionaries(st.sampled_from(LIMITS), st.sampled_from([0.0103, 0.0131, 0.0307, 0.217, 3.1]), min_size=1),
    q=st.floats(0, 100),
)
def test_goodput_and_percentiles(jobs: list[Any], batching: Any, num_blocks: int, limits: Any, q: float) -> None:
    run, _ = run_watched(workload_of(jobs), num_blocks, batching=batching, max_tokens=40)
    assert run.goodput(**limits) == pytest.approx(naive_goodput(run, limits), rel=1e-9)
    records = sequence_metrics(run.trace)
    gaps = [gap for record in records for gap in record.itl_s]
    assert run.fold.itl(q) == pytest.approx(percentile(gaps, q), rel=1e-9, nan_ok=True)
    assert run.fold.itl_mean_s == pytest.approx(mean(gaps), rel=1e-9, nan_ok=True)
    said, ttfts = run.summary, [record.ttft_s for record in records]
    assert said.ttft_p99_s == pytest.approx(percentile(ttfts, 99), rel=1e-9)
    assert said.ttft_mean_s == pytest.approx(mean(ttfts), rel=1e-9)
    tpots = [record.tpot_s for record in records if record.tpot_s is not None]
    assert said.tpot_mean_s == pytest.approx(mean(tpots), rel=1e-9, nan_ok=True)


@given(
    pairs=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=1, max_size=20),
    q=st.floats(0, 100),
    few=st.sampled_from([1, 4, 10_000]),
)
def test_a_weighted_percentile_is_that_of_the_long_list(pairs: list[tuple[float, int]], q: float, few: int) -> None:
    values, counts = zip(*pairs, strict=True)
    long = [value for value, count in pairs for _ in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_FEW", few)
        assert weighted_percentile(values, counts, q) == pytest.approx(percentile(long, q), rel=1e-12, abs=1e-12)


# ---- the closed loop ------------------------------------------------------------------------------------------------


def closed(jobs: list[Job], users: int, think_s: float, **options: Any) -> Simulation:
    run, _ = run_watched(ClosedLoop(jobs, users, think_s), 400, **options)
    return run


def identical(count: int, answer: int = 20) -> list[Job]:
    return [Job(0.0, range(100 * i, 100 * i + 12), answer) for i in range(count)]


@pytest.mark.parametrize(("users", "think_s"), [(1, 0.0), (1, 0.5), (4, 0.0), (4, 0.25)])
def test_users_in_step_reach_the_bound_of_the_response_time_law(users: int, think_s: float) -> None:
    """X = N / (Z + R) (Denning and Buzen 1978, the interactive response time law): every cycle is one think and one
    answer, and with users in step the run is whole cycles."""
    run = closed(identical(5 * users), users, think_s, batching=ContinuousBatching(max_num_seqs=users))
    throughput = run.fold.num_requests / (run.fold.makespan_s + think_s)
    assert throughput == pytest.approx(users / (think_s + run.summary.e2e_mean_s), rel=1e-9)
    require_little(run)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=16),
    users=st.integers(1, 5),
    think_s=st.sampled_from([0.0, 0.05, 0.4]),
    batching=st.sampled_from(BATCHINGS[:3]),
)
def test_no_run_is_faster_than_the_response_time_law(
    lengths: list[Any], users: int, think_s: float, batching: Any
) -> None:
    asked = [Job(0.0, range(100 * i, 100 * i + prompt), answer) for i, (prompt, answer) in enumerate(lengths)]
    run = closed(asked, users, think_s, batching=batching)
    bound = users / (think_s + run.summary.e2e_mean_s)
    assert run.fold.num_requests / (run.fold.makespan_s + think_s) <= bound * (1 + 1e-9)
    # With equality when each user counts until his own last answer is thought about: whole cycles for everybody
    last: dict[str, float] = {}
    clients = {e.request_id: e.client_id for e in run.trace.events if isinstance(e, Arrived)}
    for event in run.trace.events:
        if isinstance(event, Finished):
            last[clients[event.request_id]] = event.time_s
    cycles = sum(end + think_s for end in last.values())
    assert cycles == pytest.approx(len(lengths) * (think_s + run.summary.e2e_mean_s), rel=1e-9)


def test_more_users_wait_longer_and_the_server_sets_the_pace() -> None:
    """Far above the knee N* = (Z + R) X the throughput is the server's, and R grows by one service a user."""
    service = closed(identical(1), 1, 0.0).fold.makespan_s
    one_at_a_time = ContinuousBatching(max_num_seqs=1)
    runs = {n: closed(identical(10 * n), n, 0.1, batching=one_at_a_time) for n in (8, 16)}
    for run in runs.values():
        busy = run.fold.busy_s / run.fold.makespan_s
        assert busy == pytest.approx(1.0, rel=1e-9)
        assert run.fold.num_requests / run.fold.makespan_s == pytest.approx(1 / service, rel=1e-9)
        assert sum(isinstance(e, StepEvent) for e in run.trace.events) > 0


@pytest.mark.parametrize("budget", [8, 20, 32])
def test_gaps_where_decodes_wait_for_budget(budget: int) -> None:
    """A more urgent prompt leaves no budget: the group that decodes together breaks up, and some get no row then."""
    workload = synthesize(60, partial(poisson, rate=20), prompt=50, output=partial(exponential, 20), seed=3)
    workload = replace(workload, jobs=[replace(job, priority=-i % 5) for i, job in enumerate(workload.jobs)])
    batching = ContinuousBatching(max_num_seqs=64, max_num_batched_tokens=budget)
    run, _ = run_watched(workload, 200, batching=batching, policy=Priority())
    records = sequence_metrics(run.trace)
    gaps = [gap for record in records for gap in record.itl_s]
    assert run.fold.itl_mean_s == pytest.approx(mean(gaps), rel=1e-9)
    for q in (50, 90, 99, 100):
        assert run.fold.itl(q) == pytest.approx(percentile(gaps, q), rel=1e-9)
    longest = sorted(max(record.itl_s) for record in records if record.itl_s)
    assert sorted(run.fold.longest_itl_s)[-len(longest) :] == pytest.approx(longest, rel=1e-9)
