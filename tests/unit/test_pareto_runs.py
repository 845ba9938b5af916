"""The points of a frontier are runs as `simulate` and `cbserve sim` have them; their rates are those of a long run."""

import pytest

from cbserve import ContinuousBatching, Job, Workload, azure_twin, sequence_metrics, simulate
from cbserve.core.trace import Preempted, Trace
from cbserve.explorers.moments import NUM_STEPS, Moment
from cbserve.explorers.point import WARM_UP
from cbserve.explorers.setting import POLICIES, PREFILL_FIRST, STATIC, Setting
from cbserve.explorers.sweep import Sweep
from cbserve.sim.point import numbers, prepare
from cbserve.sim.settings import Settings
from cbserve.viz.spans import spans
from cbserve.viz.style import number

NUM = 60
SETTINGS = [
    Setting(), Setting(PREFILL_FIRST, 8, 1024), Setting(STATIC, 16), Setting(policy="shortest prompt first"),
]  # fmt: skip


def sweep_of(num_requests: int = NUM, gpu: str = "a100-80", num_blocks: int | None = None) -> Sweep:
    return Sweep(gpu, "llama-3.1-8b", azure_twin("conv", num_requests), POLICIES, num_blocks)


def trace_of(sweep: Sweep, setting: Setting, rate: float) -> Trace:
    """The run that a point stands for, made without the explorer, every step lived through."""
    return simulate(
        sweep.workload.scaled(rate), sweep.cost, sweep.num_blocks(setting), batching=setting.make(),
        policy=POLICIES[setting.policy](), max_tokens=sweep.max_tokens, fast_forward=False,
    ).trace  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_rates_and_requests_in_flight_are_those_between_warm_up_and_last_arrival(setting: Setting) -> None:
    sweep = sweep_of()
    point, trace = sweep.point(setting, 4.0, NUM), trace_of(sweep, setting, 4.0)
    assert sweep.point(setting, 4.0, NUM) is point
    records = sequence_metrics(trace)
    arrivals = sorted(record.arrival_s for record in records)
    start, end = arrivals[int(WARM_UP * NUM)], arrivals[-1]
    ended = [r for r in records if start < r.finished_s <= end]
    given = [t for r in records for t in r.token_times_s if start < t <= end]
    assert point.tokens_per_s == pytest.approx(len(given) / (end - start), rel=1e-9)
    assert point.answer_rate == pytest.approx(len(ended) / (end - start), rel=1e-9)
    good = [r for r in ended if r.ttft_s <= 0.4 and max(r.itl_s, default=0.0) <= 0.1]
    assert point.goodput(0.4, 0.1) == pytest.approx(len(good) / (end - start), rel=1e-9)
    # In flight: looked at in very many moments
    moments = [start + (end - start) * (i + 0.5) / 20_000 for i in range(20_000)]
    stays = [(r.arrival_s, r.finished_s) for r in records]
    present = sum(sum(a <= t < b for t in moments) for a, b in stays) / len(moments)
    assert point.in_flight == pytest.approx(present, rel=1e-3)
    waits = [(r.arrival_s, r.admitted_s) for r in records]
    waiting = sum(sum(a <= t < b for t in moments) for a, b in waits) / len(moments)
    assert point.num_waiting == pytest.approx(waiting, rel=1e-3, abs=1e-3)
    assert point.answer_rate * point.seconds_each == pytest.approx(point.in_flight, rel=1e-12)  # Little's law


def test_a_load_that_is_carried_is_answered_at_its_rate() -> None:
    """Neither the empty engine at the start nor the drain at the end counts: they are half of a run of 80 requests."""
    for num_requests, error in ((1000, 0.02), (80, 0.3)):
        sweep = sweep_of(num_requests)
        point = sweep.point(Setting(), 5.5, num_requests)
        mean_answer = sum(job.num_output_tokens for job in sweep.workload.jobs) / num_requests
        assert point.answer_rate == pytest.approx(5.5, rel=error)
        assert point.tokens_per_s == pytest.approx(5.5 * mean_answer, rel=error)
    long = sweep_of(1000).point(Setting(), 7.9, 1000)
    assert not long.keeps(1.0, 0.1)  # what 80 requests do not show
    assert sweep_of(80).point(Setting(), 7.9, 80).keeps(1.0, 0.1)


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        (Setting(), {"batching": "mixed", "chunk": 512, "max_num_seqs": 64}),
        (Setting(PREFILL_FIRST, 8, 1024), {"batching": "prefill-first", "chunk": 1024, "max_num_seqs": 8}),
        (Setting(STATIC, 16), {"batching": "static", "batch_size": 16}),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else "",
)
def test_a_point_has_the_latencies_that_cbserve_sim_prints(setting: Setting, options: dict[str, object]) -> None:
    settings = Settings(requests=NUM, rate=4.0, model="llama-3.1-8b", **options)
    found = numbers(*prepare(settings).run(), settings)
    sweep = sweep_of()
    point = sweep.point(setting, 4.0, NUM).summary
    assert (point.ttft_p99_s, point.itl_p99_s) == (found["latency_s"]["ttft"]["p99"], found["latency_s"]["itl"]["p99"])
    assert point.e2e_mean_s == pytest.approx(found["latency_s"]["e2e"]["mean"], rel=1e-12)  # another order of addition
    assert sweep.num_blocks(setting) == found["num_blocks"]


