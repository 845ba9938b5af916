"""The live page map: step through a trace and see which page holds what, and why."""

from __future__ import annotations

from itertools import count
from typing import Any

from cbserve.core.pages import page_state, page_states
from cbserve.core.trace import Trace
from cbserve.errors import FigureError
from cbserve.explorers.page_story import tell_pages, tell_request
from cbserve.explorers.showing import show, told
from cbserve.viz.figure import Figure
from cbserve.viz.page_map import page_map
from cbserve.viz.page_words import sequence_names
from cbserve.viz.spans import letters, order_of_ids

MAX_BUTTONS = 12
_numbers = count(1)


class PageMapExplorer:
    """Controls around `page_map`; see `page_map_explorer`. The widgets are attributes, so that a test can move them."""

    def __init__(self, trace: Trace, step: int | None, highlight: str | None, width: int) -> None:
        self.trace, self.width = trace, width
        self.states = list(page_states(trace))
        self.first = self.states[0].step
        self.last = self.states[-1].step
        self.start = page_state(trace, step).step
        self.changes = [state.step for state in self.states if state.changes]  # steps in which pages change hands
        admitted = {request_id for request_id, _ in self.states[-1].owners.values()}
        order = order_of_ids(self.states[-1].arrived)
        self.requests = {name: r for r, name in letters(order).items() if r in admitted}  # letter -> request_id
        if highlight is not None and highlight not in {*self.requests, *self.requests.values()}:
            raise FigureError(
                f"highlight={highlight!r}: no such request; there is {', '.join(self.requests) or 'none'}"
            )
        self.highlight = self.requests.get(highlight or "", highlight)
        self.static_class = f"cbserve-static-{next(_numbers)}"
        self.figure = self._draw(self.start)
        self.box: Any = None

    # ---- state -> picture, without widgets ----------------------------------------------------------------------

    def _draw(self, step: int) -> Figure:
        known = {request_id for request_id, _ in self._state(step).owners.values()}
        highlight = self.highlight if self.highlight in known else None
        return page_map(self.trace, step, highlight=highlight, width=self.width)

    def _state(self, step: int) -> Any:
        return self.states[step - self.first]

    def story(self, step: int) -> str:
        """What this step did to the pages, and why."""
        state = self._state(step)
        return tell_pages(state, sequence_names(state))

    def chosen(self, step: int) -> str:
        """Where the chosen request's tokens are; empty if none is chosen."""
        if self.highlight is None:
            return ""
        state = self._state(step)
        mine = [seq_id for seq_id, (request_id, _) in state.owners.items() if request_id == self.highlight]
        return tell_request(state, mine, sequence_names(state))

    def when(self, step: int) -> str:
        return "After the last step" if step == self.last else f"Step {step:,}"

    # ---- widgets ------------------------------------------------------------------------------------------------

    def build(self) -> Any:
        """The widgets, made once. Raises ImportError without ipywidgets."""
        if self.box is not None:
            return self.box
        import ipywidgets as w  # type: ignore[import-untyped]

        wide, layout = {"description_width": "130px"}, w.Layout(width="min(98%, 560px)")
        self.step = w.IntSlider(self.start, self.first, self.last, description="step", style=wide, layout=layout)
        self.back, self.forward, self.change = (
            w.Button(description=text, tooltip=tip, layout=w.Layout(width="auto"))
            for text, tip in (
                ("Back", "one step back"),
                ("Step", "one step on"),
                ("Next change", "on to the next step in which pages change hands"),
            )
        )
        options = [("nobody", ""), *self.requests.items()]
        if len(options) <= MAX_BUTTONS:
            self.choice = w.ToggleButtons(options=options, value=self.highlight or "", style={"button_width": "auto"})
            label = w.Label(
                "light the pages of", layout=w.Layout(width="130px", display="flex", justify_content="flex-end")
            )
            choice = w.HBox([label, self.choice])  # a description of its own would stand above the buttons
        else:
            self.choice = choice = w.Dropdown(
                options=options, value=self.highlight or "", description="light the pages of", style=wide, layout=layout
            )
        self.picture, self.sentence, self.table = w.HTML(), w.HTML(), w.HTML()
        self.data = w.Checkbox(False, description="data as a table", indent=False)
        self.step.observe(lambda _: self._render(), "value")
        self.data.observe(lambda _: self._render(), "value")
        self.choice.observe(self._chosen, "value")
        self.back.on_click(lambda _: self._go(self.step.value - 1))
        self.forward.on_click(lambda _: self._go(self.step.value + 1))
        self.change.on_click(lambda _: self._next_change())
        # The widget exists only where a kernel runs: there it hides the image that a saved notebook shows instead.
        hide = w.HTML(f"<style>.{self.static_class}{{display:none}}</style>")
        buttons = w.HBox(
            [self.back, self.forward, self.change], layout=w.Layout(margin="0 0 0 138px", flex_flow="row wrap")
        )
        self.box = w.VBox([self.step, buttons, choice, self.sentence, self.picture, self.data, self.table, hide])
        self._render()
        return self.box

    def _chosen(self, change: Any) -> None:
        self.highlight = self.choice.value or None
        self._render()

    def _go(self, step: int) -> None:
        self.step.value = min(max(step, self.first), self.last)

    def _next_change(self) -> None:
        """To the next step that changes a page; from the end on to the first."""
        now = self.first - 1 if self.step.value >= self.last else self.step.value
        self._go(next((step for step in self.changes if step > now), self.last))

    def _render(self) -> None:
        step = self.step.value
        self.back.disabled, self.forward.disabled = step <= self.first, step >= self.last
        said = [(self.when(step), self.story(step))]
        if self.highlight is not None:
            letter = next(name for name, request_id in self.requests.items() if request_id == self.highlight)
            said.append((f"Pages of {letter}", self.chosen(step)))
        figure = self._draw(step)
        self.picture.value = figure.live_html(with_table=False)
        self.table.value = figure.table_html() if self.data.value else ""
        self.sentence.value = told(said, self.width)

    def _ipython_display_(self) -> None:
        show(self)


def page_map_explorer(
    trace: Trace, step: int | None = None, *, highlight: str | None = None, width: int = 880
) -> PageMapExplorer:
    """A page map with controls: step forward and back through a trace, and choose whose pages are lit.

    Shows itself in a notebook: live where a kernel and ipywidgets are, and as a static figure with its table in a saved
    or untrusted one. A sentence says what the step did to the pages, and why.

    Args:
        trace: of any run, measured or simulated.
        step: where to begin; by default the step that uses the most pages. One past the last step is the end.
        highlight: the request that is chosen at first, by its id or letter; it lights all its samples.
        width: pixels, at least 480.

    Raises:
        FigureError: no such step, no such request, or a pool that cannot be drawn.
    """
    return PageMapExplorer(trace, step, highlight, width)
