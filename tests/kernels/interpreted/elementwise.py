"""Norm, rotary embedding and activation against their references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbserve.kernels.rms_norm import add_rms_norm, add_rms_norm_triton, rms_norm_triton
from cbserve.kernels.rotary import rotary, rotary_triton
from cbserve.kernels.silu_and_mul import silu_and_mul, silu_and_mul_triton

# One unit in the last place of a number near 1 to 4. The interpreter truncates when it stores bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def close(out, want) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def norm64(x, weight, eps):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("hidden", [1, 48, 64, 576])
def test_rms_norm(hidden: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, hidden).to(dtype), torch.rand(hidden).to(dtype)
    close(rms_norm_triton(x, weight, 1e-5), norm64(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rms_norm_with_the_addition_fused(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 80).to(dtype), torch.randn(3, 80).to(dtype), torch.rand(80).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert torch.equal(total, add_rms_norm(x, residual, weight, 1e-5)[1])
    close(normed, norm64(total, weight, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rms_norm_of_strided_rows_and_of_zeros() -> None:
    wide, weight = torch.randn(3, 100), torch.rand(32)
    wide[1] = 0
    close(rms_norm_triton(wide[:, :32], weight, 1e-5), norm64(wide[:, :32], weight, 1e-5))


@dtypes
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (12, 64), (5, 128)])
def test_rotary_of_a_slice_of_a_wider_product(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, heads + 2, head_dim).to(dtype)[:, :heads]
    rotation = torch.polar(torch.ones(3, head_dim // 2), 6 * torch.rand(3, head_dim // 2))
    close(rotary_triton(x, rotation), rotary64(x, rotation))
    close(rotary(x, rotation), rotary64(x, rotation))


def rotary64(x, rotation):
    real, imaginary = x.double()[..., 0::2], x.double()[..., 1::2]
    cos, sin = rotation.real.double()[:, None], rotation.imag.double()[:, None]
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).flatten(-2)


@dtypes
@pytest.mark.parametrize("size", [1, 128, 1536])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    x = (2 * torch.randn(2, 2 * size)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(silu_and_mul_triton(x), gate / (1 + (-gate).exp()) * up)
    close(silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 4), st.integers(1, 200), st.integers(0, 99))
def test_random_shapes(rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, 2 * size), torch.rand(2 * size)
    close(rms_norm_triton(x, weight, 1e-5), norm64(x, weight, 1e-5))
    close(silu_and_mul_triton(x), silu_and_mul(x).double())
    heads = x.view(rows, 1, 2 * size)
    rotation = torch.polar(torch.ones(rows, size), torch.rand(rows, size))
    close(rotary_triton(heads, rotation), rotary64(heads, rotation))
