"""The numbers of a point as tables, for the terminal and the report alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cbserve.sim.settings import Objectives
from cbserve.viz.findings import plural
from cbserve.viz.style import number, percent
from cbserve.viz.table import Table, table

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99")


def tables(found: dict[str, Any], slo: Objectives) -> list[Table]:
    """Rates and shares, then latencies."""
    refused = f"{found['refused']:,}" + (f": {found['first_refusal']}" if found["first_refusal"] else "")
    rows = [
        ("requests", f"{found['requests']:,} in {_of(found['makespan_s'], 's')}, {plural(found['steps'], 'step')}"),
        (
            "throughput",
            f"{_of(found['tokens_per_s'], 'output tokens/s')}, {_of(found['requests_per_s'], 'requests/s')}",
        ),
    ]
    if slo:
        rate = _of(found["goodput_per_s"], "requests/s")
        rows.append(("goodput", f"{rate}, {share(found['goodput_share'])} of all, kept {limits(slo)}"))
        kept = (f"{objective(name)} is kept by {share(value)}" for name, value in found["kept_share"].items())
        rows.append(("each limit alone", ", ".join(kept)))
    if found["busy_share"] is not None:
        rows += [
            (
                "busy",
                f"{share(found['busy_share'])} of the time, {share(found['compute_bound_share'])} of that bound by "
                "compute, the rest by memory",
            ),
            (
                "of the peak",
                f"{share(found['flop_utilisation'])} of FLOP/s, {share(found['bandwidth_utilisation'])} of memory "
                "bandwidth, while busy",
            ),
        ]
    if found["prefix_hit_rate"] is not None:
        rows.append(("prefix cache", f"{share(found['prefix_hit_rate'])} of prompt tokens found"))
    rows += [
        (
            "slot utilisation",
            f"{share(found['slot_utilisation'])} of {plural(found['num_slots'], 'slot')} x steps gave a token",
        ),
        ("KV cache in use", f"{share(found['kv_mean'])} on average while busy, {share(found['kv_peak'])} at the peak"),
        ("preemptions", _preemptions(found["preemptions"], found["swapped"])),
        ("refused", refused),
    ]
    latencies = [
        [label, *(milliseconds(found["latency_s"][name].get(which)) for which in STATISTICS)]
        for name, label in LATENCIES.items()
    ]
    note = "Here ITL is over the gaps of all requests together; its objective is for the longest gap of each request."
    return [table(("", "value"), rows), table(("ms", *STATISTICS), latencies, note if "itl" in dict(slo) else "")]


def _preemptions(count: int, swapped: int | None) -> str:
    """ "141 (6 swapped, 135 computed again)": the host's pool may have been full. None: nothing could be swapped."""
    ways = f" ({swapped:,} swapped, {count - swapped:,} computed again)" if count and swapped is not None else ""
    return f"{count:,}{ways}"


def limits(slo: Iterable[tuple[str, float]]) -> str:
    """ "TTFT <= 0.5 s, longest ITL <= 0.1 s"."""
    return ", ".join(f"{objective(name)} <= {number(limit)} s" for name, limit in slo)


def objective(name: str) -> str:
    """What of a request is held against its limit: of its ITL the longest."""
    return f"longest {LATENCIES[name]}" if name == "itl" else LATENCIES[name]


def settings_in_words(used: Mapping[str, object]) -> str:
    """ "batching mixed, chunk 2,048": options that have a part in the run."""
    return ", ".join(f"{dashed(name)} {said(value)}" for name, value in used.items() if value is not None)


def dashed(name: str) -> str:
    """An option as the command line has it."""
    return name.replace("_", "-")


def said(value: object) -> str:
    """The value of an option."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return number(value) if isinstance(value, int | float) else str(value)


def milliseconds(value: float | None) -> float | None:
    """For a cell: None stays None."""
    return None if value is None else 1e3 * value


def share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _of(value: float | None, unit: str) -> str:
    return f"- {unit}" if value is None else f"{number(value)} {unit}"


def rounded(value: float) -> float:
    """Three significant digits: more would claim more than a simulation knows."""
    return float(f"{value:.3g}") if math.isfinite(value) else value


def duration(value: float) -> str:
    """0.0928 s as "92.8 ms", 65 s as "65 s"."""
    ms = rounded(1e3 * value)
    return f"{number(ms)} ms" if ms < 1000 else f"{number(rounded(value))} s"
