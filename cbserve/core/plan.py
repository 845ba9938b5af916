"""What one iteration does (`StepPlan`) and what came of it (`StepResult`): plain values, picklable, complete.

An executor needs nothing else, and cannot reach into the scheduler. Nobody changes a value that was handed on; those
made in every step are not frozen, because that makes them twice as dear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from cbserve.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a decision was taken: a code and its numbers, put into words only when shown."""

    code: str
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.code not in REASONS:
            return self.code
        return REASONS[self.code].format(**{k: _Count(v) if isinstance(v, int) else v for k, v in self.numbers.items()})


class _Count(int):
    """A number that takes a noun as its format: "{need:block}" gives "1 block" or "2 blocks"."""

    def __format__(self, noun: str) -> str:
        return f"{int(self)} {noun}{'' if self == 1 else 's'}" if noun else str(int(self))


REASONS = {
    "no_blocks": "needs {need:block}, {free} free",
    "no_slots": "needs {need:slot}, {free} of {slots} free",
    "no_budget": "needs {need:token} in one step, {left} of {budget} left",
    "batch_running": "the batch is running: static batching admits nobody until it ends",
    "preempted_this_step": "somebody was preempted in this step: nobody else is admitted",
    "out_of_blocks": "{grower} needs {need:block}, {free} free; {victim} comes last in the policy's order",
    "displaced": "{candidate} is more urgent and needs its place ({why})",
    "too_long_for_model": "the prompt has {prompt:token}, the model takes {limit} with at least one new token; "
    "shorten the prompt",
    "too_long_for_pool": "prompt {prompt} + max_tokens {max_tokens} need {need:block} of {block_size} tokens, the pool "
    "has {total}; lower max_tokens, shorten the prompt or enlarge the pool (num_blocks, kv_cache_bytes)",
    "samples_too_long_for_pool": "static batching keeps room for prompt {prompt} + max_tokens {max_tokens} for each of "
    "n={samples} samples: {need:block} of {block_size} tokens, the pool has {total}; lower n or max_tokens, shorten "
    "the prompt or enlarge the pool (num_blocks, kv_cache_bytes)",
    "prompt_too_long_for_pool": "the prompt has {prompt:token} and needs {need:block} of {block_size} tokens, the pool "
    "has {total}; shorten the prompt or enlarge the pool (num_blocks, kv_cache_bytes)",
    "prompt_too_long_for_step": "the prompt has {prompt:token}, and a step computes at most {budget}; allow chunked "
    "prefill, shorten the prompt or raise max_num_batched_tokens",
    "too_long_for_step": "prompt {prompt} + max_tokens {max_tokens} can need {need} tokens in one step of at most "
    "{budget}; "
    "allow chunked prefill or raise max_num_batched_tokens",
    "too_many_samples": "n={need} samples need as many slots, there are {slots}; lower n or raise the number of slots",
    "empty_prompt": "the prompt has no tokens; give at least one",
    "invalid": "{message}",
}


