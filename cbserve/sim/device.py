"""The device of a simulated run: a GPU of the table, or what was calibrated: this machine, or another engine's run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbserve.calibration import calibration_path, latest_path, load_calibration
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import StepPlan
from cbserve.errors import CBServeError
from cbserve.executors.timing import timing_row
from cbserve.files import tilde
from cbserve.hardware.capacity import CPU_KV_CACHE_BYTES, default_num_blocks, kv_capacity, peak_activation_bytes
from cbserve.hardware.gpus import GPUS, Gpu
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.host import memory_bytes
from cbserve.hardware.models import model_shape
from cbserve.hardware.roofline import Roofline
from cbserve.sim.settings import Settings

MODEL = "llama-3.1-8b"
_FITTED = "fitted to Llama-3.1-8B in bf16 on an A100-80 SXM (NVIDIA aiconfigurator 0.12)"
_ALSO = "which reaches 0.67 to 0.70 and 0.62 to 0.75 in the same tables"  # see Roofline.on
# vLLM's post on V1 (blog.vllm.ai, 2025-01-27) calls the CPU's part noticeable for Llama-8B on an H100, where the GPU
# takes about 5 ms; the fit is that of the README.
_CPU_S, _CPU = 5e-3, "vLLM notices it from 5 ms down, and a run of its 0.19 is fitted with 2.4 ms"


@dataclass(frozen=True)
class Device:
    """What a step costs there. `source`: where efficiencies and overhead are from."""

    name: str
    cost: Roofline
    source: str
    table: Gpu | None  # None: its memory is not known
    is_cpu: bool = False
    max_model_len: int | None = None  # most tokens of prompt and answer; None: no limit is known
    limit: str = ""  # who says so
    memory_bytes: float | None = None  # of a CPU's machine, where it is known

    @property
    def kv_dtype_bytes(self) -> int:
        return self.cost.kv_dtype_bytes or self.cost.dtype_bytes

    def room(self, utilization: float, max_num_tokens: int, max_num_seqs: int, block_size: int) -> tuple[int, str]:
        """Blocks of the KV cache that an engine makes here, and what they come from, in words.

        Args:
            utilization: share of a GPU's memory that may be used.
            max_num_tokens, max_num_seqs: the largest step, for a GPU's activations.

        Raises:
            InvalidRequestError: the weights do not fit (with the arithmetic).
            CBServeError: the memory of a GPU is not known.
        """
        model, dtype_bytes, kv_dtype_bytes = self.cost.model, self.cost.dtype_bytes, self.kv_dtype_bytes
        if self.table is not None:
            sixteen_bits = 2 if dtype_bytes < 1 else dtype_bytes  # what small weights are multiplied with
            activations = peak_activation_bytes(model, max_num_tokens, max_num_seqs, sixteen_bits)
            capacity = kv_capacity(model, self.table, utilization, activations, dtype_bytes, kv_dtype_bytes, block_size)
            gb = [f"{value / 1e9:.3g}" for value in (
                utilization * self.table.memory_bytes, capacity.weights_bytes, capacity.activation_bytes,
            )]  # fmt: skip
            why = f"from {gb[0]} GB usable - {gb[1]} GB of weights - {gb[2]} GB of activations and runtime (estimated)"
            return capacity.num_blocks, why
        if not self.is_cpu:
            raise CBServeError(
                f"the memory of {self.name} for a KV cache is not known: give --num-blocks (`cbserve twin` prints the "
                "engine's own as `KV pool`)"
            )
        self._require_room_for_weights()
        block_bytes = model.block_bytes(block_size, kv_dtype_bytes)
        num_blocks = default_num_blocks(CPU_KV_CACHE_BYTES, block_bytes, block_size, max_num_seqs, self.max_model_len)
        most = f"{CPU_KV_CACHE_BYTES / 1e6:.0f} MB"
        if self.max_model_len is not None:
            most = f"the smaller of {max_num_seqs} requests x {self.max_model_len:,} tokens and {most}"
        unknown = "" if self.memory_bytes is not None else "; its memory is not known, so the weights may not fit"
        return num_blocks, f"the engine's default on a CPU: {most}; --num-blocks sets another size{unknown}"

    def _require_room_for_weights(self) -> None:
        model, dtype_bytes, memory = self.cost.model, self.cost.dtype_bytes, self.memory_bytes
        if memory is None or (need := model.weights_bytes(dtype_bytes)) <= memory:
            return
        smaller = next((size for size in (4, 2, 1) if size < dtype_bytes and model.weights_bytes(size) <= memory), None)
        cure = f"take a model of at most {memory / dtype_bytes / 1e9:.2g}e9 parameters"
        if smaller is not None:
            cure += f", or store the weights in {8 * smaller} bits (dtype_bytes={smaller})"
        raise InvalidRequestError(
            f"{model.name} does not fit on {self.name}: {model.num_params / 1e9:.4g}e9 parameters x {dtype_bytes} "
            f"bytes = {need / 1e9:.3g} GB of weights, {memory / 1e9:.3g} GB of memory; {cure}"
        )


def device_of(settings: Settings) -> Device:
    """The device with its model.

    Raises:
        CBServeError: no model or GPU of that name (the message lists all), no calibration, or a share of a memory that
            is not known.
    """
    kv_dtype_bytes = settings.kv_dtype_bytes
    if kv_dtype_bytes is None and (settings.dtype_bytes or 1) < 1:
        kv_dtype_bytes = 2
    named = {"eff_compute": settings.eff_compute, "eff_memory": settings.eff_memory, "overhead_s": settings.overhead,
             "dtype_bytes": settings.dtype_bytes, "kv_dtype_bytes": kv_dtype_bytes}  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    given["block_size"] = settings.block_size
    file = calibration_file(settings.gpu)
    if file is not None:
        device = _calibrated(settings, file, given)
    else:
        gpu = find_gpu(settings.gpu)
        cost = Roofline.on(gpu, MODEL if settings.model is None else settings.model, **given)
        device = _limited(Device(gpu.name, cost, _assumed(gpu, cost, settings.overhead is not None), gpu))
    if settings.utilization is not None and device.table is None:
        settings.refuse("utilization")
    if settings.max_model_len is not None:
        device = replace(device, max_model_len=settings.max_model_len, limit="as given")
    return device


def _assumed(gpu: Gpu, cost: Roofline, has_overhead: bool) -> str:
    """Where efficiencies and overhead are from, and how far that is from this GPU, model and dtype."""
    ms = 1e3 * cost(StepPlan(0, [timing_row(0, 1, ())]))
    others = [gpu.name] * (gpu.name != "A100-80 SXM")
    others += [cost.model.name] * (cost.model.num_params != model_shape(MODEL).num_params)
    others += [f"weights of {8 * cost.dtype_bytes:g} bits"] * (cost.dtype_bytes != 2)
    said = _FITTED
    if others in (["H100 SXM"], ["H200 SXM"]):
        said += f"; an assumption for {others[0]}, {_ALSO}"
    elif others:
        said += f"; for {', '.join(others)} an assumption"
    if ms < 1e3 * _CPU_S and not has_overhead:
        said += (
            f". A decode of one request takes {ms:.2g} ms by that, too little for an engine: these tables time "
            f"kernels, and its own work on the CPU, some milliseconds a step, is left out ({_CPU}). Set it with "
            "--overhead"
        )
    return said


def calibration_file(gpu: str) -> Path | None:
    """Where the calibration lies that `--gpu` names; None for a GPU of the table.

    Raises:
        CBServeError: it names neither.
    """
    if gpu == "this":
        return latest_path()
    try:
        find_gpu(gpu)
    except InvalidRequestError as error:
        if gpu.endswith(".json") or os.path.isfile(gpu):
            return Path(gpu)
        names = str(error).removesuffix(", or describe yours as a Gpu")
        raise InvalidRequestError(f"{names}, `this`, or a file of `cbserve calibrate --out`") from None
    return None


def _calibrated(settings: Settings, file: Path, given: dict[str, Any]) -> Device:
    """As it was calibrated; without a model, with the one that it was calibrated with."""
    calibration, is_here = load_calibration(file), settings.gpu == "this"
    about, gpu = calibration.environment, GPUS.get(calibration.device)
    cost = replace(calibration.cost(), **given)
    what, run = f"{calibration.model.name} on {calibration.created[:10]}", about.get("fitted_to")
    source = f"calibrated with {what} ({calibration.clock})" if run is None else f"fitted to {what}, {run}"
    if is_here:
        both = all(calibration_path(is_cpu_time).exists() for is_cpu_time in (False, True))
        source += f", {tilde(file)}{', the newer of two' if both else ''}"
    is_cpu = bool(about.get("threads"))  # 0 on a GPU, nothing where another engine's run was fitted
    memory = about.get("memory_bytes", memory_bytes() if is_here else None) if is_cpu else None
    device = Device(calibration.device, cost, source, gpu, is_cpu, memory_bytes=memory)
    if settings.model is not None and (shape := model_shape(settings.model)) != calibration.model:
        source = f"{source}; for {shape.name} an assumption"
        return _limited(replace(device, cost=replace(cost, model=shape), source=source))
    if (length := about.get("max_model_len")) is not None:
        return replace(device, max_model_len=length, limit="that of the calibrated engine")
    return _limited(device)


def _limited(device: Device) -> Device:
    """With the length that its model was made for, where that is known."""
    model = device.cost.model
    limit = "by its config.json" if os.path.isfile(model.source) else f"what {model.name} was made for"
    return replace(device, max_model_len=model.max_position_embeddings, limit=limit)
