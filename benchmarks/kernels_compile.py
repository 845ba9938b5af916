"""What the Triton kernels compile to, without a GPU: `python benchmarks/kernels_compile.py [--capability 75 80 89 90]`.

Each case calls an operation with tensors that have shapes but no memory, and compiles the kernels that it would launch,
at the tile sizes that it would choose. The table shows registers a thread, spilled bytes, shared memory, instructions,
and those of the tensor cores (HMMA). `tests/kernels/test_compile.py` holds the same reports to limits.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cbserve.kernels.jit import Launch, interpreting, recording

CAPABILITIES = (75, 80, 89, 90)
_TYPES = {
    **{torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.bfloat16: "*bf16"},
    **{torch.int32: "*i32", torch.int64: "*i64"},
}


@dataclass(frozen=True)
class Report:
    """One kernel, compiled. `spilled_bytes`: stack a thread; `shared_bytes`: a program; `dot`: multiplies halves."""

    case: str
    kernel: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    instructions: int
    tensor_core_instructions: int
    dot: bool


def compile_launch(launch: Launch, case: str, capability: int) -> Report:
    """Compile what `launch` would run on a GPU of this compute capability, and look into the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = launch.kernel.jitted
    values = dict(zip(function.arg_names, launch.args, strict=False)) | launch.kwargs
    options = {name: values.pop(name) for name in ("num_warps", "num_stages") if name in values}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(function.arg_names):
        value = values[name]
        if name.isupper() or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]  # torch allocates at multiples of 512 bytes
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, opcodes = _disassemble(compiled.asm["cubin"])
    return Report(
        case,
        launch.kernel.function.__name__.strip("_"),
        capability,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spilled_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared_bytes=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        instructions=len(opcodes),
        tensor_core_instructions=sum(op.startswith(("HMMA", "HGMMA")) for op in opcodes),
        dot=bool(re.search(r"tt\.dot .*xb?f16>", compiled.asm["ttir"])),
    )


def _disassemble(cubin: bytes) -> tuple[str, list[str]]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, flag, file], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    # A line of code: /*0040*/ @P0 HMMA.16816.F32 R4, R8, R12, R4 ;
    return usage, re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", code, re.MULTILINE)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_case(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, splits: int) -> None:
    from cbserve.kernels.paged_decode import paged_decode_triton

    cache = meta(1024, block_size, kv_heads, head_dim, dtype=dtype)
    tables, lens = meta(4, 128, dtype=torch.int32), meta(4, dtype=torch.int32)
    paged_decode_triton(meta(4, heads, head_dim, dtype=dtype), cache, cache, tables, lens, 0.1, num_splits=splits)


