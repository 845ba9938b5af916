"""Rotary position embedding (Su et al., arXiv 2104.09864) on pairs that lie side by side.

Element 2 j and 2 j + 1 of a head are the real and the imaginary part of one complex number, which is turned by the
angle position * theta_j. `models.llama` brings q and k into this order by reordering rows of their weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cbserve.kernels.jit import Kernel, KernelError, check_tensor, power_of_two

if TYPE_CHECKING:
    import triton.language as tl


def rotary(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn every head by its token's angles, in float32.

    x: [N, heads, head_dim]. rotation: complex64 [N, head_dim / 2], e^(i * angle). Returns [N, heads, head_dim].
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2).to(x.dtype)


@Kernel
def _rotary_kernel(
    x, rotation, out, x_token_stride, x_head_stride, heads, PAIRS: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr
):
    """One token a program: all its heads, as tiles [HEADS, COLS] of real and of imaginary parts."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, COLS)[None, :]
    mask = (head < heads) & (pair < PAIRS)
    cos = tl.load(rotation + (token * PAIRS + pair) * 2, mask=pair < PAIRS, other=0.0)
    sin = tl.load(rotation + (token * PAIRS + pair) * 2 + 1, mask=pair < PAIRS, other=0.0)
    source = x + token * x_token_stride + head * x_head_stride + pair * 2
    real = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    imaginary = tl.load(source + 1, mask=mask, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * (2 * PAIRS) + pair * 2
    tl.store(target, real * cos - imaginary * sin, mask=mask)
    tl.store(target + 1, real * sin + imaginary * cos, mask=mask)


def rotary_triton(x: Tensor, rotation: Tensor) -> Tensor:
    """`rotary` as a Triton kernel; x may be a slice of a wider product. Raises KernelError for what it cannot take."""
    check_tensor("x", x, (None, None, None), contiguous=False)
    tokens, heads, head_dim = x.shape
    if head_dim % 2:
        raise KernelError(f"head_dim is {head_dim}; rotary embedding needs an even one")
    check_tensor("rotation", rotation, (tokens, head_dim // 2), (torch.complex64,), x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotary_kernel[(tokens,)](
            x, torch.view_as_real(rotation), out, x.stride(0), x.stride(1), heads, **rotary_config(heads, head_dim)
        )
    return out


def rotary_config(heads: int, head_dim: int) -> dict[str, int]:
    pairs, rows = head_dim // 2, power_of_two(heads)
    columns = power_of_two(pairs)
    return {"PAIRS": pairs, "HEADS": rows, "COLS": columns, "num_warps": min(max(rows * columns // 512, 1), 8)}
