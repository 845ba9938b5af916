"""What a run looked like over time says the same as its metrics, however long it gets."""

from collections import Counter

import pytest
import viz_checks
from engine_harness import make_engine
from hypothesis import given
from hypothesis import strategies as st

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.metrics import percentile, sequence_metrics
from cbserve.core.policies import Priority
from cbserve.core.request import Request, SamplingParams
from cbserve.core.trace import Event, Forked, Preempted, Refused, StepEvent, Trace
from cbserve.hardware.roofline import Roofline
from cbserve.sim.over_time import OverTime
from cbserve.sim.series import Series, evenly
from cbserve.sim.telling import SLOTS, STEPS, TellingPart
from cbserve.simulation import Simulation, simulate
from cbserve.viz import timeline
from cbserve.workloads.synthetic import azure_twin

COST = Roofline.on("a100-80", "llama-3.1-8b")


def series(events: list[Event]) -> Series:
    found = Series()
    for event in events:
        found.add(event)
    return found


Piece = tuple[float, float, float, float]  # from, to (seconds), value there, value there


def assert_means(over_time: OverTime, pieces: list[Piece]) -> list[float]:
    """Each piece is looked at for each part. Returns the middles of the parts."""
    begin, end = pieces[0][0], pieces[-1][1]
    edges = [begin]
    while edges[-1] < end:
        edges.append(min(end, begin + len(edges) * over_time.width_s))
    parts, expected = list(zip(edges, edges[1:], strict=False)), []
    for low, high in parts:
        cuts = [(max(low, a), min(high, b), a, b, first, last) for a, b, first, last in pieces]
        total = sum(
            (to - at) * (first + (last - first) * ((at + to) / 2 - a) / (b - a))
            for at, to, a, b, first, last in cuts
            if at < to
        )
        expected.append(total / (high - low))
    xs, ys, tops = ([part[k] for part in over_time.parts()] for k in range(3))
    assert xs == pytest.approx([(low + high) / 2 for low, high in parts])
    assert ys == pytest.approx(expected, rel=1e-6, abs=1e-4)
    highest = max((max(first, last) for a, b, first, last in pieces if a < b), default=0)
    assert max(tops, default=0) == pytest.approx(highest)
    assert all(top >= mean - 1e-4 for top, mean in zip(tops, ys, strict=True))
    return xs


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
    mine = sorted(zip(found.arrival_s, found.ttft_s, strict=True))
    theirs = sorted((record.arrival_s, record.ttft_s) for record in records if record.ttft_s is not None)
    assert sum(mine, ()) == pytest.approx(sum(theirs, ()))
    gaps = sorted(gap for record in records for gap in record.itl_s)
    assert sorted(found.gaps.elements()) == pytest.approx(gaps, rel=5.1e-5)
    begin, total = trace.steps[0].start_s, 0.0
    for middle, mean, _ in found.used_blocks.parts():
        length = 2 * (middle - begin)
        begin, total = begin + length, total + mean * length
    assert total == pytest.approx(simulation.fold.used_block_s)
    assert found.used_blocks.peak == simulation.summary.peak_used_blocks


def test_samples_of_one_request_have_their_times_too() -> None:
    engine = make_engine({"A": 4, "B": 6})
    engine.run([Request(name, range(20), SamplingParams(max_tokens=9, n=3)) for name in "AB"])
    found, records = series(engine.trace.events), sequence_metrics(engine.trace)
    expected = sorted((record.arrival_s, record.ttft_s) for record in records)
    assert sorted(zip(found.arrival_s, found.ttft_s, strict=True)) == expected
    assert sorted(found.gaps.elements()) == sorted(gap for record in records for gap in record.itl_s)


@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
def test_spans_give_the_means_of_their_steps(batching: Batching) -> None:
    trace = run(batching).trace
    found, steps = series(trace.events), trace.steps
    for name in ("running", "waiting"):
        pieces = [(s.start_s, s.end_s, value := getattr(s, f"num_{name}"), value) for s in steps]
        over_time = getattr(found, name)
        assert_means(over_time, pieces)
        assert over_time.peak == max(value for *_, value in pieces)


times = st.floats(0, 1e3).map(lambda seconds: seconds**3 / 1e6)  # of all magnitudes
values = st.integers(0, 1000)


# A step of a millisecond at least: of what is far shorter, days after the start, a float keeps too few digits
spans = times.map(lambda seconds: 1e-3 + seconds)


@given(st.lists(st.tuples(times, spans, values, values), min_size=1, max_size=60), st.floats(0, 1e4))
def test_parts_of_a_run_of_any_length_have_exact_means(steps, now):
    over_time, pieces = OverTime(), []
    for idle, seconds, first, last in steps:
        start, now = now + idle, now + idle + seconds
        pieces.append((start, now, first, last))
        over_time.add(*pieces[-1])
    assert over_time.peak == max(max(first, last) for *_, first, last in pieces)
    xs = assert_means(over_time, pieces)
    length = now - pieces[0][0]
    if length > OverTime.MOST * 2.0**-20:
        assert OverTime.MOST / 2 < len(xs) <= OverTime.MOST


def test_a_value_that_grows_is_cut_where_the_parts_are() -> None:
    over_time = OverTime()
    over_time.add(3.0, 67.0, 0.0, 64.0)
    over_time.add(67.0, 70.0, 5.0, 5.0)
    over_time.add(100.5, 100.75, 9.0, 9.0)  # the last part is of 0.75 s
    xs, ys, tops = ([part[k] for part in over_time.parts()] for k in range(3))
    assert over_time.width_s == 1 and xs[:3] == [3.5, 4.5, 5.5] and xs[-2:] == [99.5, 100.375]
    assert ys == pytest.approx([*(k + 0.5 for k in range(64)), 5, 5, 5, *[0] * 30, 3])
    assert tops == pytest.approx([*range(1, 65), 5, 5, 5, *[0] * 30, 9])
    assert over_time.peak == 64


