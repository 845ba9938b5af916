"""What kernels refuse, before anything is launched, and what they would launch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from cbserve.kernels.backends import TORCH, TRITON, choose_backend
from cbserve.kernels.jit import KernelError, recording
from cbserve.kernels.paged_attention import paged_attention
from cbserve.kernels.paged_decode import choose_splits, paged_decode, paged_decode_triton
from cbserve.kernels.paged_prefill import paged_prefill, paged_prefill_triton, prefill_tiles


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    with recording(80):
        yield


def decode_arguments(**changes):
    arguments = {
        "q": torch.zeros(3, 6, 64),
        "k_cache": torch.zeros(9, 16, 2, 64),
        "v_cache": torch.zeros(9, 16, 2, 64),
        "block_tables": torch.zeros(3, 4, dtype=torch.int32),
        "context_lens": torch.ones(3, dtype=torch.int32),
        "scale": 0.1,
    }
    return arguments | changes


def test_good_arguments_are_launched() -> None:
    with recording(80) as launches:
        out = paged_decode_triton(**decode_arguments())
    assert out.shape == (3, 6, 64) and [launch.grid for launch in launches] == [(3, 2, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 6, 32)}, "q has shape [3, 6, 32]; it must be [any, any, 64]"),
        ({"q": torch.zeros(3, 6, 64, dtype=torch.float16)}, "q is torch.float16; it must be torch.float32"),
        ({"q": torch.zeros(3, 64, 6).transpose(1, 2)}, "the last dimension of q has stride 6; it must be 1"),
        ({"q": torch.zeros(6, 3, 64).transpose(0, 1)}, "the heads of q have stride 192; they must lie side by side"),
        ({"q": torch.zeros(3, 5, 64)}, "5 query heads on 2 KV heads"),
        ({"q": torch.zeros(3, 18, 64)}, "18 query heads on 2 KV heads"),
        ({"q": torch.zeros(2, 6, 64)}, "2 queries but 3 block tables"),
        ({"k_cache": torch.zeros(9, 2, 16, 64).transpose(1, 2)}, "k_cache is not contiguous"),
        ({"v_cache": torch.zeros(9, 16, 2, 32)}, "v_cache has shape"),
        ({"v_cache": torch.zeros(9, 16, 2, 64, device="meta")}, "v_cache is on meta, the other arguments on cpu"),
        ({"block_tables": torch.zeros(3, 4)}, "block_tables is torch.float32; it must be torch.int32 or torch.int64"),
        ({"context_lens": torch.ones(2, dtype=torch.int32)}, "context_lens has shape [2]; it must be [3]"),
        ({"num_splits": 0}, "num_splits is 0; it must be 1 to 32"),
        ({"out": torch.zeros(3, 6, 32)}, "out has shape"),
        ({name: torch.zeros(9, 12, 2, 64) for name in ("k_cache", "v_cache")}, "block_size is 12"),
        (
            {"q": torch.zeros(3, 6, 48)} | {name: torch.zeros(9, 16, 2, 48) for name in ("k_cache", "v_cache")},
            "head_dim is 48",
        ),
    ],
)
def test_bad_arguments_are_refused(changes, message: str) -> None:
    with recording(80) as launches, pytest.raises(KernelError, match=re.escape(message)):
        paged_decode_triton(**decode_arguments(**changes))
    assert not launches


def test_a_cpu_tensor_outside_the_interpreter_is_refused() -> None:
    code = "import torch; from cbserve.kernels.silu_and_mul import *; silu_and_mul_triton(torch.ones(2, 4))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "KernelError: gate_up is on cpu; Triton kernels need a CUDA device" in done.stderr


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.float16)]
)
def test_torch_is_chosen_where_it_is_asked_for(device: str, dtype: torch.dtype) -> None:
    assert choose_backend("torch", device, dtype, [64]) is TORCH


def test_auto_chooses_triton_on_cuda_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert (
        choose_backend("auto", "cuda", torch.float32, [64])
        is choose_backend("triton", "cuda", torch.float32, [64])
        is TRITON
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto", "cuda", torch.float32, [64]) is TORCH
    with pytest.raises(KernelError, match="triton is not installed"):
        choose_backend("triton", "cuda", torch.float32, [64])


def test_a_backend_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match="needs a CUDA device, not cpu"):
        choose_backend("triton", "cpu", torch.float32, [64])
    with pytest.raises(KernelError, match="'cuda' does not exist"):
        choose_backend("cuda", "cpu", torch.float32, [64])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", "cpu", torch.float32, [64]) is TRITON


def test_kernels_import_without_importing_triton() -> None:
    code = "import sys, cbserve.kernels.backends; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("programs", "max_context", "splits"), [(1, 256, 1), (1, 512, 2), (1, 100_000, 4), (2, 100_000, 2), (4, 100_000, 1)]
)
def test_contexts_are_split_until_the_device_is_full(programs: int, max_context: int, splits: int) -> None:
    assert choose_splits(programs, max_context, torch.device("cpu")) == splits  # counts as one multiprocessor


def test_tiles_cover_every_query_once_and_those_that_see_most_come_first() -> None:
    q, k_cache = torch.zeros(12, 4, 64), torch.zeros(1, 16, 1, 64)  # float32: 16 rows a tile, 4 queries of 4 heads
    assert prefill_tiles([5, 0, 7], [5, 3, 100], q, k_cache).tolist() == [[2, 4], [2, 0], [0, 4], [0, 0]]


def test_the_references_agree_with_the_engine_s_own_attention() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(12, 8, 2, 16), torch.randn(12, 8, 2, 16)
    tables, lens = torch.randperm(12).view(3, 4), torch.tensor([1, 17, 32])
    start = torch.tensor([0, 1, 8, 40])
    q = torch.randn(40, 6, 16)
    want = paged_attention(q, k, v, tables, start, lens, 0.25)
    torch.testing.assert_close(paged_prefill(q, k, v, tables, start, lens, 0.25), want, rtol=1e-5, atol=1e-5)
    want = paged_attention(q[:3], k, v, tables, torch.arange(4), lens, 0.25)
    torch.testing.assert_close(paged_decode(q[:3], k, v, tables, lens, 0.25), want, rtol=1e-5, atol=1e-5)


def test_prefill_refuses_wrong_starts() -> None:
    arguments = decode_arguments()
    with pytest.raises(KernelError, match="query_start"):
        paged_prefill_triton(**arguments, query_start=torch.zeros(3, dtype=torch.int32))
