"""One page of a page map, its marks, and the key that names those that occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbserve.core.pages import USED, Page, PageState
from cbserve.viz import style
from cbserve.viz.figure import Canvas
from cbserve.viz.findings import joined
from cbserve.viz.spans import order_of_ids

TAKEN = {"allocated": "new", "hit": "found in the prefix cache", "shared": "shared", "copied": "a copy",
         "swapped_in": "copied back from the host"}  # fmt: skip
GIVEN = {"freed": "given back", "evicted": "its content was lost", "copied": "left for a copy"}
KEY = {
    "shared": "grey, ×n: shared by n, read only",
    "empty": "no token here yet",
    "cached": "free, content findable; (A) held it last",
    "taken": "taken since the step before",
    "given": "given back since the step before",
    "lit": "pages of {who}",
    "host": "in host memory",
}
QUIET = "pointer-events:none"


class PageArtist:
    """Draws single pages and knows what is new about them.

    Args:
        canvas: where to.
        state, pages: what is drawn.
        names: seq_id -> label.
        lit: sequences whose pages are outlined.
    """

    def __init__(
        self, canvas: Canvas, state: PageState, pages: Sequence[Page], names: Mapping[int, str], lit: frozenset[int]
    ) -> None:
        self.canvas, self.state, self.pages, self.names, self.lit = canvas, state, pages, names, lit
        self.order = order_of_ids(state.arrived)
        self.lit_blocks = {
            block: (seq_id, index)
            for seq_id in sorted(lit, reverse=True)
            for index, block in enumerate(state.tables.get(seq_id, ()))
        }
        self.taken: dict[int, str] = {}
        self.given: dict[int, str] = {}
        got: set[tuple[int, int]] = set()  # (seq_id, block) since the step before, but for what a fork shares
        for change in state.changes:
            if change.kind in TAKEN:
                self.taken |= dict.fromkeys(change.blocks, TAKEN[change.kind])
            if change.kind in TAKEN and change.kind != "shared":
                got |= {(change.seq_id, block) for block in change.blocks}
            if change.kind in GIVEN:
                self.given |= dict.fromkeys(change.sources or change.blocks, GIVEN[change.kind])
        # A page that somebody held all along has one holder more, but nobody took it from the pool.
        self.new = {
            page.block
            for page in pages
            if page.state == USED and all((seq_id, page.block) in got for seq_id, _ in page.holders)
        }
        self.seen: set[str] = set()

    def index(self, seq_id: int) -> int:
        """The index of a sequence's look."""
        return self.order[self.state.owners[seq_id][0]]

    def fill(self, seq_id: int) -> str:
        return self.canvas.look(self.index(seq_id))

    def used(self, page: Page, x: float, y: float, w: float, h: float, hover: str) -> None:
        """A page in use: its filled part in the owner's look, the rest hatched; grey with a stripe each if shared."""
        is_shared, share, r = page.ref_count > 1, page.num_tokens / self.state.block_size, 4 if min(w, h) > 16 else 1.5
        look = {"cls": "m"} if is_shared else {"cls": "", "fill": self.fill(page.holders[0][0])}
        edge = "" if is_shared else f"stroke:{style.colour(self.index(page.holders[0][0]))}"
        if share == 1:
            self.canvas.rect(x, y, w, h, hover=hover, rx=r, **look)
        else:
            self.seen.add("empty")
            self.canvas.rect(x, y, w, h, "w", hover, rx=r, style=edge)
            if share:
                cls = look.pop("cls")
                wide = max(w * share, 1.5)
                round_ = f"a{r} {r} 0 0 0 -{r} {r}v{h - 2 * r:.1f}a{r} {r} 0 0 0 {r} {r}"
                d = f"M{x + wide:.1f} {y:.1f}H{x + r:.1f}{round_}H{x + wide:.1f}z"
                d = d if wide > r else f"M{x:.1f} {y:.1f}h{wide:.1f}v{h:.1f}h-{wide:.1f}z"
                self.canvas.add("path", cls, "", d=d, style=QUIET, **look)
        if is_shared:
            self.seen.add("shared")
            self._stripes(page, x, y, w, h)

    def _stripes(self, page: Page, x: float, y: float, w: float, h: float) -> None:
        """Along the lower edge one piece in the colour of each holder."""
        tall = max(2.0, min(6.0, h * 0.16))
        indices = list(dict.fromkeys(self.index(seq_id) for seq_id, _ in page.holders))[:6]
        inner = w - (6 if w > 20 else 2)
        for i, index in enumerate(indices):
            at = x + (w - inner) / 2 + inner * i / len(indices)
            d = f"M{at:.1f} {y + h - tall - 1.5:.1f}h{inner / len(indices):.1f}v{tall:.1f}h-{inner / len(indices):.1f}z"
            self.canvas.add("path", "", "", d=d, fill=style.colour(index), stroke="#fff", stroke_width=0.7, style=QUIET)

    def label(self, x: float, y: float, text: str, size: float = 13) -> None:
        """Dark with a white edge: legible on every look, in both themes."""
        own = "" if size == 13 else f";font-size:{size:g}px"
        self.canvas.text(x, y, text, "l", style=f"fill:#111;stroke:#fff;{QUIET}{own}")

    def news(self, block: int) -> str:
        return self.taken.get(block, "") or self.given.get(block, "")

    def corner(self, block: int, x: float, y: float, w: float) -> None:
        """A corner: full if the page was taken since the step before, hollow if it was given back."""
        page = self.pages[block]
        kind = "taken" if block in self.new else "given"
        if kind == "given" and (page.state == USED or block not in self.given):
            return
        self.seen.add(kind)
        size = max(5.0, min(11.0, w * 0.24))
        cls = "badge" if kind == "taken" else "e"
        self.canvas.add("path", cls, "", d=f"M{x + w - size:.1f} {y:.1f}h{size:.1f}v{size:.1f}z", style=QUIET)

    def outline(self, x: float, y: float, w: float, h: float) -> None:
        self.seen.add("lit")
        wide = 3 if w > 16 else 2
        d = f"M{x - 1.5:.1f} {y - 1.5:.1f}h{w + 3:.1f}v{h + 3:.1f}h-{w + 3:.1f}z"
        style_ = f"stroke-width:{wide};stroke-linejoin:round;{QUIET}"
        self.canvas.add("path", "e", "", d=d, style=style_)

    def key(self, y: float) -> float:
        """Name the marks that occur. Returns the last baseline."""
        x = 16.0
        for kind, text in KEY.items():
            if kind not in self.seen:
                continue
            text = text.format(who=joined([self.names[seq_id] for seq_id in sorted(self.lit)], 6))
            needed = 26 + style.text_width(text, 12) + 16
            if x > 16 and x + needed > self.canvas.width:
                x, y = 16, y + 20
            self._sample(kind, x, y)
            self.canvas.text(x + 25, y, text, "a")
            x += needed
        return y if self.seen else y - 28

    def _sample(self, kind: str, x: float, y: float) -> None:
        if kind in ("taken", "given"):
            cls = "badge" if kind == "taken" else "e"
            self.canvas.add("path", cls, "", d=f"M{x + 4:.1f} {y - 10:.1f}h11v11z")
        elif kind == "lit":
            self.canvas.add("path", "e", "", d=f"M{x + 1.5:.1f} {y - 9:.1f}h15v10h-15z", style="stroke-width:3")
        else:
            cls = {"shared": "m", "empty": "w"}.get(kind, "x")
            dash = {"cached": "4 3", "host": "1.5 2.5"}.get(kind, "")
            self.canvas.rect(x, y - 10, 18, 12, cls, rx=2, stroke_dasharray=dash)
