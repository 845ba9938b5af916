"""A table for notebooks and terminals: numbers to the right, words to the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cbserve.errors import FigureError
from cbserve.viz.style import number, printable


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _is_numeric(column: Sequence[object]) -> bool:
    values = [value for value in column if value is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """For each column: is it of numbers?"""
    for name, value in (("header", header), ("rows", rows)):
        if not hasattr(value, "__len__") or isinstance(value, str):
            raise FigureError(f"{name}={value!r}: must be a list")
    for row in rows:
        if not hasattr(row, "__len__") or isinstance(row, str):
            raise FigureError(f"row {row!r} is no list; give one value a column")
        if len(row) != len(header):
            raise FigureError(
                f"row {list(row)!r} has {len(row)} cells, the header {len(header)}; give one value a column"
            )
    return [_is_numeric([row[i] for row in rows]) for i in range(len(header))]


def table_html(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """An HTML table; columns of numbers are right aligned. A caption makes it a `<figure>` with that name."""
    align = [
        f'style="text-align:{"right" if right else "left"};padding:2px 10px;line-height:1.4"'
        for right in _columns(header, rows)
    ]
    head = "".join(
        f'<th scope="col" {a}>{escape(printable(str(name)))}</th>' for name, a in zip(header, align, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td {a}>{escape(printable(_cell(v)))}</td>" for v, a in zip(row, align, strict=True))
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if not caption:
        return table
    # A <caption> would be no wider than the table: a source line beside three short columns becomes a tower of words.
    named = f'<figcaption style="text-align:left;line-height:1.45">{escape(printable(caption))}</figcaption>'
    return f'<figure style="margin:4px 0">{named}{table}</figure>'


@dataclass(frozen=True)
class Table:
    """Shows itself as HTML in a notebook and as aligned text elsewhere (`str`)."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def _repr_html_(self) -> str:
        return table_html(self.header, self.rows, self.caption)

    def __str__(self) -> str:
        right = _columns(self.header, self.rows)
        lines = [list(map(str, self.header)), *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        text = [
            "  ".join(f"{v:>{w}}" if r else f"{v:<{w}}" for v, w, r in zip(line, widths, right, strict=True))
            for line in lines
        ]
        return "\n".join(line.rstrip() for line in ([self.caption] if self.caption else []) + text)

    __repr__ = __str__


def table(header: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> Table:
    """A `Table`. Raises FigureError when a row has not one value for each column."""
    _columns(header, rows)
    return Table(tuple(header), tuple(tuple(row) for row in rows), caption)
