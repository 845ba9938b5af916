"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone or fused with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from cbserve.kernels.jit import Kernel, check_tensor, power_of_two

if TYPE_CHECKING:
    import triton.language as tl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x w / sqrt(mean(x^2) + eps) over the last dimension, computed in float32. x: [N, hidden], weight: [hidden]."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype first. x, residual: [N, hidden]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


@Kernel
def _rms_norm_kernel(
    x, residual, weight, out, total, x_stride, eps, hidden, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program. A row fits into the registers of a program, so it is read once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + row * hidden + column, values, mask=mask)
        values = values.to(total.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    weights = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, values * scale * weights, mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` as a Triton kernel; rows of x may be strided. Raises KernelError for what it cannot take."""
    _check(x, weight)
    out = x.new_empty(x.shape)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` as one Triton kernel: the sum is not read again. Raises KernelError for what it cannot take."""
    _check(x, weight)
    check_tensor("residual", residual, tuple(x.shape), (x.dtype,), x.device)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _check(x: Tensor, weight: Tensor) -> None:
    check_tensor("x", x, (None, None), contiguous=False)
    check_tensor("weight", weight, (x.shape[1],), (x.dtype,), x.device)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    rows, hidden = x.shape
    if rows:
        config = rms_norm_config(hidden)
        _rms_norm_kernel[(rows,)](
            x, residual, weight, out, total, x.stride(0), eps, hidden, HAS_RESIDUAL=residual is not None, **config
        )


def rms_norm_config(hidden: int) -> dict[str, int]:
    block = power_of_two(hidden)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
