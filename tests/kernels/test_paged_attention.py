"""Attention over the paged cache against a loop in float64, and writing into the cache."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbserve.kernels.block_copy import copy_blocks
from cbserve.kernels.kv_store import store_kv
from cbserve.kernels.paged_attention import paged_attention


def naive(q, k_cache, v_cache, block_tables, query_start, context_lens, scale) -> Tensor:
    """One query and one head at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[2]
    block_size = k_cache.shape[1]
    for s, context in enumerate(context_lens.tolist()):
        start, stop = query_start[s].item(), query_start[s + 1].item()
        for i in range(start, stop):
            positions = range(context - (stop - i) + 1)
            k = torch.stack([k_cache[block_tables[s, p // block_size], p % block_size] for p in positions]).double()
            v = torch.stack([v_cache[block_tables[s, p // block_size], p % block_size] for p in positions]).double()
            for h in range(q.shape[1]):
                weights = (scale * (k[:, h // group] @ q[i, h].double())).softmax(0)
                out[i, h] = weights @ v[:, h // group]
    return out


def problem(lens, *, kv_heads=2, group=2, head_dim=8, block_size=8, seed=0, spare_blocks=3):
    """Arguments of `paged_attention` for sequences of (query_len, context_len), on scattered blocks.

    Every slot that holds no token is NaN, and block tables are padded with ids of foreign blocks.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in lens]
    num_blocks = sum(needed) + spare_blocks
    blocks = list(range(num_blocks))
    random.Random(seed).shuffle(blocks)
    tables = torch.full((len(lens), max(needed) + 1), blocks[-1], dtype=torch.int32)
    caches = [torch.full((num_blocks, block_size, kv_heads, head_dim), torch.nan) for _ in range(2)]
    for s, ((_, context), count) in enumerate(zip(lens, needed, strict=True)):
        own, blocks = blocks[:count], blocks[count:]
        tables[s, :count] = torch.tensor(own)
        slots = torch.tensor([own[p // block_size] * block_size + p % block_size for p in range(context)])
        store_kv(*(torch.randn(context, kv_heads, head_dim, generator=generator) for _ in range(2)), *caches, slots)
    queries = [n for n, _ in lens]
    q = torch.randn(sum(queries), kv_heads * group, head_dim, generator=generator)
    query_start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    context_lens = torch.tensor([context for _, context in lens], dtype=torch.int32)
    return q, *caches, tables, query_start, context_lens, head_dim**-0.5


def check(arguments, tolerance=1e-5):
    torch.testing.assert_close(paged_attention(*arguments).double(), naive(*arguments), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1)], id="the first token of all"),
        pytest.param([(1, 9)], id="one decode"),
        pytest.param([(1, 16), (1, 16)], id="decodes that fill their blocks"),
        pytest.param([(1, 15), (1, 16), (1, 17), (1, 1)], id="decodes around a block boundary"),
        pytest.param([(1, 3), (1, 200), (1, 5), (1, 190)], id="decodes of very different lengths"),
        pytest.param([(7, 7)], id="one prompt"),
        pytest.param([(16, 16), (8, 8)], id="prompts that fill their blocks"),
        pytest.param([(5, 21)], id="a chunk after a context"),
        pytest.param([(2, 17), (1, 17)], id="a chunk that crosses a block boundary"),
        pytest.param([(1, 12), (9, 9), (1, 30), (4, 20), (1, 8)], id="all mixed"),
    ],
)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_equals_the_float64_loop(lens, block_size):
    check(problem(lens, block_size=block_size))


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_grouped_queries_read_their_own_kv_head(kv_heads, group):
    check(problem([(1, 11), (3, 14), (1, 5)], kv_heads=kv_heads, group=group))


def test_many_lengths_need_several_groups():
    """Far more padding than one group may have."""
    check(problem([(1, 1 + 37 * i % 301) for i in range(20)], kv_heads=1, group=1, head_dim=4))


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 16]),
    block_size=st.sampled_from([1, 4, 8, 16, 32]),
    seed=st.integers(0, 2**16),
)
def test_any_shapes(lens, kv_heads, group, head_dim, block_size, seed):
    lens = [(queries, queries + before) for queries, before in lens]
    check(problem(lens, kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=block_size, seed=seed))


def test_a_sequence_does_not_notice_the_others():
    lens = [(1, 12), (9, 9), (1, 100), (4, 20), (1, 12)]
    q, k_cache, v_cache, tables, query_start, context_lens, scale = problem(lens)
    together = paged_attention(q, k_cache, v_cache, tables, query_start, context_lens, scale)
    for s in range(len(lens)):
        own = slice(query_start[s], query_start[s + 1])
        start = torch.tensor([0, lens[s][0]])
        alone = paged_attention(q[own], k_cache, v_cache, tables[s : s + 1], start, context_lens[s : s + 1], scale)
        torch.testing.assert_close(alone, together[own], rtol=1e-6, atol=1e-6)


def test_the_cache_is_only_read():
    arguments = problem([(1, 12), (9, 9), (1, 3)])
    before = [cache.clone() for cache in arguments[1:3]]
    paged_attention(*arguments)
    torch.testing.assert_close(list(arguments[1:3]), before, rtol=0, atol=0, equal_nan=True)


def test_store_writes_the_slots_and_nothing_else():
    k, v = torch.randn(3, 2, 4), torch.randn(3, 4, 4)[:, 2:]  # v with strides, as it comes out of a fused product
    k_cache, v_cache = torch.zeros(5, 8, 2, 4), torch.zeros(5, 8, 2, 4)
    store_kv(k, v, k_cache, v_cache, torch.tensor([39, 0, 12]))
    for x, cache in ((k, k_cache), (v, v_cache)):
        expected = torch.zeros(5, 8, 2, 4)
        expected[4, 7], expected[0, 0], expected[1, 4] = x
        assert torch.equal(cache, expected)


def test_copies_read_all_sources_first():
    cache = torch.arange(2 * 2 * 4.0).view(2, 2, 4, 1, 1, 1).repeat(1, 1, 1, 8, 2, 4)
    before = cache.clone()
    copy_blocks(cache, cache, [(0, 1), (1, 2)])
    assert torch.equal(cache[:, :, 1], before[:, :, 0])
    assert torch.equal(cache[:, :, 2], before[:, :, 1])
    assert torch.equal(cache[:, :, [0, 3]], before[:, :, [0, 3]])
