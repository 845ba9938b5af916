"""`PagedAttention` on a CPU with decodes in C (`paged_decode.c`), which reads K and V where they lie."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from pathlib import Path

import torch
from torch import Tensor

from cbserve.kernels.c_library import c_library, shares_torchs_threads
from cbserve.kernels.jit import KernelError
from cbserve.kernels.paged_attention import PagedAttention

LANES = 8  # as in paged_decode.c


@functools.cache
def paged_decode() -> Callable[..., None]:
    """The function of `paged_decode.c`. Raises KernelError where it cannot be compiled."""
    function = c_library(Path(__file__).with_name("paged_decode.c")).paged_decode
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, ctypes.c_long, *[pointer] * 6, *[number] * 5, ctypes.c_float, number]
    function.restype = None
    return function  # type: ignore[no-any-return]


@functools.cache
def _may_use_threads() -> bool:
    return shares_torchs_threads()


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
        self._function = paged_decode()
        self._decodes = decodes = next((s for s, n in enumerate(query_lens) if n != 1), len(query_lens))
        rest = block_tables[decodes:], query_lens[decodes:], context_lens[decodes:]
        self._prefills = PagedAttention(*rest, block_size, dtype, device) if decodes < len(query_lens) else None
        tables, contexts = block_tables[:decodes], context_lens[:decodes]
        for table, context in zip(tables, contexts, strict=True):
            if not 0 < context <= len(table) * block_size:
                raise KernelError(
                    f"a context of {context} tokens in {len(table)} blocks of {block_size}: give all blocks"
                )
        blocks = list(chain.from_iterable(tables))
        self._least, self._most = min(blocks, default=0), max(blocks, default=0)
        self._tables = torch.tensor(blocks, dtype=torch.int32)
        self._starts = torch.tensor([0, *accumulate(map(len, tables))], dtype=torch.int32)
        self._contexts = torch.tensor(contexts, dtype=torch.int32)
        self._num_threads = torch.get_num_threads() if _may_use_threads() else 1

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """One layer. q: [N, num_heads, head_dim]; caches and result as in `paged_attention.paged_attention`.

        Raises:
            KernelError: not float32 on a CPU, or a head_dim that C does not take.
        """
        decodes, (_, heads, head_dim) = self._decodes, q.shape
        out = torch.empty(q.shape, dtype=q.dtype)
        if decodes:
            num_blocks, block_size, kv_heads, _ = k_cache.shape
            _check(q, k_cache, v_cache)
            if self._least < 0 or self._most >= num_blocks:
                raise KernelError(f"blocks {self._least} to {self._most} in a cache of {num_blocks}")
            if q.stride(1) != head_dim or q.stride(2) != 1:
                q = q.contiguous()
            sizes = decodes, heads, kv_heads, head_dim, block_size, scale, self._num_threads
            caches, tables = (
                (k_cache.data_ptr(), v_cache.data_ptr()),
                (self._tables.data_ptr(), self._starts.data_ptr()),
            )
            self._function(
                q.data_ptr(), q.stride(0), out.data_ptr(), *caches, *tables, self._contexts.data_ptr(), *sizes
            )
        if self._prefills is not None:
            out[decodes:] = self._prefills.run(q[decodes:], k_cache, v_cache, scale)
        return out


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise KernelError unless C can take these: it would read another tensor's memory."""
    _, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim:
        raise KernelError(
            f"q has shape {list(q.shape)}, k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)}; they must "
            "be [any, heads, head_dim] and twice [num_blocks, block_size, kv_heads, head_dim]"
        )
    if head_dim % LANES or heads % kv_heads:
        raise KernelError(
            f"{heads} query heads of {head_dim} on {kv_heads} KV heads; head_dim must be a multiple of {LANES}, and "
            "each KV head serves as many query heads: use backend='torch'"
        )
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise KernelError(f"{name} is {x.dtype} on {x.device}; C takes float32 on a CPU: use backend='torch'")
        if name != "q" and not x.is_contiguous():
            raise KernelError(f"{name} is not contiguous (strides {x.stride()}); use .contiguous()")
