"""Bars, lines and histograms in the style of the timeline: a finding as title, direct labels, the data as a table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from cbserve.errors import FigureError
from cbserve.viz import given, style
from cbserve.viz.axes import Scale, along, draw_x, draw_y, extent, free_place, heading, spread
from cbserve.viz.figure import ID, Canvas, Figure

Points = tuple[Sequence[float], Sequence[float]]


def bars(
    labels: Sequence[str],
    series: Sequence[float] | Mapping[str, Sequence[float]],
    *,
    title: str,
    unit: str = "",
    caption: str | None = None,
    horizontal: bool = True,
    width: int = 880,
) -> Figure:
    """Labelled bars with their values.

    Args:
        labels: one for each bar or group of bars.
        series: values, where one that is not finite has no bar; or several series by name ("measured", "predicted"),
            drawn side by side.
        title: the finding.
        unit: printed behind each value; so is the name of a series, where there are several.
        horizontal: False draws columns.

    Raises:
        FigureError: a series has not one value for each label, a value is negative, or there is nothing to draw.
    """
    _frame(title, caption, width)
    labels = given.texts("labels", labels)
    by_name = series if isinstance(series, Mapping) else {"": series}
    named = {str(name): given.numbers(f"series {name!r}" if name else "series", v) for name, v in by_name.items()}
    for name, values in named.items():
        if len(values) != len(labels):
            raise FigureError(f"series {name!r} has {len(values)} values for {len(labels)} labels; give one each")
        if any(value < 0 for value in values):
            raise FigureError(f"series {name!r} has the value {min(values)}: bars start at 0; draw it with lines()")
    _, high = extent([value for values in named.values() for value in values], log=False, from_zero=True)
    canvas = Canvas(width)
    draw = _horizontal if horizontal else _vertical
    height = draw(canvas, heading(canvas, title), labels, named, unit, high)
    header = ["", *(f"{name or 'value'}{f' ({unit})' if unit else ''}" for name in named)]
    rows = [[label, *(values[i] for values in named.values())] for i, label in enumerate(labels)]
    spoken = "; ".join(
        f"{label}: " + ", ".join(_said(v[i], unit, name) for name, v in named.items()) for i, label in enumerate(labels)
    )
    return Figure(canvas.svg(height, title, spoken + "."), title, spoken + ".", caption or f"{title}.", (header, rows))


def _frame(title: object, caption: object, width: object, height: object = 240) -> None:
    given.text("title", title)
    if caption is not None:
        given.text("caption", caption)
    given.pixels("width", width, 240)
    given.pixels("height", height, 200)


def _said(value: float, unit: str, name: str = "") -> str:
    return f"{style.number(value)}{f' {unit}' if unit else ''}{f' {name}' if name else ''}"


def _fill(canvas: Canvas, index: int) -> str:
    look = f"r{index % style.NUM_LOOKS}"
    canvas.defs.setdefault(look, style.pattern(ID + look, index))
    return f"url(#{ID}{look})"


def _horizontal(
    canvas: Canvas, y: float, labels: Sequence[str], named: Mapping[str, Sequence[float]], unit: str, high: float
) -> float:
    left = min(280.0, 24 + max(style.text_width(label, 13) for label in labels))
    said = {name: [_said(v, unit, name if len(named) > 1 else "") for v in values] for name, values in named.items()}
    texts = [text for group in said.values() for text in group]
    scale = Scale(0, high, left, canvas.width - 24 - max(style.text_width(text, 13, bold=True) for text in texts))
    tall = 24 if len(named) == 1 else 18
    y += 18
    top = y
    for i, label in enumerate(labels):
        lines = style.wrap(label, left - 20, 13)  # 4 pixels of slack: float sums must not break a fitting label
        middle = y + tall * len(named) / 2 - (len(lines) - 1) * 8
        for k, line in enumerate(lines):
            canvas.text(left - 8, middle + 4.5 + 16 * k, line, "b", "end", style="font-size:13px")
        for index, (name, values) in enumerate(named.items()):
            hover, end = f"{label}: {_said(values[i], unit, name)}", left
            if math.isfinite(values[i]):
                end = scale(values[i])
                canvas.rect(left, y, end - left, tall - 2, "", hover, fill=_fill(canvas, index), rx=3)
            canvas.text(
                end + 7,
                y + tall / 2 + 3.5,
                said[name][i],
                "b",
                style="font-size:13px;font-weight:600",
            )
            y += tall
        y += max(12, len(lines) * 16 - tall * len(named))
    canvas.line(left, top - 4, left, y - 8, "x")
    return y + 4


def _vertical(
    canvas: Canvas, y: float, labels: Sequence[str], named: Mapping[str, Sequence[float]], unit: str, high: float
) -> float:
    if len(named) > 1:
        x, y = 16.0, y + 26
        for index, name in enumerate(named):
            canvas.rect(x, y - 11, 18, 12, "", fill=_fill(canvas, index), rx=2)
            canvas.text(x + 24, y, name, "b")
            x += 40 + style.text_width(name, 12)
    top, bottom = y + 48, y + 268
    scale = Scale(0, high, bottom, top)
    left = 24 + max(style.text_width(style.number(v), 12) for v in scale.ticks(48))
    draw_y(canvas, scale, left, canvas.width - 16, unit or "value")
    group = (canvas.width - 16 - left) / len(labels)
    wide = min(90.0, group * 0.78 / len(named))
    deepest = 1
    for i, label in enumerate(labels):
        x = left + group * (i + 0.5) - wide * len(named) / 2
        lines = style.wrap(label, group - 6, 12)
        deepest = max(deepest, len(lines))
        for k, line in enumerate(lines):
            canvas.text(left + group * (i + 0.5), bottom + 17 + 15 * k, line, "b", "middle")
        for index, (name, values) in enumerate(named.items()):
            at, text = bottom, style.number(values[i])
            hover = f"{label}: {_said(values[i], unit, name)}"
            if math.isfinite(values[i]):
                at = scale(values[i])
                canvas.rect(x + 1, at, wide - 2, bottom - at, "", hover, fill=_fill(canvas, index), rx=2)
            if style.text_width(text, 12, bold=True) <= wide + 8:
                canvas.text(x + wide / 2, at - 6, text, "b halo", "middle", style="font-weight:600")
            x += wide
    canvas.line(left, bottom, canvas.width - 16, bottom, "x")
    return bottom + 17 + 15 * deepest


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
    """Lines with markers, each named at its end.

    Args:
        series: name -> (x values, y values); values that are not finite leave a gap.
        log_x, log_y: logarithmic axes; all values must be above 0.
        from_zero: a linear y axis begins at 0.
        reference: (y value, text): a dashed line across, for a bound or a claim.

    Raises:
        FigureError: x and y differ in length, a log axis would show a value <= 0, or there is nothing to draw.
    """
    _frame(title, caption, width, height)
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
    bottom = top + height - 120
    every_y = [y for found in points.values() for _, y in found] + ([reference[0]] if reference else [])
    xs_ends = extent([x for found in points.values() for x, _ in found], log=True)
    y_scale = Scale(*extent(every_y, log_y, from_zero), bottom, top, log_y)
    left = 26 + max(style.text_width(style.number(v), 12) for v in y_scale.ticks(48))
    right = width - 24 - min(220.0, max(style.text_width(name, 13, bold=True) for name in points))
    x_scale = Scale(*xs_ends, left, right, log_x)
    draw_y(canvas, y_scale, left, right, y_name)
    own = sorted({x for found in points.values() for x, _ in found})
    last = draw_x(canvas, x_scale, top, bottom, x_name, own if log_x and len(own) <= 10 else None)
    ends = {name: y_scale(found[-1][1]) for name, found in points.items()}
    places = spread(list(ends.values()), 17, top + 4, bottom - 2)
    for index, ((name, found), place) in enumerate(zip(points.items(), places, strict=True)):
        _line(canvas, index, name, [(x_scale(x), y_scale(y), x, y) for x, y in found])
        x, y = x_scale(found[-1][0]), ends[name]
        if x < right - 1 or abs(place - y) > 3:
            canvas.line(x + 6, y, right + 6, place, "x", stroke_opacity=0.5)
        canvas.text(right + 12, place + 4.5, name, "b", style="font-size:13px;font-weight:600")
    if reference:
        y, what = y_scale(reference[0]), str(reference[1])
        canvas.line(left, y, right, y, "e", stroke_dasharray="6 4")
        wide = style.text_width(what, 12)
        xs = (left + 6, (left + right - wide) / 2, right - wide - 6)
        taken = [at for found in points.values() for at in along([(x_scale(a), y_scale(b)) for a, b in found])]
        at = free_place(what, [(x, y + dy) for dy in (-6, 15) if y + dy > top for x in xs], taken)
        canvas.text(*at, what, "b halo")
    rows = [[name, x, y] for name, (xs, ys) in pairs.items() for x, y in zip(xs, ys, strict=True)]
    desc = " ".join(
        f"{name}: {y_name} {style.number(f[0][1])} at {x_name} {style.number(f[0][0])}, "
        f"{style.number(f[-1][1])} at {style.number(f[-1][0])}." for name, f in points.items()
    )  # fmt: skip
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


MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "m-4 -4h8v8h-8z", "m0 -5l5 9h-10z", "m0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
    "m0 5l5 -9h-10z",
)  # fmt: skip
DASHES = ("", "8 4", "3 3", "10 3 3 3", "1 4")


def _line(canvas: Canvas, index: int, name: str, points: Sequence[tuple[float, float, float, float]]) -> None:
    colour = style.colour(index)
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, *_ in points)
    more = {"stroke_dasharray": DASHES[index % len(DASHES)]}
    canvas.add("path", "", name, d=d, fill="none", stroke=colour, stroke_width=2.5, stroke_linejoin="round", **more)
    every = max(1, len(points) // 24)
    for k in sorted({*range(0, len(points), every), len(points) - 1}):
        px, py, x, y = points[k]
        shape = f"M{px:.1f} {py:.1f}{MARKERS[index % len(MARKERS)]}"
        canvas.add("path", "dot", f"{name}: {style.number(y)} at {style.number(x)}", d=shape, fill=colour)


def histogram(
    values: Sequence[float],
    *,
    title: str,
    x_name: str,
    num_bins: int = 30,
    log_x: bool = False,
    expected: Callable[[float], float] | Sequence[float] | None = None,
    expected_name: str = "expected",
    marks: Mapping[str, float] | None = None,
    caption: str | None = None,
    width: int = 880,
    height: int = 320,
) -> Figure:
    """How often values fall into bins of equal width (of equal ratio with `log_x`).

    Args:
        expected: a curve to compare with: a cumulative distribution function, or a second sample (scaled).
        marks: name -> value, drawn as lines down to the axis ("mean", "p99").

    Raises:
        FigureError: nothing to draw, a log axis would show a value <= 0, or a value of a wrong kind.
    """
    _frame(title, caption, width, height)
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
    counts = _counts(finite, edges)
    curve: list[float] = []
    if expected is not None and not callable(expected):
        expected = [v for v in given.numbers("expected", expected) if math.isfinite(v)]
    if callable(expected):
        shares = given.numbers("expected", [expected(edge) for edge in edges])
        if not all(map(math.isfinite, shares)):
            raise FigureError("expected: gives nan or inf within the values' range; give a distribution function")
        curve = [len(finite) * (b - a) for a, b in zip(shares, shares[1:], strict=False)]
    elif expected is not None and len(expected):
        curve = [n * len(finite) / len(expected) for n in _counts(sorted(expected), edges)]
    y_scale = Scale(*extent([*counts, *curve], log=False, from_zero=True), bottom, top)
    draw_y(canvas, y_scale, 60, width - 28, "how many")
    last = draw_x(canvas, x_scale, top, bottom, x_name)
    fill = _fill(canvas, 0)
    for i, count in enumerate(counts):
        a, b, y = x_scale(edges[i]), x_scale(edges[i + 1]), y_scale(count)
        hover = f"{style.number(edges[i])} to {style.number(edges[i + 1])}: {count:,}"
        if count:
            canvas.rect(a + 0.5, y, b - a - 1, bottom - y, "", hover, fill=fill)
    if curve:
        middles = [(x_scale(a) + x_scale(b)) / 2 for a, b in zip(edges, edges[1:], strict=False)]
        _line(canvas, 5, expected_name, [(x, y_scale(c), e, c) for x, c, e in zip(middles, curve, edges, strict=False)])
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
    header = [f"from ({x_name})", "to", "how many", *([expected_name] if curve else [])]
    rows = [[edges[i], edges[i + 1], n, *([curve[i]] if curve else [])] for i, n in enumerate(counts)]
    desc = f"{len(finite):,} values from {style.number(finite[0])} to {style.number(finite[-1])}, in {num_bins} bins."
    desc += "".join(f" {name}: {style.number(value)}." for name, value in (marks or {}).items())
    return Figure(canvas.svg(last + 16, title, desc), title, desc, caption or f"{title}.", (header, rows))


def _counts(ordered: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many lie in each bin; the last one includes its right edge."""
    below = [
        0,
        *(
            bisect_right(ordered, edge) if i == len(edges) - 2 else _below(ordered, edge)
            for i, edge in enumerate(edges[1:])
        ),
    ]
    below[0] = _below(ordered, edges[0])
    return [b - a for a, b in zip(below, below[1:], strict=False)]


def _below(ordered: Sequence[float], edge: float) -> int:
    return bisect_right(ordered, math.nextafter(edge, -math.inf))
