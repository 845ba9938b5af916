"""Curves whose marks say what they are, over the runs that are on none of them; bands up to the highest values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cbserve.viz import given, strokes, style
from cbserve.viz.axes import Scale, along, draw_reference, draw_x, draw_y, extent, heading, left_of, spoken
from cbserve.viz.figure import Canvas, Figure


@dataclass(frozen=True)
class Mark:
    """A point and what it is, shown when the pointer rests on it; none is drawn without words."""

    x: float
    y: float
    hover: str = ""


@dataclass(frozen=True)
class Curve:
    """Marks from left to right. `tops`: for each of them, up to where a lighter band reaches."""

    name: str
    marks: Sequence[Mark]
    tops: Sequence[float] = ()


def curves(
    drawn: Sequence[Curve],
    *,
    title: str,
    x_name: str,
    y_name: str,
    caption: str,
    table: tuple[Sequence[str], Sequence[Sequence[object]]],
    cloud: tuple[str, Sequence[Mark]] = ("", ()),
    under: tuple[str, Sequence[tuple[float, float]]] = ("", ()),
    reference: tuple[float, str] | None = None,
    log_y: bool = False,
    width: int = 880,
    height: int = 220,
) -> Figure:
    """Draw curves, named by a key above them.

    Args:
        table: (header, rows) of the data.
        cloud: (name, marks): grey, behind the curves.
        under: (name, points): a broad pale line beneath them, a frontier for instance; none of fewer than two points.
        reference: (y value, text): a dashed line across.
        log_y: all values must be above 0.
        height: pixels of the plot alone.

    Raises:
        FigureError: there is nothing to draw, or a log axis would show a value <= 0.
    """
    given.frame(title, caption, width, height)
    marks = [*cloud[1], *(mark for curve in drawn for mark in curve.marks)]
    ys = [mark.y for mark in marks] + [top for curve in drawn for top in curve.tops] + [y for _, y in under[1]]
    canvas = Canvas(width)
    top = _key(canvas, heading(canvas, title) + 26, drawn, cloud, under) + 40
    bottom = top + height
    low, high = extent([*ys, *([reference[0]] if reference else [])], log_y, from_zero=True)
    y_scale = Scale(*((low / 1.2, high * 1.2) if log_y else (low, high)), bottom, top + 8, log_y)
    left = left_of(y_scale)
    right = width - 24
    low, high = extent([mark.x for mark in marks], log=True)
    room = (high - low) / 50  # no mark stands on the edge
    x_scale = Scale(low - room, high + room, left, right)
    draw_y(canvas, y_scale, left, right, y_name)
    last = draw_x(canvas, x_scale, top, bottom, x_name)
    for index, curve in enumerate(drawn):
        _band(canvas, index, curve, x_scale, y_scale)
    if len(under[1]) > 1:
        _broad(canvas, [(x_scale(x), y_scale(y)) for x, y in under[1]], under[0])
    for mark in cloud[1]:
        canvas.add("circle", "m", mark.hover, cx=x_scale(mark.x), cy=y_scale(mark.y), r=4, fill_opacity=0.75)
    places = [[(x_scale(mark.x), y_scale(mark.y)) for mark in curve.marks] for curve in drawn]
    for index, (curve, line) in enumerate(zip(drawn, places, strict=True)):
        if len(line) > 1:
            strokes.line(canvas, index, line, curve.name)
    for index, (curve, line) in enumerate(zip(drawn, places, strict=True)):
        for mark, (x, y) in zip(curve.marks, line, strict=True):
            if mark.hover:
                strokes.marker(canvas, index, x, y, mark.hover)
    if reference:
        taken = [at for line in places for at in along(line)] + [(x_scale(m.x), y_scale(m.y)) for m in cloud[1]]
        draw_reference(canvas, x_scale, y_scale, reference, taken)
    said = [spoken(c.name, x_name, y_name, [(mark.x, mark.y) for mark in c.marks]) for c in drawn]
    desc = " ".join(said) or f"{len(cloud[1])} marks."
    return Figure(canvas.svg(last + 16, title, desc), title, desc, caption, table)


def _band(canvas: Canvas, index: int, curve: Curve, x_scale: Scale, y_scale: Scale) -> None:
    if curve.tops:
        upper = [(x_scale(mark.x), y_scale(top)) for mark, top in zip(curve.marks, curve.tops, strict=True)]
        lower = [(x_scale(mark.x), y_scale(mark.y)) for mark in curve.marks]
        colour = style.colour(index)
        canvas.add("path", "", d=strokes.path([*upper, *lower[::-1]]) + "Z", fill=colour, fill_opacity=0.4)


def _broad(canvas: Canvas, points: Sequence[tuple[float, float]], hover: str = "") -> None:
    """Broader than the curves that it may run along, so that both are seen."""
    look = "stroke-width:11;stroke-opacity:.4;stroke-linejoin:round"  # the class has the colour of the theme
    canvas.add("path", "x", hover, d=strokes.path(points), style=look)


def _key(
    canvas: Canvas, y: float, drawn: Sequence[Curve], cloud: tuple[str, Sequence[Mark]],
    under: tuple[str, Sequence[tuple[float, float]]],
) -> float:  # fmt: skip
    """What each line and mark is. Returns the last baseline."""
    entries: list[tuple[str, Callable[[float, float], None]]] = []
    for index, curve in enumerate(drawn):
        has = {"has_line": len(curve.marks) > 1, "has_marker": any(mark.hover for mark in curve.marks)}
        entries.append((curve.name, partial(strokes.sample, canvas, index, **has)))
    if len(under[1]) > 1:
        entries.append((under[0], lambda x, y: _broad(canvas, [(x, y), (x + strokes.SAMPLE, y)])))
    if cloud[1]:
        entries.append((cloud[0], lambda x, y: canvas.add("circle", "m", cx=x + 14, cy=y, r=4, fill_opacity=0.75)))
    return strokes.key(canvas, y, entries)
