"""The report of a run: its numbers, and how it went over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cbserve.core.metrics import percentile
from cbserve.core.trace import Trace
from cbserve.sim.beginning import STEPS
from cbserve.sim.over_time import OverTime
from cbserve.sim.page import Draw, write_page
from cbserve.sim.series import Series, evenly
from cbserve.sim.settings import Objectives
from cbserve.sim.words import duration, rounded, tables
from cbserve.viz import histogram, lines
from cbserve.viz.figure import Figure
from cbserve.viz.style import number, percent
from cbserve.viz.timeline import timeline

SAMPLE = 5000  # gaps that a histogram shows


def write_report(
    path: Path,
    seen: Series,
    start: Trace,
    found: dict[str, Any],
    slo: Objectives,
    title: str,
    assumptions: Sequence[str],
    command: str,
) -> None:
    """Write the HTML page of a run, of which `start` is the beginning and `found` are the `numbers`.

    Raises:
        CBServeError: it cannot be written.
    """
    lead = [*assumptions, *([f"Made by: {command}"] if command else [])]
    write_page(path, title, lead, tables(found, slo), figures(seen, start, found, dict(slo)))


def figures(seen: Series, start: Trace, found: dict[str, Any], slo: dict[str, float]) -> list[Draw]:
    """What there is to draw; nothing of a run in which nothing ran."""
    if not seen.ttft_s:
        return []
    return [
        partial(_first_tokens, seen, slo),
        partial(_load, seen),
        partial(_cache, seen, found["num_blocks"]),
        *([partial(_gaps, seen, slo)] if seen.gaps else []),
        partial(_start, start, found["num_slots"]),
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
        caption=f"Requests by their arrival, in parts of {number(part)} s; simulated.",
        width=width,
    )


def _load(seen: Series, width: int) -> Figure:
    most = seen.waiting.peak
    queue = f"{most:,} wait at the worst moment" if most else "nobody waits longer than for the step in progress"
    return lines(
        {"running": seen.running.means(), "waiting": seen.waiting.means()},
        title=f"Up to {seen.running.peak:,} requests run at a time; {queue}",
        x_name="time (s)",
        y_name="requests",
        caption=f"Means over parts of {number(seen.running.width_s)} s, idle time counted as 0; simulated.",
        width=width,
    )


def _cache(seen: Series, num_blocks: int, width: int) -> Figure:
    used = seen.used_blocks
    xs, means = used.means()
    return lines(
        {"in use": (xs, [100 * mean / num_blocks for mean in means])},
        title=f"The KV cache is filled to {percent(used.peak / num_blocks)} at the peak",
        x_name="time (s)",
        y_name="blocks in use (%)",
        caption=f"Of {num_blocks:,} blocks; means over parts of {number(used.width_s)} s; simulated.",
        width=width,
    )


def _gaps(seen: Series, slo: dict[str, float], width: int) -> Figure:
    total = sum(seen.gaps.values())
    values = [1e3 * value for value in evenly(seen.gaps, SAMPLE)]
    marks = {"median": percentile(values, 50), "p99": percentile(values, 99)}
    if "itl" in slo:
        marks["objective"] = 1e3 * slo["itl"]
    shown = "each gap" if total == len(values) else f"{len(values):,} of {total:,} gaps, evenly over their ranks"
    return histogram(
        values,
        title=f"99 of 100 gaps between tokens last at most {duration(marks['p99'] / 1e3)}",
        x_name="ITL (ms)",
        num_bins=60 if width > 600 else 30,
        log_x=values[0] > 0 and values[-1] > 20 * values[0],
        marks={name: rounded(value) for name, value in marks.items()},
        caption=f"Shown: {shown}; simulated.",
        width=width,
    )


def _start(start: Trace, num_slots: int, width: int) -> Figure:
    """The first steps as the engine took them."""
    slots = int(start.meta["num_slots"])
    return timeline(
        start,
        title=f"How it begins: the first {min(STEPS, len(start.steps))} steps",
        labels=[f"Slots 0 to {slots - 1} of {num_slots:,}" if slots < num_slots else f"All {slots} slots"],
        last_step=STEPS - 1,
        width=max(480, width),
    )
