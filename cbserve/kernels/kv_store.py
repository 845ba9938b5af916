"""Writing K and V of new tokens into the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cbserve.kernels.jit import INDICES, Kernel, check_tensor, power_of_two

if TYPE_CHECKING:
    import triton.language as tl


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write K and V of N tokens into one layer's cache, in place.

    k, v: [N, kv_heads, head_dim], any strides. k_cache, v_cache: [num_blocks, block_size, kv_heads, head_dim],
    contiguous. slots: int64 [N]; slot = block id * block_size + offset in the block, -1 skips the token.
    """
    if len(slots) and int(slots.min()) < 0:
        real = slots >= 0
        k, v, slots = k[real], v[real], slots[real]
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


@Kernel
def _store_kernel(
    k, v, k_cache, v_cache, slots, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < tl.where(slot >= 0, HEADS * HEAD_DIM, 0)
    head = at // HEAD_DIM
    column = at % HEAD_DIM
    target = slot * (HEADS * HEAD_DIM) + at
    key = tl.load(k + token * k_token_stride + head * k_head_stride + column, mask=inside)
    tl.store(k_cache + target, key, mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + column, mask=inside)
    tl.store(v_cache + target, value, mask=inside)


def store_kv_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """`store_kv` as a Triton kernel. Raises KernelError for what it cannot take, but slots are not looked at."""
    check_tensor("k_cache", k_cache, (None, None, None, None))
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), k_cache.device)
    _, _, heads, head_dim = k_cache.shape
    check_tensor("slots", slots, (None,), INDICES, k_cache.device)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, (len(slots), heads, head_dim), (k_cache.dtype,), k_cache.device, contiguous=False)
    if len(slots):
        _store_kernel[(len(slots),)](
            k, v, k_cache, v_cache, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, HEAD_DIM=head_dim, **store_config(heads, head_dim),
        )  # fmt: skip


def store_config(heads: int, head_dim: int) -> dict[str, int]:
    block = power_of_two(heads * head_dim)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}
