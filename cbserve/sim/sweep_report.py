"""What a sweep found: a table of its points, and throughput against latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cbserve.sim.page import Draw, write_page
from cbserve.sim.sweep import Axes
from cbserve.sim.words import duration, limits, milliseconds, rounded
from cbserve.viz import lines
from cbserve.viz.figure import Figure
from cbserve.viz.style import number
from cbserve.viz.table import Table, table

MOST_LINES = 8
Row = Mapping[str, Any]  # of a sweep's record


def sweep_table(rows: Sequence[Row], axes: Axes, slo: Mapping[str, float]) -> Table:
    """A row a point, in the order of the grid; no numbers where it was refused."""
    header = [*map(_dashed, axes), "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"]
    header += [*(["goodput/s"] if slo else []), "KV peak %", "preempted", "refused"]
    cells = []
    for row in rows:
        found = row.get("numbers")
        values: list[object] = [_shown(row["settings"][name]) for name in axes]
        if found is None:
            values += [None] * (len(header) - len(values))
        else:
            latency = found["latency_s"]
            values += [_short(found["tokens_per_s"])]
            values += [_short(milliseconds(latency[name][p])) for name in ("ttft", "itl") for p in ("p50", "p99")]
            values += [_short(found["goodput_per_s"])] if slo else []
            values += [_short(100 * found["kv_peak"]), found["preemptions"], found["refused"]]
        cells.append(values)
    return table(header, cells, "Latencies in milliseconds." + (f" Goodput: {limits(slo.items())}." if slo else ""))


def refusals(rows: Sequence[Row], axes: Axes) -> list[tuple[str, str]]:
    """(which points, why) for each reason that there was; points that differ in the arithmetic alone share one."""
    points: dict[str, list[str]] = {}
    why: dict[str, str] = {}
    for row in rows:
        if "error" in row:
            reason = row["error"].splitlines()[0]
            at = ", ".join(f"{_dashed(name)}={_shown(row['settings'][name])}" for name in axes)
            points.setdefault(reason, []).append(at)
            why.setdefault(reason, row["error"])
    return [(f"{at[0]}" + (f" and {len(at) - 1:,} more" if at[1:] else ""), why[key]) for key, at in points.items()]


def write_sweep_report(
    path: Path, rows: Sequence[Row], axes: Axes, slo: Mapping[str, float], lead: Sequence[str]
) -> None:
    """Write the HTML page of a sweep. Raises CBServeError: it cannot be written."""
    title = f"{len(rows):,} simulated runs: " + "; ".join(map(_range, axes, axes.values()))
    found = [sweep_table(rows, axes, slo)]
    if refused := refusals(rows, axes):
        found.append(table(("refused", "why"), [(at, error.splitlines()[0]) for at, error in refused]))
    write_page(path, title, lead, found, charts(rows, axes, slo))


def charts(rows: Sequence[Row], axes: Axes, slo: Mapping[str, float]) -> list[Draw]:
    """p99 of TTFT and of ITL against throughput, a line along the longest numeric axis; with too many lines, the
    frontier alone."""
    return [
        partial(_chart, groups, name, slo.get(name))
        for name in ("ttft", "itl")
        if (groups := _groups(rows, axes, name))
    ]


def _groups(rows: Sequence[Row], axes: Axes, name: str) -> dict[str, list[tuple[float, float]]]:
    """Name of a line -> its points (tokens a second, p99 in seconds)."""
    numeric = [axis for axis, values in axes.items() if all(type(value) in (int, float) for value in values)]
    along = "rate" if "rate" in numeric else max(numeric, key=lambda axis: len(axes[axis]), default="")
    ran = [row for row in rows if "numbers" in row and row["numbers"]["latency_s"][name]["p99"] is not None]
    told = [axis for axis in axes if axis != along and len({row["settings"][axis] for row in ran}) > 1]
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for row in ran:
        found, settings = row["numbers"], row["settings"]
        label = ", ".join(_label(axis, settings[axis]) for axis in told if settings[axis] is not None)
        point = (settings[along] or 0 if along else 0, found["tokens_per_s"], found["latency_s"][name]["p99"])
        groups.setdefault(label or "all", []).append(point)
    if len(groups) > MOST_LINES:
        return {"frontier": frontier([(x, y) for group in groups.values() for _, x, y in group])}
    return {label: [(x, y) for _, x, y in sorted(group)] for label, group in groups.items()}


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (throughput, latency), those that no other point beats in both: by rising throughput."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (-point[0], point[1])):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best[::-1]


def _chart(groups: Mapping[str, Sequence[tuple[float, float]]], name: str, limit: float | None, width: int) -> Figure:
    points = [point for group in groups.values() for point in group]
    most, least = max(points), min(points, key=lambda point: point[1])
    label = name.upper()
    title = f"The highest throughput, {number(rounded(most[0]))} tokens/s, has a p99 {label} of {duration(most[1])}"
    if least[1] < most[1]:
        title += f"; the lowest p99 {label} is {duration(least[1])}"
    high, low = max(y for _, y in points), least[1]
    return lines(
        {group: ([x for x, _ in found], [1e3 * y for _, y in found]) for group, found in groups.items()},
        title=title,
        x_name="output tokens a second",
        y_name=f"p99 {label} (ms)",
        log_y=low > 0 and high > 20 * low,
        reference=None if limit is None else (1e3 * limit, f"objective {duration(limit)}"),
        caption="Each mark is a simulated run. "
        + ("Points that no other beats in both." if "frontier" in groups else "Further right and lower is better."),
        width=width,
    )


def _label(axis: str, value: object) -> str:
    if isinstance(value, str):
        return value
    shown = _shown(value)
    return f"{_dashed(axis)} {number(shown) if isinstance(shown, int | float) else shown}"


def _range(axis: str, values: Sequence[Any]) -> str:
    if all(type(value) in (int, float) for value in values) and len(values) > 1:
        return f"{_dashed(axis)} {number(min(values))} to {number(max(values))}"
    return f"{_dashed(axis)} {', '.join(str(_shown(value)) for value in values)}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "on" if value else "off"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
