"""What a run computed and moved is what the cost model charged, step by step, however the steps were recorded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.metrics import prefix_hit_rate
from cbserve.core.plan import StepPlan
from cbserve.core.trace import Event, Preempted
from cbserve.hardware.roofline import Roofline
from cbserve.sim.work import Work
from cbserve.simulation import simulate
from cbserve.workloads.arrivals import poisson
from cbserve.workloads.sessions import multi_turn
from cbserve.workloads.synthetic import azure_twin

COST = Roofline.on("a100-80", "llama-3.1-8b")


class Metered:
    """The cost model, which adds up what it charges for."""

    takes_steady = True
    block_size = COST.block_size

    def __init__(self, cost: Roofline) -> None:
        self.cost = cost
        self.flops = self.bytes = self.seconds = self.compute_bound_s = 0.0

    def __call__(self, plan: StepPlan) -> float:
        step = self.cost.of(plan)
        self.flops += step.flops
        self.bytes += step.bytes
        self.seconds += step.seconds
        self.compute_bound_s += step.seconds if step.compute_s > step.memory_s else 0.0
        return step.seconds

    def require_link(self) -> float:
        return self.cost.require_link()


TIGHT = {"batching": ContinuousBatching(max_num_seqs=64), "num_blocks": 700}
RUNS: dict[str, dict[str, Any]] = {
    "mixed": {"batching": ContinuousBatching(max_num_seqs=64, max_num_batched_tokens=512)},
    "prefill first": {"batching": ContinuousBatching(mixed=False, max_num_seqs=64)},
    "static": {"batching": StaticBatching(8), "max_tokens": 1000},
    "recompute": TIGHT,
    "swap": {**TIGHT, "preemption": "swap", "num_host_blocks": 1000},
}


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("cost", [COST, replace(COST, dtype_bytes=1, kv_dtype_bytes=2, kv_passes=3.0, overlap=0.5)])
@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_sum_over_all_steps(name: str, cost: Roofline, fast_forward: bool) -> None:
    workload, options = azure_twin("conv", 60, seed=3, rate=12), {"num_blocks": 20_000, **RUNS[name]}
    metered, work = Metered(cost), Work(cost)
    simulate(workload, metered, fast_forward=False, **options)
    preempted: list[Event] = []

    def note(event: Event) -> None:
        if isinstance(event, Preempted):
            preempted.append(event)

    run = simulate(workload, cost, fast_forward=fast_forward, keep_trace=False, listeners=[work.add, note], **options)
    assert bool(preempted) == ("num_blocks" in RUNS[name])
    assert work.flops == pytest.approx(metered.flops)
    assert work.bytes == pytest.approx(metered.bytes)
    assert work.busy_s == pytest.approx(metered.seconds) == pytest.approx(run.fold.busy_s)
    assert work.compute_bound_s == pytest.approx(metered.compute_bound_s)
    assert 0 < work.compute_bound_s < work.busy_s
    assert work.flop_utilisation == pytest.approx(metered.flops / cost.flops / metered.seconds)
    assert 0 < work.flop_utilisation < cost.eff_compute and 0 < work.bandwidth_utilisation < cost.eff_memory
    assert not work._going and not work._prompts and work._sum_going == 0


@pytest.mark.parametrize("num_blocks", [150, 20_000])
def test_prompt_tokens_in_the_prefix_cache_are_counted_as_in_a_trace(num_blocks: int) -> None:
    workload, work = multi_turn(20, 3, 100, 50, partial(poisson, rate=5), think_s=2.0), Work(COST)
    run = simulate(workload, COST, num_blocks, enable_prefix_caching=True, listeners=[work.add])
    assert work.prefix_hit_rate == prefix_hit_rate(run.trace) > 0.1
