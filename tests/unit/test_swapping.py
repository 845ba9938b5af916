"""Preemption by swapping: what goes out comes back, whoever takes the blocks meanwhile."""

import pytest
from engine_harness import GhostCache, add, make_scheduler

from cbserve.core.batching import ContinuousBatching
from cbserve.core.duties import Step
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import Reason, StepPlan, StepResult
from cbserve.core.policies import FCFS, Priority
from cbserve.core.scheduler import Scheduler


def swapping(**kwargs) -> tuple[Scheduler, GhostCache]:
    scheduler = make_scheduler(**{"num_host_blocks": 20, "preemption": "swap"} | kwargs)
    return scheduler, GhostCache(scheduler)


def run(scheduler: Scheduler, cache: GhostCache, token: int = 1):
    """One step whose rows are checked against the cache's content."""
    plan = scheduler.schedule(0.0)
    scheduler.check()
    cache.run(plan)
    scheduler.update(plan, StepResult([[token] * row.num_samples for row in plan.rows]), 0.0)
    scheduler.check()
    return plan


def test_a_victim_goes_out_gives_its_blocks_back_and_comes_in_at_other_ids():
    scheduler, cache = swapping(num_blocks=10)
    add(scheduler, "first", 80, max_tokens=3)
    second = add(scheduler, "second", 80, max_tokens=9)
    run(scheduler, cache)
    old = list(scheduler.kv.tables[second.seq_id])
    plan = run(scheduler, cache)
    assert [(p.request_id, p.how) for p in plan.preemptions] == [("second", "swap")]
    assert [source for source, _ in plan.swap_outs] == old
    assert second.num_computed_tokens == 80 and second.seq_id not in scheduler.kv.tables
    assert scheduler.kv.host_pool.num_used == 5
    run(scheduler, cache)  # the first ends
    plan = run(scheduler, cache)
    assert [len(row.token_ids) for row in plan.rows] == [1], "nothing is computed again"
    assert not plan.rows[0].is_prefill
    assert [target for _, target in plan.swap_ins] != old, (
        "it came back to the same ids by luck: the test shows nothing"
    )
    assert scheduler.kv.host_pool.num_used == 0


def test_a_full_host_pool_falls_back_to_recompute():
    scheduler, cache = swapping(num_blocks=10, num_host_blocks=4)
    add(scheduler, "first", 80, max_tokens=3)
    second = add(scheduler, "second", 80, max_tokens=9)
    run(scheduler, cache)
    plan = run(scheduler, cache)
    assert [p.how for p in plan.preemptions] == ["recompute"] and not plan.swap_outs
    assert second.num_computed_tokens == 0 and scheduler.kv.host_pool.num_used == 0


def test_hazard_one_a_request_that_is_not_resident_is_not_swapped():
    """Admitted and displaced before it computed anything: there is nothing to keep."""
    scheduler, _ = swapping()
    seq = add(scheduler, "A", 20)
    assert scheduler.kv.swap_out(seq, []) is None
    assert scheduler.kv.host_pool.num_used == 0


def test_hazard_two_a_host_block_that_is_still_read_is_not_written():
    """One step brings a sequence in and then swaps another out; outs are carried out first, so they need other
    blocks."""
    scheduler, cache = swapping(policy=Priority(displace=True), num_blocks=6, num_host_blocks=4, block_size=4)
    top = add(scheduler, "top", 8, max_tokens=9, priority=0)
    middle = add(scheduler, "middle", 6, max_tokens=9, priority=1)
    run(scheduler, cache)
    # swap the middle one out by hand of a more urgent arrival that takes all the room
    add(scheduler, "burst", 9, max_tokens=1, priority=0, arrival_s=1.0)
    low = None
    seen_in, seen_out = set(), set()
    for _ in range(40):
        if low is None and not scheduler.kv.swapped.get(middle.seq_id) and middle.num_preemptions:
            low = add(scheduler, "low", 3, max_tokens=9, priority=2)
        if not scheduler.has_unfinished:
            break
        plan = run(scheduler, cache)
        seen_in |= {host for host, _ in plan.swap_ins}
        seen_out |= {host for _, host in plan.swap_outs}
        assert not {host for host, _ in plan.swap_ins} & {host for _, host in plan.swap_outs}
    assert seen_in and seen_out and top.is_finished and middle.is_finished


