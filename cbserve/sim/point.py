"""One point: from settings to a workload, a device and a run, and from the run to its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.blocks import MOST_BLOCKS
from cbserve.core.errors import InvalidRequestError
from cbserve.core.metrics import mean, percentile
from cbserve.core.policies import FCFS, Policy, Priority
from cbserve.core.run_fold import RunFold
from cbserve.core.trace import Event
from cbserve.outputs import RequestOutput
from cbserve.sim.device import Device, device_of
from cbserve.sim.settings import WORKLOADS, Settings, in_options
from cbserve.sim.work import Work
from cbserve.simulation import Simulation, simulate
from cbserve.workloads.readers import read_trace
from cbserve.workloads.synthetic import azure_twin
from cbserve.workloads.workload import Workload

REQUESTS, BATCH_SIZE, MAX_NUM_SEQS, UTILIZATION, SWAP_GIB = 1000, 32, 256, 0.9, 4.0
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
    num_host_blocks: int

    def run(
        self,
        trace_path: str | Path | None = None,
        progress: Callable[[RequestOutput], None] | None = None,
        listeners: Iterable[Callable[[Event], None]] = (),
    ) -> tuple[Simulation, Work]:
        """Simulate it, keeping no trace. Arguments and errors are those of `simulate`."""
        settings, cost = self.settings, self.device.cost
        policy: Policy = Priority() if settings.policy == "priority" else FCFS()
        work = Work(cost)
        simulation = simulate(
            self.workload,
            cost,
            self.num_blocks,
            settings.block_size,
            self.batching,
            policy,
            enable_prefix_caching=settings.prefix_caching,
            preemption=settings.preemption,
            num_host_blocks=self.num_host_blocks,
            max_tokens=self.max_tokens,
            max_model_len=self.device.max_model_len,
            keep_trace=False,
            trace_path=trace_path,
            progress=progress,
            listeners=[work.add, *listeners],
            meta={"model": cost.model.name, "device": f"{self.device.name} (simulated)"},
        )
        return simulation, work

    def resolved(self) -> dict[str, Any]:
        """All settings as they are used, as JSON can hold them; None where one has no part in this run."""
        settings, device, rows = self.settings, self.device, self.batching.max_num_seqs
        is_static, is_twin = settings.batching == "static", settings.trace is None
        is_share = device.table is not None and settings.num_blocks is None
        return settings.as_dict() | {
            "workload": _workload(settings) if is_twin else None,
            "requests": _requests(settings) if is_twin else None,
            "seed": settings.seed or 0 if is_twin else None,
            "rate": settings.rate or _known(self.workload.rate),
            "max_tokens": self.max_tokens,
            "model": settings.model or device.cost.model.name,
            "max_model_len": device.max_model_len,
            "dtype_bytes": device.cost.dtype_bytes,
            "kv_dtype_bytes": device.kv_dtype_bytes,
            "eff_compute": device.cost.eff_compute,
            "eff_memory": device.cost.eff_memory,
            "overhead": device.cost.overhead_s,
            "batch_size": rows if is_static else None,
            "chunk": None if is_static else self.batching.max_num_batched_tokens,
            "max_num_seqs": None if is_static else rows,
            "swap_space": settings.swap_space or SWAP_GIB if settings.preemption == "swap" else None,
            "utilization": settings.utilization or UTILIZATION if is_share else None,
            "num_blocks": self.num_blocks,
        }


def prepare(settings: Settings) -> Point:
    """Look up and read what `settings` name. The trace is read last: it takes the longest.

    Raises:
        CBServeError: model, GPU or trace is not there or not as it should be; the weights do not fit (with the
            arithmetic); the rate cannot be scaled; the swap space holds no block, or too many.
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
    num_host_blocks = _host_blocks(settings, device) if settings.preemption == "swap" else 0
    workload = workload_of(settings)
    max_tokens = settings.max_tokens
    if max_tokens is None and settings.batching == "static":  # else a batch would reserve the whole pool for one
        max_tokens = max(job.num_output_tokens for job in workload.jobs)
    return Point(settings, workload, device, batching, num_blocks, room, max_tokens, num_host_blocks)


