"""What an engine asks of who carries its steps out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cbserve.core.plan import Ramp, StepPlan, StepResult


class Executor(Protocol):
    """Carries out a `StepPlan`; sees nothing else."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class ForeseeingExecutor(Executor, Protocol):
    """One that knows beforehand what steps will take: a simulation."""

    takes_steady: bool  # it follows plans whose steady rows are not told one by one

    def ramp(self, plan: StepPlan, most: int) -> Ramp:
        """Durations of `plan` and of at most `most` - 1 steps that differ from it in lengths only. No answer ends
        before the last of them."""

    def foresee(self, plan: StepPlan, count: int) -> list[Sequence[int]]:
        """The tokens that each row of `plan` is given in `count` such steps."""

    def answer(self, plan: StepPlan) -> StepResult:
        """What `execute` gives, but for the duration: of a step that `ramp` has told."""
