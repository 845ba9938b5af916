"""Lines with markers, each named at its end or in a key, on linear or logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from cbserve.errors import FigureError
from cbserve.viz import given, style
from cbserve.viz.axes import Scale, along, draw_reference, draw_x, draw_y, extent, heading, left_of, spoken, spread
from cbserve.viz.figure import Canvas, Figure
from cbserve.viz.strokes import SAMPLE, key, sample, stroke

WITH_ASIDE, MOST_ASIDE = 560, 0.3  # pixels of a figure with names at the ends of lines; their most, a share of it

Points = tuple[Sequence[float], Sequence[float]]


def lines(
    series: Mapping[str, Points],
    *,
    title: str,
    x_name: str,
    y_name: str,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = True,
    reference: tuple[float, str] | None = None,
    caption: str | None = None,
    width: int = 880,
    height: int = 340,
) -> Figure:
    """Lines with markers, each named at its end; in a key above where the names would take too much of the width.

    Args:
        series: name -> (x values, y values); values that are not finite leave a gap.
        log_x, log_y: logarithmic axes; all values must be above 0.
        from_zero: a linear y axis begins at 0.
        reference: (y value, text): a dashed line across, for a bound or a claim.

    Raises:
        FigureError: x and y differ in length, a log axis would show a value <= 0, or there is nothing to draw.
    """
    given.frame(title, caption, width, height)
    given.mapping("series", series, "name -> (x values, y values)")
    pairs = {str(name): _pair(name, xy) for name, xy in series.items()}
    if reference is not None:
        if not isinstance(reference, tuple | list) or len(reference) != 2:
            raise FigureError(f"reference={reference!r}: must be (y value, text)")
        given.finite("reference", reference[0])
    points = {name: [p for p in zip(*xy, strict=True) if all(map(math.isfinite, p))] for name, xy in pairs.items()}
    points = {name: found for name, found in points.items() if found}
    canvas = Canvas(width)
    top = heading(canvas, title) + 44
    aside = max((style.text_width(name, 13, bold=True) for name in points), default=0.0)
    if is_aside := width >= WITH_ASIDE and aside <= MOST_ASIDE * width:
        aside += SAMPLE + 6
    else:
        looks = [(name, partial(sample, canvas, k, has_line=len(p) > 1)) for k, (name, p) in enumerate(points.items())]
        top, aside = key(canvas, top - 18, looks) + 40, 0.0
    bottom = top + height - 120
    every_y = [y for found in points.values() for _, y in found] + ([reference[0]] if reference else [])
    xs_ends = extent([x for found in points.values() for x, _ in found], log=True)
    y_scale = Scale(*extent(every_y, log_y, from_zero), bottom, top, log_y)
    left = left_of(y_scale)
    right = width - 24 - aside
    x_scale = Scale(*xs_ends, left, right, log_x)
    draw_y(canvas, y_scale, left, right, y_name)
    own = sorted({x for found in points.values() for x, _ in found})
    last = draw_x(canvas, x_scale, top, bottom, x_name, own if log_x and len(own) <= 10 else None)
    ends = {name: y_scale(found[-1][1]) for name, found in points.items()}
    places = spread(list(ends.values()), 17, top + 4, bottom - 2)
    for index, ((name, found), place) in enumerate(zip(points.items(), places, strict=True)):
        stroke(canvas, index, name, [(x_scale(x), y_scale(y), x, y) for x, y in found])
        if not is_aside:
            continue
        x, y = x_scale(found[-1][0]), ends[name]
        if x < right - 1 or abs(place - y) > 3:
            canvas.line(x + 6, y, right + 6, place, "x", stroke_opacity=0.5)
        sample(canvas, index, right + 8, place, has_line=len(found) > 1)
        canvas.text(right + 14 + SAMPLE, place + 4.5, name, "b", style="font-size:13px;font-weight:600")
    if reference:
        taken = [at for found in points.values() for at in along([(x_scale(a), y_scale(b)) for a, b in found])]
        draw_reference(canvas, x_scale, y_scale, reference, taken)
    rows = [[name, x, y] for name, (xs, ys) in pairs.items() for x, y in zip(xs, ys, strict=True)]
    desc = " ".join(spoken(name, x_name, y_name, found) for name, found in points.items())
    return Figure(
        canvas.svg(last + 16, title, desc), title, desc, caption or f"{title}.", (["series", x_name, y_name], rows)
    )


def _pair(name: object, xy: object) -> tuple[list[float], list[float]]:
    if not hasattr(xy, "__len__") or isinstance(xy, str | Mapping) or len(xy) != 2:
        raise FigureError(f"series {name!r} is {xy!r}; give (x values, y values)")
    xs, ys = (given.numbers(f"series {name!r}", values) for values in xy)  # type: ignore[attr-defined]
    if len(xs) != len(ys):
        raise FigureError(f"series {name!r} has {len(xs)} x values and {len(ys)} y values; give pairs")
    return xs, ys