def _host_blocks(settings: Settings, device: Device) -> int:
    space, block_bytes = (
        settings.swap_space or SWAP_GIB,
        device.cost.model.block_bytes(settings.block_size, device.kv_dtype_bytes),
    )
    num_blocks = space * 2**30 / block_bytes
    if not 1 <= num_blocks <= MOST_BLOCKS:
        least, most = (number * block_bytes / 2**30 for number in (1, MOST_BLOCKS))
        raise InvalidRequestError(
            f"swap_space={space:g}: must be at least {least:.3g} and at most {most:.3g} GiB, which hold 1 and "
            f"{MOST_BLOCKS:,} blocks of {block_bytes:,} bytes"
        )
    return int(num_blocks)


def workload_of(settings: Settings) -> Workload:
    """Raises CBServeError: the trace cannot be read, or its arrivals not be scaled."""
    if settings.trace is not None:
        workload = _read(settings.trace, settings.limit)
    else:
        workload = _twin(_workload(settings).removeprefix("azure-"), _requests(settings), settings.seed or 0)
        workload = workload if settings.limit is None else workload.first(settings.limit)
    return workload if settings.rate is None else workload.scaled(settings.rate)


def _workload(settings: Settings) -> str:
    return settings.workload or WORKLOADS[0]


def _requests(settings: Settings) -> int:
    return settings.requests or REQUESTS


@lru_cache(maxsize=1)  # the points of a sweep mostly share it
def _read(trace: str, limit: int | None) -> Workload:
    return read_trace(trace, limit)


@lru_cache(maxsize=1)
def _twin(name: str, num_requests: int, seed: int) -> Workload:
    return azure_twin(name, num_requests, seed)


def numbers(simulation: Simulation, work: Work, settings: Settings) -> dict[str, Any]:
    """The run as JSON can hold it: times in seconds, rates a second, shares in 0..1; None where there is no value.

    `kept_share` is of all requests, for each objective alone. `busy_share` is of the time from the first arrival on;
    the other shares of the device are of the time in which a step ran.
    """
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
        "first_refusal": in_options(simulation.refused[0][1]) if simulation.refused else None,
        "steps": summary.num_steps,
        "makespan_s": summary.makespan_s,
        "prompt_tokens": summary.num_prompt_tokens,
        "output_tokens": summary.num_output_tokens,
        "tokens_per_s": _known(summary.tokens_per_s),
        "requests_per_s": _known(num_served / summary.makespan_s if summary.makespan_s else math.nan),
        "latency_s": latency,
        "goodput_per_s": goodput,
        "goodput_share": None if goodput is None else goodput * summary.makespan_s / summary.num_requests,
        "kept_share": _kept(fold, settings),
        "busy_share": _known(work.busy_s / summary.makespan_s if summary.makespan_s else math.nan),
        "compute_bound_share": _known(work.compute_bound_s / work.busy_s if work.busy_s else math.nan),
        "flop_utilisation": _known(work.flop_utilisation),
        "bandwidth_utilisation": _known(work.bandwidth_utilisation),
        "prefix_hit_rate": _known(work.prefix_hit_rate) if settings.prefix_caching else None,
        "slot_utilisation": _known(summary.slot_utilisation),
        "num_slots": int(simulation.trace.meta["num_slots"]),
        "occupancy": _known(summary.occupancy),
        "kv_mean": fold.used_block_s / fold.busy_s / num_blocks if fold.busy_s else None,
        "kv_peak": summary.peak_used_blocks / num_blocks,
        "num_blocks": num_blocks,
        "preemptions": summary.num_preemptions,
        "swapped": work.num_swapped if settings.preemption == "swap" else None,
    }


def _kept(fold: RunFold, settings: Settings) -> dict[str, float | None]:
    """Of all requests, those that keep each objective; none does without a first token, and a nan breaks none."""
    values = {"ttft": fold.ttft_s, "tpot": fold.tpot_s, "itl": fold.longest_itl_s, "e2e": fold.e2e_s}
    shares: dict[str, float | None] = {}
    for name, limit in settings.slo:
        pairs = zip(fold.ttft_s, values[name], strict=True)
        num_kept = sum(not math.isnan(ttft) and not value > limit for ttft, value in pairs)
        shares[name] = num_kept / fold.num_requests if fold.num_requests else None
    return shares


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
