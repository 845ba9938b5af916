"""A scene: sliders and menus in front of one function that answers with a figure and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from cbserve.errors import CBServeError
from cbserve.explorers.showing import Background, alert, show, told
from cbserve.viz.figure import Figure

_numbers = count(1)
Told = Sequence[tuple[str, str]]
Answer = tuple[Figure, Told]


@dataclass(frozen=True)
class Control:
    """What can be chosen, in order: (what is shown, value) pairs. `is_menu`: names rather than a scale."""

    name: str
    options: Sequence[tuple[str, Any]]
    is_menu: bool = False


class Scene:
    """Controls, a picture that answers each move, what it says in words, its data as a table.

    The widgets are in `widgets`, by name. Shows itself live, and as a static figure in a saved or untrusted notebook.

    Args:
        answers: called with the controls' values by name; gives one or more answers, a figure and (heading, sentence)
            pairs each: the first at once, the others with more in them.
        controls: name of the argument -> control.
        values: where the controls begin.

    Raises:
        CBServeError: `answers` refuses the first values.
    """

    def __init__(
        self, answers: Callable[..., Iterator[Answer]], controls: Mapping[str, Control], values: Mapping[str, Any]
    ) -> None:
        self._answers, self.controls, self.values = answers, controls, dict(values)
        self._background = Background()
        self.static_class = f"cbserve-static-scene-{next(_numbers)}"
        *_, (self.figure, self.told) = answers(**values)
        self.box: Any = None

    def build(self) -> Any:
        """The widgets, made once. Raises ImportError without ipywidgets."""
        if self.box is not None:
            return self.box
        import ipywidgets as w  # type: ignore[import-untyped]

        looks = {"style": {"description_width": "170px"}, "layout": w.Layout(width="min(98%, 560px)")}
        self.widgets = {
            name: (w.Dropdown if control.is_menu else w.SelectionSlider)(
                options=control.options, value=self.values[name], description=control.name, **looks
            )
            for name, control in self.controls.items()
        }
        self.error, self.sentence, self.picture, self.table = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.data = w.Checkbox(False, description="data as a table", indent=False)
        for widget in self.widgets.values():
            widget.observe(self._moved, "value")
        self.data.observe(lambda _: self._render(), "value")
        hide = w.HTML(f"<style>.{self.static_class}{{display:none}}</style>")
        self.box = w.VBox(
            [*self.widgets.values(), self.error, self.sentence, self.picture, self.data, self.table, hide]
        )
        self._render()
        return self.box

    def _moved(self, change: Any) -> None:
        values = {name: widget.value for name, widget in self.widgets.items()}
        answers = self._answers(**values)
        try:
            answer = next(answers)
        except CBServeError as error:  # the picture stays
            self.error.value = alert(str(error))
            return
        self.values, self.error.value = values, ""
        self._show(answer)
        self._background.start(self._rest(answers))

    def _rest(self, answers: Iterator[Answer]) -> Iterator[None]:
        for answer in answers:
            self._show(answer)
            yield

    def _show(self, answer: Answer) -> None:
        self.figure, self.told = answer
        self._render()

    def _render(self) -> None:
        self.picture.value = self.figure.live_html(with_table=False)
        self.table.value = f'<div style="overflow-x:auto">{self.figure.table_html()}</div>' if self.data.value else ""
        self.sentence.value = told(self.told)

    def _ipython_display_(self) -> None:
        show(self)
