"""How often values fall into bins, beside what was expected."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from cbserve.errors import FigureError
from cbserve.viz import given, style
from cbserve.viz.axes import Scale, along, draw_x, draw_y, extent, free_place, heading
from cbserve.viz.figure import Canvas, Figure
from cbserve.viz.strokes import stroke


def histogram(
    values: Sequence[float],
    *,
    title: str,
    x_name: str,
    num_bins: int = 30,
    log_x: bool = False,
    percent: bool = False,
    expected: Callable[[float], float] | Sequence[float] | None = None,
    expected_name: str = "expected",
    marks: Mapping[str, float] | None = None,
    caption: str | None = None,
    width: int = 880,
    height: int = 320,
) -> Figure:
    """How often values fall into bins of equal width (of equal ratio with `log_x`).

    Args:
        percent: show shares of all values, not how many: for a sample.
        expected: a curve to compare with: a cumulative distribution function, or a second sample (scaled).
        marks: name -> value, drawn as lines down to the axis ("mean", "p99").

    Raises:
        FigureError: nothing to draw, a log axis would show a value <= 0, or a value of a wrong kind.
    """
    given.frame(title, caption, width, height)
    given.integer("num_bins", num_bins, least=1)
    if num_bins > width:
        raise FigureError(f"num_bins={num_bins}: at most one a pixel, {width}")
    finite = sorted(v for v in given.numbers("values", values) if math.isfinite(v))
    if marks is not None:
        given.mapping("marks", marks, "name -> value")
        for name, value in marks.items():
            given.finite(f"mark {name!r}", value)
    canvas = Canvas(width)
    low, high = extent([*finite, *(marks or {}).values()] if finite else [], log=log_x)
    top = heading(canvas, title) + 44 + 16 * len(marks or {})
    bottom = top + height - 120
    x_scale = Scale(low, high, 60, width - 28, log_x)
    low, high = x_scale.low, x_scale.high
    edges = [
        low * (high / low) ** (i / num_bins) if log_x else low + (high - low) * i / num_bins
        for i in range(num_bins + 1)
    ]
    edges[-1] = high
    each, y_name = (100 / len(finite), "share (%)") if percent else (1, "how many")
    counts = [each * count for count in _counts(finite, edges)]
    curve: list[float] = []
    if expected is not None and not callable(expected):
        expected = [v for v in given.numbers("expected", expected) if math.isfinite(v)]
    if callable(expected):
        shares = given.numbers("expected", [expected(edge) for edge in edges])
        if not all(map(math.isfinite, shares)):
            raise FigureError("expected: gives nan or inf within the values' range; give a distribution function")
        curve = [each * len(finite) * (b - a) for a, b in pairwise(shares)]
    elif expected is not None and len(expected):
        curve = [each * n * len(finite) / len(expected) for n in _counts(sorted(expected), edges)]
    y_scale = Scale(*extent([*counts, *curve], log=False, from_zero=True), bottom, top)
    draw_y(canvas, y_scale, 60, width - 28, y_name)
    last = draw_x(canvas, x_scale, top, bottom, x_name)
    fill = canvas.look(0)
    for i, count in enumerate(counts):
        a, b, y = x_scale(edges[i]), x_scale(edges[i + 1]), y_scale(count)
        much = f"{count:.3g} %" if percent else f"{count:,}"
        hover = f"{style.number(edges[i])} to {style.number(edges[i + 1])}: {much}"
        if count:
            canvas.rect(a + 0.5, y, b - a - 1, bottom - y, "", hover, fill=fill)
    if curve:
        middles = [(x_scale(a) + x_scale(b)) / 2 for a, b in pairwise(edges)]
        points = [(x, y_scale(c), e, c) for x, c, e in zip(middles, curve, edges, strict=False)]
        stroke(canvas, 5, expected_name, points)
    for k, (name, value) in enumerate(sorted((marks or {}).items(), key=lambda item: item[1])):
        x, y = x_scale(value), top - 8 - 16 * (len(marks or {}) - 1 - k)
        text = f"{name} {style.number(value)}"
        canvas.add(
            "path",
            "e",
            f"{name}: {style.number(value)}",
            d=f"M{x:.1f} {y - 8:.1f}V{bottom:.1f}",
            stroke_dasharray="5 3",
        )
        on_left = x + style.text_width(text, 13, bold=True) + 6 > width - 10
        canvas.text(
            x + (-6 if on_left else 6),
            y,
            text,
            "b halo",
            "end" if on_left else "",
            style="font-size:13px;font-weight:600",
        )
    if curve:
        line = [(x, y_scale(c)) for x, c in zip(middles, curve, strict=True)]
        tops = [(x, y_scale(n)) for x, n in zip(middles, counts, strict=True)]
        taken = along(line) + [at for x, y in tops for at in along([(x, y), (x, bottom)]) if y < bottom - 1]
        taken += [at for v in (marks or {}).values() for at in along([(x_scale(v), top), (x_scale(v), bottom)])]
        room = width - 20 - style.text_width(expected_name, 12)
        places = [(x + 9, max(y - 8, top + 10)) for x, y in line if x + 9 <= room]
        canvas.text(*free_place(expected_name, places or [(room, top + 10)], taken), expected_name, "b halo")
    header = [f"from ({x_name})", "to", y_name, *([expected_name] if curve else [])]
    rows = [[edges[i], edges[i + 1], n, *([curve[i]] if curve else [])] for i, n in enumerate(counts)]
    desc = f"{len(finite):,} values from {style.number(finite[0])} to {style.number(finite[-1])}, in {num_bins} bins."
    desc += "".join(f" {name}: {style.number(value)}." for name, value in (marks or {}).items())
    return Figure(canvas.svg(last + 16, title, desc), title, desc, caption or f"{title}.", (header, rows))


def _counts(ordered: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many lie in each bin; the last one includes its right edge."""
    below = [*(bisect_left(ordered, edge) for edge in edges[:-1]), bisect_right(ordered, edges[-1])]
    return [b - a for a, b in pairwise(below)]
