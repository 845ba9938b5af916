"""Iterations that differ in lengths only, at once: between two decisions every running sequence gets one token a step.

A simulator need not live through each of them: for how long nothing else changes is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from cbserve.core.duties import Duties
from cbserve.core.plan import StepPlan
from cbserve.core.policies import Policy
from cbserve.core.request import Sequence

# Why the first in the queue waits, when one more token for everybody who runs cannot change it.
_LASTING = frozenset({"no_slots", "no_blocks", "no_budget", "batch_running"})


class FastForward(Duties):
    """`horizon` and `advance`; the trace of a run is the same with and without them."""

    held: dict[int, Sequence]
    _by_id: dict[int, Sequence]
    _step: int
    _prefill_streak: int
    _num_evictions: int

    def horizon(self, plan: StepPlan) -> int:
        """For how many iterations, that of `plan` included, nothing but lengths will change. 1: look again after it.

        Answers may end sooner, by an EOS: only the executor knows. A sequence that ends by its length does so in the
        last of these iterations. Duties that a learner wrote may decide anything, so they are asked every time.
        """
        if not plan.rows or plan.admissions or plan.preemptions or plan.copies or plan.swap_outs or plan.swap_ins:
            return 1
        if not self._decides_by_itself or self.held:
            return 1
        if len(self.policy) and (
            plan.blocked is None or plan.blocked.reason.code not in _LASTING or self.policy.may_displace
        ):
            return 1
        steps, num_rows = 2**62, 0
        growing: list[int] = []  # tokens that the last block of each row still takes
        size = self.kv.block_size
        for row in plan.rows:
            if row.is_padding:
                continue
            if row.is_prefill or row.num_samples != 1 or row.params.stop or row.params.stop_token_ids:
                return 1
            seq = self._by_id[row.seq_id]
            steps = min(steps, seq.max_tokens - len(seq.output_token_ids))
            num_rows += 1
            growing.append(len(row.block_table) * size - row.end)
        if num_rows != len(self.running):
            return 1
        if self.kv.enable_prefix_caching and len(
            self.policy
        ):  # a block that becomes full may be what the first waits for
            steps = min(steps, min(room if room else size for room in growing))
        return min(steps, 1 + self._steps_until_full(growing))

    def advance(self, plan: StepPlan, count: int, sampled: SequenceOf[SequenceOf[int]]) -> None:
        """Take in the first `count` - 1 of `count` such iterations, and make `plan` that of the last one.

        Args:
            count: at most `horizon(plan)`.
            sampled: for each row of the plan, the count - 1 tokens that it was given.
        """
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
        self._prefill_streak = 0
        self._count_evictions(plan)

    def _count_evictions(self, plan: StepPlan) -> None:
        """Cached blocks that lost their content to others since this was called last are those of `plan`."""
        pool = self.kv.pool
        if count := pool.num_evictions - self._num_evictions:
            self._num_evictions += count
            plan.num_evictions += count
            plan.evicted += pool.take_evicted()

    @property
    def _decides_by_itself(self) -> bool:
        """No duty was overridden."""
        mine = type(self)
        return all(getattr(mine, name) is getattr(FastForward, name) for name in _DUTIES)

    def _steps_until_full(self, growing: list[int]) -> int:
        """For how many further steps the free blocks suffice, when each row's last block still takes so many tokens."""
        free, size = self.kv.num_free_blocks, self.kv.block_size
        rounds, free = divmod(free, len(growing))  # everybody gets one block for every `size` steps
        return rounds * size + sorted(growing)[free]


_DUTIES = ("retire", "admit", "displace", "grow", "blocked", "num_new_tokens", "most_blocks")
