"""Swapping, timed on this machine: what it costs, and whether to recompute instead."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from cbserve.core.plan import StepPlan
from cbserve.executors.timing import timing_row
from cbserve.executors.torch_executor import TorchExecutor

REPEATS = 3
NUM_TOKENS = 128


def faster_preemption(executor: TorchExecutor, block_size: int) -> str:
    """ "swap" or "recompute", whichever costs fewer seconds here.

    Swapping moves the K and V of the victim's computed tokens out and in again: bytes over the measured link, twice.
    Recomputing is one prefill of the same tokens (Kwon et al. 2023, section 4.5 and figure 19). Both grow in proportion
    to the length until attention counts, so one comparison decides for all victims.
    """
    num_blocks = min(-(-NUM_TOKENS // block_size), executor.bounds.num_blocks, executor.host_cache.shape[2])
    swap_s = sum(_median(executor, plan) for plan in swap_out_and_in(num_blocks))
    num_tokens = min(num_blocks * block_size, executor.bounds.max_position)
    recompute_s = _median(executor, StepPlan(-1, [timing_row(0, num_tokens, range(num_blocks), num_samples=0)]))
    return "swap" if swap_s < recompute_s else "recompute"


def swap_out_and_in(num_blocks: int) -> tuple[StepPlan, StepPlan]:
    """Steps that do nothing but copy the first `num_blocks` out to the host, and in again."""
    pairs = [(i, i) for i in range(num_blocks)]
    return StepPlan(-1, swap_outs=pairs), StepPlan(-1, swap_ins=pairs)


@contextmanager
def spare_host_pool(executor: TorchExecutor, num_blocks: int) -> Iterator[None]:
    """Inside, the executor swaps to a host pool of this size, and what its own one holds is safe."""
    own, executor.host_cache = executor.host_cache, executor.new_host_cache(num_blocks)
    try:
        yield
    finally:
        executor.host_cache = own


def _median(executor: TorchExecutor, plan: StepPlan) -> float:
    executor.execute(plan)  # warm up
    return statistics.median(executor.execute(plan).duration_s for _ in range(REPEATS))