def test_a_run_that_has_ended_leaves_nothing_of_its_requests() -> None:
    engine = make_engine(policy=Priority(displace=True), batching=ContinuousBatching(max_num_seqs=2), num_blocks=6)

    def ask(name: str, prompt: int = 20, n: int = 1, priority: int = 1) -> None:
        params = SamplingParams(max_tokens=9, n=n)
        engine.add_request(Request(name, range(prompt), params, priority=priority))
        engine.step()

    for name, n in (("preempted", 1), ("runs", 1), ("waits", 2)):
        ask(name, n=n)
    ask("too long", prompt=1000)
    ask("urgent", n=2, priority=0)
    for name in ("preempted", "runs", "waits"):
        engine.abort(name)
    engine.run()
    assert {type(event) for event in engine.trace.events} >= {Preempted, Refused, Forked}
    for trace in (engine.trace, run(BATCHINGS[0], 700).trace, run(BATCHINGS[2]).trace):
        found = series(trace.events)
        assert not any(getattr(found, name) for name in ("_arrivals", "_asked", "_going", "_paused"))


def test_a_sample_over_ranks_has_the_same_distribution() -> None:
    counts = Counter({1.0: 9_000, 2.0: 900, 50.0: 100})
    values = evenly(counts, 1000)
    assert Counter(values) == {1.0: 900, 2.0: 90, 50.0: 10}
    assert evenly(Counter({3.0: 2}), 1000) == [3.0, 3.0]
    assert evenly(Counter(), 10) == []
    assert percentile(values, 99.5) == 50.0


def told(trace: Trace) -> TellingPart:
    found = TellingPart()
    for event in trace.events:
        found.add(event)
    return found


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    ("batching", "num_blocks", "kind"),
    [
        (BATCHINGS[0], 700, "preemption"),
        (ContinuousBatching(max_num_seqs=4), 20_000, "queue"),
        (BATCHINGS[2], 20_000, "queue"),
        (ContinuousBatching(max_num_seqs=64, max_num_batched_tokens=100_000), 20_000, "running"),
    ],
    ids=str,
)
def test_the_most_telling_part_is_that_of_the_run(
    batching: Batching, num_blocks: int, kind: str, fast_forward: bool
) -> None:
    trace = run(batching, num_blocks, fast_forward).trace
    part = told(trace).part(trace.meta)
    assert part is not None and part.kind == kind and part.last_step - part.first_step == STEPS - 1
    whole = {step.step: step for step in trace.of(StepEvent)}
    if kind == "preemption":
        first = next(trace.of(Preempted))
        moment = first.step
        assert first.slot in part.slots and first in part.trace.events
    else:
        name = {"queue": "num_waiting", "running": "num_running"}[kind]
        moment = max(whole, key=lambda step: (getattr(whole[step], name), -step))
        assert part.count == getattr(whole[moment], name)
    assert part.first_step <= moment <= part.last_step and part.time_s <= whole[moment].end_s
    steps = part.trace.steps
    assert [step.step for step in steps[:STEPS]] == list(range(part.first_step, part.last_step + 1))
    for step in steps:
        assert step.count == 1 and sorted(step.rows) == sorted(whole[step.step].rows)
    for width in (480, 880):
        figure = timeline(part.trace, first_step=part.first_step, last_step=part.last_step, slots=part.slots,
                          axis="time", queue=True, width=width)  # fmt: skip
        viz_checks.check(figure.svg)
    drawn = {box.text for box in viz_checks.texts(figure.svg) if box.text.startswith("slot ")}
    assert drawn == {f"slot {slot}" for slot in part.slots} and len(drawn) <= SLOTS


def test_a_part_of_a_long_run_is_a_small_part_of_its_events() -> None:
    workload = azure_twin("conv", 2000, seed=3, rate=6)
    trace = simulate(workload, COST, 20_000).trace
    found = told(trace)
    stretches = {id(s): s for moment in found._moments.values() for s in [*moment.stretches, *found._stretches]}
    assert sum(len(s.begun) + len(s.events) for s in stretches.values()) < len(trace.events) / 10
    assert not any((found._arrivals, found._begun, found._going))


def test_samples_of_a_request_and_a_run_of_few_steps_are_told() -> None:
    engine = make_engine({"A": 4, "B": 6})
    engine.run([Request(name, range(20), SamplingParams(max_tokens=9, n=3)) for name in "AB"])
    part = told(engine.trace).part(engine.trace.meta)
    assert part is not None and part.first_step == 0 and part.trace.steps == engine.trace.steps
    assert TellingPart().part(engine.trace.meta) is None


def test_samples_that_began_before_the_part_are_known_in_it() -> None:
    engine = make_engine(dict.fromkeys("ABC", 400), num_blocks=1000)
    for name in "ABC":
        engine.add_request(Request(name, range(20), SamplingParams(max_tokens=400, n=2)))
        for _ in range(150):
            engine.step()
    engine.run()
    part = told(engine.trace).part(engine.trace.meta)
    assert part is not None and part.kind == "running" and part.first_step > 200
    rows = timeline(part.trace, first_step=part.first_step, last_step=part.last_step).table[1]
    assert len(rows) == 6
