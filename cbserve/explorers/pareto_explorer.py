"""The live frontier: throughput against latency for settings that the learner turns, each point a run of the scheduler
on simulated hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import count
from typing import Any

from cbserve.core.policies import Policy
from cbserve.errors import CBServeError, FigureError
from cbserve.explorers.pareto_view import GOODPUT, ITL, TOKENS, TTFT, ParetoView
from cbserve.explorers.setting import KINDS, POLICIES, STATIC, Setting
from cbserve.explorers.showing import Background, alert, choices, show, told
from cbserve.explorers.sweep import Point
from cbserve.hardware.gpus import GPUS
from cbserve.hardware.models import MODELS
from cbserve.viz.figure import Figure
from cbserve.viz.frontier import Frontier
from cbserve.viz.style import round_ms
from cbserve.workloads.workload import Workload

CAPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
TTFTS_S = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
ITLS_S = (0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
MAX_KEPT = 4
MAX_POINTS = 40  # buttons that lie over the picture
COMPARED = (Setting(), Setting("prefill first", 64, 2048), Setting(max_num_seqs=8))
_numbers = count(1)


class ParetoExplorer(ParetoView):
    """Controls around `frontier`; see `pareto_explorer`. The widgets are attributes, so that a test can move them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._background = Background()
        self.static_class = f"cbserve-static-{next(_numbers)}"
        self.figure: Figure = self.draw()
        self.box: Any = None

    def build(self) -> Any:
        """The widgets, made once. Raises ImportError without ipywidgets."""
        if self.box is not None:
            return self.box
        import ipywidgets as w  # type: ignore[import-untyped]

        wide = {"description_width": "130px"}
        layout = w.Layout(width="min(98%, 430px)")

        def slider(name: str, options: Sequence[tuple[str, Any]], value: Any) -> Any:
            return w.SelectionSlider(options=options, value=value, description=name, style=wide, layout=layout)

        def menu(name: str, options: Sequence[Any], value: Any) -> Any:
            return w.Dropdown(options=options, value=value, description=name, style=wide, layout=layout)

        def label(text: str) -> Any:
            return w.Label(text, layout=w.Layout(width="130px", display="flex", justify_content="flex-end"))

        self.gpus, self.models = menu("GPU", list(GPUS), self.gpu), menu("model", list(MODELS), self.model)
        self.works = menu("workload", list(self.workloads), self.workload)
        most = max(300, self.num_requests)
        self.requests = w.IntSlider(
            self.num_requests, 50, most, 50, description="requests", style=wide, layout=layout, continuous_update=False
        )
        self.kind = menu("batching", KINDS, self.setting.batching)
        self.cap = slider("batch cap", choices(CAPS, self.setting.max_num_seqs), self.setting.max_num_seqs)
        self.budget = slider("chunk (tokens)", choices(BUDGETS, self.setting.token_budget), self.setting.token_budget)
        self.policy = menu("policy", list(self.policies), self.setting.policy)
        self.ttft = slider("TTFT limit", choices(TTFTS_S, self.ttft_s, round_ms), self.ttft_s)
        self.itl = slider("ITL limit", choices(ITLS_S, self.itl_s, round_ms), self.itl_s)
        self.across = w.ToggleButtons(options=[TTFT, ITL], value=self.x, style={"button_width": "90px"})
        self.up = w.ToggleButtons(options=[TOKENS, GOODPUT], value=self.y, style={"button_width": "130px"})
        self.points = menu("point", self._options(), self.chosen)
        self.keep = w.Button(description="Keep this curve", tooltip="compare it with the next ones")
        self.forget = w.Button(description="Forget the others", tooltip="only the curve of the controls stays")
        self.error, self.sentence, self.style = w.HTML(), w.HTML(), w.HTML()
        self.picture, self.caption, self.steps_picture, self.table = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.data = w.Checkbox(False, description="data as tables", indent=False)
        self._is_setting = False
        for control in (self.gpus, self.models, self.works, self.requests, self.kind, self.cap, self.budget,
                        self.policy, self.ttft, self.itl, self.across, self.up):  # fmt: skip
            control.observe(self._changed, "value")
        self.points.observe(self._chose, "value")
        self.data.observe(lambda _: self._render(), "value")
        self.keep.on_click(lambda _: self._keep())
        self.forget.on_click(lambda _: self._forget())
        self.buttons = [w.Button(layout=w.Layout(display="none")) for _ in range(MAX_POINTS)]
        for number, button in enumerate(self.buttons):
            button.add_class(f"cbserve-pt-{number}")
            button.on_click(lambda _, number=number: self._pressed(number))
        self.plot = w.Box([self.picture, *self.buttons])
        self.plot_class = f"cbserve-plot-{self.static_class.rsplit('-', 1)[1]}"
        self.plot.add_class(self.plot_class)
        hide = w.HTML(f"<style>.{self.static_class}{{display:none}}</style>")
        flow = w.Layout(flex_flow="row wrap", width="100%", max_width="900px")
        left = [self.gpus, self.models, self.works, self.requests, self.ttft]
        right = [self.kind, self.cap, self.budget, self.policy, self.itl]
        column = w.Layout(width="min(100%, 440px)")
        rows = [
            w.HBox([w.VBox(left, layout=column), w.VBox(right, layout=column)], layout=flow),
            w.HBox([w.HBox([label("latency →"), self.across]), w.HBox([label("↑ throughput"), self.up])], layout=flow),
            w.HBox([self.points, self.keep, self.forget], layout=flow),
        ]
        self.box = w.VBox([*rows, self.error, self.sentence, self.style, self.plot, self.caption, self.steps_picture,
                           self.data, self.table, hide])  # fmt: skip
        self._render()
        self._render_steps()
        return self.box

    def _options(self) -> list[tuple[str, tuple[Setting, float]]]:
        return [(f"{s.name} at {rate:g}/s", (s, rate)) for s in self.settings for rate in self.rates]

    def _changed(self, change: Any) -> None:
        """Simulate what the controls say at the chosen rate, draw, and fill in the rest of the curves afterwards."""
        if self._is_setting:
            return
        before = self.gpu, self.model, self.workload, self.num_requests, self.sweep
        rates, index = self.rates, self.rates.index(self.chosen[1])
        try:
            self.gpu, self.model, self.workload = self.gpus.value, self.models.value, self.works.value
            self.num_requests = self.requests.value
            self.sweep = self._sweep()
        except CBServeError as error:
            self.gpu, self.model, self.workload, self.num_requests, self.sweep = before
            self._say(str(error))
            return
        self.ttft_s, self.itl_s, self.x, self.y = self.ttft.value, self.itl.value, self.across.value, self.up.value
        was = self.setting
        self.setting = Setting(self.kind.value, self.cap.value, self.budget.value, self.policy.value)
        self.budget.disabled = self.kind.value == STATIC
        if self.setting != was or self.rates != rates:
            self.chosen = (self.setting, self.rates[min(index, len(self.rates) - 1)])
        self._refresh()

    def _refresh(self) -> None:
        self._is_setting = True
        self.points.options = self._options()
        self.points.value = self.chosen
        self._is_setting = False
        self._say("")
        self._render()
        self._later()

    def _chose(self, change: Any) -> None:
        if not self._is_setting and self.points.value is not None:
            self.chosen = self.points.value
            self._render()
            self._later()

    def _pressed(self, number: int) -> None:
        if number < len(self._places):
            self.points.value = self._places[number]

    def _keep(self) -> None:
        self.kept = list(dict.fromkeys([*self.kept, self.setting]))[-MAX_KEPT:]

    def _forget(self) -> None:
        self.kept = []
        self.chosen = (self.setting, self.chosen[1])
        self._refresh()

    def _say(self, message: str) -> None:
        self.error.value = alert(message)

    # ---- answering at once, and then completely -----------------------------------------------------------------

    def _later(self) -> None:
        self._background.start(self._rest())

    def _rest(self) -> Iterator[None]:
        """The rest of the curves, one run at a time, then the first steps of the chosen one."""
        for setting in self.settings:
            for rate in self.rates:
                if self.sweep.known(setting, rate) is None:
                    self.sweep.point(setting, rate)
                    self._render()
                    yield
        self._render_steps()

    def _render(self) -> None:
        self.point()  # the chosen run is there before it is drawn
        figure = self.draw()
        self._lay_buttons(figure)
        self.picture.value = figure.live_svg()
        self.caption.value = f'<div style="line-height:1.45;max-width:880px">{escape(figure.caption)}</div>'
        tables = f"{self.numbers()}{figure.table_html()}" if self.data.value else ""
        self.table.value = f'<div style="overflow-x:auto">{tables}</div>' if tables else ""
        self.sentence.value = told(self.story())

    def _lay_buttons(self, figure: Frontier) -> None:
        """A button over each point, at its share of the picture's width and height: a picture cannot call back."""
        points = [(s, p.rate, xy) for s, line in zip(self.settings, figure.places, strict=True)
                  for p, xy in zip(self._drawn(s), line, strict=True)][:MAX_POINTS]  # fmt: skip
        self._places = [(setting, rate) for setting, rate, _ in points]
        width, height = figure.size
        me = f".{self.plot_class}"
        rules = [
            f"{me}{{position:relative;overflow:visible;width:min(100%,{width}px)}}",
            f"{me}>.widget-html{{width:100%;margin:0}}{me} svg{{display:block}}",
            f"{me}>button{{position:absolute;width:26px;height:26px;min-width:0;margin:-13px 0 0 -13px;padding:0;"
            "border-radius:50%;background:transparent!important;box-shadow:none!important;line-height:26px}",
            f"{me}>button:focus-visible{{outline:2px solid var(--jp-brand-color1,#0072B2)}}",
        ]
        for number, button in enumerate(self.buttons):
            is_used = number < len(points)
            button.layout.display = None if is_used else "none"
            if is_used:
                setting, rate, (x, y) = points[number]
                button.tooltip = f"{setting.name} at {rate:g} requests/s"
                where = f"left:{100 * x / width:.3f}%;top:{100 * y / height:.3f}%"
                layer = 2 if setting == self.setting else 1  # points may lie on each other
                rules.append(f"{me}>.cbserve-pt-{number}{{{where};z-index:{layer}}}")
        self.style.value = f"<style>{''.join(rules)}</style>"

    def _drawn(self, setting: Setting) -> list[Point]:
        return [p for p in self._known(setting) if all(map(math.isfinite, self._xy(p)))]

    def _render_steps(self) -> None:
        self.steps_picture.value = self.steps().live_html(with_table=False)

    def _ipython_display_(self) -> None:
        show(self)


