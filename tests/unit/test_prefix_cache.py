"""The prefix index: what is found, what is never found, and what it does to the free list."""

import pytest
from engine_harness import GhostCache, make_engine, make_scheduler, step
from hypothesis import given
from hypothesis import strategies as st

from cbserve.core.blocks import BlockPool
from cbserve.core.errors import ConservationError
from cbserve.core.metrics import prefix_hit_rate
from cbserve.core.plan import Reason, StepResult
from cbserve.core.request import Request, SamplingParams
from cbserve.core.trace import Admitted


def cached(**kwargs):
    return make_scheduler(prefix_caching=True, **kwargs)


def put(scheduler, name, tokens, max_tokens=1, **kwargs):
    seq = scheduler.add(Request(name, tokens, SamplingParams(max_tokens=max_tokens), **kwargs))
    assert not isinstance(seq, Reason)
    return seq


def finish(scheduler, token=1):
    plans = []
    while scheduler.has_unfinished:
        plans.append(step(scheduler, token)[0])
    return plans


def test_only_full_blocks_are_hashed():
    scheduler = cached()
    put(scheduler, "A", range(55))
    finish(scheduler)
    assert len(scheduler.kv.pool._hash_of) == 3


@pytest.mark.parametrize("first_is", ["finished", "running"])
def test_the_same_48_tokens_hit_three_blocks_and_need_one_new(first_is):
    scheduler = cached()
    first = put(scheduler, "A", range(55), max_tokens=1 if first_is == "finished" else 50)
    step(scheduler)
    used = scheduler.kv.pool.num_used
    second = put(scheduler, "B", [*range(48), 900, 901], max_tokens=50)
    plan, _ = step(scheduler)
    (row,) = [row for row in plan.rows if row.request_id == "B"]
    assert (row.start, len(row.token_ids)) == (48, 2)
    assert plan.admissions[0].num_cached_tokens == 48
    table = scheduler.kv.tables[second.seq_id]
    if first_is == "running":
        assert table[:3] == scheduler.kv.tables[first.seq_id][:3]
        assert [scheduler.kv.pool.ref_counts[block] for block in table] == [2, 2, 2, 1]
        assert scheduler.kv.pool.num_used == used + 1
    else:
        assert [scheduler.kv.pool.ref_counts[block] for block in table] == [1, 1, 1, 1]


@pytest.mark.parametrize("length", [16, 32, 33])
def test_a_fully_cached_prompt_still_computes_at_least_one_token(length):
    scheduler = cached()
    put(scheduler, "A", range(length))
    finish(scheduler)
    put(scheduler, "B", range(length))
    (plan,) = finish(scheduler)
    assert plan.rows[0].start == (length - 1) // 16 * 16
    assert plan.rows[0].num_samples == 1


def test_a_block_that_decode_fills_is_found_by_the_next_turn():
    scheduler = cached()
    first = put(scheduler, "A", range(100, 120), max_tokens=30)
    finish(scheduler, token=7)
    history = [*range(100, 120), *first.output_token_ids, 55, 56]
    put(scheduler, "B", history)
    (plan,) = finish(scheduler)
    assert plan.rows[0].start == 48, "20 prompt and 29 written answer tokens: three full blocks"


@pytest.mark.parametrize(("salt", "start"), [("tenant", 0), ("", 32)])
def test_another_salt_finds_nothing(salt, start):
    scheduler = cached()
    put(scheduler, "A", range(40))
    finish(scheduler)
    put(scheduler, "B", range(40), cache_salt=salt)
    (plan,) = finish(scheduler)
    assert plan.rows[0].start == start


@pytest.mark.parametrize("change", [0, 15, 16, 31])
def test_one_other_token_hides_its_block_and_all_behind_it(change):
    scheduler = cached()
    put(scheduler, "A", range(48))
    finish(scheduler)
    tokens = list(range(48))
    tokens[change] = 999
    put(scheduler, "B", tokens)
    (plan,) = finish(scheduler)
    assert plan.rows[0].start == change // 16 * 16


def test_cache_off_finds_nothing_and_counts_nothing():
    trace = {}
    for on in (False, True):
        engine = make_engine(prefix_caching=on)
        for name in "AB":
            engine.run([Request(name, range(40), SamplingParams(max_tokens=3))])
        trace[on] = engine.trace
    assert all(e.num_cached_tokens == 0 for e in trace[False].of(Admitted))
    assert prefix_hit_rate(trace[False]) is None, "no queries differs from no hits"
    assert prefix_hit_rate(trace[True]) == pytest.approx(32 / 80)


def test_on_a_cold_cache_the_hit_rate_is_zero_and_not_unknown():
    engine = make_engine(prefix_caching=True)
    engine.run([Request("A", range(40), SamplingParams(max_tokens=3))])
    assert prefix_hit_rate(engine.trace) == 0.0


