"""The page map: the pool as a grid of pages, beside it the block tables that point into it."""

from __future__ import annotations

from collections.abc import Mapping

from cbserve.core.pages import PageState, page_state
from cbserve.core.trace import Trace
from cbserve.errors import FigureError
from cbserve.viz import given, style
from cbserve.viz import page_words as words
from cbserve.viz.axes import heading
from cbserve.viz.figure import Canvas, Figure
from cbserve.viz.findings import caption, joined, plural
from cbserve.viz.page_grid import Grid, Tables
from cbserve.viz.page_marks import PageArtist

WIDE = 720  # pixels: from here on the tables stand beside the pool, else above it
MARGIN = 16
MAX_PAGES = 2048


def page_map(
    source: Trace | PageState,
    step: int | None = None,
    *,
    highlight: str | None = None,
    title: str | None = None,
    names: Mapping[str, str] | None = None,
    width: int = 880,
) -> Figure:
    """Draw which page holds what, and whose block table points to it, while one step computes.

    Args:
        source: a trace, or a state of `core.pages`.
        step: of a trace; by default the step that uses the most pages. One past the last step is the end of the run.
        highlight: a request, by its id or by the letter on its pages: they are outlined and its table points to them.
        title: the finding; computed from the state by default.
        names: request_id -> what stands on its pages; letters in order of arrival by default.
        width: pixels, at least 480.

    Raises:
        FigureError: no such step, no such request, a step for a state, or a pool that cannot be drawn.
    """
    given.pixels("width", width, 480)
    if not isinstance(source, Trace | PageState):
        raise FigureError(f"{source!r} is no trace; give what serve(...) returns")
    if title is not None:
        given.text("title", title)
    if names is not None:
        given.mapping("names", names, "request id -> what stands on its pages")
    if isinstance(source, PageState) and step is not None:
        raise FigureError(f"step={step} for a state, which is that of step {source.step}; give the trace instead")
    state = source if isinstance(source, PageState) else page_state(source, step)
    if state.num_blocks > MAX_PAGES:
        raise FigureError(
            f"num_blocks={state.num_blocks:,}: at most {MAX_PAGES:,} pages can be told apart in a picture; "
            "run with a smaller pool or larger blocks"
        )
    labels = words.sequence_names(state, names)
    lit = _lit(state, labels, highlight)
    pages = state.pages()
    is_end = isinstance(source, Trace) and state.step > max((s.step for s in source.steps), default=-1)
    when = "when the run has ended" if is_end else f"in step {state.step:,}"
    title = title or words.finding(state, pages, labels)
    canvas = Canvas(width)
    y = _numbers(canvas, heading(canvas, title) + 42, words.numbers(state, pages))
    artist = PageArtist(canvas, state, pages, labels, lit)
    is_wide, top = width >= WIDE and len(pages) <= 640, y + 34
    left = MARGIN + (width - 2 * MARGIN) * 0.46 if is_wide else MARGIN
    grid = Grid(artist, left, width - MARGIN)
    tables = Tables(artist, MARGIN, left - 30 if is_wide else width - MARGIN)
    pool = f"the pool {when}: {len(pages):,} pages of {plural(state.block_size, 'token')}"
    if is_wide:
        ends = tables.draw(top), grid.draw(top, pool)
        tables.arrows(grid)
        y = max(ends)
    else:
        y = grid.draw(tables.draw(top) + 34, pool)
    y = artist.key(y + 28)
    text = words.describe(state, pages, labels, when)
    said = caption(title, [source]) if isinstance(source, Trace) else f"{title}."
    return Figure(canvas.svg(y + 16, title, text), title, text, said, words.table_twin(state, pages, labels))


def _lit(state: PageState, labels: Mapping[int, str], highlight: str | None) -> frozenset[int]:
    """The sequences that `highlight` names: all samples of a request, or one."""
    if highlight is None:
        return frozenset()
    found = {
        seq_id
        for seq_id, (request_id, _) in state.owners.items()
        if highlight in (request_id, labels[seq_id], labels[seq_id].rpartition(".")[0])
    }
    if not found:
        known = joined(sorted(set(labels.values())), 12) or "nobody"
        raise FigureError(f"highlight={highlight!r}: no such request so far; there is {known}")
    return frozenset(found)


def _numbers(canvas: Canvas, y: float, numbers: list[tuple[str, str]]) -> float:
    """The numbers that matter, large, each above what it measures. Returns the last baseline."""
    x = float(MARGIN)
    for large, what in numbers:
        wide = max(style.text_width(large, 28, bold=True), style.text_width(what, 12))
        if x > MARGIN and x + wide > canvas.width - MARGIN:
            x, y = MARGIN, y + 58
        canvas.text(x, y, large, "n")
        canvas.text(x, y + 18, what, "a")
        x += wide + 30
    return y + 18
