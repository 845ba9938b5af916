"""How a series is told apart without its colour: dashes and markers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbserve.viz import style
from cbserve.viz.figure import Canvas

MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "m-4 -4h8v8h-8z", "m0 -5l5 9h-10z", "m0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
    "m0 5l5 -9h-10z",
)  # fmt: skip
DASHES = ("", "8 4", "3 3", "10 3 3 3", "1 4")


def path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def shape(index: int, x: float, y: float) -> str:
    return f"M{x:.1f} {y:.1f}{MARKERS[index % len(MARKERS)]}"


def line(canvas: Canvas, index: int, points: Sequence[tuple[float, float]], hover: str = "") -> None:
    canvas.add(
        "path", "", hover, d=path(points), fill="none", stroke=style.colour(index), stroke_width=2.5,
        stroke_linejoin="round", stroke_dasharray=DASHES[index % len(DASHES)],
    )  # fmt: skip


def marker(canvas: Canvas, index: int, x: float, y: float, hover: str = "") -> None:
    canvas.add("path", "dot", hover, d=shape(index, x, y), fill=style.colour(index))


def stroke(canvas: Canvas, index: int, name: str, points: Sequence[tuple[float, float, float, float]]) -> None:
    """The line of series `index` through `points`, each (x, y in pixels, x, y in words), with some 24 markers."""
    line(canvas, index, [at[:2] for at in points], name)
    every = max(1, len(points) // 24)
    for k in sorted({*range(0, len(points), every), len(points) - 1}):
        px, py, x, y = points[k]
        marker(canvas, index, px, py, f"{name}: {style.number(y)} at {style.number(x)}")


SAMPLE = 28  # pixels of a line beside its name


def sample(canvas: Canvas, index: int, x: float, y: float, has_line: bool, has_marker: bool = True) -> None:
    """How series `index` looks, from `x` rightwards, to stand before its name."""
    if has_line:
        line(canvas, index, [(x, y), (x + SAMPLE, y)])
    if has_marker:
        marker(canvas, index, x + SAMPLE / 2, y)


def key(canvas: Canvas, y: float, entries: Sequence[tuple[str, Callable[[float, float], None]]]) -> float:
    """Names behind what draws their sample (at x, y), in as many rows as it takes. Returns the last baseline."""
    x = 16.0
    for name, draw in entries:
        wide = SAMPLE + 8 + style.text_width(name, 12)
        if x > 16 and x + wide > canvas.width - 8:
            x, y = 16.0, y + 20
        draw(x, y - 4)
        canvas.text(x + SAMPLE + 8, y, name, "b")
        x += wide + 18
    return y
