"""What a frontier explorer shows, without its widgets: state -> picture, words and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cbserve.core.policies import Policy
from cbserve.explorers.setting import Setting
from cbserve.explorers.sweep import Point, Sweep
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import model_shape
from cbserve.viz.figure import Figure
from cbserve.viz.frontier import Curve, Frontier, InFlight, Mark, frontier
from cbserve.viz.style import percent, round_ms, said_s
from cbserve.viz.table import table_html
from cbserve.viz.timeline import timeline
from cbserve.workloads.synthetic import azure_twin
from cbserve.workloads.workload import Workload

NUM_STEPS = 120  # of the timeline
TTFT, ITL = "TTFT p99", "ITL p99"
TOKENS, GOODPUT = "output tokens/s", "goodput"


class ParetoView:
    """A sweep, what is chosen of it, and how that is drawn and told."""

    def __init__(
        self, gpu: str, model: str, workloads: Mapping[str, Workload | str], num_requests: int,
        rates: Sequence[float] | None, settings: Sequence[Setting], policies: Mapping[str, Callable[[], Policy]],
        ttft_s: float, itl_s: float,
    ) -> None:  # fmt: skip
        self.gpu, self.model = find_gpu(gpu).name, model_shape(model).name
        self.workloads, self.workload, self.num_requests = workloads, next(iter(workloads)), num_requests
        self._given_rates, self.policies = rates, policies
        self.setting, self.kept = settings[0], list(settings[1:])
        self.ttft_s, self.itl_s, self.x, self.y = ttft_s, itl_s, TTFT, TOKENS
        self._sweeps: dict[tuple[Any, ...], Sweep] = {}
        self.sweep = self._sweep()
        self.chosen = (self.setting, self.rates[len(self.rates) // 2])
        for setting in self.settings:
            for rate in self.rates:
                self.sweep.point(setting, rate)

    def _sweep(self) -> Sweep:
        """Of the GPU, model and workload that are chosen; an earlier one is taken up again."""
        key = self.gpu, self.model, self.workload, self.num_requests
        if key not in self._sweeps:
            source = self.workloads[self.workload]
            workload = azure_twin(source, self.num_requests, seed=1) if isinstance(source, str) else source
            self._sweeps[key] = Sweep(self.gpu, self.model, workload.first(self.num_requests), self.policies)
            if len(self._sweeps) > 8:
                del self._sweeps[next(iter(self._sweeps))]
        return self._sweeps[key]

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(self._given_rates or self.sweep.rates)

    @property
    def settings(self) -> list[Setting]:
        """One a curve, without repetition: what the controls say, then what was kept."""
        return list(dict.fromkeys([self.setting, *self.kept]))

    def point(self) -> Point:
        """The chosen run."""
        return self.sweep.point(*self.chosen)

    def _known(self, setting: Setting) -> list[Point]:
        return [p for rate in self.rates if (p := self.sweep.known(setting, rate)) is not None]

    def draw(self) -> Frontier:
        """The frontier of all runs made so far."""
        curves = {setting: self._known(setting) for setting in self.settings}
        limit_s = self.ttft_s if self.x == TTFT else self.itl_s
        drawn = [Curve(s.name, [self._mark(p) for p in points]) for s, points in curves.items()]
        focus = curves[self.setting]
        cost, cap = self.sweep.cost, self.setting.max_num_seqs
        bounds = [
            (float(cap), f"batch cap {cap}"),
            (cost.critical_batch(), f"critical batch F/BW {cost.critical_batch():.0f}"),
        ]
        carried = self.carries(focus)
        return frontier(
            drawn, title=self._finding(curves), x_name=f"{self.x} in seconds", y_name=self._y_name,
            caption=self._caption(), table=self._table(curves), limit=(limit_s, f"limit {round_ms(limit_s)}"),
            chosen=self._place_of_chosen(curves),
            large=(f"{carried:g}/s" if carried else "none",
                   [f"of {len(focus)} rates keeps both limits" if not carried else "requests, within both limits"]),
            in_flight=InFlight([p.in_flight for p in focus], bounds),
        )  # fmt: skip

    @property
    def _y_name(self) -> str:
        return "output tokens a second" if self.y == TOKENS else "goodput: requests a second within both limits"

    def _place_of_chosen(self, curves: Mapping[Setting, list[Point]]) -> tuple[int, int] | None:
        setting, rate = self.chosen
        at = [p.rate for p in curves.get(setting, [])]
        return (list(curves).index(setting), at.index(rate)) if rate in at else None

    def _xy(self, point: Point) -> tuple[float, float]:
        said = point.summary
        x = said.ttft_p99_s if self.x == TTFT else said.itl_p99_s
        return x, said.tokens_per_s if self.y == TOKENS else self.goodput(point)

    def goodput(self, point: Point) -> float:
        """Requests a second that kept both limits, each by itself."""
        return point.fold.goodput({"ttft": self.ttft_s, "itl": self.itl_s})

    def _mark(self, point: Point) -> Mark:
        x, y = self._xy(point)
        kept = point.keeps(self.ttft_s, self.itl_s)
        hover = (
            f"{point.setting.name}, {point.rate:g} requests/s: {point.summary.tokens_per_s:,.0f} tokens/s, "
            f"TTFT p99 {said_s(point.summary.ttft_p99_s)}, ITL p99 {said_s(point.summary.itl_p99_s)}; "
            f"{'keeps both limits' if kept else 'breaks a limit'}"
        )
        return Mark(x, y, f"{point.rate:g}/s", hover, kept)

    def carries(self, points: Sequence[Point]) -> float:
        """The highest of the rates that keeps both limits; 0: none."""
        return max((p.rate for p in points if p.keeps(self.ttft_s, self.itl_s)), default=0.0)

    def _finding(self, curves: Mapping[Setting, list[Point]]) -> str:
        limits = f"{TTFT} ≤ {round_ms(self.ttft_s)} and {ITL} ≤ {round_ms(self.itl_s)}"
        said = [
            f"{setting.name} carries {f'{rate:g} requests/s' if rate else 'none of the rates'}"
            for setting, points in curves.items()
            for rate in [self.carries(points)]
        ]
        return f"Within {limits}: {'; '.join(said[:3])}"

    def _caption(self) -> str:
        workload = self.sweep.workload
        return (
            f"Simulated for {self.model} on one {self.gpu}, not measured: the engine's own scheduler, "
            f"{len(workload)} requests of {workload.name} at each rate, step times of a roofline. Up and left is "
            "better. A filled point keeps both limits, a hollow one breaks one. The curves bend where requests begin "
            "to wait. Goodput counts the answers whose TTFT and longest gap are both within the limits."
        )

    def _table(self, curves: Mapping[Setting, list[Point]]) -> tuple[list[str], list[list[object]]]:
        header = ["setting", "requests/s", "tokens/s", "goodput/s", "TTFT p99 (s)", "ITL p99 (s)", "E2E mean (s)",
                  "in flight", "keeps both"]  # fmt: skip
        rows: list[list[object]] = [
            [
                setting.name, p.rate, p.summary.tokens_per_s, self.goodput(p), p.summary.ttft_p99_s,
                p.summary.itl_p99_s, p.summary.e2e_mean_s, p.in_flight,
                "yes" if p.keeps(self.ttft_s, self.itl_s) else "no",
            ]
            for setting, points in curves.items()
            for p in points
        ]  # fmt: skip
        return header, rows

    def story(self) -> list[tuple[str, str]]:
        """What the chosen run gave, and what Little's law and the critical batch say of it."""
        point, said = self.point(), self.point().summary
        cost, answers = self.sweep.cost, len(point.fold.e2e_s)
        kept = [
            f"{name} {said_s(value)} ({'within' if not value > limit else 'beyond'} {round_ms(limit)})"
            for name, value, limit in ((TTFT, said.ttft_p99_s, self.ttft_s), (ITL, said.itl_p99_s, self.itl_s))
        ]
        refused = f" {point.num_refused} requests can never be served and are refused." if point.num_refused else ""
        good = self.goodput(point)
        share = f"{round(good * point.fold.makespan_s)} of {answers} answers kept both limits"
        critical = cost.critical_batch()
        below = point.in_flight < critical
        return [
            (
                f"{point.setting.name} at {point.rate:g} requests/s",
                f"{said.tokens_per_s:,.0f} tokens/s; {', '.join(kept)}. Goodput {good:.3g} requests/s: {share}."
                + refused,
            ),
            (
                "Little's law",
                f"{point.answer_rate:.3g} answers/s × {said.e2e_mean_s:.3g} s each = {point.in_flight:.3g} requests in "
                f"flight on average, of which {self._in_queue(point):.3g} wait for a slot.",
            ),
            (
                "Critical batch",
                f"F/BW = {critical:.0f} tokens a step, with {percent(cost.eff_compute)} of the FLOPs and "
                f"{percent(cost.eff_memory)} of the bandwidth reached. "
                + (
                    "With fewer decodes than that a step loads weights for longer than it computes: a request more in "
                    "the batch costs little."
                    if below
                    else "More are in flight than that: each one more makes every step longer."
                ),
            ),
        ]

    def _in_queue(self, point: Point) -> float:
        """Little's law once more, for the queue alone."""
        return point.answer_rate * point.summary.queue_mean_s

    def numbers(self) -> str:
        """The chosen run as a table."""
        point = self.point()
        rows = [*point.summary.rows(), ("goodput", f"{self.goodput(point):.3g} requests/s"),
                ("in flight", f"{point.in_flight:.3g} requests")]  # fmt: skip
        return table_html([f"{point.setting.name} at {point.rate:g}/s", "simulated"], rows)

    def steps(self) -> Figure:
        """The first steps of the chosen run, on the clock."""
        setting, rate = self.chosen
        trace = self.sweep.trace(setting, rate, NUM_STEPS)
        longest = max((s.end_s - s.start_s for s in trace.steps), default=0.0)
        title = (
            f"{setting.name} at {rate:g} requests/s: the longest of the first {NUM_STEPS} steps takes {said_s(longest)}"
        )
        return timeline(trace, axis="time", queue=True, title=title)
