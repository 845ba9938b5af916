"""Serving speed and cost on this CPU: `python benchmarks/serving_cpu.py [--threads N] [--model NAME_OR_FOLDER]`.

The 64 requests of `workload.py`, served by continuous batching: tokens per second, steps against the fewest possible,
time
against the replay's prediction; beside it what a step costs the scheduler with 64 running requests, and the memory
above
torch, weights and KV pool.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch  # first, so that its memory counts as its own
from workload import MAX_NUM_SEQS, workload

from cbserve import (
    LLM,
    BlockPool,
    ContinuousBatching,
    KVCacheManager,
    Request,
    SamplingParams,
    Scheduler,
    continuous_steps_bound,
    measure_step_times,
    serve,
    static_steps,
    summarize,
)
from cbserve.core.plan import StepResult


def scheduling_ms(num_running: int = 64, num_steps: int = 200) -> float:
    """Median milliseconds of `schedule` + `update` for a step of `num_running` decodes: no model, no trace."""
    scheduler = Scheduler(KVCacheManager(BlockPool(10_000)), ContinuousBatching(max_num_seqs=num_running))
    for i in range(num_running):
        scheduler.add(Request(str(i), range(1, 101), SamplingParams(max_tokens=num_steps + 10)))
    times = []
    for _ in range(num_steps):
        began = time.perf_counter()
        plan = scheduler.schedule(0.0)
        between = time.perf_counter()
        result = StepResult([[1] * row.num_samples for row in plan.rows])
        again = time.perf_counter()
        scheduler.update(plan, result, 0.0)
        times.append((time.perf_counter() - again) + (between - began))
    return 1e3 * statistics.median(times[1:])  # the first step admits


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=None, help="default: measured")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    prompts, lengths = workload()
    print(f"scheduling: {scheduling_ms():.3f} ms a step with 64 running requests (schedule + update)")
    before = resident_mb()
    llm = LLM(args.model, max_num_seqs=MAX_NUM_SEQS, num_blocks=1024, verbose=False)
    if args.threads:
        llm.executor.num_threads = args.threads
    loaded = resident_mb()
    times = measure_step_times(llm, repeats=3)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    for _ in range(args.repeats):
        llm.generate(prompts, params, use_tqdm=False)
        found = summarize(llm.trace)
        bound = continuous_steps_bound(lengths, MAX_NUM_SEQS)
        predicted = summarize(
            serve(
                lengths,
                llm.scheduler.batching,
                prompt_tokens=[len(p) for p in prompts],
                num_blocks=1024,
                step_time_s=times,
            )
        )
        print(
            f"serving: {found.num_output_tokens} tokens in {found.makespan_s:.1f} s, {found.tokens_per_s:.1f}/s, "
            f"{torch.get_num_threads()} threads; predicted by replay {predicted.makespan_s:.1f} s "
            f"({predicted.makespan_s / found.makespan_s - 1:+.1%})"
        )
        print(
            f"steps: {found.num_steps}, fewest possible {bound} ({bound / found.num_steps:.1%}), static "
            f"{static_steps(lengths, MAX_NUM_SEQS)}; slot utilisation {found.slot_utilisation:.1%}"
        )
    config, dtype_bytes = llm.config, llm.model.dtype.itemsize
    weights = sum(torch.Size(shape).numel() for shape in config.tensor_shapes().values()) * dtype_bytes
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size * dtype_bytes  # the packed copy for the output layer
    touched = max(step.num_used_blocks for step in llm.trace.steps) * 16 * llm.kv_bytes_per_token
    above = resident_mb() - before - (weights + touched) / 1e6
    print(
        f"memory: {before:.0f} MB with torch imported, {loaded:.0f} MB loaded, {resident_mb():.0f} MB after; weights "
        f"{weights / 1e6:.0f} MB, KV touched {touched / 1e6:.0f} MB; {above:.0f} MB above those"
    )


if __name__ == "__main__":
    sys.exit(main())
