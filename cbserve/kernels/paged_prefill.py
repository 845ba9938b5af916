"""Attention of prompts, or parts of them, over a paged KV cache: packed sequences, causal after a cached context.

One program takes a tile of queries of one sequence with all query heads that share a KV head, as rows of one matrix,
and walks over the cache with an online softmax (FlashAttention, Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cbserve.kernels.jit import INDICES, Kernel, capability, check_tensor, power_of_two
from cbserve.kernels.paged_decode import LOG2_E, check_attention

if TYPE_CHECKING:
    import triton.language as tl


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """The queries of a sequence are its last tokens; each sees the positions up to its own.

    q: [N, num_heads, head_dim], the sequences one after the other. k_cache, v_cache: [num_blocks, block_size,
    num_kv_heads, head_dim]. block_tables: int [S, max_blocks]. query_start: int [S + 1], sequence s owns the queries
    query_start[s] .. query_start[s + 1] - 1. context_lens: int [S], tokens of each sequence in the cache, those of its
    queries included. scale: what q . k is multiplied by. Returns [N, num_heads, head_dim].
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        own = slice(starts[s], starts[s + 1])
        blocks = block_tables[s, : -(-context // k_cache.shape[1])].long()
        k, v = (c[blocks].flatten(0, 1)[:context].repeat_interleave(group, dim=1) for c in (k_cache, v_cache))
        scores = torch.einsum("nhd,thd->hnt", q[own], k) * scale
        queries = own.stop - own.start
        future = torch.ones(queries, context, dtype=torch.bool, device=q.device).triu(context - queries + 1)
        out[own] = torch.einsum("hnt,thd->nhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    return out


@Kernel
def _prefill_kernel(
    q, k_cache, v_cache, block_tables, query_start, context_lens, tiles, out,
    q_stride, out_stride, table_stride, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, KV head). Row r is query r // GROUP of the tile, head r % GROUP of the KV head."""
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    first_query = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    begin = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - begin
    cached = tl.load(context_lens + sequence) - num_queries

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    query = first_query + row // GROUP
    QUERIES: tl.constexpr = ROWS // GROUP
    real = (row < QUERIES * GROUP) & (query < num_queries)
    own = real[:, None] & (column[None, :] < HEAD_DIM)
    lane = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + column[None, :]
    token_row = (begin + query).to(tl.int64)[:, None]
    queries = tl.load(q + token_row * q_stride + lane, mask=own, other=0.0)
    # Rows without a query see position 0, as the first one does, and are not stored: no row is wholly masked.
    last_seen = tl.where(real, cached + query, 0)

    best = tl.full([ROWS], -3.4028234663852886e38, tl.float32)  # finite: -inf less -inf is NaN
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, COLS], tl.float32)
    end = cached + tl.minimum(first_query + QUERIES, num_queries)
    for start in range(0, end, TILE):
        position = start + tl.arange(0, TILE)
        exists = position < end
        block = tl.load(block_tables + sequence * table_stride + position // BLOCK_SIZE, mask=exists, other=0)
        token = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # a cache may have more than 2^31 elements
        at = (token * KV_HEADS + kv_head) * HEAD_DIM
        inside = exists[:, None] & (column[None, :] < HEAD_DIM)
        k = tl.load(k_cache + at[:, None] + column[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(position[None, :] <= last_seen[:, None], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - top)
        weights = tl.exp2(scores - top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_cache + at[:, None] + column[None, :], mask=inside, other=0.0)
        values = values * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = top
    result = values / tl.where(total > 0, total, 1.0)[:, None]  # 0 where nothing weighs anything, as in torch
    tl.store(out + token_row * out_stride + lane, result, mask=own)


def paged_prefill_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_prefill` as a Triton kernel. Tokens in the cache that no query sees never matter, be they NaN.

    tiles: those of `prefill_tiles`, if they are known already; without them the lengths are fetched from the device.
    out: where the result goes. Raises KernelError for what the kernel cannot take.
    """
    _, num_heads, head_dim = check_attention(q, k_cache, v_cache, block_tables, context_lens)
    check_tensor("query_start", query_start, (block_tables.shape[0] + 1,), INDICES, q.device)
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    config = prefill_config(q.dtype, head_dim, capability(q.device))
    if tiles is None:
        tiles = prefill_tiles(query_start.diff().tolist(), context_lens.tolist(), q, k_cache)
    else:
        check_tensor("tiles", tiles, (None, 2), (torch.int32,), q.device)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        check_tensor("out", out, tuple(q.shape), (q.dtype,), q.device)
    if len(tiles):
        _prefill_kernel[(len(tiles), kv_heads)](
            q, k_cache, v_cache, block_tables, query_start, context_lens, tiles, out,
            q.stride(0), out.stride(0), block_tables.stride(0), scale * LOG2_E,
            KV_HEADS=kv_heads, GROUP=num_heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, **config,
        )  # fmt: skip
    return out


def prefill_tiles(query_lens: Sequence[int], context_lens: Sequence[int], q: Tensor, k_cache: Tensor) -> Tensor:
    """int32 [T, 2]: a sequence, and the first query of one of its tiles; the same in all layers of a step.

    query_lens, context_lens: of S sequences. q, k_cache: as in `paged_prefill`. Tiles that see most come first, so that
    none of them is left for the end.
    """
    rows = prefill_config(q.dtype, q.shape[2], capability(q.device))["ROWS"]
    queries_per_tile = rows // (q.shape[1] // k_cache.shape[2])
    tiles = [
        (context_len - query_len + first, s, first)
        for s, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True))
        for first in range(0, query_len, queries_per_tile)
    ]
    tiles.sort(reverse=True)
    return torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32).view(-1, 2).to(q.device)


def prefill_config(dtype: torch.dtype, head_dim: int, capability: int) -> dict[str, int]:
    """Tile sizes for one generation of GPUs (75, 80, 89, 90): rows of queries, positions of K and V."""
    columns = power_of_two(head_dim)
    if dtype == torch.float32:
        rows, tile, warps, stages = 16, 16, 4, 1
    elif capability < 80:
        rows, tile, warps, stages = 16, 16, 8, 1
    else:
        # Stages: how far loads run ahead, counting the block table's; as far as 48 KiB of shared memory allow.
        rows, warps = 64, 4
        if capability >= 90:  # its tensor cores read the queries from shared memory too
            tile, stages = (32, 2) if columns > 64 else (64, 3)
        else:
            tile, stages = (32, 3) if columns > 64 else (64, 5)
    return {"ROWS": rows, "COLS": columns, "TILE": tile, "num_warps": warps, "num_stages": stages}
