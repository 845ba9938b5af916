"""Show a text in a terminal and its HTML twin in a notebook; the HTML needs no script and no style sheet.

JupyterLab strips styles with variables from the outputs of an untrusted notebook: tables, emphasis and links carry
the meaning, and Lab's own theme colours them, light and dark.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["Shown", "escape", "facts", "show", "svg_image", "table"]


class Shown:
    """A result that displays as HTML in a notebook and as plain text elsewhere."""

    def __init__(self, text: str, html: str) -> None:
        self.text, self.html = text, html

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}


def show(text: str, html: str) -> None:
    """Display at once: in a kernel as HTML with its text twin, elsewhere printed."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import display

        display(Shown(text, html))
    else:
        print(text)


def svg_image(svg: str, alt: str) -> str:
    """The SVG as an `<img>`, the one form that every front end shows, trusted or not."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Named facts as an HTML table of two columns."""
    lines = (
        f'<tr><th scope="row" align="left">{escape(name)}</th><td align="left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{''.join(lines)}</table>"


def table(header: list[str], rows: list[list[str]]) -> tuple[str, str]:
    """The same table as aligned text and as HTML. Cells are plain text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    text = "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
    head = "".join(f'<th scope="col" align="left">{escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f'<td align="left">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows)
    return text, f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
