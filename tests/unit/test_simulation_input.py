"""What `simulate` is given: nonsense is named before it becomes a number; a number of numpy is a number."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.hardware.capacity import kv_capacity
from cbserve.hardware.roofline import Roofline
from cbserve.simulation import simulate, simulating
from cbserve.workloads.arrivals import ClosedLoop
from cbserve.workloads.workload import Job, Workload

COST = Roofline.on("a100-80", "llama-3.1-8b")
JOB = Job(0.0, range(40), 5)
WORK = Workload("work", [JOB])
JOBS = [
    5, Job("0", range(40), 5), Job(None, range(40), 5), Job(math.nan, range(40), 5), Job(2**70, range(40), 5),
    Job(0.0, range(40), math.nan), Job(0.0, range(40), 1.5), Job(0.0, range(40), "5"), Job(0.0, range(40), None),
    Job(0.0, np.arange(40), 5), Job(0.0, "text", 5), Job(0.0, range(-10, 0), 5), Job(0.0, [1, -1], 5),
    Job(0.0, [1.5], 5), Job(0.0, [None], 5), Job(0.0, 40, 5), Job(0.0, [], 5),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_that_cannot_be_simulated_is_named(job: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"jobs\[1\]: "):
        Workload("work", [JOB, job])
    if not isinstance(job, Job) or job.arrival_s == 0.0:
        with pytest.raises(InvalidRequestError, match=r"jobs\[1\]: "):
            ClosedLoop([JOB, job], users=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("workload", "cost", "scheduler") for value in (None, 5, "x", [3])],
        ("cost", lambda plan: 0.02),  # it cannot tell many steps at once
        *[("max_model_len", value) for value in (0, -1, math.nan, "5", [3])],
        *[("num_blocks", value) for value in (0, math.nan, "5", None, 2**70)],
        *[("num_host_blocks", value) for value in (-1, "5", 2**70)],
    ],
)
def test_an_argument_that_cannot_be_used_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name if name != "num_host_blocks" else "num_blocks"):
        simulate(**{"workload": WORK, "cost": COST, "num_blocks": 100} | {name: value})


def test_ids_that_the_prefix_cache_cannot_hash_are_named() -> None:
    for ids in ([1.5] * 40 + [1], [2**70] * 40):
        with pytest.raises(InvalidRequestError, match="request '0'"):
            simulate(Workload("work", [Job(0.0, ids, 5)]), COST, 100, enable_prefix_caching=True)


def test_swaps_are_charged_for_blocks_of_their_size() -> None:
    with pytest.raises(InvalidRequestError, match="block_size=32.*16"):
        simulate(WORK, COST, 100, block_size=32, preemption="swap", num_host_blocks=10)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_whole_numbers_of_numpy_are_whole_numbers(fast_forward: bool) -> None:
    jobs = [Job(np.float64(0.5 * i), [int(n) for n in np.arange(40)], np.int64(5 + i)) for i in range(3)]
    for workload in (Workload("work", jobs), ClosedLoop(jobs, users=2)):
        run = simulate(workload, COST, np.int64(100), np.int32(16), fast_forward=fast_forward)
        assert run.summary.num_output_tokens == 5 + 6 + 7


def test_users_without_a_job_cost_nothing() -> None:
    assert simulate(ClosedLoop([JOB, JOB], users=2**70), COST, 100).summary.num_requests == 2


@pytest.mark.parametrize(
    "workload", [Workload("work", [JOB] * 3), ClosedLoop([JOB] * 3, users=2)], ids=lambda w: type(w).__name__
)
def test_with_pauses_it_is_the_same_run(workload: Any) -> None:
    outputs: list[Any] = []
    run, pauses = simulating(workload, COST, 100, progress=outputs.append), 0
    with pytest.raises(StopIteration) as ended:
        while True:
            next(run)
            pauses += 1
            assert len(outputs) == pauses
    assert pauses == 3 and ended.value.value.trace == simulate(workload, COST, 100).trace


def test_simulate_says_what_it_takes_and_can_be_sent_to_another_process() -> None:
    said, parts = inspect.signature(simulate), inspect.signature(simulating)
    assert said.parameters == parts.parameters and said.return_annotation == "Simulation"
    assert pickle.loads(pickle.dumps(simulate)) is simulate
    with pytest.raises(TypeError, match="num_block"):
        simulate(WORK, COST, num_block=100)  # type: ignore[call-arg]


FIELDS = [
    "flops", "memory_bytes_s", "eff_compute", "eff_memory", "overhead_s", "overlap", "dtype_bytes", "block_size",
    "kv_passes", "kv_dtype_bytes", "host_link_bytes_s",
]  # fmt: skip


@pytest.mark.parametrize("value", ["5", [3], math.nan, -1])
def test_what_is_no_number_makes_no_roofline_and_no_goodput(value: Any) -> None:
    for name in FIELDS:
        with pytest.raises(InvalidRequestError, match=name):
            Roofline.on("a100-80", "llama-3.1-8b", **{name: value})
    for name in ("utilization", "activation_bytes"):
        with pytest.raises(InvalidRequestError, match=name):
            kv_capacity("llama-3.1-8b", "a100-80", **{name: value})
    with pytest.raises(InvalidRequestError, match="ttft"):
        simulate(WORK, COST, 100).goodput(ttft=value)


def test_a_simulation_shows_itself_as_a_short_table() -> None:
    run = simulate(Workload("w", [Job(0.1 * i, range(30), 20) for i in range(50)]), COST, 1000)
    shown = [str(run), repr(run), repr(run.fold), run._repr_html_()]
    assert all(len(text) < 5000 and "50" in text for text in shown)
    assert "slot utilisation" in str(run) and "<td" in shown[-1]


@pytest.mark.parametrize("name", ["fast_forward", "block_size", "num_slots", "clock"])
def test_what_the_engine_says_of_itself_is_not_overwritten(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"meta has {name}, which the engine itself says"):
        simulate(WORK, COST, 1000, meta={name: 5, "mine": 1})


@pytest.mark.parametrize("q", [-1, 100.5, math.nan, math.inf])
def test_percentiles_are_asked_for_in_0_to_100(q: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"0\.\.100"):
        simulate(WORK, COST, 1000).fold.itl(q)


def test_a_block_has_a_largest_size() -> None:
    with pytest.raises(InvalidRequestError, match="block_size=65537: must be at most 65,536"):
        simulate(WORK, COST, 10, 65_537)
