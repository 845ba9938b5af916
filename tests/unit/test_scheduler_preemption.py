"""Who yields when blocks run out, who displaces whom, and that nothing is lost by it."""

import pytest
from engine_harness import add, chunks, make_engine, make_scheduler, running, step, waiting

from cbserve.core.batching import ContinuousBatching
from cbserve.core.errors import SchedulerError
from cbserve.core.metrics import sequence_metrics
from cbserve.core.policies import FCFS, Priority
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler
from cbserve.core.summary import summarize
from cbserve.core.trace import Admitted, Preempted


def test_the_later_one_yields_all_its_blocks_and_queues_in_front():
    scheduler = make_scheduler(num_blocks=10)
    first = add(scheduler, "first", 80, arrival_s=0.0)
    second = add(scheduler, "second", 80, arrival_s=1.0)
    step(scheduler)
    add(scheduler, "third", 5, arrival_s=2.0)
    plan, _ = step(scheduler)
    assert [p.request_id for p in plan.preemptions] == ["second"]
    assert plan.preemptions[0].cause == "out_of_blocks"
    assert (plan.preemptions[0].num_blocks, plan.preemptions[0].num_computed_tokens) == (5, 80)
    assert second.num_computed_tokens == 0
    assert len(scheduler.kv.tables[first.seq_id]) == 6 and second.seq_id not in scheduler.kv.tables
    assert waiting(scheduler) == ["second", "third"]
    assert plan.admissions == [], "no new request in a step that preempted somebody"
    assert plan.blocked.reason.code == "preempted_this_step"


def test_resume_replays_prompt_and_output_and_samples_nothing_twice():
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, "first", 80, max_tokens=3)
    second = add(scheduler, "second", 80, max_tokens=9)
    step(scheduler, token=11)
    step(scheduler, token=12)
    assert second.output_token_ids == [11]
    step(scheduler, token=13)  # the first ends
    plan, _ = step(scheduler, token=14)
    (row,) = plan.rows
    assert list(row.token_ids) == [*range(1, 81), 11] and row.start == 0 and row.is_prefill
    assert second.output_token_ids == [11, 14]


def test_the_least_urgent_preempts_itself_and_the_others_are_still_tried():
    scheduler = make_scheduler(policy=Priority(), num_blocks=3)
    add(scheduler, "low", 16, priority=5)
    add(scheduler, "high", 17, priority=1)
    step(scheduler)
    plan, _ = step(scheduler)
    assert [p.request_id for p in plan.preemptions] == ["low"]
    assert chunks(plan) == {"high": 1}


@pytest.mark.parametrize("started_first", ["low", "high"])
def test_the_victim_is_the_lowest_priority_even_if_it_started_first(started_first):
    scheduler = make_scheduler(policy=Priority(), num_blocks=4)
    for name in (started_first, "high" if started_first == "low" else "low"):
        add(scheduler, name, 30, priority={"low": 9, "high": 0}[name])
        step(scheduler)
    for _ in range(3):
        plan, _ = step(scheduler)
        if plan.preemptions:
            break
    assert [p.request_id for p in plan.preemptions] == ["low"]
    assert running(scheduler) == ["high"]