def prefill_case(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    from cbserve.kernels.paged_prefill import paged_prefill_triton

    cache = meta(1024, block_size, kv_heads, head_dim, dtype=dtype)
    tables, starts, lens = (meta(*shape, dtype=torch.int32) for shape in ((4, 128), (5,), (4,)))
    tiles = meta(16, 2, dtype=torch.int32)
    paged_prefill_triton(meta(512, heads, head_dim, dtype=dtype), cache, cache, tables, starts, lens, 0.1, tiles)


def norm_case(dtype: torch.dtype, hidden: int) -> None:
    from cbserve.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton

    x, weight = meta(64, hidden, dtype=dtype), meta(hidden, dtype=dtype)
    rms_norm_triton(x, weight, 1e-5)
    add_rms_norm_triton(x, x, weight, 1e-5)


def rotary_case(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    from cbserve.kernels.rotary import rotary_triton

    qkv = meta(64, heads + 2 * kv_heads, head_dim, dtype=dtype)
    rotary_triton(qkv[:, : heads + kv_heads], meta(64, head_dim // 2, dtype=torch.complex64))


def silu_case(dtype: torch.dtype, size: int) -> None:
    from cbserve.kernels.silu_and_mul import silu_and_mul_triton

    silu_and_mul_triton(meta(64, 2 * size, dtype=dtype))


def store_case(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    from cbserve.kernels.kv_store import store_kv_triton

    qkv = meta(64, heads + 2 * kv_heads, head_dim, dtype=dtype)
    cache = meta(64, 16, kv_heads, head_dim, dtype=dtype)
    store_kv_triton(qkv[:, heads:-kv_heads], qkv[:, -kv_heads:], cache, cache, meta(64, dtype=torch.int64))


def blocks_case(dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int) -> None:
    from cbserve.kernels.block_copy import copy_blocks_triton

    cache = meta(2, 2, 64, block_size, kv_heads, head_dim, dtype=dtype)
    copy_blocks_triton(cache, cache, [(0, 1), (2, 3)])
    copy_blocks_triton(cache, cache, [(0, 1), (1, 3)])  # through a copy: gather and scatter


def sampling_case(vocab: int) -> None:
    from cbserve.kernels.sampling import sample_tokens_triton

    temperature, top_p, min_p = (meta(8) for _ in range(3))
    u, top_k = meta(8, dtype=torch.float64), meta(8, dtype=torch.int32)
    sample_tokens_triton(meta(8, vocab), temperature, top_k, top_p, min_p, u)


def cases() -> dict[str, Callable[[], None]]:
    """By name: the shapes of SmolLM2 (9 query heads on 3 KV heads of 64), Llama-3-8B (32 on 8 of 128), extremes."""
    f32, f16, b16 = torch.float32, torch.float16, torch.bfloat16
    return {
        "decode SmolLM2 float16": lambda: decode_case(f16, 9, 3, 64, 16, 8),
        "decode SmolLM2 float32": lambda: decode_case(f32, 9, 3, 64, 16, 1),
        "decode Llama-3-8B bfloat16": lambda: decode_case(b16, 32, 8, 128, 16, 1),
        "decode Llama-3-8B float32": lambda: decode_case(f32, 32, 8, 128, 16, 8),
        "decode MHA float16": lambda: decode_case(f16, 8, 8, 32, 8, 1),
        "decode 8 heads a KV head, float16": lambda: decode_case(f16, 8, 1, 128, 32, 1),
        "decode 8 heads a KV head, float32": lambda: decode_case(f32, 8, 1, 128, 32, 1),
        "decode MHA float32": lambda: decode_case(f32, 8, 8, 128, 8, 1),
        "prefill SmolLM2 float16": lambda: prefill_case(f16, 9, 3, 64, 16),
        "prefill SmolLM2 float32": lambda: prefill_case(f32, 9, 3, 64, 16),
        "prefill Llama-3-8B bfloat16": lambda: prefill_case(b16, 32, 8, 128, 16),
        "prefill Llama-3-8B float32": lambda: prefill_case(f32, 32, 8, 128, 16),
        "prefill MHA float16": lambda: prefill_case(f16, 8, 8, 32, 8),
        "prefill 8 heads a KV head, float16": lambda: prefill_case(f16, 8, 1, 128, 32),
        "store SmolLM2 float32": lambda: store_case(f32, 9, 3, 64),
        "store Llama-3-8B bfloat16": lambda: store_case(b16, 32, 8, 128),
        "blocks SmolLM2 float32": lambda: blocks_case(f32, 3, 64, 8),
        "norm SmolLM2 float32": lambda: norm_case(f32, 576),
        "norm Llama-3-8B bfloat16": lambda: norm_case(b16, 4096),
        "rotary SmolLM2 float32": lambda: rotary_case(f32, 9, 3, 64),
        "rotary Llama-3-8B bfloat16": lambda: rotary_case(b16, 32, 8, 128),
        "SiLU Llama-3-8B bfloat16": lambda: silu_case(b16, 14336),
        "sampling Llama-3-8B": lambda: sampling_case(128256),
    }


def reports(capability: int, only: str = "") -> list[Report]:
    """What every case whose name contains `only` would launch, compiled."""
    if interpreting():
        raise SystemExit("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    found = []
    for name, case in cases().items():
        if only in name:
            with recording(capability) as launches:
                case()
            found += [compile_launch(launch, name, capability) for launch in launches]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    form = "{:<34} {:<18} {:>4} {:>5} {:>9} {:>7} {:>6} {:>13} {:>5}"
    print(form.format("case", "kernel", "sm", "warps", "registers", "spilled", "shared", "instructions", "HMMA"))
    for capability in arguments.capability:
        for r in reports(capability, arguments.only):
            print(
                form.format(
                    *(r.case, r.kernel, r.capability, r.warps, r.registers, r.spilled_bytes),
                    *(r.shared_bytes, r.instructions, r.tensor_core_instructions),
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
