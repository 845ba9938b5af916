"""The free list, the pool, block tables: nothing is lost, nothing is given out twice."""

import re

import pytest
from engine_harness import add, make_scheduler, step
from hypothesis import given
from hypothesis import strategies as st

from cbserve.core.blocks import BlockPool, FreeList
from cbserve.core.errors import ConservationError, InvalidRequestError, NoFreeBlocksError


def test_free_list_pops_removes_and_appends_in_order():
    free = FreeList(range(4))
    assert free.pop() == [0]
    for block in (7, 8, 9):
        free.append(block)
    free.prepend([0])
    free.remove(8)
    assert list(free) == [0, 1, 2, 3, 7, 9] and len(free) == 6
    assert free.pop(5) == [0, 1, 2, 3, 7]
    with pytest.raises(NoFreeBlocksError):
        free.pop(2)
    assert list(free) == [9], "a pop that fails takes nothing"


def test_free_list_refuses_what_would_break_it():
    free = FreeList([1, 2])
    free.append(3)
    with pytest.raises(ConservationError):
        free.append(3)
    with pytest.raises(NoFreeBlocksError):
        free.remove(1)
    assert list(free) == [1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["pop", "append", "prepend", "remove"]), st.integers(0, 9)), max_size=60))
def test_free_list_is_a_stack_before_a_queue(operations):
    free, stack, kept = FreeList(range(5)), list(range(5)), []
    for name, block in operations:
        if name == "pop" and stack + kept:
            (got,) = free.pop()
            assert got == (stack or kept).pop(0)
        elif name == "remove" and block in kept:
            free.remove(block)
            kept.remove(block)
        elif name == "append" and block not in stack + kept:
            free.append(block)
            kept.append(block)
        elif name == "prepend" and block not in stack + kept:
            free.prepend([block])
            stack.insert(0, block)
        assert list(free) == stack + kept and len(free) == len(stack) + len(kept)


def test_allocating_too_many_takes_none():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(NoFreeBlocksError, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_freeing_twice_is_an_error_and_sharing_a_free_block_too():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ConservationError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(ConservationError, match="is free"):
        pool.share(blocks)


def test_a_lease_outlives_the_table():
    pool = BlockPool(3)
    table = pool.allocate(2)
    lease = pool.lease(table, "padding row of A")
    pool.free(table)
    assert pool.num_used == 2
    pool.check([])
    pool.release(lease)
    assert pool.num_used == 0
    with pytest.raises(ConservationError, match="padding row of A was released twice"):
        pool.release(lease)


def test_check_sees_a_leak_and_a_phantom():
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check([table])
    with pytest.raises(ConservationError, match="1 references counted, 0 held"):
        pool.check([])
    with pytest.raises(ConservationError, match="block 2"):
        pool.check([table, [2]])


@given(st.lists(st.sampled_from(["allocate", "free", "share", "lease", "release"]), max_size=80), st.randoms())
def test_pool_conserves_blocks(operations, rng):
    pool, tables, leases = BlockPool(8), [], []
    for name in operations:
        if name == "allocate" and pool.num_free:
            tables.append(pool.allocate(rng.randint(1, pool.num_free)))
        elif name == "free" and tables:
            pool.free(tables.pop(rng.randrange(len(tables))))
        elif name == "share" and tables:
            tables.append(list(rng.choice(tables)))
            pool.share(tables[-1])
        elif name == "lease" and tables:
            leases.append(pool.lease(rng.choice(tables), "test"))
        elif name == "release" and leases:
            pool.release(leases.pop(rng.randrange(len(leases))))
        pool.check(tables)
        assert pool.num_free + pool.num_used == 8
    for table in tables:
        pool.free(table)
    for lease in leases:
        pool.release(lease)
    assert pool.num_free == 8


@pytest.mark.parametrize("size", [(0, 16), (4, 0), (-1, 16), ("a", 16), (4, None), (1.5, 16), (True, 16)])
def test_a_pool_without_blocks_is_refused(size):
    with pytest.raises(InvalidRequestError, match="at least 1"):
        BlockPool(*size)


@pytest.mark.parametrize("count", [-1, "a", 1.5, None])
def test_a_number_of_blocks_that_is_none_is_refused_and_takes_nothing(count):
    pool = BlockPool(5)
    with pytest.raises(InvalidRequestError, match=f"count={count!r}"):
        pool.allocate(count)
    assert pool.num_free == 5 and pool.allocate(0) == []


@pytest.mark.parametrize("use", ["free", "share", "lease", "check"])
@pytest.mark.parametrize("block", [9, 5, -1, "a", None, 1.5])
def test_a_block_of_no_pool_is_named(use, block):
    pool = BlockPool(5)
    pool.allocate(5)
    arguments = {"lease": ([block], "test"), "check": ([[block]],)}.get(use, ([block],))
    with pytest.raises(ConservationError, match=re.escape(f"block {block!r} is not of this pool")):
        getattr(pool, use)(*arguments)
    assert pool.ref_counts == [1] * 5 and not pool.leases


def test_a_block_comes_only_when_a_token_needs_it():
    scheduler = make_scheduler(block_size=4)
    seq = add(scheduler, "A", 4, max_tokens=10)
    sizes = []
    while scheduler.has_unfinished:
        plan, _ = step(scheduler)
        sizes.append(len(plan.rows[0].block_table))
    assert sizes == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert seq.num_tokens == 14 and scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("prompt", [6, 8])
def test_samples_share_the_prompts_blocks_and_copy_on_the_first_write(prompt):
    """Block size 4: a prompt of 6 leaves a half full block that all but the last writer must copy; one of 8 leaves
    none."""
    scheduler = make_scheduler(block_size=4)
    parent = add(scheduler, "A", prompt, max_tokens=3, n=3)
    _, update = step(scheduler)
    children = [child for _, child in update.forked]
    tables = [scheduler.kv.tables[seq.seq_id] for seq in (parent, *children)]
    assert tables[0] == tables[1] == tables[2] and scheduler.kv.pool.num_used == 2
    plan, _ = step(scheduler)
    assert len(plan.rows) == 3
    assert len(plan.copies) == (2 if prompt == 6 else 0), "the last to write needs no copy"
    assert all(source == tables[0][-1] for source, _ in plan.copies)
    writes = [row.block_table[row.start // 4] for row in plan.rows]
    assert len(set(writes)) == 3, "two samples write into the same block"
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.kv.pool.num_used == 0
