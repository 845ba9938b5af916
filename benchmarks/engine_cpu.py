"""Decode speed on this CPU against its floor: `python benchmarks/engine_cpu.py [--threads N] [--model NAME]`.

The floor of a step is what no engine can avoid, measured in the same run on the same machine: the bare matrix products
on packed weights, and reading K and V once at the bandwidth of a plain copy. The table says what part of a step that
is, and where the rest goes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from cbserve.core.plan import Row, StepPlan
from cbserve.core.request import SamplingParams
from cbserve.executors import torch_executor
from cbserve.executors.torch_executor import TorchExecutor
from cbserve.models.llama import Linear, LlamaModel
from cbserve.models.weights import load_model

BATCHES, CONTEXT, BLOCK_SIZE = (1, 8, 32), 128, 16
COPY_BYTES = 256 * 2**20  # far beyond any cache


def median_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second that a large copy moves, read and written bytes both counted."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_s(lambda: target.copy_(source), repeats=5)


def matrix_products(model: LlamaModel, batch: int) -> Callable[[], None]:
    """All matrix products of one decode step, lm_head included, and nothing else."""
    linears = [x for layer in model.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    config = model.config
    queries = config.num_heads * config.head_dim
    inputs = [
        torch.randn(batch, n) for n in (config.hidden_size, queries, config.hidden_size, config.intermediate_size)
    ]
    head_input = torch.randn(batch, config.hidden_size)

    @torch.inference_mode()
    def run() -> None:
        for index, linear in enumerate(linears):
            linear(inputs[index % 4])
        model.lm_head(head_input)

    return run


def decode_plan(batch: int, context: int, num_blocks: int) -> StepPlan:
    """One decode step of `batch` sequences of `context` tokens, on scattered blocks."""
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    per_row = -(-context // BLOCK_SIZE)
    params = SamplingParams(temperature=0.0)
    return StepPlan(
        0,
        [
            Row(i, str(i), i, context - 1, [1000 + i], blocks[i * per_row : (i + 1) * per_row], params, context - 1)
            for i in range(batch)
        ],
    )


@contextmanager
def stopwatch(executor: TorchExecutor, spent: dict[str, float]) -> Iterator[None]:
    """Time in matrix products, attention with its gather, storing K and V, and sampling, added up in `spent`."""

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return run

    places = [
        (Linear, "__call__", "products"),
        (executor.backend.paged_attention, "run", "attention"),
        (torch_executor, "sample", "sampling"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, label in places:
        setattr(owner, name, timed(label, getattr(owner, name)))
    backend = executor.backend
    executor.backend = replace(backend, store_kv=timed("store", backend.store_kv))
    try:
        yield
    finally:
        executor.backend = backend
        for owner, name, original in originals:
            setattr(owner, name, original)


def decode_speed(model: LlamaModel, executor: TorchExecutor, repeats: int) -> None:
    bandwidth = copy_bandwidth()
    print(f"threads {torch.get_num_threads()}, copy {bandwidth / 1e9:.1f} GB/s (read + written), context {CONTEXT}")
    parts = ("products", "attention", "store", "sampling")
    print("batch  step ms  products ms  K/V ms  floor ms  floor/step | in the step, ms: " + "  ".join(parts) + "  rest")
    for batch in BATCHES:
        plan = decode_plan(batch, CONTEXT, executor.bounds.num_blocks)
        kv = batch * CONTEXT * model.config.kv_bytes_per_token() / bandwidth
        # In turns, and their ratio turn by turn: what else the machine does meets both alike.
        bare = matrix_products(model, batch)
        turns = [(median_s(bare, 1), median_s(lambda plan=plan: executor.execute(plan), 1)) for _ in range(repeats)]
        products, step = (statistics.median(times) for times in zip(*turns, strict=True))
        ratio = statistics.median((bare_s + kv) / step_s for bare_s, step_s in turns)
        spent: dict[str, float] = {}
        with stopwatch(executor, spent):
            watched = median_s(lambda plan=plan: executor.execute(plan), repeats)
        shares = [spent[part] / (repeats + 1) for part in parts]
        numbers = (f"{x * 1e3:.2f}" for x in [*shares, watched - sum(shares)])
        print(
            f"{batch:5}  {step * 1e3:7.1f}  {products * 1e3:11.1f}  {kv * 1e3:6.1f}  {(products + kv) * 1e3:8.1f}  "
            f"{ratio:9.1%}  | " + "  ".join(numbers)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=None, help="default: measured")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    model = load_model(args.model, "cpu", torch.float32).model
    num_blocks = max(BATCHES) * -(-CONTEXT // BLOCK_SIZE)
    executor = TorchExecutor(model, num_blocks, BLOCK_SIZE, num_threads=args.threads)
    decode_speed(model, executor, args.repeats)


if __name__ == "__main__":
    main()
