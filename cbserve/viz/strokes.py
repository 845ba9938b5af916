"""How a series is told apart without its colour: dashes and markers."""

from __future__ import annotations

from collections.abc import Sequence

from cbserve.viz import style
from cbserve.viz.figure import Canvas

MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", "m-4 -4h8v8h-8z", "m0 -5l5 9h-10z", "m0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
    "m0 5l5 -9h-10z",
)  # fmt: skip
DASHES = ("", "8 4", "3 3", "10 3 3 3", "1 4")


def stroke(canvas: Canvas, index: int, name: str, points: Sequence[tuple[float, float, float, float]]) -> None:
    """The line of series `index` through `points`, each (x, y in pixels, x, y in words), with some 24 markers."""
    colour = style.colour(index)
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, *_ in points)
    more = {"stroke_dasharray": DASHES[index % len(DASHES)]}
    canvas.add("path", "", name, d=d, fill="none", stroke=colour, stroke_width=2.5, stroke_linejoin="round", **more)
    every = max(1, len(points) // 24)
    for k in sorted({*range(0, len(points), every), len(points) - 1}):
        px, py, x, y = points[k]
        shape = f"M{px:.1f} {py:.1f}{MARKERS[index % len(MARKERS)]}"
        canvas.add("path", "dot", f"{name}: {style.number(y)} at {style.number(x)}", d=shape, fill=colour)
