"""The operations between matrix products in C, for float32 on a CPU: each reads its input once.

Arguments and results are those of the torch functions of the same name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbserve.kernels.c_library import LANES, c_library, num_threads
from cbserve.kernels.jit import KernelError

# In a step each line here runs in every layer, right after a matrix product has emptied the processor's caches, and
# takes several times as long as in a loop of its own. So arguments are looked at in few, cheap questions.


def add_rms_norm_c(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm.add_rms_norm`. Raises KernelError for what C cannot take."""
    rows, size = x.shape
    if residual.shape != x.shape or weight.shape != (size,) or size % LANES:
        raise KernelError(
            f"x is {list(x.shape)}, residual {list(residual.shape)}, weight {list(weight.shape)}; they must be twice "
            f"[any, size] and [size], a multiple of {LANES}: use backend='torch'"
        )
    if not (fits(x) and fits(residual) and fits(weight)):
        raise refusal(x=x, residual=residual, weight=weight)
    out, total = torch.empty_like(x), torch.empty_like(x)
    c_library().add_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), rows, size, eps,
        num_threads(),
    )  # fmt: skip
    return out, total


def rotary_c(x: Tensor, rotation: Tensor) -> Tensor:
    """`rotary.rotary`. Raises KernelError for what C cannot take."""
    tokens, heads, head_dim = x.shape
    if rotation.shape != (tokens, head_dim // 2) or rotation.dtype != torch.complex64 or head_dim % 2:
        raise KernelError(f"rotation is {rotation.dtype} {list(rotation.shape)}; x is {list(x.shape)}")
    x = side_by_side(x)
    if not (x.is_cpu and x.dtype == torch.float32 and rotation.is_cpu and rotation.is_contiguous()):
        raise refusal(x=x, rotation=rotation)
    out = x.new_empty(tokens, heads, head_dim)  # whatever torch's default dtype and device are
    c_library().rotary(
        x.data_ptr(), x.stride(0), rotation.data_ptr(), out.data_ptr(), tokens, heads, head_dim, num_threads()
    )
    return out


def silu_and_mul_c(gate_up: Tensor) -> Tensor:
    """`silu_and_mul.silu_and_mul`. Raises KernelError for what C cannot take."""
    rows, twice = gate_up.shape
    if twice % (2 * LANES):
        raise KernelError(f"gate_up is {list(gate_up.shape)}; each half must be a multiple of {LANES}")
    if not fits(gate_up):
        raise refusal(gate_up=gate_up)
    out = gate_up.new_empty(rows, twice // 2)
    c_library().silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, twice // 2, num_threads())
    return out


def store_kv_c(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """`kv_store.store_kv`. Raises KernelError for what C cannot take, and for a slot beyond the cache."""
    num_blocks, block_size, heads, head_dim = k_cache.shape
    tokens = len(slots)
    if k.shape != (tokens, heads, head_dim) or v.shape != k.shape or v_cache.shape != k_cache.shape:
        raise KernelError(f"k is {list(k.shape)}, v {list(v.shape)}, the caches {list(k_cache.shape)}; slots {tokens}")
    k, v = side_by_side(k), side_by_side(v)
    good = fits(k_cache) and fits(v_cache) and k.is_cpu and v.is_cpu and k.dtype == v.dtype == torch.float32
    if not (good and slots.is_cpu and slots.dtype == torch.int64 and slots.is_contiguous()):
        raise refusal(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    beyond = c_library().store_kv(
        k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_cache.data_ptr(), v_cache.data_ptr(),
        slots.data_ptr(), tokens, num_blocks * block_size, heads * head_dim,
    )  # fmt: skip
    if beyond >= 0:
        raise KernelError(f"slot {beyond} in a cache of {num_blocks * block_size}; nothing was written")


def side_by_side(x: Tensor) -> Tensor:
    """[N, heads, head_dim] with any distance between tokens, but none between the heads of one."""
    _, between_heads, between = x.stride()
    return x if between == 1 and between_heads == x.shape[2] else x.contiguous()


def fits(x: Tensor) -> bool:
    """Whether C can take it as it lies in memory."""
    return x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()


def refusal(**tensors: Tensor) -> KernelError:
    """What to raise when one of these does not fit."""
    found = "; ".join(f"{name} is {x.dtype} on {x.device}, strides {list(x.stride())}" for name, x in tensors.items())
    return KernelError(
        f"{found}. C takes contiguous float32 on a CPU (slots: int64, rotation: complex64): use backend='torch'"
    )
