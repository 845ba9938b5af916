"""Swap or recompute? Measured once on this machine."""

from __future__ import annotations

import statistics

from cbserve.core.plan import StepPlan
from cbserve.executors.timing import timing_row
from cbserve.executors.torch_executor import TorchExecutor

REPEATS = 3
NUM_TOKENS = 128


def faster_preemption(executor: TorchExecutor, block_size: int) -> str:
    """ "swap" or "recompute", whichever costs fewer seconds here.

    Swapping moves the K and V of the victim's computed tokens out and in again: bytes over the measured link, twice.
    Recomputing is one prefill of the same tokens (Kwon et al. 2023, section 4.5 and figure 19). Both grow in proportion
    to
    the length until attention counts, so one comparison decides for all victims.
    """
    num_blocks = min(-(-NUM_TOKENS // block_size), executor.bounds.num_blocks, executor.host_cache.shape[2])
    swap_s = _median(executor, StepPlan(-1, swap_outs=[(i, i) for i in range(num_blocks)]))
    swap_s += _median(executor, StepPlan(-1, swap_ins=[(i, i) for i in range(num_blocks)]))
    num_tokens = min(num_blocks * block_size, executor.bounds.max_position)
    recompute_s = _median(executor, StepPlan(-1, [timing_row(0, num_tokens, range(num_blocks), num_samples=0)]))
    return "swap" if swap_s < recompute_s else "recompute"


def _median(executor: TorchExecutor, plan: StepPlan) -> float:
    executor.execute(plan)  # warm up
    return statistics.median(executor.execute(plan).duration_s for _ in range(REPEATS))
