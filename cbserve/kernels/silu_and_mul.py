"""The activation of Llama's MLP: SwiGLU (Shazeer, arXiv 2002.05202) on the fused product of gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cbserve.kernels.jit import Kernel, KernelError, check_tensor

if TYPE_CHECKING:
    import triton.language as tl


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32. gate_up: [N, 2 * size], gate first. Returns [N, size]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@Kernel
def _silu_and_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    """Program (row, part): BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, gate * tl.sigmoid(gate) * up, mask=mask)


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """`silu_and_mul` as a Triton kernel. Raises KernelError for what it cannot take."""
    check_tensor("gate_up", gate_up, (None, None))
    rows, columns = gate_up.shape
    if columns % 2:
        raise KernelError(f"gate_up has {columns} columns; gate and up are equally wide, so the number must be even")
    size = columns // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        config = silu_and_mul_config()
        grid = (rows, -(-size // config["BLOCK"]))
        _silu_and_mul_kernel[grid](gate_up, out, size, **config)
    return out


def silu_and_mul_config() -> dict[str, int]:
    return {"BLOCK": 1024, "num_warps": 4}
