"""Rules that a finished notebook keeps, whatever it says: headings, alt texts, no traces of a machine, size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

WARN_BYTES = 300_000
MAX_BYTES = 1_000_000
MAX_CELLS = 60  # a chapter; what is longer is two chapters

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,6})\s+\S", re.MULTILINE)
_IMAGE_WITHOUT_ALT = re.compile(r"!\[\s*\]\([^)]*\)")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
_ABSOLUTE_PATH = re.compile(r"(?<![\w./:-])(?:/(?:home|Users|root|tmp|work|mnt|var|opt)/[\w.-]+|[A-Z]:\\\\?Users\\)")


def rule_faults(notebook: Any, size_bytes: int, kind: str = "chapters") -> list[str]:
    """What `notebook` (nbformat v4, `size_bytes` on disk, of the folder `kind`) does against the rules, a line each."""
    faults = [*_heading_faults(notebook), *_alt_faults(notebook), *_trace_faults(notebook)]
    if "widgets" in notebook.metadata:
        faults.append("has metadata.widgets, which GitHub refuses to show; rebuild")
    if size_bytes > MAX_BYTES:
        faults.append(f"has {size_bytes:,} bytes, and the limit is {MAX_BYTES:,}")
    if kind == "chapters" and len(notebook.cells) > MAX_CELLS:
        faults.append(f"has {len(notebook.cells)} cells, and a chapter has at most {MAX_CELLS}")
    return faults


def _heading_faults(notebook: Any) -> Iterator[str]:
    """The first heading is h1, there is one h1, and no level is skipped on the way down."""
    previous = 0
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for match in _HEADING.finditer(_FENCE.sub("", cell.source)):
            level = len(match.group(1))
            if level > previous + 1:
                yield f"cell {cell.id}: a heading of level {level} follows level {previous}"
            if level == 1 and previous:
                yield f"cell {cell.id}: a second heading of level 1"
            previous = level
    if not previous:
        yield "has no heading"


class _Images(HTMLParser):
    """Counts images and inline SVGs that say nothing to someone who cannot see them."""

    def __init__(self) -> None:
        super().__init__()
        self.mute: list[str] = []
        self._open_svgs: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "img" and not (named.get("alt") or "").strip():
            self.mute.append("an <img> without alt text")
        elif tag == "svg":
            self._open_svgs.append(bool(named.get("aria-label") or named.get("aria-hidden") == "true"))
        elif tag == "title" and self._open_svgs:
            self._open_svgs[-1] = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg" and self._open_svgs and not self._open_svgs.pop():
            self.mute.append("an <svg> without a title")


def _alt_faults(notebook: Any) -> Iterator[str]:
    for cell in notebook.cells:
        pieces = [cell.source] if cell.cell_type == "markdown" else []
        if cell.cell_type == "markdown" and _IMAGE_WITHOUT_ALT.search(cell.source):
            yield f"cell {cell.id}: an image without alt text"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            pieces += [data[kind] for kind in ("text/html", "image/svg+xml") if kind in data]
            if "image/png" in data and "text/html" not in data:
                yield f"cell {cell.id}: a bare PNG has no alt text; show it as <img alt=...>"
        for piece in pieces:
            images = _Images()
            images.feed("".join(piece))
            yield from (f"cell {cell.id}: {fault}" for fault in images.mute)


def _trace_faults(notebook: Any) -> Iterator[str]:
    """No path and no memory address of the machine that built it."""
    for cell in notebook.cells:
        texts = [cell.source]
        for output in cell.get("outputs", []):
            texts.append("".join(output.get("text", "")))
            texts += ["".join(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
            if _WIDGET_VIEW in output.get("data", {}):
                yield f"cell {cell.id}: a widget view, whose model a fresh clone lacks"
        for text in texts:
            # Embedded images are base64, in which anything can occur.
            text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
            if found := _ABSOLUTE_PATH.search(text):
                yield f"cell {cell.id}: {found.group()!r} is a path of one machine"
            if found := _ADDRESS.search(text):
                yield f"cell {cell.id}: {found.group()!r} is a memory address, another one in each run"
