"""`PagedAttention` on Triton kernels: planned once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cbserve.kernels.jit import capability
from cbserve.kernels.paged_attention import PagedAttention, num_leading_decodes
from cbserve.kernels.paged_decode import paged_decode_triton
from cbserve.kernels.paged_prefill import paged_prefill_triton, prefill_tiles


class TritonPagedAttention:
    """The part of paged attention that is the same in all layers of a step; the arguments of `PagedAttention`.

    Sequences with one query at the front are decodes, all that follow are prefill: decodes are fastest in front. Below
    compute capability 8.0 Triton has no tensor cores, so there prefill goes through torch.
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
        self.num_queries = sum(query_lens)
        self._decodes = decodes = num_leading_decodes(query_lens)
        self._decode_tables = _padded(block_tables[:decodes], device)
        self._decode_lens = torch.tensor(context_lens[:decodes], dtype=torch.int32, device=device)
        rest = block_tables[decodes:], query_lens[decodes:], context_lens[decodes:]
        self._torch_prefill = PagedAttention(*rest, block_size, dtype, device) if capability(device) < 80 else None
        self._tables = _padded(rest[0], device)
        self._starts = torch.tensor([0, *accumulate(rest[1])], dtype=torch.int32, device=device)
        self._lens = torch.tensor(rest[2], dtype=torch.int32, device=device)
        self._tiles: Tensor | None = None
        self._host_lens = rest[1], rest[2]

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """One layer. q: [N, num_heads, head_dim]; caches and result as in `paged_attention.paged_attention`."""
        decodes, out = self._decodes, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            tables, lens = self._decode_tables, self._decode_lens
            paged_decode_triton(q[:decodes], k_cache, v_cache, tables, lens, scale, out=out[:decodes])
        if self.num_queries == decodes:
            return out
        if self._torch_prefill is not None:
            out[decodes:] = self._torch_prefill.run(q[decodes:], k_cache, v_cache, scale)
            return out
        if self._tiles is None:  # the first layer of the step: only it shows how many heads share a KV head
            self._tiles = prefill_tiles(*self._host_lens, q, k_cache)
        prefill = self._tables, self._starts, self._lens, scale
        paged_prefill_triton(q[decodes:], k_cache, v_cache, *prefill, tiles=self._tiles, out=out[decodes:])
        return out


def _padded(block_tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    # The width is always a multiple of 16: for other widths Triton would compile other variants, in mid-service.
    longest = -(-max(map(len, block_tables), default=1) // 16) * 16
    rows = [[*table, *[0] * (longest - len(table))] for table in block_tables]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), longest)
