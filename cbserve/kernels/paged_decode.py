"""Attention of one new token a sequence over a paged KV cache (Kwon et al. 2023, arXiv 2309.06180, section 4.1).

A decode step reads all of K and V for one query, so its floor is the memory's bandwidth. Two ideas bring it there:
- The query heads that share a KV head are the rows of one tile (grouped-query attention, Ainslie et al., arXiv
  2305.13245): K and V are read once for all of them, and tensor cores have rows to multiply.
- A long context is split over several programs if there are too few sequences to fill the device (Flash-Decoding, Dao
  et al. 2023). Each leaves a partial result and the logarithm of its weight; a second kernel merges them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cbserve.kernels.jit import (
    INDICES,
    Kernel,
    KernelError,
    capability,
    check_no_bfloat16_dot,
    check_tensor,
    power_of_two,
)

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = 1.4426950408889634


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Each query sees all positions of its sequence, its own included.

    q: [S, num_heads, head_dim]. k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; query head h reads
    KV head h // (num_heads / num_kv_heads). block_tables: int [S, max_blocks]; block_tables[s, p // block_size] holds
    position p of sequence s. context_lens: int [S], tokens of each sequence in the cache; 0 gives zeros. scale: what
    q . k is multiplied by. Returns [S, num_heads, head_dim].
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    for s, context in enumerate(context_lens.tolist()):
        blocks = block_tables[s, : -(-context // k_cache.shape[1])].long()
        k, v = (c[blocks].flatten(0, 1)[:context].repeat_interleave(group, dim=1) for c in (k_cache, v_cache))
        if context:
            weights = (torch.einsum("hd,thd->ht", q[s], k) * scale).softmax(-1)
            out[s] = torch.einsum("ht,thd->hd", weights, v)
    return out


@Kernel
def _decode_kernel(
    q, k_cache, v_cache, block_tables, context_lens, out, partial, partial_lse,
    q_stride, out_stride, table_stride, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split): the split's share of the context, TILE positions at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    head = kv_head * GROUP + row
    own = (row[:, None] < GROUP) & (column[None, :] < HEAD_DIM)
    queries = tl.load(q + sequence * q_stride + head[:, None] * HEAD_DIM + column[None, :], mask=own, other=0.0)

    # Every sequence is split evenly, whatever its length; the last splits of a short one find nothing to do.
    context = tl.load(context_lens + sequence)
    share = tl.cdiv(tl.cdiv(context, TILE), splits) * TILE
    begin = split * share
    end = tl.minimum(begin + share, context)

    best = tl.full([ROWS], -3.4028234663852886e38, tl.float32)  # finite: -inf less -inf is NaN
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        block = tl.load(block_tables + sequence * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        token = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # a cache may have more than 2^31 elements
        at = (token * KV_HEADS + kv_head) * HEAD_DIM
        inside = seen[:, None] & (column[None, :] < HEAD_DIM)
        k = tl.load(k_cache + at[:, None] + column[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - top)
        weights = tl.exp2(scores - top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_cache + at[:, None] + column[None, :], mask=inside, other=0.0)
        values = values * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = top

    # A split that is empty, or whose scores are all -inf, has total = 0 and best as it began: it leaves zeros, which
    # weigh nothing beside another's result.
    result = values / tl.where(total > 0, total, 1.0)[:, None]
    if not SPLIT:
        tl.store(out + sequence * out_stride + head[:, None] * HEAD_DIM + column[None, :], result, mask=own)
    else:
        slot = (sequence * (KV_HEADS * GROUP) + head) * splits + split
        lse = best + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(partial_lse + slot, lse, mask=row < GROUP)
        tl.store(partial + slot[:, None] * HEAD_DIM + column[None, :], result, mask=own)


@Kernel
def _merge_kernel(
    partial, partial_lse, out, out_stride, splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head): the mean of its partial results, each weighted by exp2(lse)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SLOTS)
    column = tl.arange(0, COLS)
    slot = (sequence * HEADS + head) * splits + split
    lse = tl.load(partial_lse + slot, mask=split < splits, other=-float("inf"))
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - best)
    total = tl.sum(weights, axis=0)
    inside = (split[:, None] < splits) & (column[None, :] < HEAD_DIM)
    values = tl.load(partial + slot[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0)
    result = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + sequence * out_stride + head * HEAD_DIM + column, result, mask=column < HEAD_DIM)


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_decode` as Triton kernels. Tokens in the cache beyond a context never matter, be they NaN.

    num_splits: programs a sequence and KV head; None chooses as many as fill the device. out: where the result goes.
    Raises KernelError for what the kernels cannot take.
    """
    num_sequences, num_heads, head_dim = check_attention(q, k_cache, v_cache, block_tables, context_lens)
    if block_tables.shape[0] != num_sequences:
        raise KernelError(f"{num_sequences} queries but {block_tables.shape[0]} block tables; decode takes one each")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        check_tensor("out", out, tuple(q.shape), (q.dtype,), q.device)
    if not out.numel():
        return out
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if num_splits is None:
        num_splits = choose_splits(num_sequences * kv_heads, block_tables.shape[1] * block_size, q.device)
    elif not 1 <= num_splits <= _MAX_SPLITS:
        raise KernelError(f"num_splits is {num_splits}; it must be 1 to {_MAX_SPLITS}")
    partial = lse = None
    if num_splits > 1:
        partial = torch.empty((num_sequences, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_sequences, num_heads, num_splits), dtype=torch.float32, device=q.device)
    config = decode_config(q.dtype, num_heads // kv_heads, head_dim, capability(q.device))
    _decode_kernel[(num_sequences, kv_heads, num_splits)](
        q, k_cache, v_cache, block_tables, context_lens, out, partial, lse,
        q.stride(0), out.stride(0), block_tables.stride(0), scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=num_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLIT=num_splits > 1,
        **config,
    )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[(num_sequences, num_heads)](
            partial, lse, out, out.stride(0), num_splits, HEADS=num_heads, HEAD_DIM=head_dim, **merge_config(head_dim),
        )  # fmt: skip
    return out


_MAX_SPLITS = 32
_MIN_SPLIT_TOKENS = 256  # below that a program has barely begun when it ends


def choose_splits(programs: int, max_context: int, device: torch.device) -> int:
    """As many as give every multiprocessor four programs, but none too short a part."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    splits = 1
    while splits < _MAX_SPLITS and splits * programs < 4 * processors and max_context >= 2 * splits * _MIN_SPLIT_TOKENS:
        splits *= 2
    return splits


def decode_config(dtype: torch.dtype, group: int, head_dim: int, capability: int) -> dict[str, int]:
    """Tile sizes for one generation of GPUs (75, 80, 89, 90): rows of queries, positions of K and V."""
    columns = power_of_two(head_dim)
    if dtype == torch.float32 or capability < 80:
        # No tensor cores: more rows than there are heads would only cost time.
        rows, tile, stages = power_of_two(group), 16 if columns > 64 else 32, 1
    else:
        rows, tile, stages = 16, 32 if columns > 64 else 64, 5  # K and V twice in flight, behind the block table
    return {"ROWS": rows, "COLS": columns, "TILE": tile, "num_warps": 4, "num_stages": stages}


def merge_config(head_dim: int) -> dict[str, int]:
    return {"SLOTS": _MAX_SPLITS, "COLS": power_of_two(head_dim), "num_warps": 4}


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> tuple[int, int, int]:
    """The shape of q. Raises KernelError for tensors that paged attention cannot take."""
    check_tensor("k_cache", k_cache, (None, None, None, None))
    num_blocks, block_size, kv_heads, head_dim = k_cache.shape
    check_tensor("v_cache", v_cache, (num_blocks, block_size, kv_heads, head_dim), (k_cache.dtype,), k_cache.device)
    check_tensor("q", q, (None, None, head_dim), (k_cache.dtype,), k_cache.device, contiguous=False)
    if q.stride(1) != head_dim and q.shape[1] > 1:
        raise KernelError(f"the heads of q have stride {q.stride(1)}; they must lie side by side: use .contiguous()")
    check_tensor("block_tables", block_tables, (None, None), INDICES, k_cache.device, contiguous=False)
    check_tensor("context_lens", context_lens, (block_tables.shape[0],), INDICES, k_cache.device)
    check_no_bfloat16_dot(q)
    if head_dim not in (16, 32, 64, 128):
        raise KernelError(f"head_dim is {head_dim}; the attention kernels have tiles for 16, 32, 64 and 128")
    if q.shape[1] % kv_heads or not 1 <= q.shape[1] // kv_heads <= 8:
        raise KernelError(
            f"{q.shape[1]} query heads on {kv_heads} KV heads; the kernels take 1 to 8 query heads for each KV head"
        )
    if block_size & (block_size - 1):
        raise KernelError(f"block_size is {block_size}; the kernels take powers of two, such as 8, 16 and 32")
    return q.shape[0], q.shape[1], head_dim