def test_a_run_is_made_in_small_parts_and_not_at_all_when_it_is_left() -> None:
    sweep = sweep_of()
    parts = sweep.run(Setting(), 4.0, NUM)
    for _ in range(NUM // 2):
        next(parts)
    parts.close()
    assert sweep.known(Setting(), 4.0, NUM) is None
    assert sum(1 for _ in sweep.run(Setting(), 4.0, NUM)) >= NUM
    assert sweep.known(Setting(), 4.0, NUM) is not None
    assert list(sweep.run(Setting(), 4.0, NUM)) == []


def test_the_rates_follow_the_hardware() -> None:
    slow, fast = (sweep_of(gpu=gpu) for gpu in ("a100-80", "h100"))
    assert list(slow.rates) == sorted(set(slow.rates)) and len(slow.rates) == 6
    assert 1.5 < fast.rates[-1] / slow.rates[-1] < 4
    # The last one is about what the hardware can do: the engine does not get far beyond it
    most = simulate(
        slow.workload.scaled(1000), slow.cost, slow.num_blocks(Setting()),
        batching=ContinuousBatching(max_num_seqs=128),
    )  # fmt: skip
    assert 0.5 * slow.rates[-1] < NUM / most.fold.makespan_s < 1.5 * slow.rates[-1]


def test_shortest_prompt_first() -> None:
    jobs = [Job(0.01 * i, range(1000 * i, 1000 * i + n), 5) for i, n in enumerate((500, 400, 30, 200))]
    sweep = Sweep("a100-80", "llama-3.1-8b", Workload("four", jobs), POLICIES)
    setting = Setting(max_num_seqs=1, policy="shortest prompt first")
    firsts = sorted(sequence_metrics(trace_of(sweep, setting, 1000.0)), key=lambda r: r.token_times_s[0])
    assert [r.num_prompt_tokens for r in firsts] == [500, 30, 200, 400]
    assert 4 * sweep.point(setting, 1000.0, 4).summary.ttft_mean_s == pytest.approx(sum(r.ttft_s for r in firsts))


# ---- telling moments -------------------------------------------------------------------------------------------------


def moments_of(sweep: Sweep, setting: Setting, rate: float) -> list[Moment]:
    for _ in sweep.find_moments(setting, rate, NUM):
        pass
    return sweep.known_moments(setting, rate, NUM)


def test_moments_are_the_first_preemption_the_longest_queue_and_the_beginning() -> None:
    sweep, setting = sweep_of(num_blocks=300), Setting(max_num_seqs=16)
    found, trace = moments_of(sweep, setting, 4.0), trace_of(sweep, setting, 4.0)
    assert [moment.kind for moment in found] == ["preemption", "queue", "start"]
    preempted = next(trace.of(Preempted))
    worst = max(trace.steps, key=lambda step: step.num_waiting)
    assert found[0].name == f"first preemption, second {number(preempted.time_s)}"
    assert found[1].name == f"most waiting: {worst.num_waiting} requests, second {number(worst.start_s)}"
    for moment, step in zip(found, (preempted.step, worst.step, 0), strict=True):
        assert moment.first_step <= step <= moment.last_step
        # The same steps as in the run that lived through each
        expected = [s for s in trace.steps if moment.first_step <= s.step <= moment.last_step + 1]
        steps = moment.trace.steps
        assert [s.step for s in steps] == [s.step for s in expected] and len(steps) <= NUM_STEPS + 1
        assert [sorted(s.rows) for s in steps] == [sorted(s.rows) for s in expected]
        assert [s.end_s for s in steps] == pytest.approx([s.end_s for s in expected], rel=1e-9)
        assert {span.seq_id for span in spans(moment.trace)} == {row.seq_id for s in expected for row in s.rows}


def test_a_run_in_which_nobody_waits_begins_at_the_beginning() -> None:
    jobs = [Job(10.0 * i, range(100), 5) for i in range(NUM)]
    sweep = Sweep("a100-80", "llama-3.1-8b", Workload("calm", jobs), POLICIES)
    assert [moment.kind for moment in moments_of(sweep, Setting(), 0.1)] == ["start"]
