"""Made up workloads: independent streams, twins that resemble their traces, prompts that begin alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import mean

import pytest

from cbserve.clock import VirtualClock
from cbserve.core.batching import ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import InvalidRequestError
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import StepPlan, StepResult
from cbserve.core.scheduler import Scheduler
from cbserve.core.trace import Admitted
from cbserve.engine import Engine
from cbserve.workloads.arrivals import ClosedLoop, all_at_once, poisson
from cbserve.workloads.lengths import exponential, lognormal
from cbserve.workloads.sessions import multi_turn, shared_prefix
from cbserve.workloads.synthetic import CODE_ARRIVALS, azure_twin, synthesize
from cbserve.workloads.workload import Workload


def correlation(x: list[float], y: list[float]) -> float:
    mx, my = mean(x), mean(y)
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return xy / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


def test_synthesize_draws_what_it_is_told() -> None:
    workload = synthesize(4000, partial(poisson, rate=5.0), 512, partial(exponential, 200.0), seed=2)
    rows = workload.summary()
    assert rows["rate_per_s"] == pytest.approx(5.0, rel=0.06)
    assert (rows["prompt_mean"], rows["prompt_max"]) == (512, 512)
    assert rows["output_mean"] == pytest.approx(200.5, rel=0.06)
    assert workload == synthesize(4000, partial(poisson, rate=5.0), 512, partial(exponential, 200.0), seed=2)
    assert workload.jobs != synthesize(4000, partial(poisson, rate=5.0), 512, partial(exponential, 200.0), seed=3).jobs
    prompts = sorted((job.prompt for job in workload.jobs), key=lambda prompt: prompt[0])
    assert all(a[-1] < b[0] for a, b in zip(prompts, prompts[1:], strict=False))  # nothing shared


def test_the_same_distribution_twice_is_drawn_independently() -> None:
    lengths = partial(lognormal, 200.0, 0.5)
    workload = synthesize(4000, partial(poisson, rate=1.0), lengths, lengths, seed=1)
    prompts, outputs = [len(job.prompt) for job in workload.jobs], [job.num_output_tokens for job in workload.jobs]
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(workload.jobs, workload.jobs[1:], strict=False)]
    assert abs(correlation(prompts, outputs)) < 0.06
    assert abs(correlation(gaps, outputs[1:])) < 0.06


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synthesize(3, [0.0, 1.0], 5, 5), "arrivals="),
        (lambda: synthesize(3, all_at_once, [1, 2], 5), "prompt="),
        (lambda: synthesize(3, all_at_once, [1, 2, 0], 5), r"prompt\[2\]=0"),
        (lambda: synthesize(3, all_at_once, 5, [1, 2.5, 3]), r"output\[1\]=2.5"),
        (lambda: synthesize(3, all_at_once, 5, 3.5), "output=3.5"),
        (lambda: synthesize(3, [0.0, "1", 2.0], 5, 5), r"arrivals\[1\]='1'"),
        (lambda: synthesize(2, [1.0, 0.0], 5, 5), "sort the jobs"),
        (lambda: synthesize(-1, all_at_once, 5, 5), "n=-1"),
        (lambda: shared_prefix(3, 0, 8, 4, 4, all_at_once), "num_prefixes=0"),
        (lambda: shared_prefix(3, 1, -8, 4, 4, all_at_once), "prefix_tokens=-8"),
        (lambda: multi_turn(3, 0, 8, 4, all_at_once, 1.0), r"turns\[0\]=0"),
        (lambda: multi_turn(3, 2, 8, 4, all_at_once, -1.0), "think_s=-1.0"),
        (lambda: azure_twin("chat", 3), "'conv' and 'code'"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("conv", (1154.7, 1020), (211.1, 129)), ("code", (2047.8, 1469), (27.9, 13))],
)
def test_a_twin_has_the_lengths_of_its_trace(
    name: str, prompt: tuple[float, float], output: tuple[float, float]
) -> None:
    twin = azure_twin(name, 20_000, seed=1)
    rows = twin.summary()
    assert "synthetic" in twin.name and "synthetic" in twin.note and "CC-BY-4.0" in twin.source
    assert rows["prompt_mean"] == pytest.approx(prompt[0], rel=0.06)
    assert rows["prompt_p50"] == pytest.approx(prompt[1], rel=0.03)
    assert rows["output_mean"] == pytest.approx(output[0], rel=0.06)
    assert rows["output_p50"] == pytest.approx(output[1], rel=0.03)
    assert azure_twin(name, 50, seed=1, rate=0.7).rate == pytest.approx(0.7)


def test_the_conv_twin_is_nearly_poisson() -> None:
    rows = azure_twin("conv", 20_000, seed=1).summary()
    assert rows["rate_per_s"] == pytest.approx(5.530, rel=0.03)
    assert rows["gap_cv"] == pytest.approx(1.094, rel=0.03)


@pytest.mark.slow
def test_the_code_twin_comes_in_bursts_as_the_trace_does() -> None:
    # By the formulas of `on_off`, exactly; the trace: 2.566 requests a second, CV of gaps 13.15.
    on, off, rate_on = (CODE_ARRIVALS.keywords[name] for name in ("on_s", "off_s", "rate_on"))
    assert rate_on * on / (on + off) == pytest.approx(2.566, rel=0.001)
    assert math.sqrt(1 + 2 * rate_on * on * off**2 / (on + off) ** 2) == pytest.approx(13.15, rel=0.001)
    # What is drawn, over a long time. One hour holds some fifty bursts only, and differs by a tenth or more.
    rows = synthesize(200_000, CODE_ARRIVALS, 1, 1, seed=1).summary()
    assert rows["rate_per_s"] == pytest.approx(2.566, rel=0.06)
    assert rows["gap_cv"] == pytest.approx(13.15, rel=0.06)
    # 193 of the trace's 344 windows of 10 s are empty
    times = CODE_ARRIVALS(n=100_000, seed=2)
    windows = math.ceil(times[-1] / 10)
    assert 1 - len({int(t // 10) for t in times}) / windows == pytest.approx(193 / 344, abs=0.05)


def test_shared_prefix() -> None:
    workload = shared_prefix(300, 3, 64, 16, 4, partial(poisson, rate=9.0), seed=1)
    heads = {tuple(job.prompt[:64]) for job in workload.jobs}
    tails = [tuple(job.prompt[64:]) for job in workload.jobs]
    assert len(heads) == 3 and len(set(tails)) == 300
    assert {len(tail) for tail in tails} == {16}
    assert len({token for tail in tails for token in tail}) == 300 * 16
    assert not {token for head in heads for token in head} & {token for tail in tails for token in tail}
    first, second = shared_prefix(2, 1, 0, 5, 1, all_at_once).jobs
    assert first.prompt[0] != second.prompt[0]


def test_multi_turn_prompts_hold_all_that_was_said() -> None:
    workload = multi_turn(20, 4, partial(exponential, 30.0), [7] * 80, partial(poisson, rate=1.0), 5.0, 1, 100)
    assert len(workload) == 80
    for session in range(20):
        turns = [job for job in workload.jobs if job.session == session]
        assert len(turns) == 4
        for before, after in zip(turns, turns[1:], strict=False):
            answered = [*before.prompt, *range(before.prompt[-1] + 1, before.prompt[-1] + 8)]
            assert list(after.prompt[: len(answered)]) == answered and len(after.prompt) > len(answered)
            assert after.arrival_s > before.arrival_s
        assert turns[0].prompt[:100] == workload.jobs[0].prompt[:100]
    regular = multi_turn(2, [2, 3], 8, 4, [0.0, 0.0], 2.0, exponential=False)
    assert [(job.arrival_s, job.session) for job in regular.jobs] == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 1)]


class Continuing:
    """Answers that go on with the token after the prompt's last one, as simulated answers do."""

    def __init__(self, workload: Workload) -> None:
        self.jobs = workload.jobs

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = []
        for row in plan.rows:
            job, said = self.jobs[int(row.request_id)], row.end - row.num_prompt_tokens
            sampled.append([0 if said + 1 == job.num_output_tokens else job.prompt[-1] + 1 + said])
        return StepResult(sampled, duration_s=0.001)


