"""Random arrivals, aborts and tiny pools: the invariants hold after every step, and everybody ends once."""

from collections import Counter, defaultdict

import hypothesis.strategies as st
import pytest
from engine_harness import GhostCache, make_scheduler
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.plan import Reason, StepResult
from cbserve.core.policies import FCFS, Priority
from cbserve.core.request import Request, SamplingParams
from cbserve.executors.scripted import EOS

BATCHINGS = st.one_of(
    st.builds(
        ContinuousBatching,
        mixed=st.booleans(),
        chunked=st.just(True),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 40),
        long_prefill_token_threshold=st.sampled_from([0, 3, 7]),
        max_prefill_streak=st.integers(1, 4),
    ),
    st.builds(ContinuousBatching, mixed=st.booleans(), chunked=st.just(False), max_num_seqs=st.integers(1, 6),
              max_num_batched_tokens=st.just(60)),
    st.builds(StaticBatching, st.integers(1, 5)),
)  # fmt: skip
POLICIES = st.sampled_from([FCFS, Priority, lambda: Priority(displace=True)])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        batching=BATCHINGS, policy=POLICIES, num_blocks=st.integers(3, 14), block_size=st.sampled_from([1, 2, 4]),
        prefix_caching=st.booleans(), num_host_blocks=st.sampled_from([0, 0, 3, 20]),
    )  # fmt: skip
    def setup(self, batching, policy, num_blocks, block_size, prefix_caching, num_host_blocks):
        self.scheduler = make_scheduler(
            batching, policy=policy(), num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks, preemption="swap" if num_host_blocks else "recompute",
        )  # fmt: skip
        self.cache = GhostCache(self.scheduler)
        self.added, self.ended, self.samples = 0, Counter(), {}
        self.expected: dict[int, list[int]] = {}
        self.now = 0.0

    @rule(
        prompt=st.integers(1, 25), max_tokens=st.integers(1, 12), priority=st.integers(0, 2), n=st.integers(1, 3),
        hold=st.booleans(), family=st.integers(0, 2),
    )  # fmt: skip
    def arrive(self, prompt, max_tokens, priority, n, hold, family):
        name = f"r{self.added}"
        self.added += 1
        params = SamplingParams(max_tokens=max_tokens, n=n)
        tokens = [min(i, 7) + 100 * family for i in range(prompt)]  # families share prefixes
        request = Request(name, tokens, params, arrival_s=self.now, priority=priority)
        added = self.scheduler.add(request, waiting_for=name if hold and priority == 2 else None)
        if isinstance(added, Reason):
            pool = self.scheduler.kv.pool
            need = -(-(prompt + max_tokens - 1) // pool.block_size)
            assert need * n > pool.num_blocks or n > self.scheduler.batching.max_num_seqs
        else:
            self.samples[name] = n

    @rule(data=st.data())
    def abort(self, data):
        names = sorted(self.scheduler.requests)
        if names:
            self.take(self.scheduler.abort(data.draw(st.sampled_from(names))))

    @rule()
    def complete_all(self):
        for seq in list(self.scheduler.held.values()):
            self.scheduler.complete(seq.waiting_for)

    @rule(token=st.sampled_from([EOS, 1, 2, 3]))
    def one_step(self, token):
        self.step(token)

    def step(self, token):
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        budget = self.scheduler.batching.max_num_batched_tokens
        if budget is not None:
            assert plan.num_tokens <= budget
        ids = [row.seq_id for row in plan.rows]
        assert len(ids) == len(set(ids)), "scheduled twice"
        assert len(plan.rows) <= self.scheduler.batching.max_num_seqs
        slots = [row.slot for row in plan.rows]
        assert len(slots) == len(set(slots)), "two rows in one slot"
        written = defaultdict(set)
        for row in plan.rows:
            size = self.scheduler.kv.block_size
            assert len(row.block_table) * size >= row.end, "the table is too short for this step"
            for position in range(row.start, row.end):
                place = row.block_table[position // size], position % size
                # padding rows of samples that ended together recompute the same token of a block that they share
                written[place].add((row.request_id, tuple(row.token_ids)) if row.is_padding else row.seq_id)
        assert all(len(writers) == 1 for writers in written.values()), "two rows write to one place"
        if plan.preemptions and all(p.cause == "out_of_blocks" for p in plan.preemptions):
            assert not plan.admissions
        self.cache.run(plan)
        before = {row.seq_id: row for row in plan.rows}
        update = self.scheduler.update(plan, StepResult([[token] * row.num_samples for row in plan.rows]), self.now)
        for seq, _ in update.new_tokens:
            seen = self.expected.setdefault(seq.seq_id, [])
            seen.append(token)
            assert seq.output_token_ids == seen, "a token was lost or repeated"
        for row in before.values():
            if row.num_samples == 0 and not row.is_padding:
                assert row.seq_id not in {seq.seq_id for seq, _ in update.new_tokens}
        self.take(update)
        return plan

    def take(self, update):
        for seq in update.finished:
            assert seq.finish_reason is not None
            self.ended[seq.seq_id] += 1
            assert self.ended[seq.seq_id] == 1, "ended twice"

    @invariant()
    def conserved(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        """Everybody who is left ends within a bounded number of steps: nothing hangs, nothing starves."""
        if not hasattr(self, "scheduler"):
            return
        self.complete_all()
        for _ in range(4000):
            if not self.scheduler.has_unfinished:
                break
            plan = self.step(1)
            assert plan.rows or plan.preemptions, f"nothing to run: {plan.blocked}"
        assert not self.scheduler.has_unfinished, "did not end"
        assert self.scheduler.kv.pool.num_used == 0 and not self.scheduler.kv.pool.leases
        host = self.scheduler.kv.host_pool
        assert host is None or host.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_twenty_thousand_random_steps():
    """Mixed priorities, tiny pools, aborts: 20,000 steps from a seed."""
    import random

    rng = random.Random(0)
    for round_ in range(20):
        machine = SchedulerMachine()
        batching = ContinuousBatching(
            mixed=round_ % 2 == 0, max_num_seqs=rng.randint(1, 8), max_num_batched_tokens=rng.randint(4, 64)
        )
        policy, host = Priority(displace=round_ % 3 == 0), rng.choice([0, 4, 40])
        blocks, size = rng.randint(6, 20), rng.choice([1, 2, 4])
        machine.setup(batching, lambda policy=policy: policy, blocks, size, round_ % 4 > 1, host)
        for _ in range(1000):
            while rng.random() < 0.3:
                machine.arrive(
                    rng.randint(1, 20),
                    rng.randint(1, 15),
                    rng.randint(0, 2),
                    rng.choice([1, 1, 1, 2, 3]),
                    False,
                    rng.randint(0, 1),
                )
            if rng.random() < 0.05 and machine.scheduler.requests:
                machine.take(machine.scheduler.abort(rng.choice(sorted(machine.scheduler.requests))))
            machine.step(EOS if rng.random() < 0.05 else 1)
        machine.teardown()
