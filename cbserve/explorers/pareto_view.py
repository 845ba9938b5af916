"""What a frontier explorer shows, without its widgets: state -> picture, words and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cbserve.core.metrics import percentile
from cbserve.explorers.curves import FIRST_LOOK, Curves, Line
from cbserve.explorers.moments import NUM_STEPS
from cbserve.explorers.point import Point
from cbserve.explorers.setting import MIXED
from cbserve.viz.figure import Figure
from cbserve.viz.findings import joined, plural
from cbserve.viz.frontier import Curve, Frontier, Mark, frontier
from cbserve.viz.style import percent, round_ms, said_s
from cbserve.viz.table import table_html
from cbserve.viz.timeline import timeline

TTFT, ITL = "TTFT p99", "ITL p99"
TOKENS, GOODPUT = "output tokens/s", "goodput"


class ParetoView(Curves):
    """Draws and tells the curves, within limits of TTFT and ITL; other arguments as for `Curves`."""

    def __init__(self, ttft_s: float, itl_s: float, *args: Any) -> None:
        super().__init__(*args)
        self.ttft_s, self.itl_s, self.x, self.y = ttft_s, itl_s, TTFT, TOKENS

    # ---- the frontier --------------------------------------------------------------------------------------------

    def draw(self, width: int = 880) -> Frontier:
        """The frontier of all runs made so far."""
        curves = {line: self.points(line) for line in self.lines}
        marks = {line: [self._mark(line, point) for point in points] for line, points in curves.items()}
        line, rate = self.chosen
        in_focus, cost = curves[line], self.find_sweep(line.place).cost
        limit_s = self.ttft_s if self.x == TTFT else self.itl_s
        return frontier(
            [Curve(self.name(line), found) for line, found in marks.items()],
            title=self._finding(curves), x_name=f"{self.x} in seconds",
            y_name=self._y_name, caption=self._caption(), table=self._table(curves),
            limit=(limit_s, f"limit {round_ms(limit_s)}"), focus=list(curves).index(line),
            chosen=marks[line][[point.rate for point in in_focus].index(rate)], large=self._large(line, in_focus),
            bounds=[
                (float(line.setting.max_num_seqs), f"batch cap {line.setting.max_num_seqs}"),
                (cost.critical_batch(), f"critical batch F/BW {cost.critical_batch():.0f}"),
            ],
            width=width,
        )  # fmt: skip

    @property
    def _y_name(self) -> str:
        if self.y == TOKENS:
            return "output tokens/s while requests arrive"
        return "goodput/s: TTFT and every gap in the limits"

    def xy(self, point: Point) -> tuple[float, float]:
        said = point.summary
        x = said.ttft_p99_s if self.x == TTFT else said.itl_p99_s
        return x, point.tokens_per_s if self.y == TOKENS else self.goodput(point)

    def goodput(self, point: Point) -> float:
        return point.goodput(self.ttft_s, self.itl_s)

    def _mark(self, line: Line, point: Point) -> Mark:
        x, y = self.xy(point)
        is_rough = self.is_rough(line, point)
        kept = point.keeps(self.ttft_s, self.itl_s) and not is_rough
        verdict = f"{'both' if kept else 'not both'} within their limits"
        hover = (
            f"{self.name(line)}, {point.rate:g} requests/s: {point.tokens_per_s:,.0f} tokens/s, "
            f"TTFT p99 {said_s(point.summary.ttft_p99_s)}, ITL p99 {said_s(point.summary.itl_p99_s)}; "
            f"{f'first look with {point.num_requests} requests' if is_rough else verdict}"
        )
        return Mark(x, y, f"{point.rate:g}/s", hover, kept, is_rough, point.in_flight)

    def carries(self, points: Sequence[Point]) -> float:
        """The highest of the rates whose p99 of TTFT and ITL, of those served, are both within the limits; 0: none."""
        return max((p.rate for p in points if p.keeps(self.ttft_s, self.itl_s)), default=0.0)

    def _large(self, line: Line, points: Sequence[Point]) -> tuple[str, list[str]]:
        """What the curve in focus carries."""
        rate, name = self.carries(points), line.setting.name
        if self._is_look(line, points):
            return "…", [f"first look: whole runs will say what {name} carries"]
        if rate:
            least = "≥ " if rate == max(self.rates(line)) else ""
            return f"{least}{rate:g}/s", [f"requests with {name}: both p99 within the limits"]
        return "none", [f"of {len(points)} rates with {name} has both p99 within the limits"]

    def _is_look(self, line: Line, points: Sequence[Point]) -> bool:
        """Or not even that yet."""
        return len(points) < len(self.rates(line)) or any(self.is_rough(line, point) for point in points)

    def _finding(self, curves: Mapping[Line, list[Point]]) -> str:
        """What each curve carries, if its whole runs are known: few requests say too much, because a queue has no time
        to grow."""
        looks = [line for line, points in curves.items() if self._is_look(line, points)]
        if len(looks) == len(curves):
            return f"First look, {FIRST_LOOK} requests a point: whole runs will say what each setting carries"
        limits = f"{TTFT} ≤ {round_ms(self.ttft_s)} and {ITL} ≤ {round_ms(self.itl_s)}"
        first = [self.chosen[0], self.line, *self.kept, *curves]
        said = [
            f"{self.name(line)} carries {self._rates_said(line, self.carries(curves[line]))}"
            for line in dict.fromkeys(first)
            if line not in looks
        ]
        more = f". First look yet: {joined(list(map(self.name, looks)))}" if looks else ""
        return f"Within {limits}: {'; '.join(said[:3])}{more}"

    def _rates_said(self, line: Line, rate: float) -> str:
        if not rate:
            return "none of the rates"
        return f"{rate:g} requests/s" + (" or more" if rate == max(self.rates(line)) else "")

    def _caption(self) -> str:
        places = dict.fromkeys(line.place for line in self.lines)
        return (
            f"Simulated for {joined(list(dict.fromkeys(map(self._machine, places))))}, not measured: the engine's own "
            f"scheduler, {joined(list(dict.fromkeys(map(self._requests, self.lines))))} at each rate, step times of a "
            "roofline. Up and left is better. Filled: the p99 of TTFT and that of ITL, over all gaps together, are "
            "both within the limits; hollow: one is not. Goodput is stricter: an answer counts only if its TTFT and "
            "every gap are. The curves bend where requests begin to wait. Rates are counted from a tenth of the "
            "arrivals to the last one, while the engine neither fills nor runs empty; latencies are those of all "
            "requests served."
        )

    def _requests(self, line: Line) -> str:
        return f"{self.num_each_of(line):,} requests of {self.find_sweep(line.place).workload.name}"

    def _machine(self, place: tuple[str, str, str]) -> str:
        device = self.find_sweep(place).device
        on = f"on one {device.name}" if device.table is not None else f"on {device.name}, {device.source}"
        return f"{place[1]} {on}"

    def _table(self, curves: Mapping[Line, list[Point]]) -> tuple[list[str], list[list[object]]]:
        header = ["setting", "requests/s", "tokens/s", "answers/s", "goodput/s", "TTFT p99 (s)", "ITL p99 (s)",
                  "E2E mean (s)", "in flight", "both p99 kept", "requests"]  # fmt: skip
        rows: list[list[object]] = [
            [
                self.name(line), p.rate, p.tokens_per_s, p.answer_rate, self.goodput(p), p.summary.ttft_p99_s,
                p.summary.itl_p99_s, p.summary.e2e_mean_s, p.in_flight,
                "yes" if p.keeps(self.ttft_s, self.itl_s) else "no", p.num_requests,
            ]
            for line, points in curves.items()
            for p in points
        ]  # fmt: skip
        return header, rows

    # ---- the chosen run ------------------------------------------------------------------------------------------

    def story(self) -> list[tuple[str, str]]:
        """What the chosen run gave, and what Little's law and the critical batch say of it."""
        point, line = self.point(), self.chosen[0]
        rough = f", first look with {point.num_requests} requests" if self.is_rough(line, point) else ""
        none = self._why_none(line)
        return [
            (f"{self.name(line)} at {point.rate:g} requests/s{rough}", self._performance(point)),
            *([("No rate keeps the limits", none)] if none else []),
            ("Little's law", self._littles_law(point)),
            ("Critical batch", self._critical_batch(point)),
        ]

    def _performance(self, point: Point) -> str:
        said = point.summary
        kept = [
            f"{name} {said_s(value)} ({_beside(value, limit)} {round_ms(limit)})"
            for name, value, limit in ((TTFT, said.ttft_p99_s, self.ttft_s), (ITL, said.itl_p99_s, self.itl_s))
        ]
        good = point.num_good(self.ttft_s, self.itl_s)
        is_even = abs(point.arrival_rate / point.rate - 1) < 0.05
        arrive = "requests arrive" if is_even else f"{point.arrival_rate:.3g} requests/s arrive (the rate varies)"
        text = (
            f"{point.tokens_per_s:,.0f} tokens/s while {arrive}; {', '.join(kept)}. Goodput "
            f"{self.goodput(point):.3g}/s: {good} of the {plural(point.num_answers, 'answer')} in that time kept the "
            "limits with TTFT and every gap"
        )
        if point.keeps(self.ttft_s, self.itl_s) and point.num_good(math.inf, self.itl_s) < point.num_answers:
            text += "; a p99 forgives one gap in a hundred, wherever it falls"
        if said.num_refused:
            most = self.find_sweep(self.chosen[0].place).device.max_model_len
            why = "" if most is None else f", most of them longer than the {most:,} tokens of the model"
            text += f". {said.num_refused:,} of the {point.num_requests:,} requests can never be served{why}"
        return f"{text}."

    def _why_none(self, line: Line) -> str:
        """What the lightest load says where no rate is within the limits."""
        points = self.points(line)
        if self._is_look(line, points) or self.carries(points):
            return ""
        lightest = points[0]
        ttft, itl = lightest.summary.ttft_p99_s, lightest.summary.itl_p99_s
        broken = [("TTFT", ttft)] * (ttft > self.ttft_s) + [("ITL", itl)] * (itl > self.itl_s)
        said = [f"{name} p99 is {said_s(value)}" for name, value in broken]
        waits = percentile(list(lightest.fold.queue_s), 99) > ttft / 2  # for a slot: nearly all of it
        cures = ["a wider limit"]
        cures += ["shorter prompts"] if ttft > self.ttft_s else []
        cures += ["a larger batch cap"] if ttft > self.ttft_s and waits else []
        cures += ["a smaller chunk"] if itl > self.itl_s and line.setting.batching == MIXED else []
        return f"At {lightest.rate:g} requests/s, the lightest load, {' and '.join(said)}. Try {joined(cures)}."

    def _littles_law(self, point: Point) -> str:
        waiting = f"of which {_three(point.num_waiting)} wait for a slot"
        if not point.num_answers:
            return f"no answer was complete while requests arrived; {_three(point.in_flight)} in flight, {waiting}."
        grows = point.answer_rate < 0.8 * point.rate and point.num_requests == self.num_each
        return (
            f"{_three(point.answer_rate)} answers/s × {_three(point.seconds_each)} s in the system for each = "
            f"{_three(point.in_flight)} requests in flight on average, {waiting}."
            + (" More arrive than are answered, so the queue grows as long as they do." if grows else "")
        )

    def _critical_batch(self, point: Point) -> str:
        cost = self.find_sweep(self.chosen[0].place).cost
        critical = cost.critical_batch()
        return (
            f"F/BW = {critical:.0f} tokens a step, with {percent(cost.eff_compute)} of the FLOPs and "
            f"{percent(cost.eff_memory)} of the bandwidth reached. "
            + (
                "With fewer decodes than that a step loads weights for longer than it computes: a request more in "
                "the batch costs little."
                if point.in_flight - point.num_waiting < critical
                else "More run than that: each one more makes every step longer."
            )
        )

    def numbers(self) -> str:
        """The chosen run as a table."""
        point = self.point()
        rows = [pair for pair in point.summary.rows() if pair[0] != "throughput"]  # that one counts ramp-up and drain
        rows += [("while requests arrive", f"{point.window.seconds:.3f} s"),
                 ("throughput then", f"{point.tokens_per_s:.1f} tokens/s"),
                 ("goodput then", f"{self.goodput(point):.3g} requests/s"),
                 ("in flight then", f"{point.in_flight:.3g} requests")]  # fmt: skip
        return table_html([f"{self.name(self.chosen[0])} at {point.rate:g}/s", "simulated"], rows)

    # ---- its steps -----------------------------------------------------------------------------------------------

    def steps(self, width: int = 880) -> Figure:
        """Some steps of the chosen run around that moment, on the clock."""
        line, rate = self.chosen
        moment = self.shown_moment()
        shown = moment.trace.steps[:NUM_STEPS]
        longest = max((step.end_s - step.start_s for step in shown), default=0.0)
        title = (
            f"{self.name(line)} at {rate:g} requests/s, {moment.name}: the longest of {plural(len(shown), 'step')} "
            f"takes {said_s(longest)}"
        )
        return timeline(
            moment.trace, axis="time", queue=True, title=title, first_step=moment.first_step,
            last_step=moment.last_step, width=width,
        )  # fmt: skip


def _beside(value: float, limit: float) -> str:
    if not value > limit:
        return "within"
    return "just beyond" if said_s(value) == round_ms(limit) else "beyond"


def _three(value: float) -> str:
    """Three digits, and all of a large number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
