"""A grid of simulated runs: each point is written down when it ends, and the next sweep goes on from there."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbserve import __version__
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import CBServeError
from cbserve.sim.device import calibration_file, device_of
from cbserve.sim.paths import POINT
from cbserve.sim.point import numbers, prepare, workload_of
from cbserve.sim.pool import Lost, Runner
from cbserve.sim.settings import OPTIONS, Settings, in_options, parse

MOST_POINTS = 100_000
Axes = dict[str, list[Any]]


def read_axes(text: str) -> Axes:
    """ "rate=0.5,1;chunk=256,512" -> {"rate": [0.5, 1.0], "chunk": [256, 512]}.

    Raises:
        CBServeError: an option that cannot be swept, one that is given twice, or a value that it cannot have.
    """
    axes: Axes = {}
    swept = [name for name, option in OPTIONS.items() if option.metadata["swept"]]
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, values = part.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in swept:
            known = ", ".join(option.replace("_", "-") for option in swept)
            raise CBServeError(f"--sweep: {part!r}: must be OPTION=VALUE,VALUE,... with an option of {known}")
        if name in axes:
            raise CBServeError(f"--sweep: {name.replace('_', '-')} is given twice; put its values into one list")
        try:
            axes[name] = list(dict.fromkeys(parse(name, value.strip()) for value in values.split(",")))
        except CBServeError as error:
            raise CBServeError(f"--sweep: {error}") from None
    if not axes:
        raise CBServeError("--sweep: names no option; give rate=0.5,1,2;chunk=256,512 for instance")
    return axes


def grid(base: Settings, axes: Axes) -> list[Settings]:
    """Every combination once; options without effect beside the others do not make points of their own.

    Raises:
        CBServeError: there are too many, or an option has no effect in any of them.
    """
    size = 1
    for values in axes.values():
        size *= len(values)
    if size > MOST_POINTS:
        raise CBServeError(f"--sweep: {size:,} points; at most {MOST_POINTS:,}")
    points = [replace(base, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    for name in points[0].without_effect():
        if all(name in point.without_effect() for point in points):
            points[0].refuse(name)
    return list(dict.fromkeys(point.normal() for point in points))


def check(points: Sequence[Settings]) -> None:
    """Look at what points share before any of them runs: names of models and GPUs, and the traffic.

    Raises:
        CBServeError: as `prepare`, except that a model may not fit: that is a result.
    """
    seen: set[tuple[object, ...]] = set()
    for point in points:
        device = (point.model, point.gpu, point.utilization is None)
        if device not in seen:
            device_of(point)
        traffic = (point.trace, point.workload, point.requests, point.seed, point.limit, point.rate)
        if traffic not in seen:
            workload_of(point)
        seen |= {device, traffic}


def key_of(settings: Settings) -> str:
    """What the numbers follow from: all settings, the content of the files that they name, and the version."""
    named = [settings.trace, settings.model, calibration_file(settings.gpu)]
    files = {str(path): _digest(path) for path in named if path and os.path.exists(path)}
    return json.dumps({"settings": settings.as_dict(), "files": files, "version": __version__}, sort_keys=True)


def _digest(path: str | Path) -> str:
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return ""  # whoever reads it will say why


def run_point(settings: Settings) -> dict[str, Any]:
    """Simulate one point: {"settings": all of them as used, "numbers": ...}, or {"error": ...} where it is refused. It
    runs in a worker."""
    try:
        point = prepare(settings)
        return {"settings": point.resolved(), "numbers": numbers(*point.run(), settings)}
    except InvalidRequestError as error:  # it will never fit; what may pass, such as a trace out of reach, is raised
        return {"error": in_options(str(error))}


class Record:
    """The file of a sweep: one JSON line a point, appended when the point ends. Each has a check sum: a line that was
    edited is left out, and its point runs again.

    Raises:
        CBServeError: the file cannot be read or written, or is no sweep; names the line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}  # by key
        self.dropped = False  # a last line that was cut
        self.changed: list[int] = []  # lines that are not as they were written
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise CBServeError(f"{self.path}: cannot be read ({error.strerror})") from None
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                if not isinstance(row["key"], str) or not ("numbers" in row or "error" in row):
                    raise ValueError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise CBServeError(
                    f"{self.path}, line {number}: is no point of a sweep; delete the line, or give another --out"
                ) from None
            if row.get("sum") == _sum(row):
                self.found[row["key"]] = row
            else:
                self.changed.append(number)
        rest = data[len(whole) :]
        if rest:  # the sweep was killed while it wrote
            if not rest.startswith(POINT) and not POINT.startswith(rest):
                raise CBServeError(f"{self.path}: its last line is no point of a sweep; give another --out")
            self.dropped = True
            with open(self.path, "r+b") as file:
                file.truncate(len(whole))

    def add(self, settings: Settings, key: str, outcome: dict[str, Any]) -> None:
        row = {"key": key, "settings": settings.as_dict(), **outcome}
        row["sum"] = _sum(row)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CBServeError(f"{self.path}: cannot be written ({error.strerror}); what is in it stays") from None
        self.found[key] = row


def _sum(row: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in row.items() if name != "sum"})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sweep(
    points: Sequence[Settings],
    record: Record,
    runner: Runner,
    progress: Callable[[int], None] = lambda num_done: None,
    run: Callable[[Settings], dict[str, Any]] = run_point,
) -> tuple[list[dict[str, Any]], list[tuple[Settings, str]]]:
    """Run the points that are not in `record` yet.

    Args:
        runner: `Processes(jobs)` or `Cluster(address)`.
        progress: called with 1 whenever a point has ended, at first with the number of those that were there.

    Returns the rows of all points that ended, in the order of `points`, and those whose worker was lost, with why; they
    are not in the record, so that the next sweep tries them again.
    """
    keys = {point: key_of(point) for point in points}
    lost: list[tuple[Settings, str]] = []
    to_do = [point for point in points if keys[point] not in record.found]
    progress(len(points) - len(to_do))
    for point, outcome in runner(run, to_do):
        if isinstance(outcome, Lost):
            lost.append((point, outcome.reason))
        else:
            record.add(point, keys[point], outcome)
        progress(1)
    return [record.found[keys[point]] for point in points if keys[point] in record.found], lost
