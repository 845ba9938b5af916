"""The curves of a frontier explorer: what the controls say, what is compared with it, what was kept, and their runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cbserve.core.errors import InvalidRequestError
from cbserve.core.policies import Policy
from cbserve.explorers.machines import Machines
from cbserve.explorers.moments import Moment
from cbserve.explorers.point import Point
from cbserve.explorers.setting import Setting
from cbserve.explorers.sweep import Sweep
from cbserve.workloads.workload import Workload

FIRST_LOOK = 80  # requests of the run that answers at once


@dataclass(frozen=True)
class Line:
    """One curve: a setting on `place`, the GPU, model and workload by their names in the menus."""

    place: tuple[str, str, str]
    setting: Setting


class Curves:
    """Sweeps, which curves of them are shown, and which point is chosen. Arguments as for `pareto_explorer`."""

    def __init__(
        self, machines: Machines, workloads: Mapping[str, Workload], num_requests: int,
        rates: Sequence[float] | None, settings: Sequence[Setting], policies: Mapping[str, Callable[[], Policy]],
        num_blocks: int | None,
    ) -> None:  # fmt: skip
        self.machines, self.gpu, self.model = machines, machines.gpu, machines.model
        self.workloads, self.workload, self.num_requests = workloads, next(iter(workloads)), num_requests
        self._given_rates, self.policies, self._num_blocks = rates, policies, num_blocks
        self.setting = settings[0]
        self.compared = list(settings[1:])  # on the machine that is chosen, whichever that is
        self.kept: list[Line] = []  # on their own one
        self._sweeps: dict[tuple[str, str, str], Sweep] = {}
        rates = self.rates(self.line)
        self.chosen = (self.line, rates[len(rates) // 2])
        self.moment = ""  # the kind that was asked for; none: the most telling one
        for _ in self.simulate(FIRST_LOOK):
            pass

    def find_sweep(self, place: tuple[str, str, str] | None = None) -> Sweep:
        """Of that GPU, model and workload, or those that are chosen; an earlier one is taken up again.

        Raises:
            CBServeError: the weights do not fit, with what can be chosen instead and the arithmetic.
        """
        gpu_name, model, workload = key = place or self.place
        sweep = self._sweeps.pop(key, None)
        if sweep is None:
            gpu, shape = self.machines.chosen(gpu_name, model)
            try:
                sweep = Sweep(gpu, shape, self.workloads[workload], self.policies, self._num_blocks)
                for setting in (self.setting, *self.compared):
                    sweep.num_blocks(setting)
            except InvalidRequestError as error:
                raise InvalidRequestError(self.machines.why_not(model, error)) from error
        self._sweeps[key] = sweep  # the one that was wanted last is last
        if len(self._sweeps) > 8:
            del self._sweeps[next(iter(self._sweeps))]
        return sweep

    # ---- curves and their runs -----------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[str, str, str]:
        return self.gpu, self.model, self.workload

    @property
    def sweep(self) -> Sweep:
        return self.find_sweep()

    @property
    def line(self) -> Line:
        """What the controls say."""
        return Line(self.place, self.setting)

    @property
    def lines(self) -> list[Line]:
        """One a curve, without repetition: what the controls say, what is compared there, what was kept."""
        here = [Line(self.place, setting) for setting in (self.setting, *self.compared)]
        return list(dict.fromkeys([*here, *self.kept]))

    def name(self, line: Line) -> str:
        """Its setting, and what of its place another curve does not share."""
        gpu, model, workload = line.place
        others = zip(*(line.place for line in self.lines), strict=True)
        gpus, models, workloads = (len(set(names)) > 1 for names in others)
        parts = [f", {model}"] * models + [f" on {gpu}"] * gpus + [f" with {workload}"] * workloads
        return "".join([line.setting.name, *parts])

    def rates(self, line: Line) -> tuple[float, ...]:
        return tuple(self._given_rates or self.find_sweep(line.place).rates)

    @property
    def num_each(self) -> int:
        """Requests of a whole run."""
        return self.num_each_of(self.chosen[0])

    def num_each_of(self, line: Line) -> int:
        """Requests of a whole run of that curve."""
        return min(self.num_requests, len(self.find_sweep(line.place).workload))

    def simulate(self, num_requests: int) -> Iterator[bool]:
        """Every point with so many requests that is not known yet, those of the chosen curve first. Yields in small
        parts, and True when a point is done."""
        line, rate = self.chosen
        near = [self.chosen, *((line, other) for other in self.rates(line))]
        every = [(other, at) for other in self.lines for at in self.rates(other)]
        for other, at in dict.fromkeys([*near, *every]):
            num = min(num_requests, self.num_each_of(other))
            if self._known(other, at, num) is None:
                for _ in self.find_sweep(other.place).run(other.setting, at, num):
                    yield False
                yield True

    def _known(self, line: Line, rate: float, least: int) -> Point | None:
        """The whole run, or else the first look, if it has `least` requests."""
        sweep = self.find_sweep(line.place)
        found = (sweep.known(line.setting, rate, n) for n in (self.num_each_of(line), FIRST_LOOK) if n >= least)
        return next((point for point in found if point is not None), None)

    def point(self) -> Point:
        """The chosen run, as far as it is known; a first look is made if there is none."""
        line, rate = self.chosen
        first_look = min(FIRST_LOOK, self.num_each)
        return self._known(line, rate, 0) or self.find_sweep(line.place).point(line.setting, rate, first_look)

    def points(self, line: Line) -> list[Point]:
        """Of a curve, its whole runs when all are known; until then first looks, as far as they are: of one curve, a
        line through both would go to and fro."""
        sweep, rates = self.find_sweep(line.place), self.rates(line)
        runs = [sweep.known(line.setting, rate, self.num_each_of(line)) for rate in rates]
        if None in runs:
            looks = [sweep.known(line.setting, rate, FIRST_LOOK) for rate in rates]
            runs = [look or run for look, run in zip(looks, runs, strict=True)]
        return [run for run in runs if run is not None]

    def is_rough(self, line: Line, point: Point) -> bool:
        """Whether it is a first look yet."""
        return point.num_requests < self.num_each_of(line)

    # ---- moments of the chosen run -------------------------------------------------------------------------------

    def moments(self) -> list[Moment]:
        """Of the chosen run; none as long as they are not found."""
        line, rate = self.chosen
        return self.find_sweep(line.place).known_moments(line.setting, rate, self.num_each)

    def find_moments(self) -> Iterator[None]:
        line, rate = self.chosen
        return self.find_sweep(line.place).find_moments(line.setting, rate, self.num_each)

    def shown_moment(self) -> Moment:
        """The one that was asked for where this run has it, or else the most telling."""
        found = self.moments()
        return next((moment for moment in found if moment.kind == self.moment), found[0])
