"""The device of a simulated run: a GPU of the table, or this machine as it was calibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cbserve.calibration import load_calibration
from cbserve.errors import CBServeError
from cbserve.hardware.capacity import CPU_KV_CACHE_BYTES, default_num_blocks, kv_capacity, peak_activation_bytes
from cbserve.hardware.gpus import Gpu
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import model_shape
from cbserve.hardware.roofline import Roofline
from cbserve.sim.settings import Settings

MODEL = "llama-3.1-8b"
_FITTED = (
    "fitted to Llama-3.1-8B in bf16 on an A100-80 SXM (NVIDIA aiconfigurator 0.12); for another GPU, model or dtype an "
    "assumption"
)


@dataclass(frozen=True)
class Device:
    """What a step costs there. `source`: where efficiencies and overhead are from."""

    name: str
    cost: Roofline
    source: str
    table: Gpu | None  # None: as it was calibrated
    is_cpu: bool = False
    max_model_len: int | None = None  # of the model that it was calibrated with; None: not known

    def room(self, utilization: float, max_num_tokens: int, max_num_seqs: int, block_size: int) -> tuple[int, str]:
        """Blocks of the KV cache that an engine makes here, and what they come from, in words.

        Args:
            utilization: share of a GPU's memory that may be used.
            max_num_tokens, max_num_seqs: the largest step, for a GPU's activations.

        Raises:
            CBServeError: the weights do not fit (with the arithmetic), or the memory is not known.
        """
        model, dtype_bytes = self.cost.model, self.cost.dtype_bytes
        if self.table is not None:
            activations = peak_activation_bytes(model, max_num_tokens, max_num_seqs, dtype_bytes)
            capacity = kv_capacity(model, self.table, utilization, activations, dtype_bytes, block_size=block_size)
            gb = [f"{value / 1e9:.3g}" for value in (
                utilization * self.table.memory_bytes, capacity.weights_bytes, capacity.activation_bytes,
            )]  # fmt: skip
            why = f"from {gb[0]} GB usable - {gb[1]} GB of weights - {gb[2]} GB of activations (estimated)"
            return capacity.num_blocks, why
        if not self.is_cpu:
            raise CBServeError(
                f"the memory of {self.name} for a KV cache is not known: give --num-blocks (`cbserve twin` prints the "
                "engine's own as `KV pool`)"
            )
        block_bytes = model.block_bytes(block_size, dtype_bytes)
        num_blocks = default_num_blocks(CPU_KV_CACHE_BYTES, block_bytes, block_size, max_num_seqs, self.max_model_len)
        most = f"{CPU_KV_CACHE_BYTES / 1e6:.0f} MB"
        if self.max_model_len is not None:
            most = f"the smaller of {max_num_seqs} requests x {self.max_model_len:,} tokens and {most}"
        return num_blocks, f"the engine's default on a CPU: {most}; --num-blocks sets another size"


def device_of(settings: Settings) -> Device:
    """Raises CBServeError: no model or GPU of that name (the message lists all), or no calibration of this machine."""
    named = {"eff_compute": settings.eff_compute, "eff_memory": settings.eff_memory, "overhead_s": settings.overhead,
             "dtype_bytes": settings.dtype_bytes}  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    given["block_size"] = settings.block_size
    if settings.gpu == "this":
        return _this(settings.model, given)
    gpu = find_gpu(settings.gpu)
    return Device(gpu.name, Roofline.on(gpu, settings.model or MODEL, **given), _FITTED, gpu)


def _this(model: str | None, given: dict[str, Any]) -> Device:
    """As it was calibrated; without a model, with the one that it was calibrated with."""
    calibration = load_calibration()
    cost = replace(calibration.cost(), **given)
    source = f"calibrated with {calibration.model.name} on {calibration.created[:10]} ({calibration.clock})"
    about = calibration.environment
    max_model_len = about.get("max_model_len")
    if model is not None and (shape := model_shape(model)) != calibration.model:
        cost, source = replace(cost, model=shape), f"{source}; for {shape.name} an assumption"
        max_model_len = None
    is_cpu = bool(about.get("threads"))  # 0 on a GPU, nothing where another engine's run was fitted
    return Device(calibration.device, cost, source, None, is_cpu, max_model_len)
