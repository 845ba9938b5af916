"""How an explorer shows itself: live where there is a kernel, and always as a static figure."""

from __future__ import annotations

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
