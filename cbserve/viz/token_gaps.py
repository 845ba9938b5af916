"""Tokens on the clock: a row for each way of serving, a tick for each token, and the longest gap between two marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbserve.errors import FigureError
from cbserve.viz import style
from cbserve.viz.axes import Scale, draw_x, heading
from cbserve.viz.figure import Canvas, Figure

WITH_SIDES = 560  # pixels: in a narrower figure names and numbers stand above the ticks
ROW, NARROW_ROW = 40, 56
LEFT, GAP, MARK, FIRST = 24, 208, 124, 100  # of columns, from the left edge and the right one


@dataclass(frozen=True)
class TokenRow:
    """When tokens came, in seconds, in order; `first_token_s` is that of the request that was in their way."""

    name: str
    tokens_s: Sequence[float]
    first_token_s: float

    @property
    def longest(self) -> tuple[float, float]:
        """(start, end) of the longest gap; the last of several."""
        gaps = zip(self.tokens_s, self.tokens_s[1:], strict=False)
        return max(gaps, key=lambda gap: (gap[1] - gap[0], gap[1]))


def token_gaps(
    rows: Sequence[TokenRow], chosen: int, limit_s: float, *, title: str, x_name: str, event: str, caption: str,
    table: tuple[Sequence[str], Sequence[Sequence[object]]], width: int = 880,
) -> Figure:  # fmt: skip
    """Draw the rows on a common clock whose 0 is `event`.

    Args:
        chosen: the row in focus.
        limit_s: a longest gap beyond it is drawn in orange and says so, one within it in blue.
        table: (header, rows) of the data.

    Raises:
        FigureError: no rows, or one with fewer than two tokens.
    """
    if not rows or any(len(row.tokens_s) < 2 for row in rows):
        raise FigureError("nothing to draw: give at least one row, with two tokens or more")
    canvas = Canvas(width)
    is_wide = width >= WITH_SIDES
    top, each = heading(canvas, title) + (40 if is_wide else 60), ROW if is_wide else NARROW_ROW
    left, right = 20.0, width - 20.0
    if is_wide:
        left, right = LEFT + max(style.text_width(row.name, 13, bold=True) for row in rows), width - GAP - 14.0
    low, high = min(row.tokens_s[0] for row in rows), max(row.tokens_s[-1] for row in rows)
    scale = Scale(low, high, left, right)
    bottom = top + each * len(rows)
    gap_x, mark_x, first_x = width - GAP, width - MARK, width - FIRST
    heads = top - (12 if is_wide else 32)
    last = draw_x(canvas, scale, top - 4, bottom, x_name)
    canvas.text(gap_x, heads, "longest gap", "a")
    canvas.text(first_x, heads, "▲ first token", "a")
    canvas.line(scale(0), top - 8, scale(0), bottom, "e", stroke_dasharray="5 3")
    at = min(max(scale(0) - style.text_width(event, 12) / 2, 16), right - style.text_width(event, 12))
    canvas.text(at, top - 12, event, "b halo")
    for index, row in enumerate(rows):
        words_y = top + each * index + (ROW / 2 + 4.5 if is_wide else 17)
        middle = top + each * index + (ROW / 2 if is_wide else 38)
        start, end = row.longest
        is_kept, bold = end - start <= limit_s, 700 if index == chosen else 400
        colour = style.COLOURS[0 if is_kept else 5]
        gap = style.said_s(end - start)
        said = f"{row.name}: longest gap {gap}, {'within' if is_kept else 'beyond'} the limit"
        if index == chosen:
            canvas.rect(8, top + each * index + 2, width - 16, each - 4, "track", said, rx=6)
        x, anchor = (left - 10, "end") if is_wide else (left - 4, "")
        canvas.text(x, words_y, row.name, "b halo", anchor, style=f"font-size:13px;font-weight:{bold}")
        tall = 9 if index == chosen else 6
        d = "".join(f"M{scale(t):.1f} {middle - tall:.1f}v{2 * tall}" for t in row.tokens_s)
        canvas.add("path", "", f"{row.name}: a tick for each token", d=d, stroke=colour, stroke_width=1.5, fill="none")
        x, edge = scale(start), scale(end)
        canvas.rect(x, middle - 3, edge - x, 6, "", said, fill=colour)
        canvas.text(gap_x, words_y, gap, "b", style=f"font-size:{16 if index == chosen else 13}px;font-weight:{bold}")
        if not is_kept:
            canvas.text(mark_x, words_y, "✕", "b", style="font-size:13px")
        if low <= row.first_token_s <= high:
            hover = f"{row.name}: first token of the long prompt after {row.first_token_s:.3g} s"
            x = scale(row.first_token_s)
            canvas.add("path", "i dot", hover, d=f"M{x:.1f} {middle + 8:.1f}l5 9h-10z")
        canvas.text(first_x, words_y, f"{row.first_token_s:.3g} s", "b", style=f"font-size:13px;font-weight:{bold}")
    desc = " ".join(
        f"{row.name}: longest gap {style.said_s(row.longest[1] - row.longest[0])}, first token of the long prompt "
        f"after {row.first_token_s:.3g} s." for row in rows
    )  # fmt: skip
    return Figure(canvas.svg(last + 16, title, desc), title, desc, caption, table)
