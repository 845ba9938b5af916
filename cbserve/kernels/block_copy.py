"""Moving whole blocks of the KV cache: copy-on-write within it, and out to the host and back for swapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cbserve.kernels.jit import FLOATS, INDICES, Kernel, KernelError, check_tensor

if TYPE_CHECKING:
    import triton.language as tl


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, K and V of all layers, within a cache (copy-on-write) or between two (swapping).

    source, target: [layers, 2, num_blocks, ...], one cache or two on any devices; written in place. pairs: (block of
    source, block of target). All sources of a layer are read before any target is written, so within one cache a block
    may be source of one pair and target of another.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs).unbind(1)
    sources, targets = sources.to(source.device), targets.to(target.device)
    for from_layer, to_layer in zip(source, target, strict=True):  # one at a time: the temporary copy stays small
        to_layer.index_copy_(1, targets, from_layer.index_select(1, sources).to(target.device))


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """[layers, 2, B, ...]: the given blocks of `cache` [layers, 2, num_blocks, ...], side by side. blocks: int [B]."""
    return cache.index_select(2, blocks)


def scatter_blocks(values: Tensor, cache: Tensor, blocks: Tensor) -> None:
    """Write `values` [layers, 2, B, ...] to the given, different blocks of `cache` [layers, 2, num_blocks, ...]."""
    cache.index_copy_(2, blocks.long(), values)


@Kernel
def _move_blocks_kernel(
    source, target, source_blocks, target_blocks, source_plane, target_plane, block_numel,
    HAS_SOURCES: tl.constexpr, HAS_TARGETS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (block, plane): one block of one layer's K or V. Without a list of blocks, it is the program's number."""
    index = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    from_block = index
    to_block = index
    if HAS_SOURCES:
        from_block = tl.load(source_blocks + index).to(tl.int64)
    if HAS_TARGETS:
        to_block = tl.load(target_blocks + index).to(tl.int64)
    read = source + plane * source_plane + from_block * block_numel
    write = target + plane * target_plane + to_block * block_numel
    for start in range(0, block_numel, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < block_numel
        tl.store(write + at, tl.load(read + at, mask=inside), mask=inside)


def gather_blocks_triton(cache: Tensor, blocks: Tensor) -> Tensor:
    """`gather_blocks` as a Triton kernel. Raises KernelError for what it cannot take."""
    _check(cache, blocks, "cache")
    layers, two, _, *shape = cache.shape
    out = torch.empty((layers, two, len(blocks), *shape), dtype=cache.dtype, device=cache.device)
    _move(cache, out, blocks, None)
    return out


def scatter_blocks_triton(values: Tensor, cache: Tensor, blocks: Tensor) -> None:
    """`scatter_blocks` as a Triton kernel. Raises KernelError for what it cannot take."""
    _check(cache, blocks, "cache")
    wanted = (*cache.shape[:2], len(blocks), *cache.shape[3:])
    check_tensor("values", values, wanted, (cache.dtype,), cache.device)
    _move(values, cache, None, blocks)


def copy_blocks_triton(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """`copy_blocks` with Triton kernels; on the way from and to the host, blocks lie side by side.

    Raises KernelError for what the kernels cannot take, and for a block that source or target does not have.
    """
    if not pairs:
        return
    for name, cache, numbers in (("source", source, {a for a, _ in pairs}), ("target", target, {b for _, b in pairs})):
        if min(numbers) < 0 or max(numbers) >= cache.shape[2]:
            raise KernelError(f"copy of blocks {list(pairs)}: the {name} has blocks 0 to {cache.shape[2] - 1}")
    sources, targets = torch.tensor(pairs).unbind(1)
    if source.device != target.device:
        if target.device.type == "cpu":
            target.index_copy_(2, targets, gather_blocks_triton(source, sources.to(source.device)).cpu())
        else:
            scatter_blocks_triton(source.index_select(2, sources).to(target.device), target, targets.to(target.device))
        return
    sources, targets = (x.contiguous().to(source.device) for x in (sources, targets))
    _check(source, sources, "source")
    check_tensor("target", target, (*source.shape[:2], None, *source.shape[3:]), (source.dtype,), source.device)
    if {a for a, _ in pairs} & {b for _, b in pairs} and source.data_ptr() == target.data_ptr():
        # Programs run in any order: a block that is read and written goes through a copy, so that all reads come first.
        scatter_blocks_triton(gather_blocks_triton(source, sources), target, targets)
    else:
        _move(source, target, sources, targets)


def _check(cache: Tensor, blocks: Tensor, name: str) -> None:
    check_tensor(name, cache, (None,) * cache.dim(), FLOATS)
    if cache.dim() < 4 or cache.shape[1] != 2:
        raise KernelError(f"{name} has shape {list(cache.shape)}; it must be [layers, 2, num_blocks, ...]")
    check_tensor("blocks", blocks, (None,), INDICES, cache.device)


def _move(source: Tensor, target: Tensor, sources: Tensor | None, targets: Tensor | None) -> None:
    blocks = sources if sources is not None else targets
    planes, block_numel = source.shape[0] * source.shape[1], source[0, 0, 0].numel()
    if blocks is not None and len(blocks):
        _move_blocks_kernel[(len(blocks), planes)](
            source, target, sources, targets, source.stride(1), target.stride(1), block_numel,
            HAS_SOURCES=sources is not None, HAS_TARGETS=targets is not None, **move_blocks_config(),
        )  # fmt: skip


def move_blocks_config() -> dict[str, int]:
    return {"TILE": 2048, "num_warps": 8}