def test_the_hit_rate_counts_a_request_once_however_often_it_was_tried():
    """B waits for a slot many steps, then is preempted and comes back by its own blocks: still one query."""
    from cbserve.core.batching import ContinuousBatching

    engine = make_engine(prefix_caching=True, batching=ContinuousBatching(max_num_seqs=2), num_blocks=6)
    engine.run(Request(name, [*range(16), ord(name)], SamplingParams(max_tokens=40)) for name in "ABCD")
    resumed = [e for e in engine.trace.of(Admitted) if e.resumed]
    assert resumed and any(e.num_cached_tokens for e in resumed), "nobody came back by the cache"
    first = [e for e in engine.trace.of(Admitted) if not e.resumed]
    assert prefix_hit_rate(engine.trace) == pytest.approx(sum(e.num_cached_tokens for e in first) / (4 * 17))


def test_an_aborted_half_prefilled_request_leaves_nothing_unwritten_in_the_index():
    from cbserve.core.batching import ContinuousBatching

    scheduler = cached(batching=ContinuousBatching(max_num_batched_tokens=40))
    cache = GhostCache(scheduler)
    put(scheduler, "A", range(100))
    cache.run(plan := scheduler.schedule(0.0))
    scheduler.update(plan, StepResult([[]]), 0.0)
    scheduler.schedule(0.0)  # 40 more are planned and never computed
    scheduler.abort("A")
    assert len(scheduler.kv.pool._hash_of) == 2, "40 computed tokens are two full blocks"
    put(scheduler, "B", range(100))
    while scheduler.has_unfinished:
        cache.run(plan := scheduler.schedule(0.0))
        scheduler.update(plan, StepResult([[1] * row.num_samples for row in plan.rows]), 0.0)


# ---- the pool's part ------------------------------------------------------------------------------------------------


def hashed(pool: BlockPool, *names: str) -> list[int]:
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name.encode())
    return blocks


def test_unhashed_blocks_are_reused_first_and_hashed_ones_least_recently_used_first():
    pool = BlockPool(5)
    old, new = hashed(pool, "old tail"), hashed(pool, "new head", "new tail")
    partial = pool.allocate(1)
    pool.free(old)
    pool.free(reversed(new))  # the tail first
    pool.free(partial)
    order = [pool.allocate(1)[0] for _ in range(5)]
    assert order == [*partial, 4, *old, new[1], new[0]]
    assert len(pool.take_evicted()) == 3


def test_a_hit_on_a_free_block_takes_it_out_of_the_free_list_and_on_a_used_one_counts_two():
    pool = BlockPool(3)
    (block,) = hashed(pool, "x")
    pool.free([block])
    assert pool.num_free == 3 and pool.find(b"x") == block
    pool.share([block])
    assert pool.num_free == 2 and pool.ref_counts[block] == 1
    pool.share([block])
    assert pool.ref_counts[block] == 2
    assert block not in pool.allocate(2)


def test_a_block_reused_for_other_content_loses_its_hash():
    pool = BlockPool(1)
    (block,) = hashed(pool, "x")
    pool.free([block])
    pool.allocate(1)
    assert pool.find(b"x") is None
    pool.free([block])
    with pytest.raises(ConservationError):
        pool.share([block])


def test_two_blocks_with_the_same_content_are_one_in_the_index():
    pool = BlockPool(2)
    first, second = hashed(pool, "x", "x")
    assert pool.find(b"x") == first
    pool.free([first, second])
    assert pool.allocate(1) == [second], "the copy that cannot be found is worth nothing"


def test_blocks_hit_by_a_request_are_not_evicted_to_serve_it():
    """4 blocks: 3 cached and free, a prompt that hits 2 of them and needs 2 more."""
    scheduler = cached(num_blocks=4)
    cache = GhostCache(scheduler)
    put(scheduler, "A", range(50))
    finish_with(scheduler, cache)
    put(scheduler, "B", [*range(32), *range(500, 530)], max_tokens=2)
    plan = finish_with(scheduler, cache)[0]
    assert plan.rows[0].start == 32 and len(set(plan.rows[0].block_table)) == 4
    assert len(plan.evicted) == 1


def test_a_request_that_hits_but_does_not_fit_waits_and_keeps_nothing():
    scheduler = cached(num_blocks=5)
    put(scheduler, "A", range(64), max_tokens=10)
    step(scheduler)
    put(scheduler, "B", [*range(32), *range(700, 740)], max_tokens=2)  # hits 2 used blocks, needs 3 more, 0 or 1 free
    plan, _ = step(scheduler)
    assert plan.blocked.request_id == "B" and plan.blocked.reason.code == "no_blocks"
    assert max(scheduler.kv.pool.ref_counts) == 1
    finish(scheduler)


def finish_with(scheduler, cache):
    plans = []
    while scheduler.has_unfinished:
        plans.append(plan := scheduler.schedule(0.0))
        scheduler.check()
        cache.run(plan)
        scheduler.update(plan, StepResult([[1] * row.num_samples for row in plan.rows]), 0.0)
        scheduler.check()
    return plans


@given(st.permutations(range(4)), st.integers(1, 20))
def test_fork_then_free_in_any_order_returns_every_count_to_zero(order, prompt):
    scheduler = make_scheduler(block_size=4)
    parent = scheduler.add(Request("A", range(prompt), SamplingParams(max_tokens=9, n=4)))
    _, update = step(scheduler)
    step(scheduler)
    seqs = [parent, *(child for _, child in update.forked)]
    for index in order:
        scheduler.kv.free(seqs[index])
    assert scheduler.kv.pool.num_used == 0 and not any(scheduler.kv.pool.ref_counts)
