"""A calibration: the constants of `hardware.Roofline` as measured, with error bars, kept in the cache folder.

`cbserve calibrate` measures this machine with the real engine; `cbserve calibrate --from` fits a run of another one.
This machine has two, in files of their own: one by the clock on the wall, one by the CPU time of one thread. A step
takes less of the second wherever others use the machine, so neither stands for the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cbserve.errors import CBServeError
from cbserve.files import cache_folder, write_whole
from cbserve.hardware.models import ModelShape
from cbserve.hardware.roofline import Roofline

FORMAT = 1
COMMAND = "cbserve calibrate"
CPU_TIME_COMMAND = "cbserve calibrate --cpu-time"
_FITTED = ("eff_compute", "eff_memory", "overhead_s", "overlap")
_LINK = "host_link_bytes_s"
_UNITS = {"overhead_s": (1e3, " ms"), _LINK: (1e-9, " GB/s")}


class CalibrationError(CBServeError):
    """There is no calibration, or its file cannot be used; names file and cure."""


@dataclass(frozen=True)
class Point:
    """One kind of step, timed: `num_rows` rows of `num_tokens` new tokens each, after `context` cached ones on average.

    A swap computes nothing and moves those `context` tokens. `seconds` is the median of `repeats` runs, `low_s` and
    `high_s` their quartiles, `fitted_s` what the model says.
    """

    kind: str  # "prefill", "decode", "swap out" or "swap in"
    num_rows: int
    num_tokens: int
    context: int
    seconds: float
    low_s: float
    high_s: float
    repeats: int
    fitted_s: float = math.nan


@dataclass(frozen=True)
class Calibration:
    """Constants of the cost model for one model on one device.

    Args:
        device: in words.
        flops, memory_bytes_s: the ceilings that the efficiencies are shares of.
        values, errors: of eff_compute, eff_memory, overhead_s and overlap, and of host_link_bytes_s where it was
            measured; a constant without an error was not fitted, one with an error of 0 stands at a bound.
        loop_s: seconds between two steps that the engine spends outside the executor.
        created: ISO 8601, UTC.
        environment: what else may matter: timer, torch, threads, dtype, load average, or the run that was fitted.
    """

    model: ModelShape
    device: str
    flops: float
    memory_bytes_s: float
    values: Mapping[str, float]
    errors: Mapping[str, float]
    created: str
    dtype_bytes: int = 2
    block_size: int = 16
    kv_passes: float = 1.0
    loop_s: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    def cost(self) -> Roofline:
        """The cost model with these constants."""
        values = dict(self.values)
        values["overhead_s"] += self.loop_s
        return Roofline(
            self.model,
            self.flops,
            self.memory_bytes_s,
            dtype_bytes=self.dtype_bytes,
            block_size=self.block_size,
            kv_passes=self.kv_passes,
            **values,
        )

    @property
    def is_cpu_time(self) -> bool:
        return self.environment.get("timer") == "process_time"

    @property
    def clock(self) -> str:
        """What timed the steps, and on how many threads of a CPU: "wall clock, 2 threads"."""
        clock, threads = "CPU time" if self.is_cpu_time else "wall clock", self.environment.get("threads")
        return f"{clock}, {threads} thread{'s' * (threads != 1)}" if threads else clock

    @property
    def median_error(self) -> float:
        """Median relative error of the fit over the points; nan without points."""
        errors = sorted(abs(p.fitted_s / p.seconds - 1) for p in self.points)
        return errors[len(errors) // 2] if errors else math.nan

    def constants(self) -> list[tuple[str, str]]:
        """(name, value with its error bar) pairs for a table."""
        rows, has_link = [], _LINK in self.values
        for name in [*_FITTED, _LINK] if has_link else _FITTED:
            value, error = self.values[name], self.errors.get(name)
            scale, unit = _UNITS.get(name, (1.0, ""))
            bar = " (not fitted)" if error is None else f" ± {error * scale:.3f}" if error else " (at its bound)"
            rows.append((name, f"{value * scale:.3f}{bar}{unit}"))
        return rows if has_link else [*rows, (_LINK, "not measured")]

    @property
    def ceilings(self) -> str:
        """What the efficiencies are shares of, in words."""
        return f"{self.flops / 1e9:.4g} GFLOP/s and {self.memory_bytes_s / 1e9:.4g} GB/s"

    def __str__(self) -> str:
        constants = ", ".join(f"{name} {text}" for name, text in self.constants())
        error = f"; fit within {self.median_error:.0%} (median)" if self.points else ""
        where = f"{self.model.name} on {self.device}, {self.created[:10]}, {self.clock}"
        return f"{where}: {constants}; ceilings {self.ceilings}{error}"

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write it as JSON, whole or not at all. Returns the path: by default `calibration_path` of its clock.

        Raises:
            CalibrationError: it cannot be written.
        """
        target = place_for(path, self.is_cpu_time)
        write_whole(target, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n", CalibrationError)
        return target


def place_for(path: str | os.PathLike[str] | None, is_cpu_time: bool) -> Path:
    """Where a calibration is written: `path`, or `calibration_path`, whose folder is made. Raises CalibrationError."""
    if path is not None:
        return Path(path)
    place = calibration_path(is_cpu_time)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(
            f"cannot make {place.parent} ({error}); set CBSERVE_HOME to a folder of yours"
        ) from error
    return place


def calibration_path(is_cpu_time: bool = False) -> Path:
    """`calibration.json` in `$CBSERVE_HOME`, by default `~/.cache/cbserve`; of CPU time `calibration-cpu-time.json`."""
    return cache_folder() / ("calibration-cpu-time.json" if is_cpu_time else "calibration.json")


def load_calibration(path: str | os.PathLike[str] | None = None, is_cpu_time: bool = False) -> Calibration:
    """The calibration of this machine by the clock on the wall, or by CPU time; or that of another file.

    Raises:
        CalibrationError: there is none, or the file is damaged or of another version; names it and the cure.
    """
    source = Path(path) if path is not None else calibration_path(is_cpu_time)
    cure = f"measure this machine with: {CPU_TIME_COMMAND if is_cpu_time else COMMAND}"
    if path is not None:
        cure = f"write it anew with: {COMMAND} --out"
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CalibrationError(f"there is no calibration at {source}; {cure}") from error
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{source} cannot be read ({error}); {cure}") from error
    try:
        if found["format"] != FORMAT:
            raise ValueError(f"format={found['format']!r}, not {FORMAT}")
        known = {f.name: found[f.name] for f in fields(Calibration)}
        known["model"] = ModelShape(**known["model"])
        known["points"] = tuple(Point(**point) for point in known["points"])
        calibration = Calibration(**known)
        calibration.cost()
        str(calibration)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, CBServeError) as error:
        raise CalibrationError(f"{source} is damaged ({type(error).__name__}: {error}); {cure}") from error
    return calibration
