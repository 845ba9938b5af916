"""The simulator's speed: beside sched-sim on the same rows in the same run, and how cost and memory grow.

    python benchmarks/simulator.py --trace AzureLLMInferenceTrace_conv.csv.gz [--sched-sim PYTHON] [--most 1000000]

3,000 requests of the Azure conversation trace, Llama-3.1-8B on an A100-80, mixed batching, 256 slots, budget 2,048.
Without --sched-sim an environment with sched-sim==0.2.1 is made in a temporary folder. CPU seconds are counted, because
both are single-threaded and a busy machine stretches wall time; medians of turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLOTS, BUDGET, GPU, MODEL, REQUESTS = 256, 2048, "a100-80", "llama-3.1-8b", 3000

SCHED_SIM = """
import json, sys, time
from sched_sim.core.event_engine import Simulator
from sched_sim.core.request import Request
from sched_sim.hardware.presets import PRESETS
from sched_sim.schedulers.factory import create_scheduler

slots, budget, rows = json.load(sys.stdin)
began = time.process_time()
hardware = PRESETS["a100"]
simulator = Simulator(hardware, create_scheduler("chunked", hardware, token_budget=budget, max_batch_size=slots))
simulator.submit_workload([
    Request(request_id=str(i), arrived_at=arrival, prompt_tokens=prompt, output_tokens=output)
    for i, (arrival, prompt, output) in enumerate(rows)
])
simulator.run()
print(json.dumps([time.process_time() - began, len(simulator.iteration_records), simulator.current_time]))
"""


def simulated(workload, **options):
    """(CPU seconds, simulation)"""
    from cbserve import ContinuousBatching, Roofline, kv_capacity, simulate

    batching = ContinuousBatching(max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET)
    cost, blocks = Roofline.on(GPU, MODEL), kv_capacity(MODEL, GPU).num_blocks
    began = time.process_time()
    simulation = simulate(workload, cost, blocks, batching=batching, **options)
    return time.process_time() - began, simulation


def beside_sched_sim(trace: str, python: str, rounds: int) -> None:
    from cbserve import read_azure

    workload = read_azure(trace, limit=REQUESTS)
    rows = [(job.arrival_s, len(job.prompt), job.num_output_tokens) for job in workload.jobs]
    ours, theirs = [], []
    for _ in range(rounds):
        seconds, simulation = simulated(workload)
        ours.append(seconds)
        done = subprocess.run(
            [python, "-c", SCHED_SIM], input=json.dumps([SLOTS, BUDGET, rows]), capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"sched-sim failed:\n{done.stderr[-2000:]}")
        their_seconds, their_steps, their_end = json.loads(done.stdout)
        theirs.append(their_seconds)
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{REQUESTS:,} requests of {Path(trace).name}, {MODEL} on {GPU}, CPU seconds, median of {rounds} turns")
    print(f"  cbserve     {mine:7.2f} s  {REQUESTS / mine:7.0f} requests/s  {simulation.fold.num_steps:,} steps")
    print(f"  sched-sim   {other:7.2f} s  {REQUESTS / other:7.0f} requests/s  {their_steps:,} steps")
    print(f"  cbserve is {other / mine:.2f} times as fast (wanted: at least 5)")
    end = simulation.fold.makespan_s
    print(f"  simulated makespan {end:.1f} s and {their_end:.1f} s: two cost models")


def step_by_step(trace: str) -> None:
    from cbserve import read_azure

    workload = read_azure(trace, limit=500)
    slowly, quickly = (simulated(workload, fast_forward=fast)[0] for fast in (False, True))
    print(
        f"\n500 requests: every step {slowly:.2f} s, fast-forward {quickly:.2f} s: {slowly / quickly:.1f} times as fast"
    )


def growth(most: int) -> None:
    """Each size in a process of its own, whose peak memory is its own."""
    print("\nsynthetic conversations at 4 requests a second, no trace kept")
    size = 1000
    while size <= most:
        done = subprocess.run([sys.executable, __file__, "--child", str(size)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        seconds, peak = json.loads(done.stdout)
        print(
            f"  {size:9,} requests  {seconds:8.1f} s  {size / seconds:6.0f} requests/s  peak {peak / 1e6:6.0f} MB",
            flush=True,
        )
        size *= 10


def child(size: int) -> None:
    from cbserve import azure_twin

    seconds, _ = simulated(azure_twin("conv", size, rate=4.0), keep_trace=False)
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="the Azure conversation trace of 2023, .csv or .csv.gz; skipped when left out")
    parser.add_argument("--sched-sim", help="the Python of an environment with sched-sim==0.2.1; made when left out")
    parser.add_argument("--most", type=int, default=100_000, help="requests of the largest run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    if args.trace:
        with tempfile.TemporaryDirectory() as folder:
            python = args.sched_sim
            if python is None:
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
                python = str(Path(folder) / "bin" / "python")
                subprocess.run([python, "-m", "pip", "install", "-q", "sched-sim==0.2.1"], check=True)
            beside_sched_sim(args.trace, python, args.rounds)
        step_by_step(args.trace)
    growth(args.most)


if __name__ == "__main__":
    main()
