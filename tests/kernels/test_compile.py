"""What the kernels compile to for GPUs that are not here; `benchmarks/kernels_compile.py` prints the same reports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPILE = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import kernels_compile
print(json.dumps([dataclasses.asdict(r) for r in kernels_compile.reports(int(sys.argv[2]))]))
"""
SHARED_BYTES = 48 * 1024  # what every GPU gives without asking
KERNELS = {
    *("decode_kernel", "merge_kernel", "prefill_kernel", "store_kernel", "move_blocks_kernel"),
    *("rms_norm_kernel", "rotary_kernel", "silu_and_mul_kernel", "sample_kernel"),
}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


CAPABILITIES = (75, 80, 89, 90)


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[int, subprocess.Popen[str]]]:
    """One process a generation of GPUs, all at once: each takes a minute of one core."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    running = {
        capability: subprocess.Popen(
            [sys.executable, "-c", COMPILE, str(BENCHMARKS), str(capability)],
            env=environment | {"TRITON_DEFAULT_FP_FUSION": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability in CAPABILITIES
    }
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_and_use_tensor_cores(capability: int, compilers: dict[int, subprocess.Popen[str]]) -> None:
    stdout, stderr = compilers[capability].communicate()
    assert compilers[capability].returncode == 0, stderr
    reports = json.loads(stdout.splitlines()[-1])
    assert {r["kernel"] for r in reports} == KERNELS
    for r in reports:
        assert r["shared_bytes"] <= SHARED_BYTES, r
        assert r["spilled_bytes"] == 0, r
        assert r["instructions"] > 50, r
        if capability >= 80:
            assert (r["tensor_core_instructions"] > 0) == r["dot"], r
    # SmolLM2 and Llama-3-8B, in halves, with and without splits: if none were found, the check above would be void.
    assert sum(r["dot"] for r in reports) >= 7