def test_priority_order_ties_by_arrival_and_equal_priorities_are_fcfs():
    scheduler = make_scheduler(policy=Priority())
    for name, priority, arrival in (("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0), ("d", 1, 0.0)):
        add(scheduler, name, 5, priority=priority, arrival_s=arrival)
    assert waiting(scheduler) == ["c", "b", "a", "d"]
    fcfs, equal = make_scheduler(policy=FCFS()), make_scheduler(policy=Priority())
    for scheduler in (fcfs, equal):
        for name, arrival in (("x", 3.0), ("y", 1.0), ("z", 2.0)):
            add(scheduler, name, 5, arrival_s=arrival)
    assert waiting(fcfs) == waiting(equal) == ["y", "z", "x"]


def test_nobody_is_preempted_for_a_more_urgent_arrival_while_there_is_room():
    scheduler = make_scheduler(ContinuousBatching(max_num_seqs=2), policy=Priority(displace=True))
    add(scheduler, "standard", 5, priority=1)
    step(scheduler)
    add(scheduler, "premium", 5, priority=0)
    plan, _ = step(scheduler)
    assert not plan.preemptions and set(chunks(plan)) == {"standard", "premium"}


@pytest.mark.parametrize("displace", [False, True])
@pytest.mark.parametrize("lacks", ["slots", "blocks"])
def test_a_premium_request_displaces_only_if_the_policy_says_so(displace, lacks):
    slots, blocks = (2, 100) if lacks == "slots" else (9, 5)
    scheduler = make_scheduler(
        ContinuousBatching(max_num_seqs=slots), policy=Priority(displace=displace), num_blocks=blocks
    )
    add(scheduler, "s1", 20, priority=1, arrival_s=0.0)
    add(scheduler, "s2", 20, priority=1, arrival_s=1.0)
    step(scheduler)
    add(scheduler, "premium", 20, priority=0, arrival_s=2.0)
    plan, _ = step(scheduler)
    if displace:
        (preemption,) = plan.preemptions
        assert (preemption.request_id, preemption.cause) == ("s2", "displaced")
        assert "premium" in str(preemption.reason) and "priority 0" in str(preemption.reason)
        assert [a.request_id for a in plan.admissions] == ["premium"]
        assert chunks(plan) == {"premium": 20, "s1": 1}
    else:
        assert not plan.preemptions and plan.blocked.request_id == "premium"


def test_nobody_is_displaced_when_that_would_not_be_enough():
    scheduler = make_scheduler(policy=Priority(displace=True), num_blocks=10)
    add(scheduler, "vip", 100, priority=0)
    add(scheduler, "standard", 16, priority=2)
    step(scheduler)
    add(scheduler, "big", 60, priority=1)
    plan, _ = step(scheduler)
    assert not plan.preemptions and plan.blocked.request_id == "big"


def test_the_trace_tells_displacement_from_running_out():
    engine = make_engine(policy=Priority(displace=True), batching=ContinuousBatching(max_num_seqs=2), num_blocks=6)
    requests = [
        Request("A", range(20), SamplingParams(max_tokens=60), 0.0, priority=1),
        Request("B", range(20), SamplingParams(max_tokens=40), 0.0, priority=1),
        Request("P", range(20), SamplingParams(max_tokens=5), 3.0, priority=0),
    ]
    outputs = engine.run(requests)
    assert sorted(len(output.outputs[0].token_ids) for output in outputs) == [5, 40, 60]
    assert {e.cause for e in engine.trace.of(Preempted)} == {"displaced", "out_of_blocks"}


def test_preemptions_lose_and_repeat_nothing():
    """Over-admission on a tiny pool: every answer is as long as the script says, token for token."""
    lengths = {name: 10 + 7 * i for i, name in enumerate("ABCDEF")}
    engine = make_engine(lengths, num_blocks=8, batching=ContinuousBatching(max_num_seqs=6))
    outputs = engine.run(Request(name, range(20), SamplingParams(max_tokens=90)) for name in lengths)
    assert engine.trace.of(Preempted), "the pool was not tight enough to preempt"
    assert sum(1 for _ in engine.trace.of(Preempted)) > 0
    for output in outputs:
        n = lengths[output.request_id]
        assert output.outputs[0].token_ids == [*range(1, n), 0]
    assert engine.scheduler.kv.pool.num_used == 0


def test_who_is_admitted_and_yields_in_one_step_is_told_in_that_order():
    engine = make_engine(policy=Priority(displace=True), num_blocks=6, block_size=4)
    engine.run(
        [
            Request("A", range(4), SamplingParams(max_tokens=16), 0.0, priority=0),
            Request("B", range(12), SamplingParams(max_tokens=8), 0.0, priority=5),
            Request("C", range(16), SamplingParams(max_tokens=4), 4.5, priority=1),
        ]
    )
    told = [(e.type, e.request_id) for e in engine.trace.of(Admitted, Preempted) if e.step == 5]
    assert told == [("preempted", "B"), ("admitted", "C"), ("preempted", "C")], "the case is another one by now"
    assert summarize(engine.trace).num_preemptions == len(list(engine.trace.of(Preempted)))
    assert [len(m.token_times_s) for m in sequence_metrics(engine.trace)] == [16, 8, 4]


def test_blocks_that_victims_share_are_free_when_all_of_them_yield():
    scheduler = make_scheduler(policy=Priority(displace=True), num_blocks=4, block_size=4)
    add(scheduler, "two samples", 8, max_tokens=4, n=2, priority=5)
    step(scheduler)
    step(scheduler)
    add(scheduler, "urgent", 12, max_tokens=4, priority=0)
    plan, _ = step(scheduler)
    assert [p.request_id for p in plan.preemptions] == ["two samples"] * 2
    assert [a.request_id for a in plan.admissions] == ["urgent"]


class RetiresNobody(Scheduler):
    def retire(self):
        return []


class RetiresEverybody(Scheduler):
    def retire(self):
        return list(self.running)


class AdmitsWithoutRoom(Scheduler):
    def admit(self, step):
        yield from list(self.policy)


class AdmitsNobody(Scheduler):
    def admit(self, step):
        return []


class AdmitsARunningOne(Scheduler):
    def admit(self, step):
        return [*self.running[:1], *([] if self.running else [self.policy.peek()])]


class VictimOutside(Scheduler):
    def grow(self, seq, num_tokens, step):
        return self.policy.peek()


WRONG_DUTIES = {
    RetiresNobody: "never retired",
    RetiresEverybody: "not finished",
    AdmitsWithoutRoom: "no room: needs 1 slot, 0 of 2 free",
    AdmitsNobody: "names nobody",
    AdmitsARunningOne: "not waiting",
    VictimOutside: "does not run",
}


@pytest.mark.parametrize("cls", WRONG_DUTIES, ids=lambda cls: cls.__name__)
def test_a_duty_that_cannot_be_carried_out_is_named_and_nothing_leaks(cls):
    engine = make_engine(cls=cls, batching=ContinuousBatching(max_num_seqs=2))
    with pytest.raises(SchedulerError, match=WRONG_DUTIES[cls]):
        engine.run(Request(name, range(20), SamplingParams(max_tokens=4)) for name in "ABC")
    engine.scheduler.check()
    assert engine.scheduler.kv.pool.num_used == 0 and not engine.has_unfinished
