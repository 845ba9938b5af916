"""The operations between matrix products in C, against the torch functions of the same name."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from cbserve.kernels import c_ops
from cbserve.kernels.jit import KernelError
from cbserve.kernels.kv_store import store_kv
from cbserve.kernels.rms_norm import add_rms_norm
from cbserve.kernels.rotary import rotary
from cbserve.kernels.silu_and_mul import silu_and_mul

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")
ROWS = [0, 1, 7, 300]  # the last is worth a second thread


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [8, 64, 576])
def test_add_rms_norm(rows: int, size: int) -> None:
    x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    close(c_ops.add_rms_norm_c(x, residual, weight, 1e-5), add_rms_norm(x, residual, weight, 1e-5))
    zeros = torch.zeros(rows, size)
    close(c_ops.add_rms_norm_c(zeros, zeros, weight, 1e-5), (zeros, zeros))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [8, 64, 72])
def test_rotary(rows: int, head_dim: int) -> None:
    wide = torch.randn(rows, 7, head_dim)
    rotation = torch.polar(torch.ones(rows, head_dim // 2), torch.randn(rows, head_dim // 2))
    for x in (wide, wide[:, :5], wide.transpose(0, 1).contiguous().transpose(0, 1)):
        close(c_ops.rotary_c(x, rotation), rotary(x, rotation))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", [1e-6, 1, 50, 1e4])
def test_silu_and_mul(rows: int, scale: float) -> None:
    """Of large numbers neither side may overflow: silu is x above and 0 below."""
    gate_up = torch.cat([scale * torch.randn(rows, 1536), torch.randn(rows, 1536)], 1)
    ours, theirs = c_ops.silu_and_mul_c(gate_up), silu_and_mul(gate_up)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6 * scale)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: c_ops.silu_and_mul_c(x.flatten(1)),
        lambda x: c_ops.rotary_c(x, torch.ones(7, 8, dtype=torch.complex64, device="cpu")),
        lambda x: torch.stack(c_ops.add_rms_norm_c(x.flatten(1), x.flatten(1), x[0].flatten(), 1e-5)),
    ],
)
def test_torchs_default_dtype_and_device_do_not_matter(call) -> None:
    x, before = torch.randn(7, 4, 16), torch.get_default_dtype()
    expected = call(x)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            result = call(x)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_silu_of_what_is_no_number() -> None:
    gate = torch.tensor([torch.nan, torch.inf, -torch.inf, -3e38, 3e38, 1e-42, -0.0, -100.0])
    gate_up = torch.cat([gate, torch.ones(8)])[None]
    torch.testing.assert_close(
        c_ops.silu_and_mul_c(gate_up), silu_and_mul(gate_up), rtol=2e-6, atol=1e-38, equal_nan=True
    )


@pytest.mark.parametrize("head_dim", [3, 64])
def test_store_kv(head_dim: int) -> None:
    caches = [torch.full((6, 4, 2, head_dim), torch.nan) for _ in range(4)]
    wide = torch.randn(5, 9, head_dim)  # as a model slices k and v out of its q, k and v
    slots = torch.tensor([17, -1, 0, 23, -1])
    store_kv(wide[:, 2:4], wide[:, 4:6], caches[0], caches[1], slots)
    c_ops.store_kv_c(wide[:, 2:4], wide[:, 4:6], caches[2], caches[3], slots)
    torch.testing.assert_close(caches[2:], caches[:2], rtol=0, atol=0, equal_nan=True)


def test_a_slot_beyond_the_cache_is_refused_before_anything_is_written() -> None:
    caches = [torch.zeros(6, 4, 2, 8) for _ in range(2)]
    with pytest.raises(KernelError, match="slot 24 in a cache of 24"):
        c_ops.store_kv_c(torch.ones(2, 2, 8), torch.ones(2, 2, 8), *caches, torch.tensor([3, 24]))
    assert not torch.cat(caches).any()


X, CACHE = torch.zeros(3, 16), torch.zeros(6, 4, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: c_ops.add_rms_norm_c(X, X, torch.zeros(8), 1e-5), "weight [8]"),
        (lambda: c_ops.add_rms_norm_c(X, X[:2], torch.zeros(16), 1e-5), "residual [2, 16]"),
        (lambda: c_ops.add_rms_norm_c(X[:, :12].clone(), X[:, :12].clone(), torch.zeros(12), 1e-5), "a multiple of 8"),
        (
            lambda: c_ops.add_rms_norm_c(X[:, ::2], X[:, ::2], torch.zeros(8), 1e-5),
            "x is torch.float32 on cpu, strides [16, 2]",
        ),
        (lambda: c_ops.add_rms_norm_c(X.half(), X, torch.zeros(16), 1e-5), "x is torch.float16 on cpu"),
        (lambda: c_ops.silu_and_mul_c(X[:, :8].clone()), "each half must be a multiple of 8"),
        (lambda: c_ops.silu_and_mul_c(X.to("meta")), "gate_up is torch.float32 on meta"),
        (lambda: c_ops.rotary_c(torch.zeros(3, 2, 8), torch.zeros(3, 4)), "rotation is torch.float32 [3, 4]"),
        (lambda: c_ops.rotary_c(torch.zeros(3, 2, 8), torch.zeros(2, 4, dtype=torch.complex64)), "[2, 4]"),
        (
            lambda: c_ops.rotary_c(torch.zeros(3, 2, 8).half(), torch.zeros(3, 4, dtype=torch.complex64)),
            "torch.float16",
        ),
        (lambda: c_ops.store_kv_c(X.view(3, 2, 8), X.view(3, 2, 8), CACHE, CACHE, torch.tensor([0])), "slots 1"),
        (lambda: c_ops.store_kv_c(X.view(3, 2, 8), X[:2].view(2, 2, 8), CACHE, CACHE, torch.arange(3)), "v [2, 2, 8]"),
        (
            lambda: c_ops.store_kv_c(X.view(3, 2, 8), X.view(3, 2, 8), CACHE[:, ::2], CACHE[:, ::2], torch.arange(3)),
            "k_cache is torch.float32 on cpu, strides",
        ),
    ],
)
def test_what_would_read_or_write_beyond_is_refused(call, message: str) -> None:
    with pytest.raises(KernelError, match=re.escape(message)):
        call()
