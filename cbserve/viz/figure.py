"""A figure that every host can show: as an image that brings its background, or live with the theme of the page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from cbserve.errors import FigureError
from cbserve.files import write_whole
from cbserve.viz.style import NUM_LOOKS, pattern, printable
from cbserve.viz.table import table_html

ID = "@id@"  # stands for the figure's own prefix until its content is known; inline figures share one id space
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

# The page's theme does not reach an <img>, so the image asks the system; inline, the page's variables decide.
_IMAGE_THEME = (
    "#@id@{--bg:#fff;--ink:#1f2328;--muted:#57606a;--grid:#d8dee4;--line:#818b98}"
    "@media(prefers-color-scheme:dark){#@id@{--bg:#161b22;--ink:#f0f3f6;--muted:#b1bac4;--grid:#30363d;--line:#8b949e}}"
)
_PAGE_THEME = (
    "#@id@{--bg:var(--jp-layout-color0,#fff);--ink:var(--jp-content-font-color1,#1f2328);"
    "--muted:var(--jp-content-font-color2,#57606a);--grid:var(--jp-border-color2,#d8dee4);"
    "--line:var(--jp-content-font-color3,#818b98)}"
)
_CLASSES = {
    "bg": "fill:var(--bg)", "t": "font-size:17px;font-weight:600", "h": "font-size:14px;font-weight:600",
    "a": "font-size:12px;fill:var(--muted)", "b": "font-size:12px", "n": "font-size:28px;font-weight:700",
    "l": "font-size:13px;font-weight:700;text-anchor:middle;paint-order:stroke;stroke-width:3px;stroke-linejoin:round",
    "halo": "paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round",
    "g": "stroke:var(--grid);stroke-width:1", "x": "stroke:var(--line);stroke-width:1;fill:none",
    "e": "stroke:var(--ink);stroke-width:1.5;fill:none", "w": "fill:url(#@id@w);stroke:var(--line);stroke-width:.8",
    "wl": "stroke:var(--line);stroke-width:1.5", "m": "fill:var(--line)", "i": "fill:var(--ink)",
    "dot": "stroke:var(--bg);stroke-width:1.2", "track": "fill:var(--grid);fill-opacity:.45",
    "pre": "fill:#000;fill-opacity:.56;stroke:#000;stroke-width:1",
    "cut": "stroke:var(--bg);stroke-width:5;fill:none", "cap": "fill:#000;fill-opacity:.62",
    "v": "fill:none;stroke:#fff;stroke-width:2;stroke-linecap:round;stroke-linejoin:round",
    "badge": "fill:var(--ink);stroke:var(--bg);stroke-width:1.5",
    "sign": "fill:none;stroke:var(--bg);stroke-width:1.8;stroke-linecap:round;stroke-linejoin:round",
}  # fmt: skip
_STYLE = "#@id@ text{fill:var(--ink)}" + "".join(f"#@id@ .{name}{{{rule}}}" for name, rule in _CLASSES.items())
_WASTE = (
    '<pattern id="@id@w" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="wl" d="M0 0V7" stroke="#818b98"/></pattern>'
)
MAX_HTML_ROWS = 200


class Canvas:
    """Collects SVG elements; coordinates in pixels, y downwards. Classes are those of `_CLASSES`."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.defs: dict[str, str] = {}
        self.parts: list[str] = []

    def add(self, tag: str, cls: str, hover: str = "", **attributes: float | str) -> None:
        named = {"class": cls, **attributes}
        text = "".join(
            f' {name.replace("_", "-")}="{_short(value)}"' for name, value in named.items() if value not in ("", None)
        )
        self.parts.append(f"<{tag}{text}>{_hover(hover)}</{tag}>" if hover else f"<{tag}{text}/>")

    def rect(
        self, x: float, y: float, width: float, height: float, cls: str, hover: str = "", **more: float | str
    ) -> None:
        self.add("rect", cls, hover, x=x, y=y, width=max(width, 0.5), height=height, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str, **more: float | str) -> None:
        self.add("path", cls, "", d=f"M{_short(x1)} {_short(y1)}L{_short(x2)} {_short(y2)}", **more)

    def text(self, x: float, y: float, text: str, cls: str, anchor: str = "", style: str = "") -> None:
        anchored = f' text-anchor="{anchor}"' if anchor else ""
        styled = f' style="{style}"' if style else ""
        self.parts.append(
            f'<text class="{cls}" x="{_short(x)}" y="{_short(y)}"{anchored}{styled}>{escape(text, quote=False)}</text>'
        )

    def look(self, index: int) -> str:
        """Colour and pattern of series or request `index`, as a value of `fill`."""
        name = f"r{index % NUM_LOOKS}"
        self.defs.setdefault(name, pattern(ID + name, index))
        return f"url(#{ID}{name})"

    def svg(self, height: float, title: str, desc: str) -> str:
        """The whole document, for an `<img>`: its ids begin with a hash of its content."""
        width, height = round(self.width), round(height)
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{ID}" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="{ID}t {ID}d" font-family="{FONT}" '
            f'style="max-width:100%;height:auto">'
            f'<title id="{ID}t">{escape(title, quote=False)}</title><desc id="{ID}d">{escape(desc, quote=False)}</desc>'
            f"<style>{_IMAGE_THEME}{_STYLE}</style><defs>{_WASTE}{''.join(self.defs.values())}</defs>"
            f'<rect class="bg" fill="#fff" width="{width}" height="{height}" rx="8"/>{"".join(self.parts)}</svg>'
        )
        text = printable(text)
        return text.replace(ID, "f" + hashlib.sha256(text.encode()).hexdigest()[:8])


