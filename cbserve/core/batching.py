"""What may join one step, and in which order the scheduler's duties run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer

# The duties of an iteration, besides `retire`, which `Scheduler.update` runs when the step is done.
DISPLACE, GROW, GROW_PREFILLS, GROW_DECODES, ADMIT = "displace", "grow", "grow_prefills", "grow_decodes", "admit"

MOST_SEQS = 65_536  # slots: the scheduler keeps a list of them, and no device runs so many sequences in a step


def _set_integers(batching: Any, least: int, *names: str) -> None:
    """The fields of these names as plain integers. Raises InvalidRequestError for anything else."""
    for name in names:
        object.__setattr__(batching, name, integer(name, getattr(batching, name), least))


def _at_most_seqs(name: str, value: int) -> None:
    if value > MOST_SEQS:
        raise InvalidRequestError(f"{name}={value}: must be at most {MOST_SEQS:,}; give the slots of one engine")


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Iteration-level batching (Yu et al. 2022, Orca, section 3.1; chunks: Agrawal et al. 2024, Sarathi-Serve, section
    4).

    Args:
        mixed: True: a step computes decodes and prefill chunks together, running sequences first (vLLM V1).
            False: prefill first: a step is either prefills or decodes, and decodes wait (vLLM V0, Orca).
        chunked: a prompt may be cut into chunks that fit the budget. False: a whole prompt or nothing.
        max_num_seqs: slots: sequences that may run at a time, at most 65,536.
        max_num_batched_tokens: token budget of one step, decodes included.
        long_prefill_token_threshold: at most so many prompt tokens of one sequence a step; 0 means no limit.
        max_prefill_streak: with mixed=False, after so many prefill steps in a row the decodes get one, so that a
            stream of new prompts cannot starve them for ever.
    """

    mixed: bool = True
    chunked: bool = True
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    max_prefill_streak: int = 16

    keeps_finished: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, value in (("mixed", self.mixed), ("chunked", self.chunked)):
            if not isinstance(value, bool):
                guess = f"; did you mean max_num_seqs={value!r}? Name the argument" if isinstance(value, int) else ""
                raise InvalidRequestError(f"{name}={value!r}: must be True or False{guess}")
        _set_integers(self, 1, "max_num_seqs", "max_num_batched_tokens", "max_prefill_streak")
        _set_integers(self, 0, "long_prefill_token_threshold")
        _at_most_seqs("max_num_seqs", self.max_num_seqs)

    def duties(self, prefill_streak: int) -> tuple[str, ...]:
        if self.mixed:
            return DISPLACE, GROW, ADMIT
        if prefill_streak >= self.max_prefill_streak:
            return (GROW_DECODES,)
        return DISPLACE, GROW_PREFILLS, ADMIT, GROW_DECODES

    def chunk(self, num_missing: int, budget_left: int, is_prefill: bool) -> int:
        """How many of a sequence's `num_missing` tokens this step computes; 0 if it must wait."""
        if is_prefill and self.long_prefill_token_threshold and self.chunked:
            num_missing = min(num_missing, self.long_prefill_token_threshold)
        if num_missing <= budget_left:
            return num_missing
        return budget_left if self.chunked and is_prefill else 0


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """Request-level batching: what waits when the engine is idle, at most `batch_size`, runs until the longest is done.

    A finished request's answer is given at its own end, but its row stays in the forward pass, recomputing its last
    token, and keeps its blocks and its slot until the batch ends: that is the waste that continuous batching removes.
    Prompts of a batch are computed together in its first step. A batch reserves memory for the longest answers that its
    requests allow, so a small pool makes small batches.

    Args:
        batch_size: requests in a batch, at most.
    """

    batch_size: int = 32

    mixed: ClassVar[bool] = True
    chunked: ClassVar[bool] = False
    max_num_batched_tokens: ClassVar[int | None] = None
    keeps_finished: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _set_integers(self, 1, "batch_size")
        _at_most_seqs("batch_size", self.batch_size)

    @property
    def max_num_seqs(self) -> int:
        return self.batch_size

    def duties(self, prefill_streak: int) -> tuple[str, ...]:
        return GROW, ADMIT

    def chunk(self, num_missing: int, budget_left: int, is_prefill: bool) -> int:
        return num_missing


Batching = ContinuousBatching | StaticBatching


def require_batching(batching: Any) -> None:
    """Raises InvalidRequestError for what is no batching and not None."""
    if not isinstance(batching, Batching | None):
        raise InvalidRequestError(f"batching={batching!r}: must be ContinuousBatching(...) or StaticBatching(...)")
