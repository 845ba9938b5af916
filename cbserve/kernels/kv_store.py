"""Writing into the paged KV cache: new tokens, and whole blocks for copy-on-write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write K and V of N tokens into one layer's cache, in place.

    k, v: [N, kv_heads, head_dim], any strides. k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim],
    contiguous. slots: int64 [N]; slot = block id * block_size + offset in the block.
    """
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def copy_blocks(cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks within a cache [layers, 2, num_blocks, ...] (K and V), in place. pairs: (source, target).

    All sources are read before any target is written, so a block may be source of one pair and target of another.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, device=cache.device).unbind(1)
    for layer in cache:  # a layer at a time: the temporary copy stays small
        layer.index_copy_(1, targets, layer.index_select(1, sources))