def test_the_next_turn_finds_prompt_and_answer_in_the_prefix_cache() -> None:
    workload = multi_turn(3, 3, 40, 24, all_at_once, 60.0, exponential=False)
    kv = KVCacheManager(BlockPool(200, 8), enable_prefix_caching=True)
    engine = Engine(Scheduler(kv, ContinuousBatching()), Continuing(workload), VirtualClock())
    outputs = list(engine.run(workload.requests(max_tokens=24)))
    assert all(output.error is None for output in outputs)
    cached = [event.num_cached_tokens for event in engine.trace.events if isinstance(event, Admitted)]
    # The last token of an answer has no K and V yet: 63 of 64 tokens and 127 of 128 are known, in whole blocks of 8.
    assert cached == [0] * 3 + [56] * 3 + [120] * 3


def test_conversations_in_a_closed_loop_wait_for_their_answers() -> None:
    loop = ClosedLoop(multi_turn(4, 3, 10, 5, all_at_once, 1.0).jobs, users=4, think_s=2.0)
    jobs = loop.start()
    assert [(job.session, len(job.prompt)) for job in jobs] == [(s, 10) for s in range(4)]
    second = loop.on_finish("2", 7.0)
    assert second is not None and (second.session, len(second.prompt), second.arrival_s) == (2, 25, 9.0)
