"""A plot area with a linear or logarithmic scale on each side, round ticks and faint grid lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cbserve.errors import FigureError
from cbserve.viz import style
from cbserve.viz.figure import Canvas


class Scale:
    """Values to pixels.

    Args:
        low, high: ends of the scale, in values.
        start, end: ends of the scale, in pixels (`end` < `start` for a y axis).
        log: logarithmic; both ends must be positive.
    """

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        if log and low <= 0:
            raise FigureError(f"a logarithmic axis cannot show {low!r}: all values must be above 0; take a linear axis")
        if high <= low:
            half = max(0.5, abs(low) / 20)  # one value stands among round ones, not between decimals of itself
            low, high = (low / 2, low * 2) if log else (low - half, low + half)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(value) if self.log else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, pixels_each: float) -> list[float]:
        """Round values, about one each `pixels_each`."""
        count = max(2, int(abs(self.end - self.start) / pixels_each))
        if not self.log:
            return style.ticks(self.low, self.high, count)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in ((1, 2, 5), (1, 3), (1,)):
            values = [m * 10.0**e for e in range(first, last + 1) for m in steps]
            values = [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(values) <= count:
                break
        values = values[:: -(-len(values) // count)] if values else values
        return values if len(values) > 1 else [self.low, self.high]


def extent(values: Iterable[float], log: bool, from_zero: bool = False) -> tuple[float, float]:
    """The ends of a scale that shows all finite `values`: round, and from 0 where that is asked.

    Raises FigureError when there is nothing to draw.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        raise FigureError("nothing to draw: give at least one finite value")
    low, high = min(finite), max(finite)
    if log or low == high == 0:
        return (low, high) if log else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    step = style.ticks(low, high, 5)
    unit = (step[1] - step[0] if len(step) > 1 else 0.0) or abs(high) or 1.0
    return math.floor(low / unit + 1e-9) * unit, math.ceil(high / unit - 1e-9) * unit


def heading(canvas: Canvas, title: str) -> float:
    """The finding, in as many lines as it takes. Returns the last baseline."""
    y = 8.0
    for line in style.wrap(title, canvas.width - 32, 17, bold=True):
        y += 22
        canvas.text(16, y, line, "t")
    return y


def left_of(y_scale: Scale) -> float:
    """Where a plot begins, in pixels: its y axis has room for its labels."""
    return 26 + max(style.text_width(name, 12) for name in style.tick_names(y_scale.ticks(48)))


def draw_x(
    canvas: Canvas, scale: Scale, top: float, bottom: float, name: str, ticks: Sequence[float] | None = None
) -> float:
    """Ticks (round values by default) and name of the x axis. Returns the last baseline."""
    right = -math.inf
    values = ticks or scale.ticks(85)
    for value, text in zip(values, style.tick_names(values), strict=True):
        x, half = scale(value), style.text_width(text, 12) / 2
        canvas.line(x, top, x, bottom, "g")
        at = min(max(x, half), canvas.width - half)
        if at - half > right + 6:
            canvas.text(at, bottom + 17, text, "a", "middle")
            right = at + half
    canvas.line(scale.start, bottom, scale.end, bottom, "x")
    canvas.text(scale.start, bottom + 36, f"{name}{' (log scale)' if scale.log else ''} →", "a")
    return bottom + 36


def draw_y(canvas: Canvas, scale: Scale, left: float, right: float, name: str) -> None:
    """Ticks of the y axis, its name above them."""
    values = scale.ticks(48)
    for value, text in zip(values, style.tick_names(values), strict=True):
        y = scale(value)
        canvas.line(left, y, right, y, "g")
        canvas.text(left - 8, y + 4.3, text, "a", "end")
    canvas.text(16, scale.end - 16, f"↑ {name}{' (log scale)' if scale.log else ''}", "a")


def along(points: Sequence[tuple[float, float]], apart: float = 4.0) -> list[tuple[float, float]]:
    """Places on the line through `points`, at most `apart` pixels from each other."""
    found = list(points[:1])
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        count = max(1, math.ceil(math.hypot(x1 - x0, y1 - y0) / apart))
        found += [(x0 + (x1 - x0) * k / count, y0 + (y1 - y0) * k / count) for k in range(1, count + 1)]
    return found


def free_place(
    text: str, places: Iterable[tuple[float, float]], taken: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Of `places` (left end and baseline of `text`, 12 px), the first that covers the fewest points of `taken`."""
    wide = style.text_width(text, 12)
    return min(places, key=lambda at: sum(-4 <= x - at[0] <= wide + 4 and -14 <= y - at[1] <= 6 for x, y in taken))


def draw_reference(
    canvas: Canvas, x_scale: Scale, y_scale: Scale, reference: tuple[float, str], taken: Sequence[tuple[float, float]]
) -> None:
    """A dashed line across at a y value, and its text where that covers the fewest points of `taken`."""
    y, text, left, right = y_scale(reference[0]), str(reference[1]), x_scale.start, x_scale.end
    canvas.line(left, y, right, y, "e", stroke_dasharray="6 4")
    wide = style.text_width(text, 12)
    xs = (left + 6, (left + right - wide) / 2, right - wide - 6)
    at = free_place(text, [(x, y + dy) for dy in (-6, 15) if y + dy > y_scale.end for x in xs], taken)
    canvas.text(*at, text, "b halo")


def spoken(name: str, x_name: str, y_name: str, points: Sequence[tuple[float, float]]) -> str:
    """The ends of a line, in words."""
    (x0, y0), (x1, y1) = (map(style.number, points[end]) for end in (0, -1))
    return f"{name}: {y_name} {y0} at {x_name} {x0}, {y1} at {x1}."


def spread(places: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Move places (pixels) as little as it takes to be `apart` from each other, within low..high, order kept."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [0.0] * len(places)
    last = low - apart
    for i in order:
        last = moved[i] = max(places[i], last + apart)
    last = high + apart
    for i in reversed(order):
        last = moved[i] = min(moved[i], last - apart)
    return moved
