"""How an explorer shows itself: live where there is a kernel, and always as a static figure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from html import escape
from importlib.util import find_spec
from time import monotonic
from typing import Any, Protocol, TypeVar

from cbserve.viz.figure import Figure

T = TypeVar("T", int, float)
SLICE_S, PAUSE_S = 0.02, 0.01  # of work between any two messages, and for messages between any two slices


class Explorer(Protocol):
    """`build` makes the widgets, which hide elements of `static_class`; `figure` is what a saved notebook shows."""

    static_class: str

    @property
    def figure(self) -> Figure: ...

    def build(self) -> Any: ...


def show(explorer: Explorer, first: Callable[[], Figure] | None = None) -> Callable[[Figure], None] | None:
    """The live widget where there can be one, and always the static figure, which the widget hides.

    Args:
        first: draws another figure at once, where `explorer.figure` takes long and a person waits for the cell, who
            cannot move a control before it has ended.

    Returns:
        What puts another figure in the place of `first`; None where that was not shown.
    """
    from IPython.display import HTML, display

    put: Any = display  # IPython leaves both untyped
    html: Any = HTML

    def static(figure: Figure) -> Any:
        return html(f'<div class="{explorer.static_class}">{figure._repr_html_()}</div>')

    if has_kernel() and find_spec("ipywidgets"):
        model = {"version_major": 2, "version_minor": 0, "model_id": explorer.build().model_id}
        put({"application/vnd.jupyter.widget-view+json": model}, raw=True)  # no text: the figure says it
        if first is not None and is_attended():
            handle = put(static(first()), display_id=True)
            return lambda figure: handle.update(static(figure))
    put(static(explorer.figure))
    return None


def is_attended() -> bool:
    """Whether a person can be asked: JupyterLab and Colab say so with each cell, nbclient, papermill and nbval do
    not."""
    from IPython.core.getipython import get_ipython

    return bool(getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False))


def has_kernel() -> bool:
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def alert(text: str) -> str:
    """What was wrong, as HTML that a screen reader says at once; lines after the first keep their columns."""
    if not text:
        return ""
    first, _, rest = text.partition("\n")
    font = "12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
    columns = (
        f"margin:4px 0 0;overflow-x:auto;white-space:pre-wrap;word-break:normal;font:{font}"  # Jupyter breaks words
    )
    arithmetic = f'<pre style="{columns}">{escape(rest)}</pre>' if rest else ""
    mark = "border-left:4px solid #D55E00;padding:2px 8px;margin:4px 0;line-height:1.45"
    return f'<div role="alert" style="{mark}">{escape(first)}{arithmetic}</div>'


def refused(message: str, before: str) -> str:
    """`alert` of why something cannot be shown, and of what is shown still, greyed: `before`, in words."""
    what, line, arithmetic = message.partition("\n")
    end = "" if what.endswith(".") else "."
    return alert(f"{what}{end} Greyed below: what was shown before, {before}.{line}{arithmetic}")


def told(pairs: Iterable[tuple[str, str]], width: int = 880) -> str:
    """Sentences, each behind who or what it is about, as HTML that is read aloud when it changes: set it last."""
    style = "margin:2px 0;line-height:1.45"
    said = "".join(f'<p style="{style}"><b>{escape(who)}:</b> {escape(what)}</p>' for who, what in pairs)
    return f'<div role="status" aria-live="polite" style="max-width:{width}px">{said}</div>'


def choices(values: Iterable[T], own: T, said: Callable[[T], str] = "{:,}".format) -> list[tuple[str, T]]:
    """(what is shown, value) pairs for a slider: `values` and the one that it begins with, in order."""
    return [(said(value), value) for value in sorted({*values, own})]


class Background:
    """Goes on with work after the answer that a learner sees at once, until something newer replaces it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Iterator[None]) -> None:
        """Some parts of `work` between any two messages of a live kernel; all of it now where no event loop runs."""
        if self._task is not None:
            self._task.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            for _ in work:
                pass
            return
        self._task = loop.create_task(_part_by_part(work))  # held, or it could be collected while it runs


async def _part_by_part(work: Iterator[None]) -> None:
    await asyncio.sleep(PAUSE_S)  # what the learner does next comes first
    began = monotonic()
    for _ in work:
        if monotonic() - began > SLICE_S:  # parts may be far smaller
            await asyncio.sleep(PAUSE_S)
            began = monotonic()
