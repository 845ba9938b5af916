"""The two halves of a page map: the grid of the pool, and the block tables with their arrows into it."""

from __future__ import annotations

from collections.abc import Sequence

from cbserve.core.pages import CACHED, USED, Page
from cbserve.viz import page_words as words
from cbserve.viz import style
from cbserve.viz.findings import plural
from cbserve.viz.page_marks import QUIET, PageArtist

MAX_TABLES = 40
MAX_ARROWS = 24  # more would hide what they point at: outlines alone


class Grid:
    """The pool. Columns are a power of two, so that a page is found by its id.

    Args:
        artist: draws the pages.
        left, right: pixels.
    """

    def __init__(self, artist: PageArtist, left: float, right: float) -> None:
        self.artist, self.left = artist, left
        count = len(artist.pages)
        self.columns = 4 if count <= 12 else 8 if count <= 64 else 16 if count <= 160 else 32 if count <= 640 else 64
        self.has_ids = (right - left) / self.columns >= 40
        self.gutter = 0.0 if self.has_ids else style.text_width(str(count), 12) + 8  # for the first id of each row
        self.pitch = min((right - left - self.gutter) / self.columns, 72.0)
        self.gap = 8.0 if self.has_ids else max(1.0, self.pitch * 0.2)
        self.size = self.pitch - self.gap
        self.tall = min(self.size, 48.0 if count <= 40 else 40.0)
        self.top = 0.0

    def place(self, block: int) -> tuple[float, float]:
        """Left and top of a page."""
        row, column = divmod(block, self.columns)
        return self.left + self.gutter + column * self.pitch, self.top + row * (self.tall + self.gap)

    def draw(self, y: float, heading: str) -> float:
        """Draw from the heading's baseline downwards. Returns the bottom."""
        for line in style.wrap(heading, self.columns * self.pitch + self.gutter, 12):
            self.artist.canvas.text(self.left, y, line, "a")
            y += 16
        self.top = y
        for page in self.artist.pages:
            self._page(page)
        for block in self.artist.lit_blocks:
            self.artist.outline(*self.place(block), self.size, self.tall)
        rows = -(-len(self.artist.pages) // self.columns)
        every = 1 if self.pitch >= 13 else 2
        if not self.has_ids:
            for row in range(0, rows, every):
                x, y = self.place(row * self.columns)
                self.artist.canvas.text(x - 6, y + self.tall / 2 + 4.3, str(row * self.columns), "a", "end")
        return self.top + rows * (self.tall + self.gap) - self.gap

    def _page(self, page: Page) -> None:
        artist, size, tall = self.artist, self.size, self.tall
        x, y = self.place(page.block)
        hover = words.hover(page, artist.state, artist.names, artist.news(page.block))
        middle = x + size / 2
        if page.state == USED:
            artist.used(page, x, y, size, tall, hover)
            self._owner(page, middle, y)
        else:
            is_cached = page.state == CACHED
            r = 4 if size > 16 else 1.5
            more = {"stroke_dasharray": "4 3" if size > 16 else "2 1.5"} if is_cached else {}
            artist.canvas.rect(
                x + 0.5, y + 0.5, size - 1, tall - 1, "x" if is_cached else "g", hover, rx=r, fill="none",
                pointer_events="all", **more,
            )  # fmt: skip
            if is_cached:
                artist.seen.add("cached")
            name = artist.names.get(page.holders[0][0], "") if page.holders else ""
            if self.has_ids:
                is_named = name and style.text_width(f"({name})", 12) <= size
                y_id = y + tall / 2 + (-3.5 if is_named else 4.3)
                artist.canvas.text(middle, y_id, str(page.block), "a", "middle")
                if is_named:
                    artist.canvas.text(middle, y_id + 16, f"({name})", "a", "middle")
        artist.corner(page.block, x, y, size)

    def _owner(self, page: Page, middle: float, y: float) -> None:
        """Id above owner; where there is no room, the owner alone, or nothing: hover and table tell it."""
        artist, size, center = self.artist, self.size, y + self.tall / 2
        owner = f"×{page.ref_count}" if page.ref_count > 1 else artist.names[page.holders[0][0]]
        if self.has_ids:
            artist.label(middle, center - 3, str(page.block))
            if style.text_width(owner, 12, bold=True) <= size - 4:
                artist.label(middle, center + 12, owner, 12)
        elif size >= 15 and style.text_width(owner, 12, bold=True) <= size:
            artist.label(middle, center + 4.3, owner, 12)


class Tables:
    """The block tables: one row a sequence, one cell an entry, in the order of the tokens.

    Args:
        artist: draws the pages.
        left, right: pixels.
    """

    def __init__(self, artist: PageArtist, left: float, right: float) -> None:
        self.artist, self.right = artist, right
        state = artist.state
        self.rows = list(state.tables.items())[:MAX_TABLES]
        self.host = list(state.swapped.items())[: max(0, MAX_TABLES - len(self.rows))]
        self.hidden = len(state.tables) + len(state.swapped) - len(self.rows) - len(self.host)
        shown = [seq_id for seq_id, _ in self.rows + self.host]
        self.x0 = left + max((style.text_width(artist.names[s], 14, bold=True) for s in shown), default=0) + 8
        count = len(shown)
        self.pitch = 42 if count <= 5 else 32 if count <= 9 else 23 if count <= 16 else 17
        self.height = self.pitch - (8 if count <= 5 else 6 if count <= 9 else 4 if count <= 16 else 2)
        longest = max((len(table) for _, table in self.rows + self.host), default=1)
        self.cell = min((right - self.x0) / longest, 46.0)
        self.places: dict[int, float] = {}  # top of each row

    def draw(self, y: float) -> float:
        """Draw from the heading's baseline downwards. Returns the bottom."""
        canvas = self.artist.canvas
        text = "block tables: position in the sequence → page" if self.rows else "no block table: nobody holds a page"
        for line in style.wrap(text, self.right - 16, 12):
            canvas.text(16, y, line, "a")
            y += 16
        for seq_id, table in self.rows:
            self.places[seq_id] = y
            self._row(seq_id, table, y, is_host=False)
            y += self.pitch
        if self.host:
            y += 20
            canvas.text(16, y, "swapped out: page in host memory", "a")
            y += 10
            for seq_id, table in self.host:
                self._row(seq_id, table, y, is_host=True)
                y += self.pitch
        if self.hidden:
            y += 14
            canvas.text(16, y, f"{plural(self.hidden, 'more table')} not drawn; the numbers count all", "a")
        return y

    def arrows(self, grid: Grid) -> None:
        """From each entry of the lit tables to its page, along the gaps between the rows of the pool."""
        lit = [(s, i, b) for s, table in self.rows if s in self.artist.lit for i, b in enumerate(table)]
        if not 0 < len(lit) <= MAX_ARROWS or grid.pitch < 18:
            return  # outlines alone
        enter, lines, heads = grid.left - 8, "", ""
        for seq_id in dict.fromkeys(s for s, _, _ in lit):
            entries = [(self.x0 + (index + 0.5) * self.cell, block) for s, index, block in lit if s == seq_id]
            bottom = self.places[seq_id] + self.height
            lane = bottom + (self.pitch - self.height) / 2 + 1
            lines += "".join(f"M{x:.1f} {bottom + 1.5:.1f}V{lane:.1f}" for x, _ in entries)
            lines += f"M{entries[0][0]:.1f} {lane:.1f}H{self.right:.1f}"
            ends: dict[float, float] = {}  # top of a row of the pool -> its farthest page
            for _, block in entries:
                x, y = grid.place(block)
                middle = x + grid.size / 2
                ends[y] = max(ends.get(y, 0.0), middle)
                heads += f"M{middle - 4:.1f} {y - 1.5:.1f}h8l-4 6.5z"
            for y, x in ends.items():
                to = y - grid.gap / 2 - 1
                half = (self.right + enter) / 2
                lines += f"M{self.right:.1f} {lane:.1f}C{half:.1f} {lane:.1f} {half:.1f} {to:.1f} {enter:.1f} {to:.1f}"
                lines += f"H{x:.1f}v4"
        add = self.artist.canvas.add
        add("path", "", "", d=lines, style=f"fill:none;stroke:var(--bg);stroke-width:3.5;{QUIET}")
        add("path", "e", "", d=lines, style=f"stroke-linejoin:round;{QUIET}")
        add("path", "badge", "", d=heads, style=f"stroke-width:.8;{QUIET}")

    def _row(self, seq_id: int, table: Sequence[int], y: float, is_host: bool) -> None:
        artist, state = self.artist, self.artist.state
        name = artist.names[seq_id]
        tokens = state.num_tokens[seq_id]
        artist.canvas.text(self.x0 - 8, y + self.height / 2 + 5, name, "h", "end")
        gap = 3.0 if self.cell > 18 else 1.0 if self.cell > 5 else 0.0
        wide = self.cell - gap
        has_ids = wide >= style.text_width(str(max(table, default=0)), 12, bold=True) + 2 and self.height >= 15
        for index, block in enumerate(table):
            x = self.x0 + index * self.cell
            first = index * state.block_size
            filled = state.filled(seq_id, index)
            where = f"entry {index} of {name}: places {first} to {first + state.block_size - 1}, {filled} filled"
            if is_host:
                artist.seen.add("host")
                artist.canvas.rect(
                    x, y, wide, self.height, "x", f"{where}, in host page {block} ({plural(tokens, 'token')} in all)",
                    rx=3, stroke_dasharray="1.5 2.5", pointer_events="all",
                )  # fmt: skip
                d = f"M{x + 2:.1f} {y + self.height - 4:.1f}h{max(wide - 4, 0.5):.1f}"
                colour = style.colour(artist.index(seq_id))
                artist.canvas.add("path", "", "", d=d, stroke=colour, stroke_width=4, style=QUIET)
                if has_ids:
                    artist.canvas.text(x + wide / 2, y + self.height / 2 + 2, str(block), "a", "middle")
                continue
            page = artist.pages[block]._replace(num_tokens=filled)
            if page.ref_count == 1:
                page = page._replace(holders=((seq_id, index),))
            shared = f", shared by {page.ref_count}" if page.ref_count > 1 else ""
            artist.used(page, x, y, wide, self.height, f"{where}, in page {block}{shared}")
            if has_ids:
                artist.label(x + wide / 2, y + self.height / 2 + 4.3, str(block), 13 if self.height > 20 else 12)
            artist.corner(block, x, y, wide) if wide > 14 else None
        end, note = self.x0 + self.cell * len(table) + 6, "done, not left yet"
        if seq_id in state.coming_in:
            note = "back from the host"
        is_noted = seq_id in state.padding or seq_id in state.coming_in
        if is_noted and end + style.text_width(note, 12) <= self.right + 24:
            artist.canvas.text(end, y + self.height / 2 + 4.3, note, "a")
        if seq_id in artist.lit and not is_host and wide > 14:
            artist.outline(self.x0, y, self.cell * len(table) - gap, self.height)
