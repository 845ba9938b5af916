"""What a run looked like over time says the same as its metrics."""

from collections import Counter

import pytest
from engine_harness import make_engine

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.metrics import percentile, sequence_metrics
from cbserve.core.request import Request, SamplingParams
from cbserve.core.trace import Arrived, Preempted, StepEvent, Trace
from cbserve.hardware.roofline import Roofline
from cbserve.sim.series import beginning, evenly, over_time, series
from cbserve.simulation import Simulation, simulate
from cbserve.workloads.synthetic import azure_twin

COST = Roofline.on("a100-80", "llama-3.1-8b")


def run(batching: Batching, num_blocks: int = 20_000, fast_forward: bool = True) -> Simulation:
    workload = azure_twin("conv", 30, seed=3, rate=12)
    longest = max(job.num_output_tokens for job in workload.jobs)
    return simulate(workload, COST, num_blocks, batching=batching, max_tokens=longest, fast_forward=fast_forward)


BATCHINGS = [
    ContinuousBatching(max_num_seqs=64, max_num_batched_tokens=512),
    ContinuousBatching(mixed=False, max_num_seqs=64),
    StaticBatching(8),
]


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(("batching", "num_blocks"), [*((b, 20_000) for b in BATCHINGS), (BATCHINGS[0], 700)], ids=str)
def test_times_and_gaps_are_those_of_the_metrics(batching: Batching, num_blocks: int, fast_forward: bool) -> None:
    simulation = run(batching, num_blocks, fast_forward)
    trace = simulation.trace
    assert any(isinstance(event, Preempted) for event in trace.events) == (num_blocks == 700)
    found, records = series(trace.events), sequence_metrics(trace)
    expected = [(record.arrival_s, record.ttft_s) for record in records if record.ttft_s is not None]
    for mine, theirs in zip(zip(*sorted(found.ttft), strict=True), zip(*sorted(expected), strict=True), strict=True):
        assert mine == pytest.approx(theirs)
    gaps = sorted(gap for record in records for gap in record.itl_s)
    assert sorted(found.gaps.elements()) == pytest.approx(gaps, abs=1e-6)
    fold = simulation.fold
    total = sum((b - a) * (first + last) / 2 for a, b, first, last in found.used_blocks)
    assert total == pytest.approx(fold.used_block_s)


def test_samples_of_one_request_have_their_times_too() -> None:
    engine = make_engine({"A": 4, "B": 6})
    engine.run([Request(name, range(20), SamplingParams(max_tokens=9, n=3)) for name in "AB"])
    found, records = series(engine.trace.events), sequence_metrics(engine.trace)
    assert sorted(found.ttft) == sorted((record.arrival_s, record.ttft_s) for record in records)
    assert sorted(found.gaps.elements()) == sorted(gap for record in records for gap in record.itl_s)


@pytest.mark.parametrize("num_bins", [1, 7, 120])
def test_bins_keep_the_integral(num_bins: int) -> None:
    found = series(run(BATCHINGS[0]).trace.events)
    for pieces in (found.running, found.waiting, found.used_blocks):
        low, high = pieces[0][0], pieces[-1][1]
        means = over_time(pieces, low, high, num_bins)
        area = sum((b - a) * (first + last) / 2 for a, b, first, last in pieces)
        assert sum(means) * (high - low) / num_bins == pytest.approx(area)


def test_a_value_that_grows_is_cut_where_the_bins_are() -> None:
    assert over_time([(0.0, 4.0, 0.0, 8.0)], 0.0, 4.0, 4) == pytest.approx([1, 3, 5, 7])
    assert over_time([(0.0, 1.0, 6.0, 6.0), (3.5, 4.0, 2.0, 2.0)], 0.0, 4.0, 4) == pytest.approx([6, 0, 0, 1])


def test_a_sample_over_ranks_has_the_same_distribution() -> None:
    counts = Counter({1.0: 9_000, 2.0: 900, 50.0: 100})
    values = evenly(counts, 1000)
    assert Counter(values) == {1.0: 900, 2.0: 90, 50.0: 10}
    assert evenly(Counter({3.0: 2}), 1000) == [3.0, 3.0]
    assert evenly(Counter(), 10) == []
    assert percentile(values, 99.5) == 50.0


@pytest.mark.parametrize("fast_forward", [True, False])
def test_the_beginning_is_that_of_the_run(fast_forward: bool) -> None:
    trace = run(BATCHINGS[0], fast_forward=fast_forward).trace
    part = beginning(trace, 60, 2)
    assert isinstance(part, Trace)
    steps = part.steps
    assert [step.step for step in steps] == list(range(60))
    assert all(step.count == 1 and step.num_steady == 0 for step in steps)
    whole = {step.step: step for step in trace.of(StepEvent)}
    for step in steps:
        assert sorted(step.rows) == sorted(row for row in whole[step.step].rows if row.slot < 2)
    shown = {event.request_id for event in part.of(Arrived)}
    assert shown and shown < {event.request_id for event in trace.of(Arrived)}
