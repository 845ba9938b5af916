"""An executor that computes nothing: a cost model says how long a step takes, a table when an answer ends."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

from cbserve.core.plan import Ramp, Row, Steady, StepPlan, StepResult
from cbserve.executors.scripted import EOS


class CostModel(Protocol):
    """Seconds of a step; `hardware.Roofline` is one.

    One that counts `plan.steady` too, by `plan.num_tokens` and `plan.context_len` for instance, says so with an
    attribute `takes_steady = True`, and is asked for much smaller plans then.
    """

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

    def __init__(self, cost: CostModel, lengths: Mapping[str, int]) -> None:
        self.cost = cost
        self.lengths = lengths
        self.takes_steady = getattr(cost, "takes_steady", False)
        self._followed: Steady | None = None
        self._ends: dict[int, int] = {}  # of the steady: seq_id -> the group's step that ends it
        self._next: list[tuple[int, int]] = []  # a heap of the same; those that left stay until they surface

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.answer(plan)
        result.duration_s = self.cost(plan)
        return result

    def answer(self, plan: StepPlan) -> StepResult:
        """See `protocol.ForeseeingExecutor`."""
        result = StepResult([self._sampled(row) if row.num_samples else [] for row in plan.rows])
        if plan.steady is not None:
            result.ended = self._ended(plan.steady)
        return result

    def ramp(self, plan: StepPlan, most: int) -> Ramp:
        """See `protocol.ForeseeingExecutor`."""
        lengths = self.lengths
        for row in plan.rows:
            left = lengths.get(row.request_id, 2**62) - (row.end - row.num_prompt_tokens)
            if left < most and not row.is_padding:
                most = left
        if plan.steady is not None:
            most = min(most, self._next_end(plan.steady) - plan.steady.step + 1)
        return self.cost.ramp(plan, max(1, most))

    def foresee(self, plan: StepPlan, count: int) -> list[Sequence[int]]:
        """See `protocol.ForeseeingExecutor`."""
        return [
            () if row.is_padding else range(row.token_ids[-1] + 1, row.token_ids[-1] + 1 + count) for row in plan.rows
        ]

    def _next_end(self, steady: Steady) -> int:
        """The step of the group in which the next of the steady rows ends, once who joined and left is noted."""
        if steady is not self._followed:
            self._followed = steady
            for seq_id in steady.left:
                self._ends.pop(seq_id, None)
            for seq_id, request_id, num_given in steady.joined:
                if (length := self.lengths.get(request_id)) is not None:
                    end = self._ends[seq_id] = steady.step + max(0, length - num_given - 1)
                    heapq.heappush(self._next, (end, seq_id))
            while self._next and self._ends.get(self._next[0][1]) != self._next[0][0]:
                heapq.heappop(self._next)
        return self._next[0][0] if self._next else 2**62

    def _ended(self, steady: Steady) -> dict[int, int]:
        ended: dict[int, int] = {}
        if self._next_end(steady) > steady.step:
            return ended
        while self._next and self._next[0][0] <= steady.step:
            end, seq_id = heapq.heappop(self._next)
            if self._ends.get(seq_id) == end:
                del self._ends[seq_id]
                ended[seq_id] = EOS
        return ended

    def _sampled(self, row: Row) -> list[int]:
        ends = row.end - row.num_prompt_tokens + 1 >= self.lengths.get(row.request_id, 2**62)
        return [EOS if ends else row.token_ids[-1] + 1] * row.num_samples
