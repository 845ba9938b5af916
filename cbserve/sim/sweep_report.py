"""What a sweep found: a table of its points, and what all of them rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbserve.sim.assumptions import efficiencies
from cbserve.sim.device import device_of
from cbserve.sim.page import write_page
from cbserve.sim.point import workload_of
from cbserve.sim.settings import OPTIONS, Settings
from cbserve.sim.sweep import Axes
from cbserve.sim.sweep_charts import Row, charts
from cbserve.sim.words import LATENCIES, dashed, limits, milliseconds, said, settings_in_words
from cbserve.viz.style import number
from cbserve.viz.table import Table, table


def sweep_table(rows: Sequence[Row], axes: Axes, slo: Mapping[str, float]) -> Table:
    """A row a point, in the order of the grid; no numbers where it was refused."""
    found = [row["numbers"] for row in rows if "numbers" in row]
    has_hits = any(numbers["prefix_hit_rate"] is not None for numbers in found)
    header = [*map(dashed, axes), "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"]
    header += [*(["goodput/s", *(f"{LATENCIES[name]} kept %" for name in slo)] if slo else [])]
    header += ["busy %", "FLOP %", "BW %", *(["hits %"] if has_hits else []), "KV peak %", "preempted", "refused"]
    cells = []
    for row in rows:
        values: list[object] = [_shown(row["settings"][name]) for name in axes]
        if (numbers := row.get("numbers")) is None:
            values += [None] * (len(header) - len(values))
        else:
            latency = numbers["latency_s"]
            values += [_short(numbers["tokens_per_s"])]
            values += [_short(milliseconds(latency[name][p])) for name in ("ttft", "itl") for p in ("p50", "p99")]
            values += [_short(numbers["goodput_per_s"])] if slo else []
            shares = [numbers["kept_share"][name] for name in slo]
            shares += [numbers[name] for name in ("busy_share", "flop_utilisation", "bandwidth_utilisation")]
            shares += [numbers["prefix_hit_rate"]] if has_hits else []
            values += [_percent(value) for value in (*shares, numbers["kv_peak"])]
            values += [numbers["preemptions"], numbers["refused"]]
        cells.append(values)
    caption = "Latencies in milliseconds, ITL over the gaps of all requests. FLOP, BW: shares of the peaks while busy."
    if slo:
        caption += (
            f" Goodput: requests with {limits(slo.items())}. Kept: share of all requests within that limit alone."
        )
    return table(header, cells, caption)


def refusals(rows: Sequence[Row], axes: Axes) -> list[tuple[str, str]]:
    """(which points, why) for each reason that there was; points that differ in the arithmetic alone share one."""
    points: dict[str, list[str]] = {}
    why: dict[str, str] = {}
    for row in rows:
        if "error" in row:
            reason = row["error"].splitlines()[0]
            at = ", ".join(f"{dashed(name)}={_shown(row['settings'][name])}" for name in axes)
            points.setdefault(reason, []).append(at)
            why.setdefault(reason, row["error"])
    return [(f"{at[0]}" + (f" and {len(at) - 1:,} more" if at[1:] else ""), why[key]) for key, at in points.items()]


def about(points: Sequence[Settings], rows: Sequence[Row], axes: Axes) -> list[str]:
    """What the numbers rest on, a sentence each: settings that all points share, efficiencies, KV cache, traffic."""
    used = [row["settings"] for row in rows if "numbers" in row] or [point.as_dict() for point in points]
    same = {
        name: used[0][name]
        for name in OPTIONS
        if name not in (*axes, "slo") and all(settings[name] == used[0][name] for settings in used)
    }
    devices = {(point.model, point.gpu): point for point in points}.values()
    sources = dict.fromkeys(efficiencies(point, device_of(point)) for point in devices)
    blocks = sorted(settings["num_blocks"] for settings in used if settings["num_blocks"] is not None)
    told = [
        "Simulated: the engine's own scheduler on a virtual clock, with a cost model in place of the GPU.",
        f"The same for all points: {settings_in_words(same)}.",
        *sources,
    ]
    if blocks and "num_blocks" not in (*axes, *same):
        most = "" if blocks[0] == blocks[-1] else f" to {blocks[-1]:,}"
        told.append(f"KV cache: {blocks[0]:,}{most} blocks, what fits beside weights and activations.")
    workload = workload_of(replace(points[0], rate=None))
    return [*told, f"Workload: {'; '.join(filter(None, (workload.name, workload.note, workload.source)))}."]


def write_sweep_report(
    path: Path, rows: Sequence[Row], axes: Axes, slo: Mapping[str, float], lead: Sequence[str]
) -> None:
    """Write the HTML page of a sweep. Raises CBServeError: it cannot be written."""
    title = f"{len(rows):,} simulated run{'' if len(rows) == 1 else 's'}: " + "; ".join(
        map(_range, axes, axes.values())
    )
    found = [sweep_table(rows, axes, slo)]
    if refused := refusals(rows, axes):
        found.append(table(("refused", "why"), [(at, error.splitlines()[0]) for at, error in refused]))
    write_page(path, title, lead, found, charts(rows, axes, slo))


def _range(axis: str, values: Sequence[Any]) -> str:
    if all(type(value) in (int, float) for value in values) and len(values) > 1:
        return f"{dashed(axis)} {number(min(values))} to {number(max(values))}"
    return f"{dashed(axis)} {', '.join(map(said, values))}"


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return said(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _percent(value: float | None) -> float | None:
    return None if value is None else _short(100 * value)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
