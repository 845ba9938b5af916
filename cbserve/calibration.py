"""A calibration: the constants of `hardware.Roofline` as measured, with error bars, kept in the cache folder.

`cbserve calibrate` measures this machine with the real engine; `cbserve calibrate --from` fits a run of another one.
This machine has two, in files of their own: one by the clock on the wall, one by the CPU time of one thread. A step
takes less of the second wherever others use the machine, so neither stands for the other; a simulation of this machine
takes the one that was made last.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from cbserve.core import given
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import CBServeError
from cbserve.files import cache_folder, read_object, write_whole
from cbserve.hardware.models import ModelShape
from cbserve.hardware.roofline import LIMITS, Roofline

FORMAT = 1
COMMAND = "cbserve calibrate"
CPU_TIME_COMMAND = "cbserve calibrate --cpu-time"
_FITTED = ("eff_compute", "eff_memory", "overhead_s", "overlap")
_LINK = "host_link_bytes_s"
_UNITS = {"overhead_s": (1e3, " ms"), _LINK: (1e-9, " GB/s")}

_AT_LEAST_0 = (lambda v: 0 <= v < math.inf, "a number of at least 0")
# Of the environment, with the least that each can be.
_COUNTS = {"threads": 0, "max_model_len": 1, "cores": 1, "memory_bytes": 1}

Made = TypeVar("Made")


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

    def require_timed(self, name: str) -> None:
        """Raises InvalidRequestError for what no step can have; `name` is the point's own."""
        given.instance(f"{name}.kind", self.kind, str, "text")
        for count in ("num_rows", "num_tokens", "context", "repeats"):
            given.integer(f"{name}.{count}", getattr(self, count), 0)
        given.positive(f"{name}.seconds", self.seconds)
        for quartile in ("low_s", "high_s"):
            given.number(f"{name}.{quartile}", getattr(self, quartile), *_AT_LEAST_0)
        given.number(f"{name}.fitted_s", self.fitted_s, lambda v: 0 < v < math.inf or v != v, "above 0, or NaN")


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

    Raises:
        InvalidRequestError: a field is of a wrong kind or out of range; names it.
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

    def __post_init__(self) -> None:
        given.instance("device", self.device, str, "text")
        _require_moment(self.created)
        for name in ("values", "errors", "environment"):
            given.instance(name, getattr(self, name), Mapping, "an object")
        _require_keys("values", self.values, _FITTED, (_LINK,))
        _require_keys("errors", self.errors, (), (*_FITTED, _LINK))
        for name, error in self.errors.items():
            given.number(f"errors.{name}", error, lambda v: not v < 0 and v != math.inf, "at least 0, or NaN")
        for name in ("dtype_bytes", "block_size"):
            given.integer(name, getattr(self, name), 1)
        for name, value in self.values.items():
            given.number(f"values.{name}", value, *LIMITS[name])
        given.number("loop_s", self.loop_s, *_AT_LEAST_0)
        self.cost()  # refuses what else is out of range
        for name, least in _COUNTS.items():
            if name in self.environment:
                given.integer(f"environment.{name}", self.environment[name], least)
        if "load_average" in self.environment:
            given.number("environment.load_average", self.environment["load_average"], *_AT_LEAST_0)
        for index, point in enumerate(self.points):
            point.require_timed(f"points[{index}]")

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
        """(name, value with its error bar) pairs for a table; the loop's part, which `cost` adds, among them."""
        rows: list[tuple[str, str]] = []
        has_link = _LINK in self.values
        for name in [*_FITTED, _LINK] if has_link else _FITTED:
            value, error = self.values[name], self.errors.get(name)
            scale, unit = _UNITS.get(name, (1.0, ""))
            bar = " (not fitted)" if error is None else f" ± {error * scale:.3f}" if error else " (at its bound)"
            rows.append((name, f"{value * scale:.3f}{bar}{unit}"))
            if name == "overhead_s" and self.loop_s:
                both = f"{1e3 * (value + self.loop_s):.3f} ms a step"
                rows.append(("loop_s", f"{1e3 * self.loop_s:.3f} ms between two steps, which predictions add: {both}"))
        return rows if has_link else [*rows, (_LINK, "not measured")]

    @property
    def ceilings(self) -> str:
        """What the efficiencies are shares of, in words."""
        return f"{self.flops / 1e9:.4g} GFLOP/s and {self.memory_bytes_s / 1e9:.4g} GB/s"

    @property
    def label(self) -> str:
        """What was measured, where, when, by which clock, and how well the steps fit."""
        return f"{self._what}{self._fit}"

    def __str__(self) -> str:
        constants = ", ".join(f"{name} {text}" for name, text in self.constants())
        return f"{self._what}: {constants}; ceilings {self.ceilings}{self._fit}"

    @property
    def _what(self) -> str:
        return f"{self.model.name} on {self.device}, {self.created[:10]}, {self.clock}"

    @property
    def _fit(self) -> str:
        return f"; fit within {self.median_error:.0%} (median)" if self.points else ""

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


