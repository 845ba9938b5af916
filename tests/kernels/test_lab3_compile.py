"""The kernel of lab 3's solution compiles for GPUs that are not here; the interpreter would let more through."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "solutions" / "source" / "lab3_paged_attention.py"
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from answer import decode_kernel

pointers = dict.fromkeys(("q", "k_cache", "v_cache"), "*fp32") | {"block_table": "*i64", "out": "*fp32"}
sizes = {"KV_HEADS": 2, "GROUP": 2, "HEAD_DIM": int(sys.argv[2]), "BLOCK_SIZE": 16}
signature = pointers | {"context_len": "i32", "scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
source = ASTSource(decode_kernel, signature, sizes)
print(triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("capability", "head_dim"), [(75, 64), (80, 16), (90, 128)])
def test_the_solution_compiles(capability: int, head_dim: int, tmp_path: Path) -> None:
    text = SOURCE.read_text()
    kernel = text[text.index("def decode_kernel(") : text.index("def absorb(")]
    header = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    (tmp_path / "answer.py").write_text(header + kernel)
    (tmp_path / "compile_it.py").write_text(COMPILE)
    command = [sys.executable, "compile_it.py", str(capability), str(head_dim)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 48 * 1024  # bytes of shared memory