def pareto_explorer(
    gpu: str = "a100-80",
    model: str = "llama-3.1-8b",
    workload: str | Workload = "conv",
    *,
    num_requests: int = 80,
    rates: Sequence[float] | None = None,
    settings: Sequence[Setting] = COMPARED,
    policies: Mapping[str, Callable[[], Policy]] = POLICIES,
    ttft_s: float = 1.0,
    itl_s: float = 0.1,
) -> ParetoExplorer:
    """Throughput against latency, with controls: each curve is a setting, each point a rate of requests.

    All runs are simulated: the engine's own scheduler on a virtual clock, step times of a roofline. A move of a control
    simulates the chosen rate at once and the other rates behind it. Choose a point, with the mouse or from the list,
    and see its first steps and its numbers.

    Args:
        gpu, model: by name, as in `GPUS` and `MODELS`.
        workload: "conv" or "code", a synthetic twin of that Azure trace, or a `Workload` whose arrivals have a rate.
        num_requests: at each rate.
        rates: requests a second, rising; None: six, up to about what the hardware can do.
        settings: the first is what the controls begin with, the others are curves to compare with.
        policies: name -> what makes a policy, for the menu.
        ttft_s, itl_s: limits of TTFT and ITL, in seconds.

    Raises:
        InvalidRequestError: no such GPU, model or workload, or the weights do not fit.
        FigureError: no rates, no settings, or a policy that is not in the menu.
    """
    if not settings or any(s.policy not in policies for s in settings):
        raise FigureError(f"settings={settings!r}: give at least one, with a policy of {', '.join(policies)}")
    if rates is not None and (not rates or list(rates) != sorted(set(rates))):
        raise FigureError(f"rates={rates!r}: give requests a second, rising")
    works: dict[str, Workload | str] = {"Azure conv (twin)": "conv", "Azure code (twin)": "code"}
    if isinstance(workload, Workload):
        works = {workload.name: workload, **works}
    elif workload == "code":
        works = dict(reversed(works.items()))
    elif workload != "conv":
        raise FigureError(f"workload={workload!r}: must be 'conv', 'code' or a Workload")
    return ParetoExplorer(gpu, model, works, num_requests, rates, settings, policies, ttft_s, itl_s)
