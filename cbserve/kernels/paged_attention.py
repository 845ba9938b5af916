"""Attention over a paged KV cache (Kwon et al. 2023, arXiv 2309.06180, section 4.1), in plain torch.

`paged_attention` is the operation; `PagedAttention` is the same in two parts, what depends on the step alone and what
depends on the layer, as in FlashInfer (Ye et al., arXiv 2501.01005, section 3.4): plan once a step, run once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Sequences that decode are computed together, padded to the longest of their group. A further group costs some fixed
# time in every layer, about as much as this many tokens of padding.
_MAX_PADDING_TOKENS = 512

# On a CPU a group also ends at so many tokens a thread, so that what is gathered is still in a cache when attention
# reads it (3 MB with three KV heads of 64). On one thread 32 x 128 tokens at once took 1.3 times as long as in halves.
_MAX_GROUP_TOKENS_PER_THREAD = 2048


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of packed queries of S sequences over their own blocks of the cache.

    The queries of a sequence are its last tokens, whose K and V are in the cache already: of sequence s, query i is at
    position context_lens[s] - query_len + i, and sees the positions up to its own.

    Args:
        q: [N, num_heads, head_dim], the sequences one after the other.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]. Query head h reads KV head
            h // (num_heads / num_kv_heads) (grouped-query attention, Ainslie et al., arXiv 2305.13245).
        block_tables: int [S, max_blocks]; block_tables[s, p // block_size] holds position p of sequence s. Entries
            from ceil(context_lens[s] / block_size) on may be anything.
        query_start: int [S + 1], from 0 to N: sequence s owns the queries query_start[s] .. query_start[s + 1] - 1.
        context_lens: int [S], tokens of the sequence in the cache, those of its queries included.
        scale: what q . k is multiplied by, usually head_dim ** -0.5.

    Returns:
        [N, num_heads, head_dim]. What lies in slots that hold no token of a sequence never matters, be it NaN.
    """
    block_size = k_cache.shape[1]
    starts, lens = query_start.tolist(), context_lens.tolist()
    tables = [row[: -(-n // block_size)] for row, n in zip(block_tables.tolist(), lens, strict=True)]
    query_lens = [stop - start for start, stop in zip(starts[:-1], starts[1:], strict=True)]
    return PagedAttention(tables, query_lens, lens, block_size, q.dtype, q.device).run(q, k_cache, v_cache, scale)


class PagedAttention:
    """The part of `paged_attention` that is the same in all layers of a step.

    block_tables: for each of S sequences, exactly the blocks that hold its context. query_lens, context_lens: S each.
    dtype, device: those of q and of the cache.
    """

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parts: list[_Decodes | _Chunk] = []
        decodes: list[tuple[int, Sequence[int], int]] = []  # (query, block table, context)
        query = 0
        for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
            if query_len == 1:
                decodes.append((query, table, context_len))
            elif query_len:
                self._parts.append(_Chunk.plan(query, query_len, table, context_len, dtype, device))
            query += query_len
        most = _MAX_GROUP_TOKENS_PER_THREAD * torch.get_num_threads() // block_size if device.type == "cpu" else None
        for group in _by_length(decodes, _MAX_PADDING_TOKENS // block_size, most):
            self._parts.append(_Decodes.plan(group, block_size, dtype, device))

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """One layer. q: [N, num_heads, head_dim]; caches and result as in `paged_attention`."""
        if len(self._parts) == 1 and isinstance(self._parts[0].queries, slice):
            return self._parts[0].run(q, k_cache, v_cache, scale)
        out = q.new_empty(q.shape)
        for part in self._parts:
            out[part.queries] = part.run(q[part.queries], k_cache, v_cache, scale)
        return out


def num_leading_decodes(query_lens: Sequence[int]) -> int:
    """How many sequences at the front have one query each: what a kernel for decodes can take as a slice."""
    return next((s for s, n in enumerate(query_lens) if n != 1), len(query_lens))


@dataclass(frozen=True)
class _Chunk:
    """Several queries of one sequence: a prompt, or a part of it."""

    queries: slice
    blocks: Tensor  # [num_blocks of the context]
    context_len: int
    mask: Tensor | None  # [query_len, context_len], added to the scores; None: a whole prompt, plainly causal

    @staticmethod
    def plan(
        query: int, query_len: int, table: Sequence[int], context_len: int, dtype: torch.dtype, device: torch.device
    ) -> _Chunk:
        mask = None
        if context_len > query_len:
            mask = torch.full((query_len, context_len), -torch.inf, dtype=dtype, device=device)
            mask.triu_(context_len - query_len + 1)
        return _Chunk(slice(query, query + query_len), torch.tensor(table, device=device), context_len, mask)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        k, v = (cache.index_select(0, self.blocks).flatten(0, 1)[: self.context_len] for cache in (k_cache, v_cache))
        queries, kv_heads, head_dim = len(q), k.shape[1], k.shape[2]
        q = q.view(queries, kv_heads, -1, head_dim).permute(
            1, 2, 0, 3
        )  # [kv_heads, heads a KV head, queries, head_dim]
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.mask is None, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(queries, -1, head_dim)


@dataclass(frozen=True)
class _Decodes:
    """One query each of several sequences of similar length."""

    queries: slice | Tensor
    size: int
    blocks: Tensor  # [size * longest block table]
    stale: Tensor | None  # positions in what is gathered that hold no token of the sequence
    mask: Tensor | None  # [size, 1, 1, padded context], added to the scores; None if nothing is padded

    @staticmethod
    def plan(
        group: Sequence[tuple[int, Sequence[int], int]], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> _Decodes:
        first, longest = group[0][0], max(len(table) for _, table, _ in group)
        queries = [query for query, _, _ in group]
        contiguous = queries == list(range(first, first + len(group)))
        # Padded with the sequence's own first block, whose contents are finite if the sequence's are.
        blocks = [[*table, *[table[0]] * (longest - len(table))] for _, table, _ in group]
        context_lens = torch.tensor([[context_len] for _, _, context_len in group])
        position = torch.arange(longest * block_size)
        beyond = position >= context_lens
        mask = stale = None
        if beyond.any():
            mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None].to(device)
            held = torch.tensor([[len(table) * block_size] for _, table, _ in group])
            stale = torch.where(position < held, position, position % block_size) >= context_lens
            stale = stale.flatten().nonzero().squeeze(1).to(device)
        return _Decodes(
            slice(first, first + len(group)) if contiguous else torch.tensor(queries, device=device),
            len(group),
            torch.tensor(blocks, device=device).flatten(),
            stale,
            mask,
        )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        k, v = self._gather(k_cache), self._gather(v_cache)
        # The query heads that share a KV head stand in the place of the queries, which is one: K and V are read once.
        q = q.view(self.size, k.shape[1], -1, q.shape[-1])
        return F.scaled_dot_product_attention(q, k, v, self.mask, scale=scale).flatten(1, 2)

    def _gather(self, cache: Tensor) -> Tensor:
        """[size, kv_heads, padded context, head_dim]"""
        x = cache.index_select(0, self.blocks).flatten(0, 1)
        if self.stale is not None:
            x.index_fill_(0, self.stale, 0)  # a weight of zero does not silence a NaN
        return x.view(self.size, -1, *x.shape[1:]).transpose(1, 2)


def _by_length(
    decodes: Sequence[tuple[int, Sequence[int], int]], max_padding: int, max_blocks: int | None
) -> list[list[tuple[int, Sequence[int], int]]]:
    """Groups of similar length. In each, the blocks of padding up to its longest sequence are at most `max_padding`,
    and with them all its blocks at most `max_blocks`, unless it is a single sequence."""
    groups: list[list[tuple[int, Sequence[int], int]]] = []
    padding = 0
    for decode in sorted(decodes, key=lambda decode: -len(decode[1])):  # stable: equal lengths stay in order
        longest = len(groups[-1][0][1]) if groups else 0
        padding += longest - len(decode[1])
        is_full = max_blocks is not None and bool(groups) and (len(groups[-1]) + 1) * longest > max_blocks
        if not groups or padding > max_padding or is_full:
            groups.append([])
            padding = 0
        groups[-1].append(decode)
    for group in groups:
        group.sort(key=lambda decode: decode[0])
    return groups
