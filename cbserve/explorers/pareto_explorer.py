"""The live frontier: throughput against latency for settings that the learner turns, each point a run of the scheduler
on simulated hardware."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import count
from typing import Any

from cbserve.core.policies import Policy
from cbserve.errors import CBServeError, FigureError
from cbserve.explorers.curves import FIRST_LOOK, Line
from cbserve.explorers.machines import Machines
from cbserve.explorers.pareto_view import GOODPUT, ITL, TOKENS, TTFT, ParetoView
from cbserve.explorers.point import Point
from cbserve.explorers.pressable import WIDTHS, PressablePicture, in_widths
from cbserve.explorers.setting import KINDS, POLICIES, STATIC, Setting
from cbserve.explorers.showing import Background, choices, refused, show, told
from cbserve.explorers.traffic import traffic
from cbserve.viz.figure import Figure
from cbserve.viz.frontier import Frontier
from cbserve.viz.style import round_ms
from cbserve.workloads.workload import Workload

CAPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
TTFTS_S = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
REQUESTS = (200, 500, 1_000, 2_000)
ITLS_S = (0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
MAX_KEPT = 4
COMPARED = (Setting(), Setting("prefill first", 64, 2048), Setting(max_num_seqs=8))
STATE = ("gpu", "model", "workload", "num_requests", "setting", "chosen", "ttft_s", "itl_s", "x", "y")
NARROWEST_STEPS = 480  # pixels of a timeline; it scrolls where there is less room
_STYLE = """
.@me .cbserve-stale{opacity:.3;pointer-events:none}
.@me .cbserve-steps{overflow-x:auto}.@me .cbserve-steps .cbserve-w360 svg{max-width:none!important}
"""
_numbers = count(1)


class ParetoExplorer(ParetoView):
    """Controls around `frontier`; see `pareto_explorer`. The widgets are attributes, so that a test can move them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._background = Background()
        number = next(_numbers)
        self.static_class, self.live_class = f"cbserve-static-{number}", f"cbserve-live-{number}"
        self.box: Any = None
        self._save: Callable[[Figure], None] | None = None
        self._steps_of: Any = None  # the run whose steps are shown; they are grey when another one is chosen

    @property
    def figure(self) -> Frontier:
        """Of whole runs, for a notebook that is saved or exported; simulates them now where they are not known."""
        for _ in self._refined():
            pass
        return self.draw()

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

        self.gpus = menu("GPU", list(self.machines.gpus), self.gpu)
        self.models = menu("model", list(self.machines.models), self.model)
        self.works = menu("workload", list(self.workloads), self.workload)
        self.requests = slider("requests", choices(REQUESTS, self.num_requests), self.num_requests)
        self.kind = menu("batching", KINDS, self.setting.batching)
        self.cap = slider("batch cap", choices(CAPS, self.setting.max_num_seqs), self.setting.max_num_seqs)
        self.budget = slider("chunk (tokens)", choices(BUDGETS, self.setting.token_budget), self.setting.token_budget)
        self.policy = menu("policy", list(self.policies), self.setting.policy)
        self.ttft = slider("TTFT limit", choices(TTFTS_S, self.ttft_s, round_ms), self.ttft_s)
        self.itl = slider("ITL limit", choices(ITLS_S, self.itl_s, round_ms), self.itl_s)
        self.across = w.ToggleButtons(options=[TTFT, ITL], value=self.x, style={"button_width": "90px"})
        self.up = w.ToggleButtons(options=[TOKENS, GOODPUT], value=self.y, style={"button_width": "130px"})
        self.points_menu = menu("point", self._options(), self.chosen)
        self.moments_menu = menu("steps", [("not simulated yet", "")], "")
        self.keep = w.Button(description="Keep this curve", tooltip="it stays, whatever you choose next")
        self.forget = w.Button(description="Forget the others", tooltip="only the curve of the controls stays")
        self.error, self.sentence, self.kept_said = w.HTML(), w.HTML(), w.HTML()
        self.caption, self.steps_picture, self.table = w.HTML(), w.HTML(), w.HTML()
        self.data = w.Checkbox(False, description="data as tables", indent=False)
        self._is_setting = False
        for control in (self.gpus, self.models, self.works, self.requests, self.kind, self.cap, self.budget,
                        self.policy, self.ttft, self.itl, self.across, self.up):  # fmt: skip
            control.observe(self._changed, "value")
        self.points_menu.observe(self._chose, "value")
        self.moments_menu.observe(self._chose_moment, "value")
        self.data.observe(lambda _: self._render(), "value")
        self.keep.on_click(lambda _: self._keep())
        self.forget.on_click(lambda _: self._forget())
        self.pressable = PressablePicture(self.live_class, self._pressed)
        self.picture, plot = self.pressable.picture, self.pressable.plot
        self.steps_picture.add_class("cbserve-steps")
        rules = _STYLE.replace("@me", self.live_class)
        style = w.HTML(f"<style>.{self.static_class}{{display:none}}{rules}</style>")
        flow = w.Layout(flex_flow="row wrap", width="100%", max_width="900px")
        left = [self.gpus, self.models, self.works, self.requests, self.ttft]
        right = [self.kind, self.cap, self.budget, self.policy, self.itl]
        column = w.Layout(width="min(100%, 440px)")
        controls = [
            w.HBox([w.VBox(left, layout=column), w.VBox(right, layout=column)], layout=flow),
            w.HBox([w.HBox([label("latency →"), self.across]), w.HBox([label("↑ throughput"), self.up])], layout=flow),
            w.HBox([self.points_menu, self.keep, self.forget], layout=flow),
            self.kept_said,
        ]
        self.shown = w.VBox(
            [self.sentence, plot, self.caption, self.moments_menu, self.steps_picture, self.data, self.table]
        )
        self.box = w.VBox([*controls, self.error, self.pressable.style, self.shown, style])
        self.box.add_class(self.live_class)
        self._follow_machine()
        self._render()
        self._later()
        return self.box

    def _options(self) -> list[tuple[str, tuple[Line, float]]]:
        return [(f"{self.name(line)} at {rate:g}/s", (line, rate)) for line in self.lines for rate in self.rates(line)]

    # ---- what the learner does -----------------------------------------------------------------------------------

    def _changed(self, change: Any) -> None:
        """Simulate what the controls say at the chosen rate, draw, and fill in the rest of the curves afterwards.

        What cannot be is said, and what was shown stays, greyed.
        """
        if self._is_setting:
            return
        before = {name: getattr(self, name) for name in STATE}
        self._follow_machine()
        try:
            self._read()
            self._render()
        except CBServeError as error:
            vars(self).update(before)
            self._say(str(error))
            return
        self._say("")
        self._offer_points()
        self._later()

    def _follow_machine(self) -> None:
        """A machine that is calibrated comes with its model."""
        calibrated = self.machines.calibrated.get(self.gpus.value)
        self.models.disabled = calibrated is not None
        if calibrated is not None:
            self._set(self.models, calibrated)

    def _read(self) -> None:
        """Take over what the controls say."""
        before, rates = self.line, self.rates(self.chosen[0])
        index = rates.index(self.chosen[1])
        self.gpu, self.model, self.workload = self.gpus.value, self.models.value, self.works.value
        self.num_requests = self.requests.value
        self.setting = Setting(self.kind.value, self.cap.value, self.budget.value, self.policy.value)
        self.ttft_s, self.itl_s, self.x, self.y = self.ttft.value, self.itl.value, self.across.value, self.up.value
        self.budget.disabled = self.kind.value == STATIC
        if self.line != before:
            rates = self.rates(self.line)
            self.chosen = (self.line, rates[min(index, len(rates) - 1)])

    def _chose(self, change: Any) -> None:
        if not self._is_setting and self.points_menu.value is not None:
            self.chosen = self.points_menu.value
            self._render()
            self._later()

    def _chose_moment(self, change: Any) -> None:
        if not self._is_setting:
            self.moment = self.moments_menu.value
            for _ in self._steps_drawn():
                pass
            self._later()  # what was being drawn when this was chosen shows another moment

    def _pressed(self, number: int) -> None:
        if number < len(self._places):
            self.points_menu.value = self._places[number]

    def _keep(self) -> None:
        """Its curve stays as it is when the controls move on, to another machine too; the oldest makes room for it."""
        kept = list(dict.fromkeys([*self.kept, self.line]))[-MAX_KEPT:]
        self._compare(self.compared[max(0, len(self.compared) + len(kept) - MAX_KEPT) :], kept)

    def _forget(self) -> None:
        self._compare([], [])

    def _compare(self, compared: list[Setting], kept: list[Line]) -> None:
        """With these curves; a point of another one cannot stay chosen."""
        self.compared, self.kept = compared, kept
        names = [f"{of.setting.name}, {of.place[1]} on {of.place[0]} with {of.place[2]}" for of in kept]
        full = f" ({MAX_KEPT} at most: the next one takes the place of the first)" * (len(kept) == MAX_KEPT)
        self.kept_said.value = f'<span role="status">Kept: {escape("; ".join(names))}{full}</span>' if kept else ""
        if self.chosen[0] not in self.lines:
            rates = self.rates(self.line)
            self.chosen = (self.line, self.chosen[1] if self.chosen[1] in rates else rates[len(rates) // 2])
        self._render()
        self._offer_points()
        self._later()

    def _set(self, control: Any, value: Any, options: Sequence[Any] | None = None) -> None:
        """Without an answer to it, and in one message: between two, what the learner chooses would be lost."""
        self._is_setting = True
        with control.hold_sync():
            if options is not None:
                control.options = options
            control.value = value
        self._is_setting = False

    def _offer_points(self) -> None:
        self._set(self.points_menu, self.chosen, self._options())

    def _say(self, message: str) -> None:
        self.error.value = refused(message, f"{self.model} on {self.gpu}") if message else ""
        self._grey(self.shown, bool(message))
        for widget in (self.points_menu, self.keep, self.forget):  # they are about what is greyed
            widget.disabled = bool(message)

    def _grey(self, widget: Any, is_stale: bool) -> None:
        (widget.add_class if is_stale else widget.remove_class)("cbserve-stale")

    # ---- answering at once, and then completely ------------------------------------------------------------------

    def _later(self) -> None:
        self._background.start(self._rest())

    def _rest(self) -> Iterator[None]:
        """First looks of all curves, the whole run of the chosen point with its steps, then all other whole runs."""
        yield from self._drawn_when_done(self.simulate(FIRST_LOOK))
        yield from self.find_moments()
        self._render()
        yield
        yield from self._steps_drawn()
        yield from self._refined()
        if self._save is not None:
            self._save(self.draw())

    def _refined(self) -> Iterator[None]:
        yield from self._drawn_when_done(self.simulate(self.num_each))

    def _drawn_when_done(self, runs: Iterator[bool]) -> Iterator[None]:
        for is_done in runs:
            if is_done and self.box is not None:
                self._render()
            yield

    def _render(self) -> None:
        self.point()  # the chosen run is there before it is drawn
        figures = {width: self.draw(width) for width in WIDTHS}
        figure = next(iter(figures.values()))
        self._places = [(line, p.rate) for line in self.lines for p in self._drawable(line)]
        points = [(f"{self.name(line)} at {rate:g} requests/s", line == self.line) for line, rate in self._places]
        self.pressable.show(figures, points)
        self.caption.value = f'<div style="line-height:1.45;max-width:880px">{escape(figure.caption)}</div>'
        tables = f"{self.numbers()}{figure.table_html()}" if self.data.value else ""
        self.table.value = f'<div style="overflow-x:auto">{tables}</div>' if tables else ""
        self.sentence.value = told(self.story())
        self._grey(self.steps_picture, self._steps_of != self._run_shown())

    def _drawable(self, line: Line) -> list[Point]:
        return [p for p in self.points(line) if all(map(math.isfinite, self.xy(p)))]

    def _run_shown(self) -> Any:
        return self.chosen, self.num_each

    def _steps_drawn(self) -> Iterator[None]:
        """The timeline of the moment that is chosen, a width at a time; nothing as long as there is none."""
        if found := self.moments():
            self._set(self.moments_menu, self.shown_moment().kind, [(moment.name, moment.kind) for moment in found])
            drawn: dict[int, str] = {}
            for width in WIDTHS:
                drawn[width] = self.steps(max(width, NARROWEST_STEPS)).live_html(with_table=False)
                yield
            self.steps_picture.value = in_widths(drawn)
            self._steps_of = self._run_shown()
            self._grey(self.steps_picture, False)

    def _ipython_display_(self) -> None:
        self._save = show(self, first=self.draw)


def pareto_explorer(
    gpu: Any = "a100-80",
    model: Any = None,
    workload: str | os.PathLike[str] | Workload | None = None,
    *,
    num_requests: int = 1_000,
    rates: Sequence[float] | None = None,
    settings: Sequence[Setting] = COMPARED,
    policies: Mapping[str, Callable[[], Policy]] = POLICIES,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    num_blocks: int | None = None,
) -> ParetoExplorer:
    """Throughput against latency, with controls: each curve is a setting, each point a rate of requests.

    All runs are simulated: the engine's own scheduler on a virtual clock, step times of a roofline. A move of a control
    is answered at once with a first look, a run of 80 requests. Whole runs follow behind it, curve by curve, and only
    they say what a setting carries: in a short run no queue has time to grow. The same goes for the cell; where nobody
    waits for it, as in an export, it is done with the whole runs. Choose a point, with the mouse or from the list, and
    see its numbers and its most telling steps.

    Args:
        gpu: by name, as in `GPUS`, or a `Gpu`; "this": this machine, as `cbserve calibrate` measured it; or the path of
            another calibration.
        model: by name, as in `MODELS`, a `ModelShape`, or the folder of a Hugging Face config.json; None:
            Llama-3.1-8B, or the model of the calibration.
        workload: "conv" or "code", a synthetic twin of that Azure trace; "chat", short prompts and answers as `cbserve
            twin` takes them; the path of a trace as `read_trace` takes it; or a `Workload` whose arrivals have a rate.
            None: "conv", or "chat" where a CPU was calibrated.
        num_requests: of a whole run, at each rate.
        rates: requests a second, rising; None: six, up to about what the hardware can do.
        settings: the first is what the controls begin with, the others are curves to compare with.
        policies: name -> what makes a policy, for the menu.
        ttft_s, itl_s: limits of TTFT and ITL, in seconds; None: 1 and 0.1, or 5 and 0.5 where a CPU was calibrated.
        num_blocks: of the KV cache; None: what the device has room for, as in `cbserve sim`.

    Raises:
        CBServeError: no such GPU or model, no calibration, the weights do not fit, or the trace cannot be read.
        FigureError: no rates, no settings, a policy that is not in the menu, or no such workload.
    """
    if not settings or any(s.policy not in policies for s in settings):
        raise FigureError(f"settings={settings!r}: give at least one, with a policy of {', '.join(policies)}")
    if rates is not None and (not rates or list(rates) != sorted(set(rates))):
        raise FigureError(f"rates={rates!r}: give requests a second, rising")
    machines = Machines(gpu, model)
    if workload is None:
        workload = "chat" if machines.is_cpu else "conv"
    works = traffic(workload, max(num_requests, *REQUESTS))
    most_s = (5.0, 0.5) if machines.is_cpu else (1.0, 0.1)
    limits_s = [most if given is None else given for given, most in zip((ttft_s, itl_s), most_s, strict=True)]
    return ParetoExplorer(*limits_s, machines, works, num_requests, rates, settings, policies, num_blocks)
