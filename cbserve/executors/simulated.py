"""An executor that computes nothing: a cost model says how long a step takes, a table when an answer ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cbserve.core.plan import Ramp, Row, StepPlan, StepResult
from cbserve.executors.scripted import EOS


class StepCost(Protocol):
    """Seconds of a step; `hardware.Roofline` is one."""

    def __call__(self, plan: StepPlan) -> float: ...

    def ramp(self, plan: StepPlan, count: int) -> Ramp:
        """Of `plan`, all decodes, and of the `count` - 1 steps after it in which each row has one token more."""


class SimulatedExecutor:
    """Answers with the token that follows the last one, and with `EOS` where the answer ends: here, so that no policy
    can peek. A later turn of a conversation whose token ids go on in the same way finds prompt and answer in the prefix
    cache.

    Args:
        cost: seconds of a step.
        lengths: output tokens by request id, EOS included; a request that is missing ends by its max_tokens.
    """

    def __init__(self, cost: StepCost, lengths: Mapping[str, int]) -> None:
        self.cost = cost
        self.lengths = lengths

    def execute(self, plan: StepPlan) -> StepResult:
        sampled = [self._sampled(row) if row.num_samples else [] for row in plan.rows]
        return StepResult(sampled, duration_s=self.cost(plan))

    def ramp(self, plan: StepPlan, most: int) -> Ramp:
        """See `engine.ForeseeingExecutor`."""
        lengths = self.lengths
        for row in plan.rows:
            left = lengths.get(row.request_id, 2**62) - (row.end - row.num_prompt_tokens)
            if left < most and not row.is_padding:
                most = left
        return self.cost.ramp(plan, max(1, most))

    def foresee(self, plan: StepPlan, count: int) -> list[Sequence[int]]:
        """See `engine.ForeseeingExecutor`."""
        return [
            () if row.is_padding else range(row.token_ids[-1] + 1, row.token_ids[-1] + 1 + count) for row in plan.rows
        ]

    def _sampled(self, row: Row) -> list[int]:
        ends = row.end - row.num_prompt_tokens + 1 >= self.lengths.get(row.request_id, 2**62)
        return [EOS if ends else row.token_ids[-1] + 1] * row.num_samples
