"""The Triton kernels on a GPU: right at real shapes, and how far from what the device can do.

    python benchmarks/gpu_check.py [--json FILE] [--seconds 210]

Needs torch, triton and numpy, nothing of which it downloads; tensors are random, shapes are those of SmolLM2-135M and
Llama-3-8B. Speed is given beside what the same device reaches in a plain copy (bytes read and written) and in a plain
matrix product. Much of a first run is compiling. `TRITON_INTERPRET=1 python benchmarks/gpu_check.py --rehearse` walks
through the same code on a CPU with tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # on a bare machine cbserve is not installed

import gpu_engine  # noqa: E402

from cbserve.kernels.backends import TORCH, TRITON, Backend  # noqa: E402
from cbserve.kernels.jit import interpreting  # noqa: E402
from cbserve.kernels.paged_decode import paged_decode, paged_decode_triton  # noqa: E402
from cbserve.kernels.paged_prefill import paged_prefill, paged_prefill_triton, prefill_tiles  # noqa: E402
from cbserve.kernels.rms_norm import rms_norm_triton  # noqa: E402
from cbserve.kernels.sampling import sample_tokens, sample_tokens_triton  # noqa: E402

# Largest difference from float64, as a part of the largest number of the result. Halves round each result once and
# their softmax weights once; bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TARGET = 0.8  # of the copy's bandwidth, for decode attention of 64 sequences of 2,048 tokens


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    block_size: int = 16


@dataclass(frozen=True)
class Size:
    """How large the tests are: real, or so small that an interpreter gets through them."""

    shapes: tuple[Shape, ...]
    tokens: int
    copy_bytes: int
    product: int
    ragged: tuple[int, ...]  # contexts of the decode that is checked
    chunks: tuple[tuple[int, int], ...]  # (queries, context) of the prefill that is checked
    decodes: tuple[tuple[int, int], ...]  # (sequences, context) of those that are timed
    prompts: tuple[tuple[int, int], ...]  # (sequences, tokens)
    repeats: int


REAL = Size(
    (
        Shape("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
        Shape("Llama-3-8B", 4096, 32, 8, 128, 14336, 128256),
    ),
    tokens=2048,
    copy_bytes=2**30,
    product=8192,
    ragged=(1, 15, 16, 17, 500, 1023, 2048, 3000),
    chunks=((1, 1), (16, 16), (130, 130), (64, 700), (1, 300), (257, 513)),
    decodes=((64, 2048), (8, 2048), (1, 2048), (1, 16384)),
    prompts=((1, 2048), (4, 1024)),
    repeats=20,
)
TINY = Size(
    (Shape("tiny", 64, 6, 2, 16, 96, 80, 8),),
    tokens=3,
    copy_bytes=2**16,
    product=64,
    ragged=(1, 8, 9, 40),
    chunks=((1, 1), (9, 9), (5, 20)),
    decodes=((2, 24),),
    prompts=((1, 16),),
    repeats=1,
)


class Bench:
    """Collects rows of the report; measures on a CUDA device, or on a CPU for a rehearsal."""

    def __init__(self, device: torch.device, size: Size, seconds: float) -> None:
        self.device, self.size, self.deadline = device, size, time.monotonic() + seconds
        self.rows: list[dict[str, object]] = []
        self.flush = torch.empty(2**28 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
        self.copy_bytes_per_s = 2 * size.copy_bytes / self.seconds(self._copy())
        self.flops: dict[torch.dtype, float] = {}

    def _copy(self) -> Callable[[], object]:
        source = torch.zeros(self.size.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def matrix_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of a square product; float32 without TF32."""
        if dtype not in self.flops:
            n = self.size.product // (2 if dtype == torch.float32 else 1)
            a = torch.randn(n, n, dtype=dtype, device=self.device)
            self.flops[dtype] = 2 * n**3 / self.seconds(lambda: a @ a)
        return self.flops[dtype]

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a run that finds nothing of its data in the L2 cache."""
        for _ in range(2):  # compile, and let the allocator settle
            run()
        times = []
        for _ in range(self.size.repeats):
            self.flush.zero_()
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def paged(self, shape: Shape, lens: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K, V, block tables on scattered blocks, context lengths."""
        needed = [-(-n // shape.block_size) for n in lens]
        blocks = torch.randperm(sum(needed), device=self.device, dtype=torch.int32)
        tables = torch.zeros(len(lens), max(needed), dtype=torch.int32, device=self.device)
        for s, own in enumerate(blocks.split(needed)):
            tables[s, : len(own)] = own
        cache = (sum(needed), shape.block_size, shape.kv_heads, shape.head_dim)
        k, v = (self.random(*cache, dtype=dtype) for _ in range(2))
        return k, v, tables, torch.tensor(lens, dtype=torch.int32, device=self.device)

    def add(self, **row: object) -> None:
        self.rows.append(row)
        cells = (f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items())
        print("  ".join(cells), flush=True)


def dtypes(bench: Bench) -> list[torch.dtype]:
    if bench.device.type != "cuda":
        return [torch.float32, torch.float16]
    bfloat16 = torch.cuda.get_device_capability(bench.device) >= (8, 0)
    return [torch.float32, torch.float16, *([torch.bfloat16] if bfloat16 else [])]


def as_float64(x: object) -> object:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def difference(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want).abs().max() / want.abs().max())


def check(bench: Bench, shape: Shape, dtype: torch.dtype) -> None:
    """Every operation against its torch reference on the same numbers in float64."""
    n, heads, kv_heads, d = min(bench.size.tokens, 64), shape.heads, shape.kv_heads, shape.head_dim

    def report(op: str, out: Tensor, want: Tensor, tolerance: float = TOLERANCE[dtype]) -> None:
        error = difference(out, want)
        ok = error <= tolerance  # False for NaN
        bench.add(check=op, shape=shape.name, dtype=str(dtype)[6:], error=error, tolerance=tolerance, ok=ok)

    x, residual = bench.random(n, shape.hidden, dtype=dtype), bench.random(n, shape.hidden, dtype=dtype)
    weight = bench.random(shape.hidden, dtype=dtype)
    total = (x + residual).double()
    normed, summed = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    report("add_rms_norm, norm", normed, norm64(total, weight))
    report("add_rms_norm, sum", summed, total, 0.0)
    report("rms_norm", rms_norm_triton(x, weight, 1e-5), norm64(x.double(), weight))
    qkv = bench.random(n, heads + 2 * kv_heads, d, dtype=dtype)
    rotation = torch.polar(torch.ones(n, d // 2), 6 * torch.rand(n, d // 2)).to(bench.device)
    qk, v_new = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    turned = torch.view_as_complex(qk.double().unflatten(-1, (-1, 2))) * rotation.unsqueeze(1).to(torch.complex128)
    report("rotary", TRITON.rotary(qk, rotation), torch.view_as_real(turned).flatten(-2))
    gate_up = bench.random(n, 2 * shape.intermediate, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    report("silu_and_mul", TRITON.silu_and_mul(gate_up), F.silu(gate) * up)

    k, v, tables, lens = bench.paged(shape, list(bench.size.ragged), dtype)
    slots = torch.randperm(k.shape[0] * shape.block_size, device=bench.device)[:n]
    slots[0] = -1
    want_k, want_v = k.clone(), v.clone()
    TORCH.store_kv(qk[: len(slots), heads:], v_new[: len(slots)], want_k, want_v, slots)
    TRITON.store_kv(qk[: len(slots), heads:], v_new[: len(slots)], k, v, slots)
    report("store_kv", torch.stack([k, v]), torch.stack([want_k, want_v]).double(), 0.0)
    cache = torch.stack([k, v])[None]
    want_cache, pairs = cache.clone(), [(0, 1), (1, 2), (3, 0)]
    TORCH.copy_blocks(want_cache, want_cache, pairs)
    TRITON.copy_blocks(cache, cache, pairs)
    report("copy_blocks", cache, want_cache.double(), 0.0)
    host = torch.zeros_like(cache, device="cpu")
    TRITON.copy_blocks(cache, host, pairs)
    TRITON.copy_blocks(host, cache, [(1, 3), (2, 4)])
    report("swap", cache[:, :, [3, 4]], cache[:, :, [0, 1]].double(), 0.0)

    scale = d**-0.5
    q = bench.random(len(lens), heads, d, dtype=dtype)
    want = paged_decode(*map(as_float64, (q, k, v, tables, lens, scale)))
    for splits in (None, 1, 8):
        out = paged_decode_triton(q, k, v, tables, lens, scale, num_splits=splits)
        report(f"paged_decode, splits {splits or 'auto'}", out, want)
    queries = [queries for queries, _ in bench.size.chunks]
    k, v, tables, lens = bench.paged(shape, [context for _, context in bench.size.chunks], dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=bench.device)
    q = bench.random(sum(queries), heads, d, dtype=dtype)
    want = paged_prefill(*map(as_float64, (q, k, v, tables, starts, lens, scale)))
    report("paged_prefill", paged_prefill_triton(q, k, v, tables, starts, lens, scale), want)


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def sampling_arguments(bench: Bench, vocab: int, rows: int, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    columns = torch.ones(rows, device=bench.device)
    return (
        3 * bench.random(rows, vocab),
        columns,
        torch.full((rows,), top_k, dtype=torch.int32, device=bench.device),
        top_p * columns,
        0 * columns,
        torch.rand(rows, dtype=torch.float64, device=bench.device),
    )


def check_sampling(bench: Bench, shape: Shape) -> None:
    """Tokens may differ from torch's only where the draw falls on a border between two, which rounding moves."""
    rows = min(bench.size.tokens, 64)
    for name, top_k, top_p in (("all", -1, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", -1, 0.9), ("both", 50, 0.9)):
        arguments = sampling_arguments(bench, shape.vocab, rows, top_k, top_p)
        differ = int((sample_tokens_triton(*arguments) != sample_tokens(*arguments)).sum())
        bench.add(check=f"sample_tokens, {name}", shape=shape.name, rows=rows, differ=differ, ok=differ <= rows // 50)


def time_bytes(bench: Bench, op: str, shape: Shape, dtype: torch.dtype, num_bytes: int, run: Callable) -> float:
    """Time an operation whose floor is the memory's bandwidth; returns its part of the copy's."""
    taken_s = bench.seconds(run)
    part = num_bytes / taken_s / bench.copy_bytes_per_s
    bench.add(
        speed=op, shape=shape.name, dtype=str(dtype)[6:], us=1e6 * taken_s, GB_per_s=num_bytes / taken_s / 1e9,
        of_copy=part,
    )  # fmt: skip
    return part


def time_decode(bench: Bench, shape: Shape, dtype: torch.dtype) -> None:
    scale, heads, kv_heads, d = shape.head_dim**-0.5, shape.heads, shape.kv_heads, shape.head_dim
    for sequences, context in bench.size.decodes:
        k, v, tables, lens = bench.paged(shape, [context] * sequences, dtype)
        q = bench.random(sequences, heads, d, dtype=dtype)
        num_bytes = 2 * sequences * context * kv_heads * d * k.element_size()
        name = f"{sequences} x {context}"
        run = lambda: paged_decode_triton(q, k, v, tables, lens, scale)  # noqa: B023, E731
        part = time_bytes(bench, f"decode {name}, Triton", shape, dtype, num_bytes, run)
        if (sequences, context) == (64, 2048):
            bench.add(target=f"decode {name}", shape=shape.name, of_copy=part, wanted=TARGET, reached=part >= TARGET)

        def gather(cache: Tensor, tables: Tensor = tables, context: int = context) -> Tensor:
            return cache[tables.long()].flatten(1, 2)[:, :context].transpose(1, 2)

        # The query heads that share a KV head in the place of queries, so that torch too reads K and V once.
        rows, k_flat, v_flat = q.view(sequences, kv_heads, -1, d), gather(k).contiguous(), gather(v).contiguous()
        run = lambda: F.scaled_dot_product_attention(rows, k_flat, v_flat, scale=scale)  # noqa: B023, E731
        time_bytes(bench, f"decode {name}, torch SDPA, gathered before", shape, dtype, num_bytes, run)
        run = lambda: F.scaled_dot_product_attention(rows, gather(k), gather(v), scale=scale)  # noqa: B023, E731
        time_bytes(bench, f"decode {name}, torch SDPA and gather", shape, dtype, num_bytes, run)


def time_prefill(bench: Bench, shape: Shape, dtype: torch.dtype) -> None:
    heads, d, scale = shape.heads, shape.head_dim, shape.head_dim**-0.5
    for sequences, tokens in bench.size.prompts:
        k, v, tables, lens = bench.paged(shape, [tokens] * sequences, dtype)
        q = bench.random(sequences * tokens, heads, d, dtype=dtype)
        starts = tokens * torch.arange(sequences + 1, dtype=torch.int32, device=bench.device)
        tiles = prefill_tiles([tokens] * sequences, [tokens] * sequences, q, k)
        flops = 4 * sequences * heads * d * tokens * (tokens + 1) / 2
        q_flat = q.view(sequences, tokens, heads, d).transpose(1, 2)
        k_flat, v_flat = (
            c[tables.long()].flatten(1, 2)[:, :tokens].transpose(1, 2).repeat_interleave(heads // shape.kv_heads, 1)
            for c in (k, v)
        )
        for name, run in (
            ("Triton", lambda: paged_prefill_triton(q, k, v, tables, starts, lens, scale, tiles)),  # noqa: B023
            ("torch SDPA, gathered before", lambda: F.scaled_dot_product_attention(q_flat, k_flat, v_flat, is_causal=True)),  # noqa: B023, E501
        ):  # fmt: skip
            taken_s = bench.seconds(run)
            bench.add(
                speed=f"prefill {sequences} x {tokens}, {name}", shape=shape.name, dtype=str(dtype)[6:],
                us=1e6 * taken_s, TFLOP_per_s=flops / taken_s / 1e12,
                of_product=flops / taken_s / bench.matrix_flops(dtype),
            )  # fmt: skip


def time_small(bench: Bench, shape: Shape, dtype: torch.dtype, backend: Backend) -> None:
    """What stands between the matrix products, for one step of many tokens."""
    n, size = bench.size.tokens, torch.empty(0, dtype=dtype).element_size()
    x, residual = (bench.random(n, shape.hidden, dtype=dtype) for _ in range(2))
    weight = bench.random(shape.hidden, dtype=dtype)
    gate_up = bench.random(n, 2 * shape.intermediate, dtype=dtype)
    rotated = shape.heads + shape.kv_heads
    qk = bench.random(n, rotated, shape.head_dim, dtype=dtype)
    rotation = torch.polar(*(torch.ones(n, shape.head_dim // 2, device=bench.device) for _ in range(2)))
    k, v, _, _ = bench.paged(shape, [n], dtype)
    new_k, new_v = (bench.random(n, shape.kv_heads, shape.head_dim, dtype=dtype) for _ in range(2))
    slots = torch.randperm(n, device=bench.device)
    for op, num_elements, run in (
        ("add_rms_norm", 4 * x.numel(), lambda: backend.add_rms_norm(x, residual, weight, 1e-5)),
        ("silu_and_mul", 3 * n * shape.intermediate, lambda: backend.silu_and_mul(gate_up)),
        ("rotary", 2 * qk.numel(), lambda: backend.rotary(qk, rotation)),
        ("store_kv", 4 * new_k.numel(), lambda: backend.store_kv(new_k, new_v, k, v, slots)),
    ):
        time_bytes(bench, f"{op} of {n} tokens, {backend.name}", shape, dtype, num_elements * size, run)


def time_sampling(bench: Bench, shape: Shape) -> None:
    rows = min(bench.size.tokens, 64)
    for name, top_k, top_p in (("plain", -1, 1.0), ("top-k 50", 50, 1.0), ("top-p 0.9", -1, 0.9)):
        arguments = sampling_arguments(bench, shape.vocab, rows, top_k, top_p)
        for backend, operation in (("triton", sample_tokens_triton), ("torch", sample_tokens)):
            taken_s = bench.seconds(lambda: operation(*arguments))  # noqa: B023
            bench.add(speed=f"sampling {rows} rows, {name}, {backend}", shape=shape.name, us=1e6 * taken_s)


def time_engine(bench: Bench, dtype: torch.dtype) -> None:
    """Tokens a second of the whole engine, and, in float32, that both backends give the same tokens."""
    tiny = bench.size is TINY
    model = gpu_engine.random_model(gpu_engine.TINY if tiny else gpu_engine.SMOLLM2, bench.device, dtype)
    work = (3, 9, 3) if tiny else (64, 128, 64)
    found = {}
    for backend in (TRITON, TORCH):
        rate, found[backend.name] = gpu_engine.serve(model, backend.name, *work)
        row = {"shape": model.config.name, "dtype": str(dtype)[6:], "tokens_per_s": rate}
        bench.add(speed=f"engine, {work[0]} requests, {backend.name}", **row)
    if dtype == torch.float32:
        same = found["triton"] == found["torch"]
        bench.add(check="engine: same tokens", shape=model.config.name, dtype="float32", ok=same)


def parts(bench: Bench) -> Iterator[Callable[[], None]]:
    """All parts of the report: what is right first, the target next."""
    shapes, kinds = bench.size.shapes, dtypes(bench)
    for shape in shapes:
        for dtype in kinds:
            yield lambda: check(bench, shape, dtype)  # noqa: B023
        yield lambda: check_sampling(bench, shape)  # noqa: B023
    yield lambda: time_engine(bench, torch.float32)
    yield lambda: time_engine(bench, kinds[-1])
    for shape in reversed(shapes):
        yield lambda: time_decode(bench, shape, kinds[-1])  # noqa: B023
        yield lambda: time_prefill(bench, shape, kinds[-1])  # noqa: B023
        yield lambda: time_small(bench, shape, kinds[-1], TRITON)  # noqa: B023
        yield lambda: time_small(bench, shape, kinds[-1], TORCH)  # noqa: B023
        yield lambda: time_sampling(bench, shape)  # noqa: B023


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    parser.add_argument("--seconds", type=float, default=210, help="begin no further part after so many")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    if arguments.rehearse and not interpreting():
        parser.error("--rehearse needs TRITON_INTERPRET=1 in the environment")
    if not arguments.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA device and torch finds none here: nothing was measured.", file=sys.stderr)
        return 2
    began = time.monotonic()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cpu") if arguments.rehearse else torch.device("cuda", torch.cuda.current_device())
    import triton

    machine: dict[str, object] = {"device": "CPU, rehearsal: times mean nothing", "torch": torch.__version__}
    if not arguments.rehearse:
        properties = torch.cuda.get_device_properties(device)
        machine["device"] = properties.name
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["memory_GiB"] = properties.total_memory / 2**30
    bench = Bench(device, TINY if arguments.rehearse else REAL, arguments.seconds)
    bench.add(**machine, triton=triton.__version__)
    bench.add(measured="copy", GB_per_s=bench.copy_bytes_per_s / 1e9)
    for dtype in dtypes(bench):
        bench.add(measured="matrix product", dtype=str(dtype)[6:], TFLOP_per_s=bench.matrix_flops(dtype) / 1e12)
    skipped = 0
    for part in parts(bench):
        if time.monotonic() < bench.deadline:
            part()
        else:
            skipped += 1
    checks = [row for row in bench.rows if "check" in row]
    failed = [row for row in checks if not row["ok"]]
    bench.add(checks=len(checks), failed=len(failed), parts_skipped=skipped, seconds=round(time.monotonic() - began, 1))
    if arguments.json:
        arguments.json.write_text(json.dumps({"size": asdict(bench.size), "rows": bench.rows}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
