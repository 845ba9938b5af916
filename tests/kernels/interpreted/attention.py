"""Paged attention kernels against their references in float64, on scattered blocks whose unused slots are NaN."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cbserve.kernels.paged_attention import PagedAttention
from cbserve.kernels.paged_decode import paged_decode, paged_decode_triton
from cbserve.kernels.paged_prefill import paged_prefill, paged_prefill_triton
from cbserve.kernels.triton_attention import TritonPagedAttention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def caches(lens, kv_heads, head_dim, block_size, dtype, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and block tables for contexts of these lengths; table entries beyond a context name foreign blocks."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // block_size) for n in lens]
    blocks = list(range(sum(needed) + 2))
    random.Random(seed).shuffle(blocks)
    tables = torch.full((len(lens), max(needed) + 1), blocks[-1], dtype=torch.int32)
    k, v = (torch.full((len(blocks), block_size, kv_heads, head_dim), torch.nan) for _ in range(2))
    for s, context in enumerate(lens):
        for p in range(context):
            if p % block_size == 0:
                tables[s, p // block_size] = blocks.pop(0)
            at = tables[s, p // block_size], p % block_size
            k[at] = torch.randn(kv_heads, head_dim, generator=generator)
            v[at] = torch.randn(kv_heads, head_dim, generator=generator)
    return k.to(dtype), v.to(dtype), tables


def check_decode(lens, *, kv_heads=1, group=2, head_dim=16, block_size=8, dtype=torch.float32, splits=None, seed=0):
    k, v, tables = caches(lens, kv_heads, head_dim, block_size, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lens), kv_heads * group, head_dim, generator=generator).to(dtype)
    context_lens = torch.tensor(lens, dtype=torch.int32)
    out = paged_decode_triton(q, k, v, tables, context_lens, head_dim**-0.5, num_splits=splits)
    want = paged_decode(q.double(), k.double(), v.double(), tables, context_lens, head_dim**-0.5)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_prefill(lens, *, kv_heads=1, group=2, head_dim=16, block_size=8, dtype=torch.float32, seed=0):
    """lens: (queries, context) of each sequence."""
    k, v, tables = caches([context for _, context in lens], kv_heads, head_dim, block_size, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    query_start = torch.tensor([0, *torch.tensor([n for n, _ in lens]).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(query_start[-1]), kv_heads * group, head_dim, generator=generator).to(dtype)
    rest = tables, query_start, torch.tensor([context for _, context in lens], dtype=torch.int32), head_dim**-0.5
    out = paged_prefill_triton(q, k, v, *rest)
    want = paged_prefill(q.double(), k.double(), v.double(), *rest)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_decode_at_block_boundaries(block_size: int, dtype: torch.dtype) -> None:
    check_decode([1, block_size - 1, block_size, block_size + 1, 70], block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_decode_for_every_number_of_query_heads_a_kv_head(group: int) -> None:
    check_decode([9, 33], kv_heads=2, group=group, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_decode_for_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    check_decode([17, 40], kv_heads=2, group=3, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_decode_merges_splits_and_ignores_empty_ones(splits: int) -> None:
    check_decode([1, 32, 33, 100], splits=splits)  # a tile has 32 positions: most have fewer tiles than splits


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_of_an_empty_context_is_zero(splits: int) -> None:
    check_decode([0, 5], splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_of_scores_of_minus_infinity_is_zero(splits: int) -> None:
    k, v, tables = caches([70], 1, 16, 8, torch.float32)
    out = paged_decode_triton(torch.ones(1, 2, 16), -torch.inf * k.abs(), v, tables, torch.tensor([70]), 0.25, splits)
    assert (out == 0).all()


def test_decode_writes_where_it_is_told_and_nowhere_else() -> None:
    k, v, tables = caches([9, 20], 1, 16, 8, torch.float32)
    q, context_lens = torch.randn(4, 5, 16)[:, :2], torch.tensor([9, 20])  # a slice of the product of q, k and v
    out = torch.full((4, 2, 16), 7.0)
    paged_decode_triton(q[1:3], k, v, tables, context_lens, 0.25, out=out[1:3])
    want = paged_decode(q[1:3].double(), k.double(), v.double(), tables, context_lens, 0.25)
    torch.testing.assert_close(out[1:3].double(), want, rtol=2e-5, atol=2e-5)
    assert (out[[0, 3]] == 7).all()


def test_large_scores_do_not_overflow() -> None:
    k, v, tables = caches([40], 1, 16, 8, torch.float32)
    q, context_lens = 1e4 * torch.randn(1, 2, 16), torch.tensor([40])
    out = paged_decode_triton(q, k, v, tables, context_lens, 1.0, num_splits=2)
    want = paged_decode(q.double(), k.double(), v.double(), tables, context_lens, 1.0)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(1, 8),
    st.sampled_from([8, 16, 32]),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_decode_of_random_shapes(lens, kv_heads, group, block_size, splits, seed) -> None:
    check_decode(lens, kv_heads=kv_heads, group=group, block_size=block_size, splits=splits, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefill_of_ragged_prompts_and_of_chunks_after_a_cached_prefix(block_size: int, dtype: torch.dtype) -> None:
    lens = [(1, 1), (block_size, block_size), (5, block_size + 5), (1, 40), (block_size + 1, block_size + 1)]
    check_prefill(lens, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8])
def test_prefill_when_heads_do_not_fill_a_tile(group: int) -> None:
    check_prefill([(19, 30)], kv_heads=2, group=group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_prefill_for_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    check_prefill([(7, 20), (12, 12)], group=3, head_dim=head_dim, dtype=dtype)


def test_prefill_of_a_sequence_without_queries_touches_nothing() -> None:
    check_prefill([(4, 4), (0, 9), (3, 8)])


@pytest.mark.parametrize("unseen", [0, 33, 70], ids=["all is seen", "the first tile is not", "nothing is"])
@pytest.mark.parametrize("capability", [75, 80])
def test_a_step_of_decodes_and_chunks_agrees_with_torch(
    capability: int, unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """unseen: so many positions have scores of minus infinity; of rows that have no other the result is 0."""
    monkeypatch.setattr("cbserve.kernels.triton_attention.capability", lambda device: capability)
    query_lens, context_lens = [1, 1, 6, 3, 1], [9, 70, 6, 50, 1]
    k, v, tables = caches(context_lens, 2, 16, 8, torch.float32)
    exact = [row[: -(-n // 8)] for row, n in zip(tables.tolist(), context_lens, strict=True)]
    q = torch.randn(12, 8, 16)[:, :6]
    q[:, :, 3] = 1.0
    for table, context in zip(exact, context_lens, strict=True):
        for position in range(min(unseen, context)):
            k[table[position // 8], position % 8, :, 3] = -torch.inf
    step = exact, query_lens, context_lens, 8, torch.float32, torch.device("cpu")
    want = PagedAttention(*step).run(q, k, v, 0.25)
    torch.testing.assert_close(TritonPagedAttention(*step).run(q, k, v, 0.25), want, rtol=2e-5, atol=2e-5)
    assert want.isfinite().all()


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.sampled_from([8, 16, 32]),
    st.integers(0, 99),
)
def test_prefill_of_random_shapes(chunks, group, block_size, seed) -> None:
    check_prefill([(n, n + cached) for n, cached in chunks], group=group, block_size=block_size, seed=seed)
