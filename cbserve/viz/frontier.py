"""Throughput against latency: a curve for each setting, a point for each rate, and how many requests are in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbserve.viz import given, style
from cbserve.viz.axes import Scale, along, draw_x, draw_y, extent, free_place, heading, left_of, spread
from cbserve.viz.figure import Canvas, Figure
from cbserve.viz.strokes import DASHES, path, shape

SIDE = 190  # pixels for the names of the curves, in a figure that is wide enough
WITH_SIDE, SMALLEST_WIDTH = 560, 320
Place = tuple[float, float]


@dataclass(frozen=True)
class Mark:
    """One run on a curve."""

    x: float
    y: float
    label: str  # its rate
    hover: str
    is_kept: bool  # all limits: drawn filled
    is_rough: bool = False  # of few requests yet: drawn faint
    in_flight: float = math.nan  # requests in the system on average


@dataclass(frozen=True)
class Curve:
    """The runs of one setting, in order of their rate."""

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Frontier(Figure):
    """A figure that knows where its points are: for each curve, for each point, (x, y) in pixels."""

    places: Sequence[Sequence[Place]] = ()
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
    focus: int = 0,
    chosen: Mark | None = None,
    large: tuple[str, Sequence[str]] | None = None,
    bounds: Sequence[tuple[float, str]] = (),
    width: int = 880,
    height: int = 300,
) -> Frontier:
    """Draw curves of throughput (up) against latency (right, log scale); up and left is better.

    Args:
        curves: marks that are not finite are left out.
        limit: (x value, text): beyond it the x axis breaks what was promised.
        focus: index of the curve that lies on top, with its rates and its own strip of requests in flight.
        chosen: the mark that is ringed, there and in the strip.
        large: the number that matters and what it measures.
        bounds: (requests in flight, name), such as the batch cap and the critical batch; they stand in the strip.
        table: (header, rows) of the data.
        width: pixels; below 560 the names of the curves stand under the plot.

    Raises:
        FigureError: no point can be drawn, or a latency is not above 0.
    """
    given.pixels("width", width, SMALLEST_WIDTH)
    curves = [Curve(c.name, [m for m in c.marks if math.isfinite(m.x) and math.isfinite(m.y)]) for c in curves]
    marks = [mark for curve in curves for mark in curve.marks]
    low, high = extent([mark.x for mark in marks] + ([limit[0]] if limit else []), log=True)
    y_ends = extent([mark.y for mark in marks], log=False, from_zero=True)
    canvas = Canvas(width)
    side = SIDE if width >= WITH_SIDE else 0
    top = heading(canvas, title) + 44
    if large and not side:
        top = _large(canvas, large, 16, top, width - 32) + 40
    above = 14.0  # of the names
    if large:
        above = max(106, 42 + 16 * sum(len(style.wrap(text, SIDE - 24, 12)) for text in large[1]))
    names = [style.wrap(curve.name, SIDE - 44, 12, bold=True) for curve in curves if curve.marks] if side else []
    bottom = top + max(height, above + (16 * max(map(len, names), default=0) + 4) * len(names))
    y_scale = Scale(*y_ends, bottom, top + 8)
    left = left_of(y_scale)
    right = float(width - (side or 28))
    x_scale = Scale(low / 1.15, high * 1.15, left, right, log=True)
    if limit:
        edge = min(max(x_scale(limit[0]), left), right)
        canvas.rect(edge, top, right - edge, bottom - top, "track", f"{limit[1]}: broken here")
    draw_y(canvas, y_scale, left, right, y_name)
    y = draw_x(canvas, x_scale, top, bottom, x_name)
    places = [[(x_scale(m.x), y_scale(m.y)) for m in curve.marks] for curve in curves]
    if limit:
        canvas.line(edge, top, edge, bottom, "e", stroke_dasharray="6 4")
    order = [focus, *(index for index in range(len(curves)) if index != focus)]
    for index in reversed(order):
        _curve(canvas, index, curves[index], places[index], is_thick=index == focus)
    for mark, (px, py) in zip(marks, [place for line in places for place in line], strict=True):
        if mark is chosen:
            canvas.add("circle", "e", cx=px, cy=py, r=10)
    area = left, right, top, bottom
    _labels(canvas, curves[focus], focus, places, area, chosen, (edge, limit[1]) if limit else None)
    if side:
        if large:
            _large(canvas, large, right + 14, top + 22, SIDE - 24)
        _names(canvas, curves, focus, places, right, top + above, bottom)
    else:
        y = _key(canvas, curves, focus, y + 22)
    if bounds and any(mark.in_flight > 0 for mark in curves[focus].marks):
        y = _strip(canvas, bounds, curves[focus], focus, y + 34, (left, right), chosen)
    desc = " ".join(_spoken(curve, x_name, y_name) for curve in curves if curve.marks)
    svg = canvas.svg(y + 16, title, desc)
    return Frontier(svg, title, desc, caption, table, places, (width, round(y + 16)))


def _spoken(curve: Curve, x_name: str, y_name: str) -> str:
    points = "; ".join(f"{style.number(m.y)} at {style.number(m.x)} with {m.label}" for m in curve.marks)
    return f"{curve.name}, {y_name} at {x_name}: {points}."


def _curve(canvas: Canvas, index: int, curve: Curve, places: Sequence[Place], is_thick: bool) -> None:
    if len(places) > 1:
        canvas.add(
            "path", "", curve.name, d=path(places), fill="none", stroke=style.colour(index),
            stroke_width=3 if is_thick else 1.8, stroke_dasharray=DASHES[index % len(DASHES)],
        )  # fmt: skip
    for mark, (x, y) in zip(curve.marks, places, strict=True):
        _mark(canvas, index, mark, x, y, mark.hover)


def _mark(canvas: Canvas, index: int, mark: Mark, x: float, y: float, hover: str) -> None:
    """In the look of curve `index`. A faint one covers the line beneath it all the same."""
    d, colour = shape(index, x, y), style.colour(index)
    faint: dict[str, float | str] = {"fill_opacity": 0.35, "stroke_dasharray": "2 2"} if mark.is_rough else {}
    if mark.is_rough:
        canvas.add("path", "bg", d=d)
    fill = colour if mark.is_kept else "var(--bg)"
    canvas.add("path", "", hover, d=d, fill=fill, stroke=colour, stroke_width=2, **faint)


def _labels(
    canvas: Canvas, curve: Curve, focus: int, places: Sequence[Sequence[Place]],
    area: tuple[float, float, float, float], chosen: Mark | None, limit: tuple[float, str] | None,
) -> None:  # fmt: skip
    """What the limit is, and the rates of the curve in focus beside its points, where they cover the least.

    The chosen one comes first. A rate is left out that would stand on another text, or nearer to another point.
    """
    left, right, top, bottom = area
    taken = [at for line in places for at in along(line)] + [at for line in places for at in line for _ in range(9)]
    texts: list[tuple[float, float, float]] = []  # left end, baseline, width

    def is_free(x: float, y: float, wide: float) -> bool:
        inside = left < x < right - wide and top + 12 < y < bottom - 2
        return inside and all(x > a + w + 4 or x + wide + 4 < a or abs(y - b) > 13 for a, b, w in texts)

    def is_own(x: float, y: float, wide: float, own: Place | None) -> bool:
        middle = x + wide / 2, y - 4
        return own is None or own == min(places[focus], key=lambda place: math.dist(place, middle))

    def put(text: str, spots: Sequence[Place], own: Place | None = None) -> None:
        wide = style.text_width(text, 12)
        free = [spot for spot in spots if is_free(*spot, wide) and is_own(*spot, wide, own)]
        if free:
            x, y = free_place(text, free, taken)
            canvas.text(x, y, text, "b halo")
            texts.append((x, y, wide))

    if limit:
        edge, wide = limit[0], style.text_width(limit[1], 12)
        put(limit[1], [(x, y) for y in (bottom - 8, top + 18) for x in (edge + 7, edge - wide - 7)])
    pairs = list(zip(curve.marks, places[focus], strict=True))
    for mark, (x, y) in sorted(pairs, key=lambda pair: pair[0] is not chosen):
        wide = style.text_width(mark.label, 12)
        put(mark.label, [(x + 12, y + 16), (x - wide - 12, y - 8), (x - wide / 2, y - 15), (x - wide / 2, y + 25),
                         (x + 14, y - 8), (x - wide - 14, y + 16)], None if mark is chosen else (x, y))  # fmt: skip


def _large(canvas: Canvas, large: tuple[str, Sequence[str]], x: float, y: float, wide: float) -> float:
    """The number and what it measures. Returns the last baseline."""
    canvas.text(x, y, large[0], "n")
    for line in [part for text in large[1] for part in style.wrap(text, wide, 12)]:
        y += 16
        canvas.text(x, y, line, "a")
    return y


def _names(
    canvas: Canvas, curves: Sequence[Curve], focus: int, places: Sequence[Sequence[Place]], right: float, top: float,
    bottom: float,
) -> None:  # fmt: skip
    """The name of each curve beside its last point, with a line that leads there."""
    drawn = [(i, curve, line[-1]) for i, (curve, line) in enumerate(zip(curves, places, strict=True)) if line]
    texts = [style.wrap(curve.name, SIDE - 44, 12, bold=True) for _, curve, _ in drawn]
    apart = 16.0 * max(map(len, texts), default=1) + 4
    spots = spread([y for *_, (_, y) in drawn], apart, top, bottom - apart + 8)
    for (index, _, (x, y)), lines, spot in zip(drawn, texts, spots, strict=True):
        canvas.line(x + 7, y, right + 8, spot, "x", stroke_opacity=0.5)
        _name(canvas, index, lines, right + 16, spot, index == focus)


def _key(canvas: Canvas, curves: Sequence[Curve], focus: int, y: float) -> float:
    """The names of the curves, one under the other. Returns the last baseline."""
    for index, curve in enumerate(curves):
        if curve.marks:
            lines = style.wrap(curve.name, canvas.width - 52, 12, bold=True)
            _name(canvas, index, lines, 24, y, index == focus)
            y += 15 * len(lines) + 4
    return y - 15


def _name(canvas: Canvas, index: int, lines: Sequence[str], x: float, y: float, is_bold: bool) -> None:
    colour = style.colour(index)
    canvas.add("path", "", d=shape(index, x, y), fill=colour, stroke=colour, stroke_width=2)
    for k, line in enumerate(lines):
        canvas.text(x + 12, y + 4.3 + 15 * k, line, "b", style=f"font-weight:{700 if is_bold else 400}")


def _strip(
    canvas: Canvas, bounds: Sequence[tuple[float, str]], curve: Curve, focus: int, y: float,
    ends: tuple[float, float], chosen: Mark | None,
) -> float:  # fmt: skip
    """How many requests are in flight at each point, on one line with the bounds. Returns the last baseline."""
    marks = [mark for mark in curve.marks if math.isfinite(mark.in_flight) and mark.in_flight > 0]
    values = [mark.in_flight for mark in marks] + [value for value, _ in bounds]
    scale = Scale(min(values) / 1.3, max(values) * 1.3, *ends, log=True)
    title = f"Requests in flight with {curve.name} (Little's law: answers a second × seconds of each)"
    for line in style.wrap(title, canvas.width - 32, 14, bold=True):
        canvas.text(16, y, line, "h")
        y += 18
    line_y = y + 56
    reach = -math.inf
    spots: list[tuple[float, float, float, str, bool]] = []  # of the line, of its name: from, to; the name, its row
    for number, (value, name) in enumerate(sorted(bounds)):
        x, wide = scale(value), style.text_width(name, 12)
        most = canvas.width - 16 - wide
        at = min(max(x - wide / 2, ends[0]), most)
        lower = number % 2 == 1 and at < reach + 10  # two that are close stand above each other
        if lower:  # beside the line of the one above, where there is room
            at = min(max(at, spots[-1][0] + 6), most)
        spots.append((x, at, at + wide, name, lower))
        reach = at + wide
    for x, at, _, name, lower in spots:
        below = lower or any(low and left < x < right for _, left, right, _, low in spots)
        canvas.line(x, y + (20 if below else 4), x, line_y, "e", stroke_dasharray="5 3")
        canvas.text(at, y + (17 if lower else 1), name, "b halo")
    last = draw_x(canvas, scale, line_y, line_y, "requests in flight")
    taken = [(scale(value), scale(value)) for value, _ in bounds]
    for mark in sorted(marks, key=lambda mark: mark is not chosen):  # the chosen one has its rate in any case
        x, half = scale(mark.in_flight), style.text_width(mark.label, 12) / 2
        if mark is chosen:
            canvas.add("circle", "e", cx=x, cy=line_y, r=10)
        if mark is chosen or all(x - half > b + 8 or x + half < a - 8 for a, b in taken):
            canvas.text(x, line_y - 14, mark.label, "b halo", "middle")
            taken.append((x - half, x + half))
    for mark in marks:
        _mark(
            canvas,
            focus,
            mark,
            scale(mark.in_flight),
            line_y,
            f"{mark.label}: {style.number(mark.in_flight)} in flight",
        )
    return last
