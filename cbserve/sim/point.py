"""One point: from settings to a workload, a device and a run, and from the run to its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.metrics import mean, percentile
from cbserve.core.policies import FCFS, Policy, Priority
from cbserve.core.trace import Event
from cbserve.outputs import RequestOutput
from cbserve.sim.device import Device, device_of
from cbserve.sim.settings import Settings
from cbserve.simulation import Simulation, simulate
from cbserve.workloads.readers import read_trace
from cbserve.workloads.synthetic import azure_twin
from cbserve.workloads.workload import Workload

BATCH_SIZE, MAX_NUM_SEQS, UTILIZATION, SWAP_GIB = 32, 256, 0.9, 4.0
CHUNK = {"continuous": 16_384, "mixed": 2048, "prefill-first": 2048}  # a whole prompt must fit into a step, or a chunk
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Point:
    """Settings with everything looked up that they name; `run` simulates it."""

    settings: Settings
    workload: Workload
    device: Device
    batching: Batching
    num_blocks: int
    room: str  # where the number of blocks comes from
    max_tokens: int | None

    def run(
        self,
        trace_path: str | Path | None = None,
        progress: Callable[[RequestOutput], None] | None = None,
        listeners: Iterable[Callable[[Event], None]] = (),
    ) -> Simulation:
        """Simulate it, keeping no trace. Arguments and errors are those of `simulate`."""
        settings, cost = self.settings, self.device.cost
        policy: Policy = Priority() if settings.policy == "priority" else FCFS()
        swap_bytes = (settings.swap_space or SWAP_GIB) * 2**30 if settings.preemption == "swap" else 0
        block_bytes = cost.model.block_bytes(settings.block_size, cost.dtype_bytes)
        return simulate(
            self.workload,
            cost,
            self.num_blocks,
            settings.block_size,
            self.batching,
            policy,
            enable_prefix_caching=settings.prefix_caching,
            preemption=settings.preemption,
            num_host_blocks=int(swap_bytes // block_bytes),
            max_tokens=self.max_tokens,
            keep_trace=False,
            trace_path=trace_path,
            progress=progress,
            listeners=listeners,
            meta={"model": cost.model.name, "device": f"{self.device.name} (simulated)"},
        )

    def assumptions(self) -> list[str]:
        """What the numbers rest on, a sentence each."""
        cost, device = self.device.cost, self.device
        step = (
            f"Simulated: the engine's own scheduler on a virtual clock. A step of {cost.model.name} on {device.name} "
            f"takes the longer of FLOPs / ({cost.flops / 1e12:.4g} TFLOP/s x {cost.eff_compute:.3g}) and bytes / "
            f"({cost.memory_bytes_s / 1e9:.4g} GB/s x {cost.eff_memory:.3g}), plus {cost.overhead_s * 1e3:.3g} ms."
        )
        return [step, self._efficiencies(), self._memory(), self._traffic()]

    def _efficiencies(self) -> str:
        names = ("eff_compute", "eff_memory", "overhead")
        given = ["--" + name.replace("_", "-") for name in names if getattr(self.settings, name) is not None]
        if len(given) == len(names):
            return "Efficiencies and overhead: as given."
        return f"Efficiencies and overhead: {self.device.source}" + (
            f"; {', '.join(given)} as given." if given else "."
        )

    def _memory(self) -> str:
        size = self.settings.block_size
        room = f"{self.num_blocks:,} blocks of {size} = {self.num_blocks * size:,} tokens"
        return f"KV cache: {room}, {self.room}."

    def _traffic(self) -> str:
        workload = self.workload
        said = f"Workload: {workload.name}, {len(workload):,} requests"
        if not math.isnan(workload.rate):
            said += f", {workload.rate:.4g} a second"
        if self.batching.keeps_finished:
            said += f"; a batch reserves room for answers of {self.max_tokens:,} tokens"
        return "; ".join(part for part in (said, workload.note, workload.source) if part) + "."


def prepare(settings: Settings) -> Point:
    """Look up and read what `settings` name. The trace is read last: it takes the longest.

    Raises:
        CBServeError: model, GPU or trace is not there or not as it should be; the weights do not fit (with the
            arithmetic); the rate cannot be scaled.
    """
    device = device_of(settings)
    budget, rows = CHUNK.get(settings.batching, 2048), MAX_NUM_SEQS
    batching: Batching
    if settings.batching == "static":
        rows = settings.batch_size or BATCH_SIZE
        batching = StaticBatching(rows)
    else:
        budget, rows = settings.chunk or budget, settings.max_num_seqs or rows
        batching = ContinuousBatching(
            mixed=settings.batching != "prefill-first",
            chunked=settings.batching != "continuous",
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
        )
    num_blocks, room = settings.num_blocks, "as given"
    if num_blocks is None:
        num_blocks, room = device.room(settings.utilization or UTILIZATION, budget, rows, settings.block_size)
    workload = workload_of(settings)
    max_tokens = settings.max_tokens
    if max_tokens is None and settings.batching == "static":  # else a batch would reserve the whole pool for one
        max_tokens = max(job.num_output_tokens for job in workload.jobs)
    return Point(settings, workload, device, batching, num_blocks, room, max_tokens)


def workload_of(settings: Settings) -> Workload:
    """Raises CBServeError: the trace cannot be read, or its arrivals not be scaled."""
    if settings.trace is not None:
        workload = _read(settings.trace, settings.limit)
    else:
        name = (settings.workload or "azure-conv").removeprefix("azure-")
        workload = _twin(name, 1000 if settings.requests is None else settings.requests, settings.seed or 0)
        workload = workload if settings.limit is None else workload.first(settings.limit)
    return workload if settings.rate is None else workload.scaled(settings.rate)


@lru_cache(maxsize=1)  # the points of a sweep mostly share it
def _read(trace: str, limit: int | None) -> Workload:
    return read_trace(trace, limit)


@lru_cache(maxsize=1)
def _twin(name: str, num_requests: int, seed: int) -> Workload:
    return azure_twin(name, num_requests, seed)


def numbers(simulation: Simulation, settings: Settings) -> dict[str, Any]:
    """The run as JSON can hold it: times in seconds, rates a second, shares in 0..1; None where there is no value."""
    fold, summary = simulation.fold, simulation.summary
    num_blocks = int(simulation.trace.meta["num_blocks"])
    served = {"ttft": fold.ttft_s, "tpot": fold.tpot_s, "e2e": fold.e2e_s}
    latency: dict[str, dict[str, float | None]] = {}
    for name, values in served.items():
        known = sorted(value for value in values if not math.isnan(value))
        latency[name] = {"mean": _known(mean(known))} | {f"p{q}": _known(percentile(known, q)) for q in PERCENTILES}
    latency["itl"] = {"mean": _known(fold.itl_mean_s)} | {f"p{q}": _known(fold.itl(q)) for q in PERCENTILES}
    num_served = sum(not math.isnan(value) for value in fold.ttft_s)
    goodput = _known(simulation.goodput(**dict(settings.slo))) if settings.slo else None
    return {
        "requests": summary.num_requests,
        "refused": summary.num_refused,
        "first_refusal": simulation.refused[0][1] if simulation.refused else None,
        "steps": summary.num_steps,
        "makespan_s": summary.makespan_s,
        "prompt_tokens": summary.num_prompt_tokens,
        "output_tokens": summary.num_output_tokens,
        "tokens_per_s": _known(summary.tokens_per_s),
        "requests_per_s": _known(num_served / summary.makespan_s if summary.makespan_s else math.nan),
        "latency_s": latency,
        "goodput_per_s": goodput,
        "goodput_share": None if goodput is None else goodput * summary.makespan_s / summary.num_requests,
        "slot_utilisation": _known(summary.slot_utilisation),
        "num_slots": int(simulation.trace.meta["num_slots"]),
        "occupancy": _known(summary.occupancy),
        "kv_mean": fold.used_block_s / fold.busy_s / num_blocks if fold.busy_s else None,
        "kv_peak": summary.peak_used_blocks / num_blocks,
        "num_blocks": num_blocks,
        "preemptions": summary.num_preemptions,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
