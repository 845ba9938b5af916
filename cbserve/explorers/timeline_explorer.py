"""The live timeline: the learner's own lengths through the real scheduler, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from cbserve.core.batching import Batching, ContinuousBatching, StaticBatching
from cbserve.core.policies import Policy
from cbserve.core.trace import Trace
from cbserve.errors import CBServeError, FigureError
from cbserve.explorers.lengths import MAX_REQUESTS, LengthError, parse_lengths, require_quick
from cbserve.explorers.showing import alert, show, told
from cbserve.explorers.story import decision_steps, tell
from cbserve.recorder import quiet
from cbserve.serving import serve
from cbserve.viz.figure import Figure
from cbserve.viz.findings import batching_name, end_step
from cbserve.viz.spans import letters, order_of_arrival
from cbserve.viz.timeline import timeline

MAX_SLOTS = 12
SIMULATED = "simulated: one step = one tick of the clock; the scheduler is the engine's own"
_numbers = count(1)


class TimelineExplorer:
    """Controls around `timeline`; see `timeline_explorer`. The widgets are attributes, so that a test can move them."""

    def __init__(
        self, lengths: Sequence[int], batch_size: int, show: str, num_blocks: int | None,
        policy: Callable[[], Policy] | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self._options, self._policy = options, policy
        self._runs: dict[str, Trace] = {}
        self.lengths, self.batch_size, self.show, self.num_blocks = list(lengths), batch_size, show, num_blocks
        self.num_requests = len(self.lengths)
        self.traces = self._serve()
        self.static_class = f"cbserve-static-{next(_numbers)}"
        self.figure = self._draw(None)
        self.box: Any = None

    # ---- state -> picture, without widgets ----------------------------------------------------------------------

    def _serve(self) -> list[Trace]:
        n = self.num_requests
        lengths = [self.lengths[i % len(self.lengths)] for i in range(n)]
        require_quick(lengths)
        options = {
            k: [v[i % len(v)] for i in range(n)] if isinstance(v, list | tuple) else v for k, v in self._options.items()
        }
        static, continuous = StaticBatching(self.batch_size), ContinuousBatching(max_num_seqs=self.batch_size)
        choices: dict[str, list[Batching]] = {
            "static": [static],
            "continuous": [continuous],
            "both": [static, continuous],
        }
        with quiet():
            return [self._run(lengths, batching, options) for batching in choices[self.show]]

    def _run(self, lengths: list[int], batching: Batching, options: dict[str, Any]) -> Trace:
        """Serve, or take the trace of an earlier, equal run: the same inputs give the same trace."""
        key = repr((lengths, batching, self.num_blocks, options))
        if key not in self._runs:
            policy = self._policy() if self._policy else None
            self._runs[key] = serve(lengths, batching, policy=policy, num_blocks=self.num_blocks, **options)
            if len(self._runs) > 32:
                del self._runs[next(iter(self._runs))]
        return self._runs[key]

    @property
    def num_steps(self) -> int:
        return max(end_step(trace) for trace in self.traces)

    def _draw(self, done: int | None) -> Figure:
        """The figure after `done` steps; None: the whole run."""
        cursor = None if done is None or done >= self.num_steps else done - 1
        return timeline(*self.traces, cursor=cursor)

    def story(self, done: int) -> list[str]:
        """For each trace a sentence or two: what the scheduler decided in the step that ended last, and why."""
        names = letters(order_of_arrival(self.traces))
        said = []
        for trace in self.traces:
            name = batching_name(trace)
            when = f"step {done - 1}" if done else "before the first step"
            said.append(f"{name.capitalize()}, {when}: {tell(trace, done - 1, names)}")
        return said

    # ---- widgets ------------------------------------------------------------------------------------------------

    def build(self) -> Any:
        """The widgets, made once. Raises ImportError without ipywidgets."""
        if self.box is not None:
            return self.box
        import ipywidgets as w  # type: ignore[import-untyped]

        wide = {"description_width": "130px"}
        layout = w.Layout(width="min(98%, 560px)")
        self.text = w.Text(
            ", ".join(map(str, self.lengths)),
            description="answer lengths",
            style=wide,
            layout=layout,
            continuous_update=False,
        )
        most = max(MAX_SLOTS, self.batch_size)
        self.slots = w.IntSlider(self.batch_size, 1, most, description="slots", style=wide, layout=layout)
        self.count = w.IntSlider(
            self.num_requests,
            1,
            max(MAX_REQUESTS, self.num_requests),
            description="requests",
            style=wide,
            layout=layout,
        )
        self.choice = w.ToggleButtons(
            options=["static", "continuous", "both"], value=self.show, style={"button_width": "110px"},
            tooltips=["static batching", "continuous batching", "static above continuous"],
        )  # fmt: skip
        label = w.Label("batching", layout=w.Layout(width="130px", display="flex", justify_content="flex-end"))
        choice = w.HBox([label, self.choice])  # a description of its own would stand above the buttons
        self.step = w.IntSlider(self.num_steps, 0, self.num_steps, description="steps done", style=wide, layout=layout)
        self.back, self.forward, self.decision = (
            w.Button(description=text, tooltip=tip, layout=w.Layout(width="auto"))
            for text, tip in (
                ("Back", "one step back"),
                ("Step", "one step on"),
                ("Next decision", "on to the next step that decides"),
            )
        )
        self.controls = [self.text, self.slots, self.count, choice, self.step]
        self.blocks = None
        if self.num_blocks is not None:
            self.blocks = w.IntSlider(
                self.num_blocks, 1, max(4 * self.num_blocks, 16), description="KV blocks", style=wide, layout=layout
            )
            self.blocks.observe(self._changed, "value")
            self.controls.insert(3, self.blocks)
        self.error, self.picture, self.sentence, self.table = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.data = w.Checkbox(False, description="data as a table", indent=False)
        self.data.observe(self._moved, "value")
        self._is_setting = False
        self.text.observe(self._lengths_changed, "value")
        for control in (self.slots, self.count, self.choice):
            control.observe(self._changed, "value")
        self.step.observe(self._moved, "value")
        self.back.on_click(lambda _: self._go(self.step.value - 1))
        self.forward.on_click(lambda _: self._go(self.step.value + 1))
        self.decision.on_click(lambda _: self._next_decision())
        # The widget exists only where a kernel runs: there it hides the image that a saved notebook shows instead.
        hide = w.HTML(
            f"<style>.{self.static_class}{{display:none}}</style><span style='font-size:12px'>{SIMULATED}</span>"
        )
        buttons = w.HBox(
            [self.back, self.forward, self.decision], layout=w.Layout(margin="0 0 0 138px", flex_flow="row wrap")
        )
        self.box = w.VBox(
            [*self.controls, buttons, self.error, self.sentence, self.picture, self.data, self.table, hide]
        )
        self._render()
        return self.box

    def _lengths_changed(self, change: Any) -> None:
        try:
            lengths = parse_lengths(self.text.value)
        except LengthError as error:
            self._say(str(error))
            return
        before, self.lengths = self.lengths, lengths
        self._set(self.count, len(lengths))
        if not self._changed(change):
            self.lengths = before

    def _changed(self, change: Any) -> bool:
        """Serve with what the controls say, and draw. False: it cannot be served; picture and state stay."""
        if self._is_setting:
            return True
        before = self.num_requests, self.batch_size, self.show, self.num_blocks
        self.num_requests, self.batch_size, self.show = self.count.value, self.slots.value, self.choice.value
        self.num_blocks = self.blocks.value if self.blocks is not None else None
        try:
            self.traces = self._serve()
        except CBServeError as error:
            self.num_requests, self.batch_size, self.show, self.num_blocks = before
            self._say(f"{error}")
            return False
        self._is_setting = True
        self.step.max = max(1, self.num_steps)
        self.step.value = self.num_steps
        self._is_setting = False
        self._render()
        return True

    def _moved(self, change: Any) -> None:
        if not self._is_setting:
            self._render()

    def _set(self, control: Any, value: int) -> None:
        self._is_setting = True
        control.value = value
        self._is_setting = False

    def _go(self, done: int) -> None:
        self.step.value = min(max(done, 0), self.num_steps)

    def _next_decision(self) -> None:
        """To the next step that decides something; from the end on to the first."""
        done = 0 if self.step.value >= self.num_steps else self.step.value
        decided = sorted({step + 1 for trace in self.traces for step in decision_steps(trace)})
        self._go(next((step for step in decided if step > done), self.num_steps))

    def _say(self, message: str) -> None:
        self.error.value = alert(message)

    def _render(self) -> None:
        done = self.step.value
        self.back.disabled, self.forward.disabled = done <= 0, done >= self.num_steps
        figure = self._draw(done)
        self.picture.value = figure.live_html(with_table=False)
        # A widget clips what is too wide for a narrow window; a table may scroll
        self.table.value = f'<div style="overflow-x:auto">{figure.table_html()}</div>' if self.data.value else ""
        self._say("")
        self.sentence.value = told(text.split(": ", 1) for text in self.story(done))

    def _ipython_display_(self) -> None:
        show(self)


def timeline_explorer(
    lengths: Sequence[int] = (10, 100, 500),
    batch_size: int = 3,
    *,
    show: str = "both",
    num_blocks: int | None = None,
    block_size: int = 16,
    prompt_tokens: int | Sequence[int] = 8,
    arrivals_s: Sequence[float] | None = None,
    priorities: Sequence[int] | None = None,
    policy: Callable[[], Policy] | None = None,
) -> TimelineExplorer:
    """A timeline with controls: own lengths, slots, requests, batching, and a cursor that tells each decision.

    More requests than lengths repeat the lengths (and arrivals, priorities and prompts). Shows itself in a notebook:
    live where a kernel and ipywidgets are, and as a static figure with its table in a saved or untrusted one.

    Args:
        lengths: output tokens of each request.
        batch_size: slots.
        show: "static", "continuous" or "both".
        num_blocks: size of the KV pool in blocks, with a slider of its own; None: all fit.
        policy: makes a policy for each run (a class, say); FCFS by default.

    Raises:
        LengthError: a length cannot be drawn.
        FigureError: `show` is none of the three.
    """
    if show not in ("static", "continuous", "both"):
        raise FigureError(f"show={show!r}: must be 'static', 'continuous' or 'both'")
    checked = parse_lengths(", ".join(map(str, lengths)))
    options = {
        "block_size": block_size,
        "prompt_tokens": prompt_tokens,
        "arrivals_s": arrivals_s,
        "priorities": priorities,
    }
    return TimelineExplorer(checked, batch_size, show, num_blocks, policy, options)
