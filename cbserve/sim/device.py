"""The device of a simulated run: a GPU of the table, or this machine as it was calibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cbserve.calibration import load_calibration
from cbserve.errors import CBServeError
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
    table: Gpu | None  # None: this machine, whose memory no table knows

    def gpu(self) -> Gpu:
        """For its memory. Raises CBServeError where that is not known."""
        if self.table is None:
            raise CBServeError(
                f"the memory of {self.name} for a KV cache is not known: give --num-blocks, 694 for "
                "instance (`cbserve twin` prints the engine's own as `KV pool`)"
            )
        return self.table


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
    source = f"calibrated with {calibration.model.name} on {calibration.created[:10]}"
    if model is not None and (shape := model_shape(model)) != calibration.model:
        cost, source = replace(cost, model=shape), f"{source}; for {shape.name} an assumption"
    return Device(calibration.device, cost, source, None)
