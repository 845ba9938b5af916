"""A scene: sliders and menus in front of one function that answers with a figure and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from cbserve.errors import CBServeError
from cbserve.explorers.pressable import WIDTHS, in_width, in_widths
from cbserve.explorers.showing import Background, refused, show, told
from cbserve.viz.figure import Figure

# A label stands above its control where both would be narrow; what was shown before is greyed while it cannot be
_STYLE = """
.@me{container:cbserve/inline-size;width:100%}.@me svg{display:block}
.@me .cbserve-stale{opacity:.3;pointer-events:none}
@container cbserve (max-width:539px){.@me .widget-inline-hbox{flex-wrap:wrap;height:auto}
.@me .widget-inline-hbox>.widget-label{width:100%!important;text-align:left}
.@me .widget-inline-hbox>select{height:28px}}
"""
_numbers = count(1)
Told = Sequence[tuple[str, str]]
Draw = Callable[[int], Figure]  # width in pixels -> the figure
Answer = tuple[Draw, Told]


@dataclass(frozen=True)
class Control:
    """What can be chosen, in order: (what is shown, value) pairs. `is_menu`: names rather than a scale."""

    name: str
    options: Sequence[tuple[str, Any]]
    is_menu: bool = False

    def said(self, value: Any) -> str:
        shown = next(shown for shown, option in self.options if option == value)
        return f"{self.name} {shown}"


class Scene:
    """Controls, a picture that answers each move, what it says in words, its data as a table.

    The widgets are in `widgets`, by name. Shows itself live, and as a static figure in a saved or untrusted notebook.

    Args:
        answers: called with the controls' values by name; gives one or more answers, what draws a figure in a width and
            (heading, sentence) pairs each: the first at once, the others with more in them.
        controls: name of the argument -> control.
        values: where the controls begin.
        follows: values by name -> those of them that follow from the others; their controls cannot be moved.

    Raises:
        CBServeError: `answers` refuses the first values.
    """

    def __init__(
        self, answers: Callable[..., Iterator[Answer]], controls: Mapping[str, Control], values: Mapping[str, Any],
        follows: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {},
    ) -> None:  # fmt: skip
        self._answers, self.controls, self.values, self._follows = answers, controls, dict(values), follows
        self._background = Background()
        number = next(_numbers)
        self.static_class, self.live_class = f"cbserve-static-scene-{number}", f"cbserve-scene-{number}"
        *_, (self._draw, self.told) = answers(**values)
        self.box: Any = None
        self._is_setting = False

    @property
    def figure(self) -> Figure:
        return self._draw(max(WIDTHS))

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
        rules = [f".{self.static_class}{{display:none}}{_STYLE.replace('@me', self.live_class)}"]
        rules += [in_width(self.live_class, width) for width in WIDTHS]
        style = w.HTML(f"<style>{''.join(rules)}</style>")
        self.shown = w.VBox([self.sentence, self.picture, self.data, self.table])
        self.box = w.VBox([*self.widgets.values(), self.error, self.shown, style])
        self.box.add_class(self.live_class)
        self._chosen()
        self._render()
        return self.box

    def _chosen(self) -> dict[str, Any]:
        """What the controls say, when those that follow have followed."""
        values = {name: widget.value for name, widget in self.widgets.items()}
        followed = self._follows(values)
        self._is_setting = True
        for name, widget in self.widgets.items():
            widget.disabled = name in followed
            widget.value = followed.get(name, widget.value)
        self._is_setting = False
        return values | dict(followed)

    def _moved(self, change: Any) -> None:
        if self._is_setting:
            return
        values = self._chosen()
        answers = self._answers(**values)
        try:
            answer = next(answers)
        except CBServeError as error:  # what was shown stays, greyed
            self._refuse(str(error), values)
            return
        self.values, self.error.value = values, ""
        self.shown.remove_class("cbserve-stale")
        self._show(answer)
        self._background.start(self._rest(answers))

    def _refuse(self, message: str, values: Mapping[str, Any]) -> None:
        """Say why, and how what is still shown was set where that differs."""
        before = [control.said(self.values[n]) for n, control in self.controls.items() if self.values[n] != values[n]]
        self.error.value = refused(message, ", ".join(before))
        self.shown.add_class("cbserve-stale")

    def _rest(self, answers: Iterator[Answer]) -> Iterator[None]:
        for answer in answers:
            self._show(answer)
            yield

    def _show(self, answer: Answer) -> None:
        self._draw, self.told = answer
        self._render()

    def _render(self) -> None:
        figures = {width: self._draw(width) for width in WIDTHS}
        table = figures[max(WIDTHS)].table_html()
        self.picture.value = in_widths({w: figure.live_html(with_table=False) for w, figure in figures.items()})
        self.table.value = f'<div style="overflow-x:auto">{table}</div>' if self.data.value else ""
        self.sentence.value = told(self.told)

    def _ipython_display_(self) -> None:
        show(self)
