"""Throughput against latency: a curve for each setting, a point for each rate, and how many requests are in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbserve.errors import FigureError
from cbserve.viz import style
from cbserve.viz.axes import Scale, along, draw_x, draw_y, extent, free_place, heading, spread
from cbserve.viz.figure import Canvas, Figure
from cbserve.viz.strokes import DASHES, MARKERS

RIGHT = 190  # pixels for the names of the curves
SMALLEST_WIDTH = 560


@dataclass(frozen=True)
class Mark:
    """One run on a curve."""

    x: float
    y: float
    label: str  # its rate
    hover: str
    is_kept: bool  # all limits: drawn filled


@dataclass(frozen=True)
class Curve:
    """The runs of one setting, in order of their rate. The first curve of a frontier is the one in focus."""

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class InFlight:
    """The strip under the frontier: requests in flight at each point of the first curve, with named bounds."""

    values: Sequence[float]
    bounds: Sequence[tuple[float, str]]  # such as the batch cap and the critical batch


@dataclass(frozen=True)
class Frontier(Figure):
    """A figure that knows where its points are: for each curve, for each point, (x, y) in pixels."""

    places: Sequence[Sequence[tuple[float, float]]] = ()
    size: tuple[int, int] = (0, 0)


def frontier(
    curves: Sequence[Curve],
    *,
    title: str,
    x_name: str,
    y_name: str,
    caption: str,
    table: tuple[Sequence[str], Sequence[Sequence[object]]],
    limit: tuple[float, str] | None = None,
    chosen: tuple[int, int] | None = None,
    large: tuple[str, Sequence[str]] | None = None,
    in_flight: InFlight | None = None,
    width: int = 880,
    height: int = 300,
) -> Frontier:
    """Draw curves of throughput (up) against latency (right, log scale); up and left is better.

    Args:
        limit: (x value, text): beyond it the x axis breaks what was promised.
        chosen: (curve, point) that is ringed.
        large: the number that matters and what it measures.
        table: (header, rows) of the data.

    Raises:
        FigureError: no point can be drawn, or a latency is not above 0.
    """
    if width < SMALLEST_WIDTH:
        raise FigureError(f"width={width!r}: must be at least {SMALLEST_WIDTH} pixels")
    curves = [Curve(c.name, [m for m in c.marks if math.isfinite(m.x) and math.isfinite(m.y)]) for c in curves]
    xs = [mark.x for curve in curves for mark in curve.marks] + ([limit[0]] if limit else [])
    y_scale_ends = extent([mark.y for curve in curves for mark in curve.marks], log=False, from_zero=True)
    low, high = extent(xs, log=True)
    canvas = Canvas(width)
    top = heading(canvas, title) + 44
    bottom = top + height
    y_scale = Scale(*y_scale_ends, bottom, top + 8)
    left = 26 + max(style.text_width(style.number(v), 12) for v in y_scale.ticks(48))
    right = width - RIGHT
    x_scale = Scale(low / 1.15, high * 1.15, left, right, log=True)
    if limit:
        edge = min(max(x_scale(limit[0]), left), right)
        canvas.rect(edge, top, right - edge, bottom - top, "track", f"{limit[1]}: broken here")
    draw_y(canvas, y_scale, left, right, y_name)
    last = draw_x(canvas, x_scale, top, bottom, x_name)
    places = [[(x_scale(m.x), y_scale(m.y)) for m in curve.marks] for curve in curves]
    if limit:
        canvas.line(edge, top, edge, bottom, "e", stroke_dasharray="6 4")
    for index in reversed(range(len(curves))):  # the first one lies on top
        _curve(canvas, index, curves[index], places[index])
    if chosen and places[chosen[0]]:
        x, y = places[chosen[0]][min(chosen[1], len(places[chosen[0]]) - 1)]
        canvas.add("circle", "e", cx=x, cy=y, r=10)
    _labels(canvas, curves, places, (left, right, top, bottom), (edge, limit[1]) if limit else None)
    _names(canvas, curves, places, right, top + (90 if large else 14), bottom)
    if large:
        y = top + 22
        canvas.text(right + 14, y, large[0], "n")
        for line in [part for text in large[1] for part in style.wrap(text, RIGHT - 24, 12)]:
            y += 16
            canvas.text(right + 14, y, line, "a")
    y = last
    if in_flight and curves and curves[0].marks:
        y = _strip(canvas, in_flight, curves[0], y + 34, left, right, chosen[1] if chosen and not chosen[0] else None)
    desc = " ".join(_spoken(curve, x_name, y_name) for curve in curves if curve.marks)
    svg = canvas.svg(y + 16, title, desc)
    return Frontier(svg, title, desc, caption, table, places, (width, round(y + 16)))


def _spoken(curve: Curve, x_name: str, y_name: str) -> str:
    points = "; ".join(f"{style.number(m.y)} at {style.number(m.x)} with {m.label}" for m in curve.marks)
    return f"{curve.name}, {y_name} at {x_name}: {points}."


def _curve(canvas: Canvas, index: int, curve: Curve, places: Sequence[tuple[float, float]]) -> None:
    colour, wide = style.colour(index), 3 if index == 0 else 1.8
    if len(places) > 1:
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = {"stroke_dasharray": DASHES[index % len(DASHES)]}
        canvas.add("path", "", curve.name, d=d, fill="none", stroke=colour, stroke_width=wide, **dash)
    for mark, (x, y) in zip(curve.marks, places, strict=True):
        shape = f"M{x:.1f} {y:.1f}{MARKERS[index % len(MARKERS)]}"
        fill = colour if mark.is_kept else "var(--bg)"
        canvas.add("path", "", mark.hover, d=shape, fill=fill, stroke=colour, stroke_width=2)


def _labels(
    canvas: Canvas, curves: Sequence[Curve], places: Sequence[Sequence[tuple[float, float]]],
    area: tuple[float, float, float, float], limit: tuple[float, str] | None,
) -> None:  # fmt: skip
    """What the limit is, and the rates of the first curve beside its points, where they cover the least."""
    left, right, top, bottom = area
    taken = [at for line in places for at in along(line)] + [at for line in places for at in line for _ in range(9)]

    def put(text: str, spots: Sequence[tuple[float, float]]) -> None:
        wide = style.text_width(text, 12)
        inside = [s for s in spots if left < s[0] < right - wide and top + 12 < s[1] < bottom - 2]
        x, y = free_place(text, inside or spots[:1], taken)
        canvas.text(x, y, text, "b halo")
        taken.extend((x + dx, y - dy) for dx in range(0, int(wide) + 1, 4) for dy in (0, 5, 10) for _ in (0, 1))

    if limit:
        edge, wide = limit[0], style.text_width(limit[1], 12)
        put(limit[1], [(x, y) for y in (bottom - 8, top + 18) for x in (edge + 7, edge - wide - 7)])
    for mark, (x, y) in zip(curves[0].marks, places[0], strict=True) if curves else ():
        wide = style.text_width(mark.label, 12)
        put(mark.label, [(x + 12, y + 16), (x - wide - 12, y - 8), (x - wide / 2, y - 15), (x - wide / 2, y + 25),
                         (x + 14, y - 8), (x - wide - 14, y + 16)])  # fmt: skip


def _names(
    canvas: Canvas, curves: Sequence[Curve], places: Sequence[Sequence[tuple[float, float]]], right: float, top: float,
    bottom: float,
) -> None:  # fmt: skip
    """The name of each curve beside its last point, with a line that leads there."""
    drawn = [(i, curve, line[-1]) for i, (curve, line) in enumerate(zip(curves, places, strict=True)) if line]
    texts = [style.wrap(curve.name, RIGHT - 44, 12, bold=True) for _, curve, _ in drawn]
    apart = 16.0 * max(map(len, texts), default=1) + 4
    spots = spread([y for *_, (_, y) in drawn], apart, top, bottom - apart + 8)
    for (index, _, (x, y)), lines, spot in zip(drawn, texts, spots, strict=True):
        canvas.line(x + 7, y, right + 8, spot, "x", stroke_opacity=0.5)
        shape = f"M{right + 16:.1f} {spot:.1f}{MARKERS[index % len(MARKERS)]}"
        canvas.add("path", "", d=shape, fill=style.colour(index), stroke=style.colour(index), stroke_width=2)
        for k, line in enumerate(lines):
            canvas.text(right + 28, spot + 4.3 + 15 * k, line, "b", style=f"font-weight:{400 if index else 700}")


def _strip(
    canvas: Canvas, strip: InFlight, curve: Curve, y: float, left: float, right: float, chosen: int | None
) -> float:
    """How many requests are in flight at each point, on one line with the bounds. Returns the last baseline."""
    pairs = [(v, m) for v, m in zip(strip.values, curve.marks, strict=True) if math.isfinite(v) and v > 0]
    values = [v for v, _ in pairs] + [v for v, _ in strip.bounds]
    scale = Scale(min(values) / 1.3, max(values) * 1.3, left, right, log=True)
    canvas.text(16, y, "Requests in flight at each point (Little's law: answers a second × mean E2E)", "h")
    line_y = y + 74
    reach = -math.inf
    for number, (value, name) in enumerate(sorted(strip.bounds)):
        x, wide = scale(value), style.text_width(name, 12)
        at = min(max(x - wide / 2, left), canvas.width - 16 - wide)
        lower = number % 2 == 1 and at < reach + 10  # two that are close stand above each other
        canvas.line(x, y + (38 if lower else 22), x, line_y, "e", stroke_dasharray="5 3")
        canvas.text(at, y + (35 if lower else 19), name, "b halo")
        reach = at + wide
    last = draw_x(canvas, scale, line_y, line_y, "requests in flight")
    reach = -math.inf
    for index, (value, mark) in enumerate(pairs):
        x = scale(value)
        shape, text = f"M{x:.1f} {line_y:.1f}{MARKERS[0]}", mark.label
        hover = f"{mark.label}: {style.number(value)} in flight"
        fill = style.colour(0) if mark.is_kept else "var(--bg)"
        canvas.add("path", "", hover, d=shape, fill=fill, stroke=style.colour(0), stroke_width=2)
        if index == chosen:
            canvas.add("circle", "e", cx=x, cy=line_y, r=10)
        half = style.text_width(text, 12) / 2
        if x - half > reach + 8:
            canvas.text(x, line_y - 14, text, "b halo", "middle")
            reach = x + half
    return last
