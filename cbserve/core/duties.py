"""The four duties of an iteration: decisions only (Yu et al. 2022, Orca, section 3.1, and the lecture).

A learner overrides one of these in a subclass of `Scheduler`, and the real engine runs it. A decision that cannot be
carried out is refused by the scheduler with a `SchedulerError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cbserve.core.books import Books
from cbserve.core.plan import Blocked, Reason, Row, StepPlan
from cbserve.core.request import Sequence, SequenceState


@dataclass(slots=True)
class Step:
    """A plan in the making: what the duties may still give away in this iteration."""

    plan: StepPlan
    now_s: float
    budget: int  # tokens that this step may compute
    budget_left: int
    was_idle: bool  # nobody ran when the step began: static batching may start a batch
    loose: list[Sequence] | None = None  # who runs and is no row of `plan.steady`; None: all who run
    rows: dict[int, Row] = field(default_factory=dict)  # by seq_id, in the order of scheduling
    copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    reserved_blocks: int = 0  # static batching: the most blocks that this batch can need


class Duties(Books):
    """What a scheduler decides, from its queue, who runs, the block tables and the limits of a step."""

    def retire(self) -> Iterable[Sequence]:
        """Duties 1 and 2: which running sequences are complete and leave; their blocks and slots become free."""
        return [seq for seq in self.running if seq.finish_reason]

    def admit(self, step: Step) -> Iterable[Sequence]:
        """Duty 3: which waiting sequences join this step, one after the other, while there is room.

        Each one that is yielded has its slot and blocks when the next is asked for.
        """
        while (seq := self.policy.peek()) is not None:
            reason = self.blocked(seq, step)
            if reason is not None:
                step.plan.blocked = Blocked(seq.seq_id, seq.request.request_id, reason)
                return  # nobody behind it is pulled forward
            yield seq

    def displace(self, step: Step) -> Iterable[tuple[Sequence, Sequence]]:
        """Duty 4: (candidate, victim) pairs: whose place a more urgent arrival takes, if the policy says so.

        All victims that the candidate needs are named, or none.
        """
        if not self.policy.may_displace or (candidate := self.policy.peek()) is None:
            return []
        running, victims = list(self.running), []
        slots, blocks = len(self.free_slots), self.kv.num_free_blocks
        num_tokens = self.kv.num_cached_tokens(candidate) + self.num_new_tokens(candidate, step)
        need = self.kv.blocks_needed(candidate, num_tokens)
        while running and (slots < candidate.pending_samples or blocks < need):
            victim = self.policy.displaces(candidate, running, step.now_s)
            if victim is None:
                return []  # it waits
            victims.append(victim)
            running.remove(victim)
            slots += victim.pending_samples
            blocks = self.kv.num_free_blocks + self.kv.num_blocks_only_of(victims)
        enough = slots >= candidate.pending_samples and blocks >= need
        return [(candidate, victim) for victim in victims] if enough else []

    def grow(self, seq: Sequence, num_tokens: int, step: Step) -> Sequence | None:
        """Who must yield so that the running `seq` can hold `num_tokens` tokens; None: there are blocks enough."""
        if self.kv.blocks_needed(seq, num_tokens) <= self.kv.num_free_blocks:
            return None
        return self.policy.victim(self.running)

    def blocked(self, seq: Sequence, step: Step) -> Reason | None:
        """Why the waiting `seq` cannot join this step; None if it can."""
        if self.batching.keeps_finished and not step.was_idle:
            return Reason("batch_running")
        need, free = seq.pending_samples, len(self.free_slots)
        if need > free:
            return Reason("no_slots", {"need": need, "free": free, "slots": self.batching.max_num_seqs})
        num_tokens = self.num_new_tokens(seq, step)
        num_cached = self.kv.num_cached_tokens(seq)
        if not num_tokens:
            missing = seq.num_tokens - num_cached
            return Reason("no_budget", {"need": missing, "left": step.budget_left, "budget": step.budget})
        if self.batching.keeps_finished:  # reserve for the longest answer: a batch must never run out of blocks
            need, free = self.most_blocks(seq), self.kv.pool.num_blocks - step.reserved_blocks
        else:  # reserve nothing: blocks for this step only
            need, free = self.kv.blocks_needed(seq, num_cached + num_tokens), self.kv.num_free_blocks
        return Reason("no_blocks", {"need": need, "free": free}) if need > free else None

    def num_new_tokens(self, seq: Sequence, step: Step) -> int:
        """How many tokens of `seq` this step can compute; 0 if it must wait."""
        if seq.is_finished:
            return 0
        is_waiting = seq.state is SequenceState.WAITING
        missing = seq.num_tokens - (self.kv.num_cached_tokens(seq) if is_waiting else seq.num_computed_tokens)
        is_prefill = is_waiting or seq.is_prefilling
        return self.batching.chunk(missing, step.budget_left, is_prefill)

    def most_blocks(self, seq: Sequence) -> int:
        """Blocks that `seq` and the samples it will fork hold at most: the last sampled token needs no K and V."""
        return self.kv.blocks_for(seq.num_prompt_tokens + seq.max_tokens - 1) * seq.pending_samples
