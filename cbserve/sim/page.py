"""A report's page: one HTML file without scripts, in the theme of the reader's system, for wide and narrow windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from cbserve.errors import CBServeError
from cbserve.files import write_whole
from cbserve.viz.figure import Figure
from cbserve.viz.style import printable
from cbserve.viz.table import Table

WIDE, NARROW = 880, 400  # pixels of a figure; a narrower window shrinks it
MANY = 8  # columns: a table with more is as wide as the window
_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--panel:#f6f8fa;--ink:#1f2328;--muted:#57606a;--edge:#d8dee4}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--panel:#161b22;--ink:#f0f3f6;--muted:#b1bac4;--edge:#30363d}}
:root{--jp-layout-color0:var(--bg);--jp-content-font-color1:var(--ink);--jp-content-font-color2:var(--muted);
--jp-border-color2:var(--edge);--jp-content-font-color3:#818b98}
body{margin:0 auto;padding:24px 20px 48px;max-width:920px;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 8px}.wide,.narrow{margin-top:28px}
h1,p{overflow-wrap:anywhere}p{margin:8px 0}.muted{color:var(--muted);font-size:.875rem}
.scroll{overflow-x:auto;margin:16px 0}.scroll,details{background:
linear-gradient(90deg,var(--bg) 30%,transparent) 0/40px,linear-gradient(270deg,var(--bg) 30%,transparent) 100%/40px,
linear-gradient(90deg,var(--edge),transparent) 0/14px,linear-gradient(270deg,var(--edge),transparent) 100%/14px;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.many{margin-inline:calc((100% - min(100vw - 40px,1360px))/2)}.many table,.many figcaption{margin:0 auto}
.many figcaption{max-width:920px}.many table{font-size:.85rem}.many th{white-space:nowrap}
.hint{display:none;margin:16px 0 -12px}
.grid td{white-space:nowrap}.grid th,.grid td{padding:2px 7px!important}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--edge);vertical-align:top}th{color:var(--muted);font-weight:600}
figcaption,summary{color:var(--muted);font-size:.875rem}details{overflow-x:auto}
code{font:.85em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
svg{display:block}.narrow{display:none}
@media(max-width:1000px){.hint{display:block}}
@media(max-width:640px){.wide{display:none}.narrow{display:block}.many{margin-inline:0}body{padding:16px 12px 32px}
.grid th,.grid td,th,td{padding:2px 5px!important}}
"""

Draw = Callable[[int], Figure]  # width in pixels -> the figure


def write_page(path: Path, title: str, lead: Sequence[str], tables: Sequence[Table], figures: Sequence[Draw]) -> None:
    """Write the page whole or not at all. The first of `lead` is printed large; figures are drawn for both widths.

    Raises:
        CBServeError: it cannot be written.
    """
    write_whole(path, page(title, lead, tables, figures), CBServeError)


def page(title: str, lead: Sequence[str], tables: Sequence[Table], figures: Sequence[Draw]) -> str:
    """The page's HTML; see `write_page`."""
    body = [f"<h1>{_text(title)}</h1>"]
    body += [f"<p{'' if index == 0 else ' class=muted'}>{_text(line)}</p>" for index, line in enumerate(lead)]
    for table in tables:
        words = "scroll" if len(table.header) == 2 else "scroll grid"  # a sentence wraps, a row of numbers does not
        if len(table.header) > MANY:
            words += " many"
            body.append(f'<p class="hint muted">{len(table.header)} columns: scroll the table sideways.</p>')
        body.append(f'<div class="{words}" tabindex="0">{table._repr_html_()}</div>')
    for draw in figures:
        wide, narrow = draw(WIDE), draw(NARROW)
        body.append(f'<div class="wide">{wide.live_html(with_table=False)}</div>')
        body.append(f'<div class="narrow">{narrow.live_html(with_table=False)}</div>')
        body.append(f"<details><summary>data as a table</summary>{wide.table_html()}</details>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(printable(text), quote=False)
