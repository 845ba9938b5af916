"""Labelled bars with their values, lying or standing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cbserve.errors import FigureError
from cbserve.viz import given, style
from cbserve.viz.axes import Scale, draw_y, extent, heading
from cbserve.viz.figure import Canvas, Figure


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
    given.frame(title, caption, width)
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


def _said(value: float, unit: str, name: str = "") -> str:
    return f"{style.number(value)}{f' {unit}' if unit else ''}{f' {name}' if name else ''}"


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
                canvas.rect(left, y, end - left, tall - 2, "", hover, fill=canvas.look(index), rx=3)
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
            canvas.rect(x, y - 11, 18, 12, "", fill=canvas.look(index), rx=2)
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
                canvas.rect(x + 1, at, wide - 2, bottom - at, "", hover, fill=canvas.look(index), rx=2)
            if style.text_width(text, 12, bold=True) <= wide + 8:
                canvas.text(x + wide / 2, at - 6, text, "b halo", "middle", style="font-weight:600")
            x += wide
    canvas.line(left, bottom, canvas.width - 16, bottom, "x")
    return bottom + 17 + 15 * deepest
