"""Devices and models that an explorer's menus offer: what is shown -> what `Sweep` takes."""

from __future__ import annotations

import os
from typing import Any

from cbserve.calibration import CalibrationError, load_calibration
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import FigureError
from cbserve.hardware.gpus import GPUS
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import MODELS, ModelShape, model_shape
from cbserve.sim.device import MODEL, calibration_file, device_of
from cbserve.sim.point import CHUNK, MAX_NUM_SEQS, UTILIZATION
from cbserve.sim.settings import Settings

THIS = "this"


class Machines:
    """The tables, this machine where it is calibrated, and what the learner gave: `gpu` and `model` in the menus.

    Args:
        gpu: as `cbserve sim --gpu` takes it, or a `Gpu`.
        model: as `cbserve sim --model` takes it, or a `ModelShape`; None: the default, or what was calibrated.

    Raises:
        CBServeError: no such GPU or model, no calibration, or a model beside one.
    """

    def __init__(self, gpu: Any, model: Any) -> None:
        self.gpus: dict[str, Any] = dict(GPUS)
        self.models: dict[str, ModelShape] = dict(MODELS)
        self.calibrated: dict[str, str] = {}  # by device; each comes with its model
        self.is_cpu = False  # what `gpu` names
        gpu = os.fspath(gpu) if isinstance(gpu, os.PathLike) else gpu
        file = calibration_file(gpu)
        try:
            this = load_calibration(calibration_file(THIS))
        except CalibrationError:
            if gpu == THIS:
                raise
        else:
            self._measured(f"this machine (calibrated {this.created[:10]})", THIS, this.model)
        if file is None:
            device, shape = find_gpu(gpu), model_shape(MODEL if model is None else model)
            self.gpu, self.model = device.name, shape.name
            self.gpus[device.name], self.models[shape.name] = device, shape
            return
        if gpu != THIS:
            this = load_calibration(file)
            self._measured(f"{file.name} (calibrated)", gpu, this.model)
        self.is_cpu = bool(this.environment.get("threads"))
        self.gpu, self.model = list(self.calibrated.items())[-1]
        if model is not None:
            raise FigureError(
                f"model={model!r} beside gpu={gpu!r}: that is calibrated with {self.model}; leave model out"
            )

    def _measured(self, name: str, source: Any, model: ModelShape) -> None:
        self.gpus[name], self.calibrated[name] = source, model.name
        self.models.setdefault(model.name, model)

    def chosen(self, gpu: str, model: str) -> tuple[Any, ModelShape | None]:
        """What `Sweep` takes for two names of the menus."""
        return self.gpus[gpu], None if gpu in self.calibrated else self.models[model]

    def why_not(self, model: str, error: InvalidRequestError) -> str:
        """That `model` does not fit, what to choose instead, and the arithmetic; or else `error` itself."""
        if "\n" not in str(error):
            return str(error)
        (what, _, _), (_, _, arithmetic) = str(error).partition(";"), str(error).partition("\n")
        larger = [name for name in GPUS if self._fits(name, model)]
        cure = f"a GPU with more memory ({', '.join(larger)}), or a smaller model" if larger else "a smaller model"
        return f"{what}; choose {cure}.\n{arithmetic}"

    def _fits(self, gpu: str, model: str) -> bool:
        device = device_of(Settings(gpu=gpu, model=self.models[model]))
        try:
            device.room(UTILIZATION, CHUNK["mixed"], MAX_NUM_SEQS, device.cost.block_size)
        except InvalidRequestError:
            return False
        return True
