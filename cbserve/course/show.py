"""Show a text in a terminal and its HTML twin in a notebook; the HTML needs no script and no style sheet.

JupyterLab strips style variables from the outputs of an untrusted notebook and keeps literal values. So text takes the
colours of the theme, light or dark, and the few coloured grounds bring their own text colour, at 4.5:1 or more.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

__all__ = ["Shown", "badge", "cell", "escape", "facts", "html_table", "show", "svg_image", "table"]

_LEFT = "text-align:left;vertical-align:top"  # Lab aligns tables to the right
_GROUNDS = {"good": "#005f8f", "bad": "#a33b00", "partly": "#6b5500", "none": "#5f5f5f"}


class Shown:
    """The two forms of one result: HTML for a notebook, plain text elsewhere."""

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


def badge(text: str, kind: str) -> str:
    """A short verdict on its own ground: `kind` is good, bad, partly or none. The words carry it, not the colour."""
    style = "color:#ffffff;padding:2px 8px;border-radius:4px;font-weight:bold;display:inline-block"
    style += ";white-space:nowrap" if len(text) <= 20 else ""  # in a narrow table three words would make three lines
    return f'<span style="background-color:{_GROUNDS[kind]};{style}">{escape(text)}</span>'


def facts(rows: Sequence[tuple[str, str]], code: Collection[str] = ()) -> str:
    """Named facts as an HTML table of two columns; those named in `code` are set as code."""

    def fact(name: str, value: str) -> str:
        shown = f"<code>{escape(value)}</code>" if name in code else cell(value)
        return f'<tr><th scope="row" style="{_LEFT}">{escape(name)}</th><td style="{_LEFT}">{shown}</td></tr>'

    return f"<table>{''.join(fact(*row) for row in rows)}</table>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, str]:
    """The same table as aligned text and as HTML. Cells are plain text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    text = "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
    return text, html_table(header, [list(map(cell, row)) for row in rows])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are HTML already."""
    head = "".join(f'<th scope="col" style="{_LEFT}">{escape(cell)}</th>' for cell in header)
    lines = ("".join(f'<td style="{_LEFT}">{cell}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cell(text: str) -> str:
    """Plain text as HTML, with numbers and their units kept on one line."""
    return escape(text).replace(" %", "&nbsp;%").replace(" = ", "&nbsp;=&nbsp;")
