"""`PagedAttention` on a CPU with decodes in C (`c/paged_decode.c`), which reads K and V where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from cbserve.kernels.c_library import LANES, c_library, num_threads
from cbserve.kernels.c_ops import fits, refusal, side_by_side
from cbserve.kernels.jit import KernelError
from cbserve.kernels.paged_attention import PagedAttention, num_leading_decodes


class CPagedAttention:
    """The part of paged attention that is the same in all layers of a step; the arguments of `PagedAttention`.

    float32 on a CPU. Sequences with one query at the front are decodes and go through C, all that follow through torch.
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
        self._function = c_library().paged_decode
        self._decodes = decodes = num_leading_decodes(query_lens)
        rest = block_tables[decodes:], query_lens[decodes:], context_lens[decodes:]
        self._prefills = PagedAttention(*rest, block_size, dtype, device) if decodes < len(query_lens) else None
        tables, contexts = block_tables[:decodes], context_lens[:decodes]
        # Also as many as decodes: C would read on behind them.
        for _, table, context in zip(range(decodes), tables, contexts, strict=True):
            if not 0 < context <= len(table) * block_size:
                raise KernelError(
                    f"a context of {context} tokens in {len(table)} blocks of {block_size}: give all blocks"
                )
        blocks = list(chain.from_iterable(tables))
        self._least, self._most = min(blocks, default=0), max(blocks, default=0)
        starts = [0, *accumulate(map(len, tables))]
        self._arrays = [
            torch.tensor(numbers, dtype=torch.int32, device="cpu") for numbers in (blocks, starts, contexts)
        ]
        self._pointers = [array.data_ptr() for array in self._arrays]
        self._block_size, self._num_threads = block_size, num_threads()

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """One layer. q: [N, num_heads, head_dim]; caches and result as in `paged_attention.paged_attention`.

        Raises:
            KernelError: not float32 on a CPU, or a head_dim that C does not take.
        """
        decodes, out = self._decodes, torch.empty_like(q, memory_format=torch.contiguous_format)
        if decodes:
            self._run_decodes(side_by_side(q), k_cache, v_cache, scale, out)
        if self._prefills is not None:
            out[decodes:] = self._prefills.run(q[decodes:], k_cache, v_cache, scale)
        return out

    def _run_decodes(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
        queries, heads, head_dim = q.shape
        num_blocks, block_size, kv_heads, cache_dim = k_cache.shape
        wrong_cache = v_cache.shape != k_cache.shape or cache_dim != head_dim or block_size != self._block_size
        if wrong_cache or queries < self._decodes:
            raise KernelError(
                f"q has shape {list(q.shape)}, k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; they "
                f"must be [N, heads, head_dim], N at least {self._decodes}, and twice [num_blocks, {self._block_size}, "
                "kv_heads, head_dim]"
            )
        if head_dim % LANES or heads % kv_heads:
            raise KernelError(
                f"{heads} query heads of {head_dim} on {kv_heads} KV heads; head_dim must be a multiple of {LANES}, "
                "and each KV head serves as many query heads: use backend='torch'"
            )
        if not (fits(k_cache) and fits(v_cache) and q.is_cpu and q.dtype == torch.float32):
            raise refusal(q=q, k_cache=k_cache, v_cache=v_cache)
        if self._least < 0 or self._most >= num_blocks:
            raise KernelError(f"blocks {self._least} to {self._most} in a cache of {num_blocks}")
        self._function(
            q.data_ptr(), q.stride(0), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), *self._pointers,
            self._decodes, heads, kv_heads, head_dim, block_size, scale, self._num_threads,
        )  # fmt: skip