def latest_path() -> Path:
    """Where the calibration of this machine lies that was made last, by either clock; where none can be read, the path
    of one that is there, or of the wall clock's."""
    paths, made = (calibration_path(), calibration_path(is_cpu_time=True)), {}
    for path in paths:
        with suppress(CalibrationError):
            made[path] = datetime.fromisoformat(load_calibration(path).created)
    return max(made, key=lambda path: made[path], default=next(filter(os.path.lexists, paths), paths[0]))


def load_calibration(path: str | os.PathLike[str] | None = None, is_cpu_time: bool = False) -> Calibration:
    """The calibration of this machine by the clock on the wall, or by CPU time; or that of another file.

    Raises:
        CalibrationError: there is none, or the file is damaged or of another version; names it and the cure.
    """
    source = Path(path) if path is not None else calibration_path(is_cpu_time)
    own = {calibration_path(): COMMAND, calibration_path(is_cpu_time=True): CPU_TIME_COMMAND}
    anew = f"write it anew with: {COMMAND} --out {quote(str(source))}"
    cure = f"measure this machine with: {own[source]}" if source in own else anew
    if not os.path.lexists(source):
        raise CalibrationError(f"there is no calibration at {source}; {cure}")
    found = read_object(source, CalibrationError, cure)
    try:
        if (version := found.pop("format", None)) != FORMAT:
            raise InvalidRequestError(f"format={given.short(version)}, not {FORMAT}")
        _require_keys("", found, [f.name for f in fields(Calibration)])
        points = given.instance("points", found["points"], list, "a list")
        found["points"] = tuple(_made(Point, point, f"points[{i}]") for i, point in enumerate(points))
        found["model"] = _made(ModelShape, found["model"], "model")
        return Calibration(**found)
    except CBServeError as error:
        raise CalibrationError(f"{source} is damaged ({error}); {cure}") from error


def _made(kind: type[Made], found: Any, name: str) -> Made:
    """What `found`, a JSON object, describes. Raises InvalidRequestError naming the key that is wrong."""
    needed = [f.name for f in fields(kind) if f.compare]  # what makes no other model may be missing
    also = [f.name for f in fields(kind) if not f.compare]
    _require_keys(name, given.instance(name, found, dict, "an object"), needed, also)
    try:
        return kind(**found)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}.{error}") from None


def _require_keys(name: str, found: Mapping[str, Any], needed: Iterable[str], also: Iterable[str] = ()) -> None:
    for key in needed:
        if key not in found:
            raise InvalidRequestError(f"{name}.{key} is missing".lstrip("."))
    for key in found:
        if key not in needed and key not in also:
            raise InvalidRequestError(f"{name}.{key} is not known".lstrip("."))


def _require_moment(created: Any) -> None:
    try:
        if datetime.fromisoformat(created).tzinfo is not None:
            return
    except (TypeError, ValueError):
        pass
    raise InvalidRequestError(f"created={given.short(created)}: must be a time such as 2026-11-29T20:00:00+00:00")
