"""How an explorer shows itself: live where there is a kernel, and always as a static figure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from cbserve.viz.figure import Figure


class Explorer(Protocol):
    """`build` makes the widgets, which hide elements of `static_class`; `figure` is what a saved notebook shows."""

    static_class: str
    figure: Figure

    def build(self) -> Any: ...


def show(explorer: Explorer) -> None:
    """The live widget where there can be one, and always the static figure, which the widget hides."""
    from IPython.display import HTML, display

    put: Any = display  # IPython leaves both untyped
    html: Any = HTML
    if has_kernel() and find_spec("ipywidgets"):
        model = {"version_major": 2, "version_minor": 0, "model_id": explorer.build().model_id}
        put({"application/vnd.jupyter.widget-view+json": model}, raw=True)  # no text: the figure says it
    put(html(f'<div class="{explorer.static_class}">{explorer.figure._repr_html_()}</div>'))


def has_kernel() -> bool:
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


@contextmanager
def quiet() -> Iterator[None]:
    """The figure shows the preemptions; a warning for each move of a slider would drown it."""
    logger = logging.getLogger("cbserve")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


class Background:
    """Goes on with work after the answer that a learner sees at once, until something newer replaces it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Iterator[None]) -> None:
        """A part of `work` between any two messages of a live kernel; all of it now where no event loop runs."""
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
    await asyncio.sleep(0.01)  # what the learner does next comes first
    for _ in work:
        await asyncio.sleep(0.01)