def _hover(text: str) -> str:
    return f"<title>{escape(text, quote=False)}</title>"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Figure:
    """A picture, what it shows in words, and its data.

    Args:
        svg: the whole document.
        title: the finding, in one sentence.
        desc: what is drawn, for who cannot see it.
        caption: shown beneath.
        table: (header, rows), the data as a table.
    """

    svg: str
    title: str
    desc: str
    caption: str
    table: tuple[Sequence[str], Sequence[Sequence[object]]]

    def _repr_html_(self) -> str:
        """An `<img>`: it survives untrusted notebooks, GitHub and both themes."""
        data = base64.b64encode(self.svg.encode()).decode()
        alt = escape(printable(f"{self.title}. {self.desc}"), quote=True)
        return self._frame(
            f'<img alt="{alt}" style="max-width:100%;height:auto" src="data:image/svg+xml;base64,{data}">'
        )

    def live_svg(self) -> str:
        """The SVG with the page's theme instead of the system's."""
        prefix = self.svg.split('id="', 1)[1].split('"', 1)[0]
        image, page = (theme.replace(ID, prefix) for theme in (_IMAGE_THEME, _PAGE_THEME))
        return self.svg.replace(image, page)

    def live_html(self, with_table: bool = True) -> str:
        """Inline SVG with hover text and the page's theme, for `widgets.HTML`."""
        return self._frame(self.live_svg(), with_table)

    def save(self, path: str | Path) -> None:
        """Write the SVG; an interruption leaves the old file as it was. Raises FigureError where it cannot."""
        write_whole(path, self.svg, FigureError)

    def table_html(self) -> str:
        """The data as an HTML table, at most `MAX_HTML_ROWS` rows of it."""
        header, rows = self.table
        more = f"<p>The first {MAX_HTML_ROWS} of {len(rows):,} rows.</p>" if len(rows) > MAX_HTML_ROWS else ""
        return table_html(header, rows[:MAX_HTML_ROWS]) + more

    def _frame(self, picture: str, with_table: bool = True) -> str:
        data = f"<details><summary>data as a table</summary>{self.table_html()}</details>" if with_table else ""
        text = f'<figcaption style="line-height:1.45">{escape(printable(self.caption))}</figcaption>'
        return f'<figure style="margin:0;max-width:100%">{picture}{text}{data}</figure>'

    def __repr__(self) -> str:
        return f"Figure({self.title!r})"