def test_a_host_block_stays_taken_until_the_step_that_reads_it_is_done():
    scheduler, cache = swapping(num_blocks=10, num_host_blocks=5)
    add(scheduler, "first", 80, max_tokens=3)
    add(scheduler, "second", 80, max_tokens=9)
    for _ in range(3):
        run(scheduler, cache)
    plan = scheduler.schedule(0.0)
    assert len(plan.swap_ins) == 5 and scheduler.kv.host_pool.num_free == 0
    scheduler.check()
    scheduler.abort("second")  # even if that step never ends
    assert scheduler.kv.host_pool.num_free == 5 and scheduler.kv.pool.num_used == 0
    scheduler.check()


def test_hazard_three_a_copy_that_was_planned_and_not_carried_out_is_not_swapped():
    """n = 2 shares a half full block; this step plans the copy, then its owner yields: the source holds the content."""
    scheduler, cache = swapping(num_blocks=8, block_size=4)
    pair = add(scheduler, "pair", 6, max_tokens=9, n=2)
    run(scheduler, cache)
    table = list(scheduler.kv.tables[pair.seq_id])
    step = Step(StepPlan(99), 0.0, 100, 100, was_idle=False)
    scheduler._schedule_row(pair, 1, step)
    assert step.copies[pair.seq_id] == [(table[1], scheduler.kv.tables[pair.seq_id][1])]
    scheduler._preempt(pair, "out_of_blocks", Reason("out_of_blocks"), step)
    assert [source for source, _ in step.plan.swap_outs] == table
    cache.run(scheduler._finish_plan(step))
    scheduler.check()
    while scheduler.has_unfinished:
        run(scheduler, cache)
    assert pair.num_output_tokens == 9


def test_what_came_in_by_this_plan_and_yields_again_keeps_its_host_copy():
    """A displaced-in sequence is the victim of the same step: its device blocks were never written."""
    scheduler, cache = swapping(policy=FCFS(), num_blocks=10)
    add(scheduler, "first", 80, max_tokens=3)
    second = add(scheduler, "second", 80, max_tokens=9)
    for _ in range(3):
        run(scheduler, cache)
    host = list(scheduler.kv.swapped[second.seq_id])
    step_ = Step(StepPlan(99), 0.0, 100, 100, was_idle=True)
    scheduler._admit(second, step_)
    assert step_.plan.swap_ins
    scheduler._preempt(second, "out_of_blocks", Reason("out_of_blocks"), step_)
    assert step_.plan.swap_ins == [] and step_.plan.swap_outs == [] and not step_.rows
    assert scheduler.kv.swapped[second.seq_id] == host and second.num_computed_tokens == 80
    scheduler.check()
    while scheduler.has_unfinished:
        run(scheduler, cache)
    assert second.num_output_tokens == 9


@pytest.mark.parametrize("when", ["swapped out", "coming in"])
def test_aborting_frees_the_host_blocks(when):
    scheduler, cache = swapping(num_blocks=10)
    add(scheduler, "first", 80, max_tokens=3)
    add(scheduler, "second", 80, max_tokens=9)
    for _ in range(2 if when == "swapped out" else 3):
        run(scheduler, cache)
    if when == "coming in":
        scheduler.schedule(0.0)
    scheduler.abort("second")
    scheduler.check()
    assert scheduler.kv.host_pool.num_used == 0


def test_a_function_may_choose_for_each_victim():
    scheduler, cache = swapping(num_blocks=10, preemption=lambda seq: "recompute" if seq.num_tokens > 50 else "swap")
    add(scheduler, "first", 80, max_tokens=3)
    add(scheduler, "second", 80, max_tokens=9)
    run(scheduler, cache)
    assert [p.how for p in run(scheduler, cache).preemptions] == ["recompute"]


def test_an_unknown_mode_is_refused():
    with pytest.raises(InvalidRequestError, match="'drop'"):
        make_scheduler(preemption="drop")


def test_mid_prefill_progress_survives_a_swap():
    scheduler, cache = swapping(
        batching=ContinuousBatching(max_num_batched_tokens=33, max_num_seqs=4),
        policy=Priority(displace=True),
        num_blocks=8,
    )
    long = add(scheduler, "long", 100, max_tokens=2, priority=1)
    run(scheduler, cache)
    assert long.num_computed_tokens == 33
    add(scheduler, "premium", 100, max_tokens=2, priority=0)
    plans = [run(scheduler, cache) for _ in range(30) if scheduler.has_unfinished]
    assert any(p.how == "swap" for plan in plans for p in plan.preemptions)
    computed = sum(len(row.token_ids) for plan in plans for row in plan.rows if row.request_id == "long")
    assert computed == 100 - 33 + 1, "a token was computed twice"
