"""The report of a run: its numbers, and how it went over time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cbserve.core.metrics import percentile
from cbserve.core.trace import Trace
from cbserve.errors import FigureError
from cbserve.sim.page import Draw, write_page
from cbserve.sim.series import Piece, Series, beginning, evenly, over_time, series
from cbserve.sim.settings import Objectives
from cbserve.sim.words import duration, rounded, tables
from cbserve.viz import histogram, lines
from cbserve.viz.figure import Figure
from cbserve.viz.style import number, percent
from cbserve.viz.timeline import timeline

BINS, SAMPLE, STEPS, SLOTS = 120, 5000, 60, 16


def write_report(
    path: Path,
    trace: Trace,
    found: dict[str, Any],
    slo: Objectives,
    title: str,
    assumptions: Sequence[str],
    command: str,
) -> None:
    """Write the HTML page of a run; `found` are its `numbers`.

    Raises:
        CBServeError: it cannot be written.
    """
    lead = [*assumptions, *([f"Made by: {command}"] if command else [])]
    write_page(path, title, lead, tables(found, slo), figures(trace, dict(slo)))


def figures(trace: Trace, slo: dict[str, float]) -> list[Draw]:
    """What there is to draw; nothing of a run in which nothing ran."""
    seen = series(trace.events)
    if not seen.ttft:
        return []
    drawn: list[Draw] = [partial(_first_tokens, seen, slo), partial(_load, seen)]
    drawn.append(partial(_cache, seen, int(trace.meta["num_blocks"])))
    if seen.gaps:
        drawn.append(partial(_gaps, seen, slo))
    start = beginning(trace, STEPS + 1, SLOTS)  # one step more than is shown: the part is not taken for the whole
    drawn.append(partial(_start, start, int(trace.meta["num_slots"])))
    return drawn


def _first_tokens(seen: Series, slo: dict[str, float], width: int) -> Figure:
    """Median and slowest TTFT of the requests that arrived within each part of the run."""
    waits = [ttft for _, ttft in seen.ttft]
    low, high = min(arrival for arrival, _ in seen.ttft), max(arrival for arrival, _ in seen.ttft)
    bins: dict[int, list[float]] = {}
    for arrival, ttft in seen.ttft:
        bins.setdefault(min(BINS - 1, int(BINS * (arrival - low) / (high - low))) if high > low else 0, []).append(ttft)
    part = (high - low) / BINS
    xs = [low + (k + 0.5) * part for k in sorted(bins)]
    drawn = {
        "slowest": (xs, [max(bins[k]) for k in sorted(bins)]),
        "median": (xs, [percentile(bins[k], 50) for k in sorted(bins)]),
    }
    limit = slo.get("ttft")
    return lines(
        drawn,
        title=f"Half of the first tokens come within {duration(percentile(waits, 50))} of the request, "
        f"99 of 100 within {duration(percentile(waits, 99))}",
        x_name="arrival (s)",
        y_name="TTFT (s)",
        reference=None if limit is None else (limit, f"objective {number(limit)} s"),
        caption=f"Requests by their arrival, in parts of {number(rounded(part))} s; simulated.",
        width=width,
    )


def _load(seen: Series, width: int) -> Figure:
    xs, drawn = _binned({"running": seen.running, "waiting": seen.waiting})
    most = max(first for _, _, first, _ in seen.waiting)
    queue = f"{most:,} wait at the worst moment" if most else "nobody waits longer than for the step in progress"
    running = max(first for _, _, first, _ in seen.running)
    return lines(
        {name: (xs, ys) for name, ys in drawn.items()},
        title=f"Up to {running:,} requests run at a time; {queue}",
        x_name="time (s)",
        y_name="requests",
        caption=f"Means over parts of {number(rounded(xs[1] - xs[0]))} s, idle time counted as 0; simulated.",
        width=width,
    )


def _cache(seen: Series, num_blocks: int, width: int) -> Figure:
    shares = [(a, b, 100 * first / num_blocks, 100 * last / num_blocks) for a, b, first, last in seen.used_blocks]
    xs, drawn = _binned({"in use": shares})
    peak = max(last for *_, last in shares) / 100
    return lines(
        {"in use": (xs, drawn["in use"])},
        title=f"The KV cache is filled to {percent(peak)} at the peak",
        x_name="time (s)",
        y_name="blocks in use (%)",
        caption=f"Of {num_blocks:,} blocks; means over parts of {number(rounded(xs[1] - xs[0]))} s; simulated.",
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
        title=f"99 of 100 gaps between tokens last at most {number(rounded(marks['p99']))} ms",
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


def _binned(named: dict[str, list[Piece]]) -> tuple[list[float], dict[str, list[float]]]:
    """Middles of the parts of the run, and the means of each value within them."""
    every = [piece for pieces in named.values() for piece in pieces]
    low, high = min(piece[0] for piece in every), max(piece[1] for piece in every)
    if not high > low:
        raise FigureError("nothing to draw: no step took any time")
    width = (high - low) / BINS
    xs = [low + (k + 0.5) * width for k in range(BINS)]
    return xs, {name: over_time(pieces, low, high, BINS) for name, pieces in named.items()}
