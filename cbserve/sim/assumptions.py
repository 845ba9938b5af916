"""What the numbers of a run rest on, in words."""

from __future__ import annotations

import math

from cbserve.sim.device import Device
from cbserve.sim.point import Point
from cbserve.sim.settings import Settings, flag_of
from cbserve.sim.words import settings_in_words
from cbserve.viz.findings import plural

_SCHEDULING = ("batching", "batch_size", "chunk", "max_num_seqs", "policy", "prefix_caching", "preemption")


def assumptions(point: Point) -> list[str]:
    """A sentence for each."""
    steps, shares = _steps(point.device), efficiencies(point.settings, point.device)
    return [steps, shares, _scheduling(point), _memory(point), _length(point), _traffic(point)]


def _steps(device: Device) -> str:
    cost = device.cost
    hidden = f"plus {1 - cost.overlap:.3g} of the shorter (overlap {cost.overlap:.3g}), " if cost.overlap < 1 else ""
    return (
        f"Simulated: the engine's own scheduler on a virtual clock. A step of {cost.model.name} on {device.name} takes "
        f"the longer of FLOPs / ({cost.flops / 1e12:.4g} TFLOP/s x {cost.eff_compute:.3g}) and bytes / "
        f"({cost.memory_bytes_s / 1e9:.4g} GB/s x {cost.eff_memory:.3g}), {hidden}plus {cost.overhead_s * 1e3:.3g} ms."
    )


def efficiencies(settings: Settings, device: Device) -> str:
    """Where the share of the peaks that is reached is from, and the overhead."""
    names = ("eff_compute", "eff_memory", "overhead")
    given = [flag_of(name) for name in names if getattr(settings, name) is not None]
    if len(given) == len(names):
        return "Efficiencies and overhead: as given."
    return f"Efficiencies and overhead: {device.source}" + (f"; {', '.join(given)} as given." if given else ".")


def _scheduling(point: Point) -> str:
    used, note = point.resolved(), ""
    if point.settings.policy == "priority" and len({job.priority for job in point.workload.jobs}) == 1:
        note = " All requests of this workload have the same priority, so they are served as by fcfs."
    return f"Scheduling: {settings_in_words({name: used[name] for name in _SCHEDULING})}.{note}"


def _memory(point: Point) -> str:
    settings, device, size = point.settings, point.device, point.settings.block_size
    room = f"{plural(point.num_blocks, 'block')} of {size} = {point.num_blocks * size:,} tokens"
    said = f"KV cache: {room}, {point.room}. A weight takes {_bytes(device.cost.dtype_bytes)}"
    said += f", a value of K and V {_bytes(device.kv_dtype_bytes)}."
    if settings.dtype_bytes or settings.kv_dtype_bytes:
        said += " A dtype changes bytes alone: FLOP/s stay as above, those of 16 bits in the table of GPUs."
    if settings.preemption == "swap" and (link := device.cost.host_link_bytes_s):
        said += f" Swaps move {link / 1e9:.3g} GB/s."
    return said


def _bytes(count: float) -> str:
    return f"{count:g} byte{'' if count == 1 else 's'}"


def _length(point: Point) -> str:
    longest = max(point.workload.jobs, key=lambda job: len(job.prompt) + job.num_output_tokens)
    said = f"the longest request has {len(longest.prompt):,} + {longest.num_output_tokens:,} tokens"
    if (most := point.device.max_model_len) is None:
        name = point.device.cost.model.name
        return f"Length: no limit ({name}'s is not known; --max-model-len sets one); {said}."
    return f"Length: at most {most:,} tokens of prompt and answer, {point.device.limit}; {said}."


def _traffic(point: Point) -> str:
    workload = point.workload
    said = f"Workload: {workload.name}, {plural(len(workload), 'request')}"
    if not math.isnan(workload.rate):
        said += f", {workload.rate:.4g} a second"
    if point.batching.keeps_finished:
        said += f"; a batch reserves room for answers of {point.max_tokens:,} tokens"
    return "; ".join(part for part in (said, workload.note, workload.source) if part) + "."
