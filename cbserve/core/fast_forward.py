"""Iterations that differ in lengths only, at once: between two decisions every running sequence gets one token a step.

A simulator need not live through each of them: for how long nothing else changes is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import islice

from cbserve.core.cruise import Cruise
from cbserve.core.duties import Duties, Step
from cbserve.core.plan import Steady, StepPlan
from cbserve.core.policies import Policy, Priority
from cbserve.core.request import SamplingParams, Sequence

# Why the first in the queue waits, when one more token for everybody who runs cannot change it.
_LASTING = frozenset({"no_slots", "no_blocks", "no_budget", "batch_running"})


class FastForward(Duties):
    """`horizon` and `advance`; the trace of a run is the same with and without them."""

    _step: int
    _skipped: bool
    _decides_by_itself: bool

    def horizon(self, plan: StepPlan) -> int:
        """For how many iterations, that of `plan` included, nothing but lengths will change. 1: look again after it.

        Answers may end sooner, by an EOS: only the executor knows. A sequence that ends by its length does so in the
        last of these iterations. Duties that a learner wrote may decide anything, so they are asked every time.
        """
        if plan.steady is not None and not plan.rows and self.cruise is not None:
            return self._horizon_of(self.cruise, plan) if self._lasts(plan) else 1
        if not plan.rows or plan.steady is not None or not self._lasts(plan):
            return 1
        steps = 2**62
        growing: list[int] = []  # tokens that the last block of each row still takes
        size = self.kv.block_size
        for row in plan.rows:
            if row.is_padding:
                continue
            if row.is_prefill or row.num_samples != 1 or _has_stops(row.params):
                return 1
            seq = self._by_id[row.seq_id]
            steps = min(steps, seq.max_tokens - len(seq.output_token_ids))
            growing.append(len(row.block_table) * size - row.end)
        if not growing or len(growing) != len(self.running):
            return 1
        if self._waits_for_blocks(plan):  # a block that becomes full may be one that the first in the queue wants
            steps = min(steps, 1 + min(growing))
        return min(steps, 1 + self._steps_until_full(growing))

    def advance(self, plan: StepPlan, count: int, sampled: SequenceOf[SequenceOf[int]]) -> None:
        """Take in the first `count` - 1 of `count` such iterations, and make `plan` that of the last one.

        Args:
            count: at most `horizon(plan)`.
            sampled: for each row of the plan, the count - 1 tokens that it was given.
        """
        if plan.steady is not None and self.cruise is not None:
            self._advance(self.cruise, plan, plan.steady, count)
            return
        steps, size = count - 1, self.kv.block_size
        due: list[tuple[int, int, int, Sequence]] = []  # a block is needed or full: (step, phase, row, sequence)
        publishes = self.kv.enable_prefix_caching
        for at, row in enumerate(plan.rows):
            if row.is_padding:
                continue
            seq = self._by_id[row.seq_id]
            seq.output_token_ids.extend(sampled[at])
            end, room = row.end, len(row.block_table) * size - row.end
            if publishes:  # a block is full after the step in which the context reaches its end
                due += [(step, 1, at, seq) for step in range((-end) % size, steps, size)]
            due += [(step, 0, at, seq) for step in range(room + 1, steps + 1, size)]
        due.sort(key=lambda entry: entry[:3])
        ends = {at: row.end for at, row in enumerate(plan.rows)}
        for step, phase, at, seq in due:
            if phase:
                seq.num_computed_tokens = ends[at] + step
                self.kv.step_done(seq)
            else:
                seq.num_computed_tokens = ends[at] + step - 1
                self.kv.allocate(seq, ends[at] + step)
        counts_service = type(self.policy).served is not Policy.served
        for _ in range(steps if counts_service else 0):
            for row in plan.rows:
                if not row.is_padding:
                    self.policy.served(self._by_id[row.seq_id], 1)
        for at, row in enumerate(plan.rows):
            if not row.is_padding:
                self._by_id[row.seq_id].num_computed_tokens = ends[at] + steps - 1
                row.start, row.token_ids = row.start + steps, sampled[at][-1:]
        self._step += steps
        plan.evicted += self.kv.pool.take_evicted()

    # ---- the group of those that decode in every step -----------------------------------------------------------

    def keep_cruise(self) -> None:
        """From now on, tell sequences that decode in every step as one group (`StepPlan.steady`), where the order among
        them is fixed and no duty is a learner's. The executor must know of it."""
        policy, batching = type(self.policy), self.batching
        orders_by_fixed_key = policy.key in (Policy.key, Priority.key) and policy.order is Policy.order
        only_orders = policy.victim is Policy.victim and policy.served is Policy.served and not self.policy.may_displace
        steps_all = batching.mixed and not batching.keeps_finished
        if self._decides_by_itself and orders_by_fixed_key and only_orders and steps_all:
            self.cruise = Cruise(self.kv.block_size)

    def _cruise(self, cruise: Cruise, step: Step) -> None:
        """Let the group take its step, and all who decode join it; or break it up for this step, where somebody may
        have to yield or wait. `step.loose` are then those who run outside it."""
        members = cruise.members
        loose = self._loose(cruise) if len(self.running) > len(members) else []
        if self._skipped or (loose and not all(map(_may_cruise, loose))):
            self._break_up(cruise)
            return
        prefilling = []
        for seq in loose:
            if seq.is_prefilling:
                prefilling.append(seq)
            else:
                cruise.join(seq, (self.policy.key(seq), seq.seq_id))
        if (latest := cruise.latest) is None:
            return
        needed = cruise.num_needing_blocks(cruise.step + 1)
        in_order = True  # a prompt that comes before decodes may leave them no budget
        for seq in prefilling:
            needed += self.kv.blocks_needed(seq, min(seq.num_computed_tokens + step.budget, seq.num_tokens))
            in_order &= (self.policy.key(seq), seq.seq_id) > latest
        if not in_order or needed > self.kv.num_free_blocks or len(members) > step.budget:
            self._break_up(cruise)
            return
        self.kv.extend(cruise.begin_steps())
        step.budget_left -= len(members)
        step.loose = prefilling
        joined, left = cruise.take_changes()
        step.plan.steady = Steady(cruise.step, len(members), cruise.context_len, joined, left)

    def _loose(self, cruise: Cruise) -> list[Sequence]:
        """Who runs outside the group, in order; mostly those admitted last, so that is where the search begins."""
        outside = (seq for seq in reversed(self.running) if seq.seq_id not in cruise.members)
        return list(islice(outside, len(self.running) - len(cruise)))[::-1]

    def _break_up(self, cruise: Cruise) -> None:
        for member in list(cruise.members.values()):
            cruise.leave(member.seq)

    def _publish(self, cruise: Cruise) -> list[int]:
        """Blocks of members that have become findable with the step that was computed."""
        if not self.kv.enable_prefix_caching:
            return []
        return [block for member in cruise.end_step() for block in self.kv.step_done(member.seq)]

    def _horizon_of(self, cruise: Cruise, plan: StepPlan) -> int:
        steps, free, size = cruise.steps_left(), self.kv.num_free_blocks, self.kv.block_size
        if self._waits_for_blocks(plan):
            steps = min(steps, 1 + cruise.fills_at(steps))
        if rounds := free // len(cruise):  # in `block_size` steps everybody takes one block
            return min(steps, rounds * size)
        for ahead in range(1, min(steps, size)):
            free -= cruise.num_needing_blocks(cruise.step + ahead)
            if free < 0:
                return ahead
        return min(steps, size)

    def _advance(self, cruise: Cruise, plan: StepPlan, steady: Steady, count: int) -> None:
        if self.kv.enable_prefix_caching:
            for _ in range(count - 1):
                self._publish(cruise)
                self.kv.extend(cruise.begin_steps())
        else:  # nobody looks at the pool in between
            self.kv.extend(cruise.begin_steps(count - 1))
        steady.step, steady.context_len = cruise.step, cruise.context_len
        self._step += count - 1
        plan.evicted += self.kv.pool.take_evicted()

    # ---- what lasts ---------------------------------------------------------------------------------------------

    def _lasts(self, plan: StepPlan) -> bool:
        """Nothing was decided in this step that another token for everybody could change."""
        if plan.decisions or plan.copies or plan.swap_outs or plan.swap_ins:
            return False
        if not self._decides_by_itself or self.held:
            return False
        if not len(self.policy):
            return True
        if type(self.policy).peek is not Policy.peek:  # a learner's: another may be the first in any step
            return False
        return plan.blocked is not None and plan.blocked.reason.code in _LASTING and not self.policy.may_displace

    def _waits_for_blocks(self, plan: StepPlan) -> bool:
        """The first in the queue may find more of its prefix as soon as somebody fills a block."""
        codes = ("no_blocks", "no_budget")
        return self.kv.enable_prefix_caching and plan.blocked is not None and plan.blocked.reason.code in codes

    def _steps_until_full(self, growing: list[int]) -> int:
        """For how many further steps the free blocks suffice, when each row's last block still takes so many tokens."""
        free, size = self.kv.num_free_blocks, self.kv.block_size
        rounds, free = divmod(free, len(growing))  # everybody gets one block for every `size` steps
        return rounds * size + sorted(growing)[free]


def decides_by_itself(scheduler: type[FastForward]) -> bool:
    """No duty was overridden."""
    return all(getattr(scheduler, name) is getattr(FastForward, name) for name in _DUTIES)


_DUTIES = ("retire", "admit", "displace", "grow", "blocked", "num_new_tokens", "most_blocks")


def _may_cruise(seq: Sequence) -> bool:
    """Each of its steps gives one token that only the executor or its length can make the last."""
    params = seq.request.params
    return params.n == 1 and not _has_stops(params)


def _has_stops(params: SamplingParams) -> bool:
    """Something besides EOS and its length can end the answer."""
    return bool(params.stop or params.stop_token_ids)
