"""What a sweep found, drawn: throughput against latency, and goodput against the rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cbserve.sim.page import Draw
from cbserve.sim.sweep import Axes
from cbserve.sim.words import dashed, duration, limits, said
from cbserve.viz.curves import Curve, Mark, curves
from cbserve.viz.figure import Figure
from cbserve.viz.style import number

MOST_CURVES = 8
Row = Mapping[str, Any]  # of a sweep's record


@dataclass(frozen=True)
class Groups:
    """The runs of a sweep, for every chart alike."""

    axes: Axes
    along: str  # the axis that rises along a curve; "" where none does
    curves: Mapping[str, Sequence[Row]]  # by name
    others: Sequence[Row]
    words: str  # which these are

    @property
    def rows(self) -> list[Row]:
        return [*(row for group in self.curves.values() for row in group), *self.others]

    def name(self, row: Row) -> str:
        """ "rate 8, h100, chunk 512"."""
        return setting(row, self.axes)


def charts(rows: Sequence[Row], axes: Axes, slo: Mapping[str, float]) -> list[Draw]:
    """p99 of TTFT and of ITL against throughput; with objectives and rates, goodput against the rate."""
    drawn: list[Draw] = []
    groups = grouped([row for row in rows if "numbers" in row], axes, bool(slo))
    if slo and groups.along == "rate" and len({row["settings"]["rate"] for row in groups.rows}) > 1:
        drawn.append(partial(_goodput, groups, slo))
    for name in ("ttft", "itl"):
        known = [row for row in rows if "numbers" in row and _p99(row, name) is not None]
        if known:
            drawn.append(partial(_latency, grouped(known, axes, bool(slo)), name, slo.get(name)))
    return drawn


def grouped(rows: Sequence[Row], axes: Axes, has_slo: bool) -> Groups:
    """A curve for each setting. With too many, one for each value of one axis, a GPU say, with the best of the other
    axes: that of the highest goodput (without objectives: throughput) at any rate. What is then on no curve is still
    there as a point."""
    numeric = [axis for axis, values in axes.items() if all(type(value) in (int, float) for value in values)]
    along = "rate" if "rate" in numeric else max(numeric, key=lambda axis: len(axes[axis]), default="")
    told = [axis for axis in axes if axis != along and len({row["settings"][axis] for row in rows}) > 1]
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["settings"][along] or 0) if along else rows:
        groups.setdefault(setting(row, told) or ("all runs" if len(rows) > 1 else "the run"), []).append(row)
    if len(groups) <= MOST_CURVES:
        return Groups(axes, along, groups, (), "")
    by_words = sorted(told, key=lambda axis: axis in numeric)  # a GPU rather than a number
    split = next((axis for axis in by_words[: len(told) - 1] if 1 < len(axes[axis]) <= MOST_CURVES), None)
    best: dict[Any, str] = {}
    if split is not None:
        for name, group in groups.items():
            value = group[0]["settings"][split]
            if value not in best or _score(group, has_slo) > _score(groups[best[value]], has_slo):
                best[value] = name
    chosen = {name: groups[name] for name in best.values()}
    others = [row for name, group in groups.items() if name not in chosen for row in group]
    words = f"Grey: the other {len(groups) - len(chosen):,} settings."
    if split is not None:
        rest = " and ".join(dashed(axis) for axis in told if axis != split)
        most = "goodput" if has_slo else "throughput"
        words = f"A curve for each {dashed(split)}, with the {rest} that has the highest {most} at any rate. {words}"
    return Groups(axes, along, chosen, others, words)


def _score(group: Sequence[Row], has_slo: bool) -> tuple[float, float]:
    found = [row["numbers"] for row in group]
    tokens = max(numbers["tokens_per_s"] for numbers in found)
    return max(numbers["goodput_per_s"] or 0.0 for numbers in found) if has_slo else tokens, tokens


def _p99(row: Row, name: str) -> float | None:
    seconds: float | None = row["numbers"]["latency_s"][name]["p99"]
    return seconds


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (throughput, latency), those that no other point beats in both: by rising throughput."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (-point[0], point[1])):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best[::-1]


def _latency(groups: Groups, name: str, limit: float | None, width: int) -> Figure:
    label = name.upper()

    def mark(row: Row) -> Mark:
        tokens, p99 = row["numbers"]["tokens_per_s"], _p99(row, name) or 0.0
        hover = f"{groups.name(row)}: {number(tokens)} tokens/s, p99 {label} {duration(p99)}"
        return Mark(tokens, 1e3 * p99, hover)

    points = [(row["numbers"]["tokens_per_s"], _p99(row, name) or 0.0) for row in groups.rows]
    most = max(groups.rows, key=lambda row: row["numbers"]["tokens_per_s"])
    low, high = min(y for _, y in points), max(y for _, y in points)
    tokens, p99 = most["numbers"]["tokens_per_s"], _p99(most, name) or 0.0
    found = f"The highest throughput, {number(tokens)} tokens/s ({groups.name(most)}), has"
    if len(points) == 1:
        found = f"The run gives {number(tokens)} tokens/s, with"
    title = f"{found} a p99 {label} of {duration(p99)}"
    if low < p99:
        title += f"; the lowest p99 {label} is {duration(low)}"
    best = [(x, 1e3 * y) for x, y in frontier(points)]
    return curves(
        [Curve(group, [mark(row) for row in rows]) for group, rows in groups.curves.items()],
        title=title,
        x_name="output tokens a second",
        y_name=f"p99 {label} (ms)",
        log_y=low > 0 and high > 20 * low,
        cloud=("other settings", [mark(row) for row in groups.others]),
        under=("frontier: no run is better in both", best if len(groups.curves) != 1 or groups.others else ()),
        reference=None if limit is None else (1e3 * limit, f"objective {duration(limit)}"),
        caption=" ".join(filter(None, ("Each mark is a simulated run.", _along(groups), groups.words))),
        table=_table(groups, "tokens/s", f"p99 {label} (ms)", lambda row: (mark(row).x, mark(row).y)),
        width=width,
    )


def _goodput(groups: Groups, slo: Mapping[str, float], width: int) -> Figure:
    def mark(row: Row) -> Mark:
        rate, kept = row["settings"]["rate"], row["numbers"]["goodput_per_s"] or 0.0
        return Mark(rate, kept, f"{groups.name(row)}: {number(kept)} requests/s kept all objectives")

    best = max(groups.rows, key=lambda row: row["numbers"]["goodput_per_s"] or 0.0)
    rates = sorted({row["settings"]["rate"] for row in groups.rows})
    return curves(
        [Curve(group, [mark(row) for row in rows]) for group, rows in groups.curves.items()],
        title=f"The highest goodput is {number(mark(best).y)} requests/s ({groups.name(best)})",
        x_name="requests a second",
        y_name="goodput (requests a second)",
        cloud=("other settings", [mark(row) for row in groups.others]),
        under=("every request keeps all objectives", [(rate, rate) for rate in (rates[0], rates[-1])]),
        caption=" ".join(
            filter(None, ("Each mark is a simulated run.", f"Goodput: {limits(slo.items())}.", groups.words))
        ),
        table=_table(
            groups,
            "goodput (1/s)",
            "requests that kept all (%)",
            lambda row: (mark(row).y, 100 * (row["numbers"]["goodput_share"] or 0.0)),
        ),
        width=width,
    )


def _along(groups: Groups) -> str:
    values = [said(value) for value in groups.axes.get(groups.along, ())]
    if len(values) < 2 or not groups.curves:
        return ""
    shown = ", ".join(values) if len(values) <= 12 else f"{values[0]} to {values[-1]}"
    return f"Along a curve the {dashed(groups.along)} rises: {shown}."


def _table(groups: Groups, x_name: str, y_name: str, values: Any) -> tuple[list[str], list[list[object]]]:
    rows = [[*(row["settings"][axis] for axis in groups.axes), *values(row)] for row in groups.rows]
    return [*map(dashed, groups.axes), x_name, y_name], rows


def setting(row: Row, axes: Iterable[str]) -> str:
    """ "rate 8, h100, chunk 512": what these axes were; a name says by itself what it is."""
    values = ((axis, row["settings"][axis]) for axis in axes)
    return ", ".join(
        value if isinstance(value, str) else f"{dashed(axis)} {said(value)}"
        for axis, value in values
        if value is not None
    )
