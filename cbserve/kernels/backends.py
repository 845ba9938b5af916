"""The sets of operations that a step is made of: torch, which runs everywhere, torch with C on a CPU, and Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from cbserve.kernels import block_copy, kv_store, rms_norm, rotary, sampling, silu_and_mul
from cbserve.kernels.c_attention import CPagedAttention
from cbserve.kernels.c_library import LANES, c_library
from cbserve.kernels.c_ops import add_rms_norm_c, rotary_c, silu_and_mul_c, store_kv_c
from cbserve.kernels.jit import KernelError, interpreting
from cbserve.kernels.paged_attention import PagedAttention
from cbserve.kernels.triton_attention import TritonPagedAttention


class StepAttention(Protocol):
    """Paged attention, planned once a step and run once a layer."""

    def __init__(
        self,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """The operations of a step; each is described where the torch function of the same name stands.

    `sample_tokens` None: `models.sampling` chooses, without a kernel.
    """

    name: str
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: type[StepAttention]
    copy_blocks: Callable[[Tensor, Tensor, Sequence[tuple[int, int]]], None]
    sample_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


TORCH = Backend(
    "torch",
    rms_norm.add_rms_norm,
    rotary.rotary,
    silu_and_mul.silu_and_mul,
    kv_store.store_kv,
    PagedAttention,
    block_copy.copy_blocks,
)
C = replace(
    TORCH,
    name="c",
    add_rms_norm=add_rms_norm_c,
    rotary=rotary_c,
    silu_and_mul=silu_and_mul_c,
    store_kv=store_kv_c,
    paged_attention=CPagedAttention,
)
TRITON = Backend(
    "triton",
    rms_norm.add_rms_norm_triton,
    rotary.rotary_triton,
    silu_and_mul.silu_and_mul_triton,
    kv_store.store_kv_triton,
    TritonPagedAttention,
    block_copy.copy_blocks_triton,
    sampling.sample_tokens_triton,
)


def choose_backend(name: str, device: str | torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> Backend:
    """The backend called `name` for a model whose vectors have these `sizes`; "auto" is Triton on CUDA where it is
    installed, C for float32 on a CPU where it can be compiled, and torch elsewhere.

    Raises KernelError for another name, and for "triton" or "c" where it cannot run.
    """
    on_cuda, installed = torch.device(device).type == "cuda", importlib.util.find_spec("triton") is not None
    if name == "torch" or (name == "auto" and on_cuda and not installed):
        return TORCH
    if name == "c" or (name == "auto" and not on_cuda):
        return _c_or_torch(device, dtype, sizes, required=name == "c")
    if name not in ("auto", "triton"):
        raise KernelError(f"backend {name!r} does not exist; use 'auto', 'triton', 'c' or 'torch'")
    if not installed:
        raise KernelError("backend 'triton': triton is not installed; pip install triton (Linux), or use 'torch'")
    if not (on_cuda or interpreting()):
        raise KernelError(
            f"backend 'triton' needs a CUDA device, not {device}; use 'torch', or set TRITON_INTERPRET=1 before triton "
            "is imported to run the kernels slowly on the CPU"
        )
    return TRITON


def _c_or_torch(device: str | torch.device, dtype: torch.dtype, sizes: Sequence[int], required: bool) -> Backend:
    try:
        if torch.device(device).type != "cpu" or dtype != torch.float32 or any(size % LANES for size in sizes):
            raise KernelError(
                f"backend 'c' computes float32 on a CPU, in vectors of a multiple of {LANES}; not {dtype} on {device} "
                f"in vectors of {list(sizes)}: use 'torch'"
            )
        c_library()
    except KernelError:
        if required:
            raise
        return TORCH
    return C
