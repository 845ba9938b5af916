"""Predict a run in seconds: measure what a step costs on this machine, then run the same scheduler on a virtual clock.

A step's cost here is a piecewise linear function of the tokens that it computes, plus a slope for the context that its
attention reads. It is what chapter 2 needs; it knows nothing of FLOPs and bytes.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import StepPlan
from cbserve.executors.timing import timing_row

if TYPE_CHECKING:
    from cbserve.llm import LLM

NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (64, 512)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: `points` are (tokens computed, seconds) at no context, `per_context_token_s` is added for each
    cached token that the step reads. Call it with a plan.

    Raises InvalidRequestError for fewer than two points, or points that do not rise in tokens."""

    points: tuple[tuple[int, float], ...]
    per_context_token_s: float = 0.0

    def __post_init__(self) -> None:
        sizes = [num_tokens for num_tokens, _ in self.points]
        if len(sizes) < 2 or any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise InvalidRequestError(f"points={self.points!r}: must be at least two (tokens, seconds), tokens rising")

    def __call__(self, plan: StepPlan) -> float:
        return self.seconds(plan.num_tokens, sum(row.start for row in plan.rows))

    def seconds(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Time of a step that computes `num_tokens` and reads `num_context_tokens` of cached K and V.

        Between points linear; beyond the last one along its last slope.
        """
        index = min(max(1, bisect_left(self.points, (num_tokens, 0.0))), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[index - 1], self.points[index]
        base = y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)
        return base + self.per_context_token_s * num_context_tokens


def measure_step_times(
    llm: LLM, num_tokens: Sequence[int] = NUM_TOKENS, repeats: int = 3, contexts: tuple[int, int] = CONTEXTS
) -> StepTimes:
    """Time single steps of `llm` while it is idle: decode rows up to 32 tokens, one prefill chunk beyond. Medians.

    Takes a few seconds for SmolLM2 on a CPU. What the KV pool holds is put back, since a prefix cache may find it.

    Args:
        num_tokens: sizes of the steps; those that pool or model cannot take are left out.

    Raises:
        InvalidRequestError: no sizes, or one below 1, or fewer than 1 repeat.
        CBServeError: requests are unfinished.
    """
    if not num_tokens or any(not isinstance(n, int) or n < 1 for n in num_tokens):
        raise InvalidRequestError(f"num_tokens={num_tokens!r}: must be integers of at least 1")
    if not isinstance(repeats, int) or repeats < 1:
        raise InvalidRequestError(f"repeats={repeats!r}: must be an integer of at least 1")
    llm.require_idle()
    short, long = contexts
    pool = llm.scheduler.kv.pool
    most = min(max(num_tokens), pool.num_blocks * pool.block_size, llm.max_model_len)
    sizes = [n for n in num_tokens if n <= most] or [most]
    plans = {n: _decodes(llm, n, short) if n <= 32 else _prefill(llm, n) for n in sizes}
    rows = min(8, max((n for n in sizes if n <= 32), default=1))
    plans.setdefault(rows, _decodes(llm, rows, short))
    plans[-1] = _decodes(llm, rows, long)  # the same rows, more context
    times: dict[int, list[float]] = {n: [] for n in plans}
    cache, blocks = llm.executor.kv_cache, sorted({b for p in plans.values() for r in p.rows for b in r.block_table})
    kept = cache[:, :, blocks] if llm.scheduler.kv.enable_prefix_caching else None  # a copy
    try:
        for repeat in range(repeats + 1):  # the first round warms up
            for n, plan in plans.items():
                duration = llm.executor.execute(plan).duration_s
                if repeat:
                    times[n].append(duration)
    finally:
        if kept is not None:
            cache[:, :, blocks] = kept
    median = {n: statistics.median(values) for n, values in times.items()}
    context_of = {n: sum(row.start for row in plan.rows) for n, plan in plans.items()}
    more = context_of[-1] - context_of[rows] if rows in context_of else 0
    slope = max(0.0, (median[-1] - median[rows]) / more) if more > 0 else 0.0
    points = tuple((n, max(0.0, median[n] - slope * context_of[n])) for n in sorted(n for n in plans if n > 0))
    if len(points) == 1:
        points = ((0, points[0][1]), *points)
    return StepTimes(points, slope)


def _decodes(llm: LLM, count: int, context: int) -> StepPlan:
    """`count` decode rows with `context` cached tokens each."""
    pool = llm.scheduler.kv.pool
    context = min(context, pool.num_blocks * pool.block_size - 1, llm.max_model_len - 1)
    blocks_each = -(-(context + 1) // pool.block_size)
    tables = ([(i * blocks_each + b) % pool.num_blocks for b in range(blocks_each)] for i in range(count))
    return StepPlan(-1, [timing_row(context, 1, table) for table in tables])


def _prefill(llm: LLM, num_tokens: int) -> StepPlan:
    num_blocks = -(-num_tokens // llm.scheduler.kv.block_size)
    return StepPlan(-1, [timing_row(0, num_tokens, range(num_blocks))])
