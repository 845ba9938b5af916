"""Kernels that move numbers and choose tokens: nothing is rounded, so results are equal, not close."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbserve.kernels.block_copy import copy_blocks, copy_blocks_triton, gather_blocks_triton, scatter_blocks_triton
from cbserve.kernels.kv_store import store_kv, store_kv_triton
from cbserve.kernels.sampling import sample_tokens, sample_tokens_triton
from cbserve.models.sampling import SamplingRow, sample, uniform

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@dtypes
def test_store_skips_slots_of_minus_one_and_takes_slices(dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 10, 16).to(dtype)
    k, v = qkv[:, 4:7], qkv[:, 7:]
    slots = torch.tensor([17, -1, 0, 30, -1])
    cache = torch.full((2, 4, 8, 3, 16), 7.0).to(dtype)
    want = cache.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[0].flatten(0, 1)[slot], want[1].flatten(0, 1)[slot] = k[i], v[i]
    for store in (store_kv_triton, store_kv):
        written = cache.clone()
        store(k, v, written[0], written[1], slots)
        assert torch.equal(written, want)


@dtypes
def test_gather_and_scatter(dtype: torch.dtype) -> None:
    cache = torch.randn(2, 2, 6, 8, 3, 5).to(dtype)
    blocks = torch.tensor([4, 0, 5])
    values = gather_blocks_triton(cache, blocks)
    assert torch.equal(values, cache[:, :, blocks])
    target = torch.full_like(cache, 7.0)
    scatter_blocks_triton(values, target, blocks)
    assert torch.equal(target[:, :, blocks], values) and (target[:, :, [1, 2, 3]] == 7).all()


@pytest.mark.parametrize("pairs", [[], [(0, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 2)], [(3, 4), (4, 3)]])
def test_copies_read_before_they_write(pairs: list[tuple[int, int]]) -> None:
    cache = torch.randn(2, 2, 5, 8, 1, 16)
    want = cache.clone()
    copy_blocks(want, want, pairs)
    copy_blocks_triton(cache, cache, pairs)
    assert torch.equal(cache, want)


def test_copy_between_two_caches() -> None:
    source, target = torch.randn(2, 2, 5, 8, 1, 16), torch.randn(2, 2, 3, 8, 1, 16)
    copy_blocks_triton(source, target, [(4, 0), (1, 2)])
    assert torch.equal(target[:, :, [0, 2]], source[:, :, [4, 1]])


def draw(logits: torch.Tensor, rows: list[SamplingRow]) -> list[list[int]]:
    """What the kernel, its reference and the sampler of the CPU choose."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    arguments = (
        logits,
        column([row.temperature for row in rows]),
        column([row.top_k for row in rows], torch.int32),
        column([row.top_p for row in rows]),
        column([row.min_p for row in rows]),
        column([uniform(row.seed, row.sample_index, row.position) for row in rows], torch.float64),
    )
    return [sample_tokens_triton(*arguments).tolist(), sample_tokens(*arguments).tolist(), sample(logits, rows)[0]]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.01},
        {"top_k": 1},
        {"top_k": 5, "temperature": 2.0},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    ],
    ids=str,
)
def test_sampling_agrees_with_the_sampler_of_the_cpu(params: dict[str, float]) -> None:
    logits = 2 * torch.randn(4, 70, generator=torch.Generator().manual_seed(1))
    kernel, reference, sampler = draw(logits, [SamplingRow(**params, seed=3, position=p) for p in range(4)])
    assert kernel == reference == sampler


def test_sampling_keeps_ties_and_skips_impossible_tokens() -> None:
    logits = torch.full((6, 8), -torch.inf)
    logits[:, [1, 3, 6]] = 0.0
    rows = [SamplingRow(top_k=2, seed=s) for s in range(3)] + [SamplingRow(top_p=0.5, seed=s) for s in range(3)]
    kernel, reference, sampler = draw(logits, rows)
    assert kernel == reference == sampler and set(kernel) <= {1, 3, 6}


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 300),
    st.floats(0.1, 3),
    st.integers(-1, 40),
    st.floats(0.05, 1),
    st.floats(0, 0.5),
    st.integers(0, 99),
)
def test_sampling_of_random_rows(vocab, temperature, top_k, top_p, min_p, seed) -> None:
    logits = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    kernel, reference, sampler = draw(logits, [SamplingRow(temperature, top_k, top_p, min_p, seed)])
    assert kernel == reference == sampler
