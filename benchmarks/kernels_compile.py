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
    ttgir = compiled.asm["ttgir"]
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
        dot=bool(re.search(r"(tt\.dot|warp_group_dot) .*x(b?f16)", ttgir)),
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
    }


def reports(capability: int, only: str = "") -> list[Report]:
    """Compile every case whose name contains `only`; a kernel that several launch in the same form counts once."""
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
