"""What all points of a curve share: how it batches, and who goes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.policies import FCFS, Policy
from cbserve.core.request import Sequence

MIXED, PREFILL_FIRST, STATIC = "mixed", "prefill first", "static"
KINDS = (MIXED, PREFILL_FIRST, STATIC)


class ShortestPromptFirst(Policy):
    """The shortest prompt first: needs no prediction, and does as well where prompts are most of the work."""

    def key(self, seq: Sequence) -> tuple[int, float]:
        return len(seq.request.prompt_token_ids), seq.arrival_s


POLICIES: Mapping[str, Callable[[], Policy]] = {"FCFS": FCFS, "shortest prompt first": ShortestPromptFirst}


@dataclass(frozen=True)
class Setting:
    """What all points of a curve share.

    Args:
        batching: "static", "mixed" (decodes and prefill chunks in one step) or "prefill first" (decodes wait).
        max_num_seqs: batch cap: sequences that run at a time.
        token_budget: tokens that a step computes at most, decodes included: the chunk that long prompts are cut to.
            Static batching has none.
        policy: who goes first, by its name in `policies`.

    Raises:
        InvalidRequestError: another batching, or a number below 1.
    """

    batching: str = MIXED
    max_num_seqs: int = 64
    token_budget: int = 512
    policy: str = "FCFS"

    def __post_init__(self) -> None:
        if self.batching not in KINDS:
            raise InvalidRequestError(f"batching={self.batching!r}: must be one of {', '.join(KINDS)}")
        self.make()

    def make(self) -> Batching:
        if self.batching == STATIC:
            return StaticBatching(self.max_num_seqs)
        return ContinuousBatching(
            mixed=self.batching == MIXED,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.token_budget,
        )

    @property
    def name(self) -> str:
        budget = {MIXED: f"chunk {self.token_budget}", PREFILL_FIRST: f"prefill first {self.token_budget}"}
        parts = [budget.get(self.batching, STATIC), f"batch {self.max_num_seqs}"]
        return ", ".join([*parts, *([self.policy] if self.policy != "FCFS" else [])])
