"""An executor without a model: each answer has a length that was decided beforehand, each step a duration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cbserve.core.plan import StepPlan, StepResult

EOS = 0  # the token id that a scripted answer ends with; all others are EOS + 1, EOS + 2, ...


class ScriptedExecutor:
    """Answers with token ids 1, 2, 3, ... and ends each answer with `EOS`, so that no policy can know its length.

    Args:
        lengths: output tokens by request id, EOS included; a request that is missing never ends by itself.
        step_time_s: seconds that a step takes: a number, or a function of the plan.
    """

    def __init__(
        self, lengths: Mapping[str, int] | None = None, step_time_s: float | Callable[[StepPlan], float] = 1.0
    ) -> None:
        self.lengths = lengths or {}
        self.step_time_s = step_time_s

    def execute(self, plan: StepPlan) -> StepResult:
        duration = self.step_time_s(plan) if callable(self.step_time_s) else self.step_time_s
        sampled = [
            [self._token(row.request_id, row.end - row.num_prompt_tokens)] * row.num_samples for row in plan.rows
        ]
        return StepResult(sampled, duration_s=duration)

    def _token(self, request_id: str, num_output_tokens: int) -> int:
        """The token that follows `num_output_tokens` earlier ones."""
        return EOS if num_output_tokens + 1 >= self.lengths.get(request_id, 2**62) else 1 + num_output_tokens % 200