@dataclass(slots=True)
class Row:
    """One sequence's part of a step: compute `token_ids` at positions `start`..`start + len(token_ids) - 1`.

    `block_table[p // block_size]` holds position p. The table may be longer than this step needs; entries that
    earlier plans have shown never change (a copied or freed table is a new list).
    `num_samples` is 0 for a chunk in mid-prefill, 1 for a decode, n for the end of a prefill of n samples.
    """

    seq_id: int
    request_id: str
    slot: int
    start: int
    token_ids: SequenceOf[int]
    block_table: SequenceOf[int]
    params: SamplingParams
    num_prompt_tokens: int
    sample_index: int = 0
    num_samples: int = 1
    is_prefill: bool = False
    is_padding: bool = False  # computed and thrown away: static batching's waste

    @property
    def end(self) -> int:
        """Context length after this step: tokens whose K and V are in the cache."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Steady:
    """Rows that are not told one by one: decodes that were in the step before and go on, one token each.

    Only a simulating executor is given any. It hears who joins and who leaves.
    """

    step: int  # counts the steps of the group
    num_rows: int
    context_len: int  # tokens in the KV cache after this step, of all of them together
    joined: tuple[tuple[int, str, int], ...] = ()  # (seq_id, request_id, tokens that its answer has already)
    left: tuple[int, ...] = ()  # seq_ids


@dataclass(slots=True)
class Admission:
    seq_id: int
    request_id: str
    slot: int
    resumed: bool  # it ran before and was preempted
    num_cached_tokens: int = 0  # found in the prefix cache
    num_swapped_blocks: int = 0  # brought back from the host pool


@dataclass(slots=True)
class Preemption:
    seq_id: int
    request_id: str
    slot: int
    cause: str  # "out_of_blocks" or "displaced"
    reason: Reason
    how: str  # "recompute" or "swap"
    num_computed_tokens: int  # tokens whose K and V are lost and will be computed again, or wait in the host pool
    num_blocks: int  # blocks that were given back
    num_swapped_blocks: int = 0  # blocks of it that this plan copies to the host


@dataclass(slots=True)
class Blocked:
    """The first in the queue was not admitted, and why."""

    seq_id: int
    request_id: str
    reason: Reason


@dataclass(slots=True)
class StepPlan:
    """One iteration. An executor carries out, in this order: `swap_outs`, `copies`, `swap_ins`, then one forward pass
    over `rows`. The order matters: a block that a swap-out empties may be the target of a copy or a swap-in of the
    same step."""

    step: int
    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block): copy-on-write
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    decisions: list[Admission | Preemption] = field(default_factory=list)  # as they were taken
    blocked: Blocked | None = None
    num_waiting: int = 0
    num_running: int = 0
    num_used_blocks: int = 0
    evicted: list[int] = field(default_factory=list)  # cached blocks that lost their content since the last plan
    steady: Steady | None = None  # further rows, see there

    @property
    def admissions(self) -> list[Admission]:
        return [taken for taken in self.decisions if isinstance(taken, Admission)]

    @property
    def preemptions(self) -> list[Preemption]:
        return [taken for taken in self.decisions if isinstance(taken, Preemption)]

    @property
    def is_empty(self) -> bool:
        """There is nothing to compute and nothing to copy: this is no step."""
        return not (self.rows or self.steady or self.swap_outs)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(row.token_ids) for row in self.rows) + (self.steady.num_rows if self.steady else 0)

    @property
    def context_len(self) -> int:
        """Tokens whose K and V attention reads, of all rows together."""
        return sum(row.end for row in self.rows) + (self.steady.context_len if self.steady else 0)


@dataclass(slots=True)
class Ramp:
    """Durations of steps in a row that differ in lengths only: arithmetic progressions, one after the other.

    `segments` are (number of steps, seconds of the first, seconds by which each is longer than the one before). A cost
    that is the larger of two linear functions of the context, as a roofline is, needs at most two.
    """

    segments: tuple[tuple[int, float, float], ...]

    @property
    def count(self) -> int:
        return sum(count for count, _, _ in self.segments)

    def total(self, count: int) -> float:
        """Seconds of the first `count` steps."""
        seconds = 0.0
        for length, first, increment in self.segments:
            n = min(length, count)
            seconds += n * first + increment * (n * (n - 1) / 2)
            count -= n
        return seconds

    def run(self, start_s: float, until_s: float = math.inf) -> tuple[int, float]:
        """The steps from `start_s` on, up to the one in which `until_s` is reached: how many, and when the last ends.

        Added up one by one, as by a clock that lives through each, so that both see an arrival after the same step.
        """
        count, end_s = 0, start_s
        for length, first, increment in self.segments:
            for i in range(length):
                end_s += first + increment * i
                if end_s >= until_s:
                    return count + i + 1, end_s
            count += length
        return count, end_s

    def cut(self, count: int) -> Ramp:
        """The first `count` steps."""
        segments = []
        for length, first, increment in self.segments:
            n = min(length, count)
            if n:
                segments.append((n, first, increment))
            count -= n
        return Ramp(tuple(segments))

    def durations(self) -> list[float]:
        """Seconds of each step."""
        return [first + increment * i for length, first, increment in self.segments for i in range(length)]


@dataclass(slots=True)
class StepResult:
    """What an executor gives back.

    Args:
        sampled: for each row of the plan, its `num_samples` new token ids.
        logprobs: for each row, for each sample, {token id: log-probability}; None if nobody asked.
        duration_s: how long the step took, in seconds (measured, or from a cost model).
        completions: keys of things that ended outside a step (a swap-in, a KV transfer).
        ended: which of the plan's steady rows end with this step: seq_id -> the token that says so.
    """

    sampled: list[SequenceOf[int]]
    logprobs: list[list[dict[int, float]] | None] | None = None
    duration_s: float = 0.0
    completions: tuple[str, ...] = ()
    ended: Mapping[int, int] = field(default_factory=dict)
