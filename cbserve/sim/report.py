"""The report of a run: its numbers, and how it went over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cbserve.core.metrics import percentile
from cbserve.sim.over_time import OverTime
from cbserve.sim.page import Draw, write_page
from cbserve.sim.series import Series, evenly
from cbserve.sim.settings import Objectives
from cbserve.sim.telling import Part
from cbserve.sim.words import duration, rounded, tables
from cbserve.viz import histogram, lines
from cbserve.viz.curves import Curve, Mark, curves
from cbserve.viz.figure import Figure
from cbserve.viz.findings import plural
from cbserve.viz.style import number, percent
from cbserve.viz.timeline import timeline

SAMPLE = 5000  # gaps that a histogram shows


def write_report(
    path: Path,
    seen: Series,
    part: Part | None,
    found: dict[str, Any],
    slo: Objectives,
    title: str,
    assumptions: Sequence[str],
    command: str,
) -> None:
    """Write the HTML page of a run, of which `part` is the most telling one and `found` are the `numbers`.

    Raises:
        CBServeError: it cannot be written.
    """
    lead = [*assumptions, *([f"Made by: {command}"] if command else [])]
    write_page(path, title, lead, tables(found, slo), figures(seen, part, found, dict(slo)))


def figures(seen: Series, part: Part | None, found: dict[str, Any], slo: dict[str, float]) -> list[Draw]:
    """What there is to draw; nothing of a run in which nothing ran."""
    if not seen.ttft_s:
        return []
    return [
        partial(_first_tokens, seen, slo),
        partial(_load, seen),
        partial(_cache, seen, found["num_blocks"]),
        *([partial(_gaps, seen, found["latency_s"]["itl"], slo)] if seen.gaps else []),
        *([partial(_steps, part, found)] if part else []),
    ]


def _first_tokens(seen: Series, slo: dict[str, float], width: int) -> Figure:
    """Median and slowest TTFT of the requests that arrived within each part of the run."""
    low, high = min(seen.arrival_s), max(seen.arrival_s)
    part = seen.running.width_s
    if high > low:  # they may all come early
        part = 2.0 ** math.ceil(math.log2((high - low) / OverTime.MOST))
    bins: dict[int, list[float]] = {}
    for arrival, ttft in zip(seen.arrival_s, seen.ttft_s, strict=True):
        bins.setdefault(int((arrival - low) / part), []).append(ttft)
    xs = [low + (k + 0.5) * part for k in sorted(bins)]
    drawn = {
        "slowest": (xs, [max(bins[k]) for k in sorted(bins)]),
        "median": (xs, [percentile(bins[k], 50) for k in sorted(bins)]),
    }
    limit = slo.get("ttft")
    return lines(
        drawn,
        title=f"Half of the first tokens come within {duration(percentile(seen.ttft_s, 50))} of the request, "
        f"99 of 100 within {duration(percentile(seen.ttft_s, 99))}",
        x_name="arrival (s)",
        y_name="TTFT (s)",
        reference=None if limit is None else (limit, f"objective {number(limit)} s"),
        caption=f"A point: the requests that arrived within {number(part)} s of each other; simulated.",
        width=width,
    )


def _load(seen: Series, width: int) -> Figure:
    running, waiting = seen.running.peak, seen.waiting.peak
    queue = "nobody waits longer than for the step in progress"
    if waiting:
        queue = f"{waiting:,} wait{'s' * (waiting == 1)} at the worst moment"
    return _over_time(
        {"running": seen.running, "waiting": seen.waiting},
        title=f"Up to {plural(running, 'request')} run{'s' * (running == 1)} at a time; {queue}",
        y_name="requests",
        width=width,
    )


def _cache(seen: Series, num_blocks: int, width: int) -> Figure:
    used = seen.used_blocks
    return _over_time(
        {f"in use of {plural(num_blocks, 'block')}": used},
        title=f"The KV cache is filled to {percent(used.peak / num_blocks)} at the peak",
        y_name="blocks in use (%)",
        width=width,
        scale=100 / num_blocks,
    )


def _over_time(values: dict[str, OverTime], title: str, y_name: str, width: int, scale: float = 1.0) -> Figure:
    """Means over parts of the run, with a band up to the highest value within each."""
    drawn, rows = [], []
    for name, over_time in values.items():
        parts = [(at, scale * mean, scale * top) for at, mean, top in over_time.parts()]
        hovers = [f"{name}, about {number(rounded(at))} s: {number(y)}, up to {number(top)}" for at, y, top in parts]
        every = max(1, len(parts) // 24)
        marks = [Mark(at, y, "" if k % every else hovers[k]) for k, (at, y, _) in enumerate(parts)]
        drawn.append(Curve(name, marks, [top for *_, top in parts]))
        rows += [[name, *part] for part in parts]
    part = number(next(iter(values.values())).width_s)
    return curves(
        drawn,
        title=title,
        x_name="time (s)",
        y_name=y_name,
        caption=f"Lines: means over {part} s each, with idle time as 0; bands: up to the highest value in that time; "
        "simulated.",
        table=(["", "time (s)", y_name, "at most"], rows),
        width=width,
    )


def _gaps(seen: Series, itl_s: dict[str, float], slo: dict[str, float], width: int) -> Figure:
    """Bars of a sample, marks of the whole run."""
    total = sum(seen.gaps.values())
    values = [1e3 * value for value in evenly(seen.gaps, SAMPLE)]
    marks = {"median": 1e3 * itl_s["p50"], "p99": 1e3 * itl_s["p99"]}
    if "itl" in slo:
        marks["objective"] = 1e3 * slo["itl"]
    sample = "" if total == len(values) else f", drawn from {len(values):,} of them with the same distribution"
    return histogram(
        values,
        title=f"99 of 100 gaps between tokens last at most {duration(itl_s['p99'])}",
        x_name="ITL (ms)",
        num_bins=60 if width > 600 else 30,
        log_x=values[0] > 0 and values[-1] > 20 * values[0],
        marks={name: rounded(value) for name, value in marks.items()},
        percent=True,
        caption=f"Shares of all {total:,} gaps{sample}; simulated.",
        width=width,
    )


def _steps(part: Part, found: dict[str, Any], width: int) -> Figure:
    """The most telling steps as the engine took them."""
    num_slots, few = found["num_slots"], len(part.slots)
    at = duration(part.time_s)
    moment = {
        "preemption": f"Around the first preemption, at {at}",
        "queue": f"Around the longest queue, {plural(part.count, 'request')} at {at}",
        "running": f"Where most requests run, {part.count:,} at {at}",
    }[part.kind]
    title = _all(found["steps"], "step")
    if part.last_step - part.first_step + 1 < found["steps"]:
        title = f"{moment}: steps {part.first_step:,} to {part.last_step:,} of {found['steps']:,}"
    which = "the one in which anything happens" if few == 1 else "those in which most happens"
    label = f"{few} of {num_slots:,} slots, {which}" if few < num_slots else _all(few, "slot")
    return timeline(
        part.trace, title=title, labels=[label], axis="time", queue=True, slots=part.slots,
        first_step=part.first_step, last_step=part.last_step, width=max(480, width),
    )  # fmt: skip


def _all(count: int, noun: str) -> str:
    return f"All {count:,} {noun}s" if count > 1 else f"The only {noun}"
