"""One workload at many rates, under settings that a learner chooses: each run is simulated once and kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.core.policies import Policy
from cbserve.core.trace import Trace
from cbserve.explorers.moments import Moment, moments
from cbserve.explorers.point import Point, Window
from cbserve.explorers.setting import STATIC, Setting
from cbserve.sim.device import device_of
from cbserve.sim.point import CHUNK, UTILIZATION
from cbserve.sim.settings import Settings
from cbserve.simulation import simulate, simulating
from cbserve.workloads.workload import Workload

SHARES = (0.2, 0.45, 0.75, 1.0, 1.25, 1.5)  # of what `BACKLOG` requests get at once: the rates of a curve
BACKLOG = 120
MAX_RUNS, MAX_MOMENTS = 400, 8  # kept
Key = tuple[Setting, float, int]


class Sweep:
    """Runs of one workload on one device with one model.

    Args:
        gpu, model: as `cbserve sim` takes them, or a `Gpu` and a `ModelShape`; a model of None is the default, or with
            a calibration its own.
        workload: jobs that do not all arrive at once; its arrivals are stretched to each rate.
        policies: name -> what makes a policy for a run.
        num_blocks: of the KV cache; None: as many as the device has room for.

    Raises:
        CBServeError: no such GPU or model, no calibration of this machine, or the weights do not fit (with the
            arithmetic).
        InvalidRequestError: nobody knows how much room this machine has, or every prompt is too long for the model.
    """

    def __init__(
        self, gpu: Any, model: Any, workload: Workload, policies: Mapping[str, Callable[[], Policy]],
        num_blocks: int | None = None,
    ) -> None:  # fmt: skip
        self.device = device_of(Settings(gpu=gpu, model=model))
        self.cost = self.device.cost
        self.workload, self.policies, self._num_blocks = workload, policies, num_blocks
        if num_blocks is None and self.device.table is None and not self.device.is_cpu:
            raise InvalidRequestError(
                f"the memory of {self.device.name} for a KV cache is not known: give num_blocks, as its engine says"
            )
        self.num_blocks(Setting())  # the weights fit, or it says so now
        shortest, most = min(len(job.prompt) for job in workload.jobs), self.device.max_model_len
        if most is not None and shortest >= most:
            raise InvalidRequestError(
                f"{self.cost.model.name} was made for {most:,} tokens, and the shortest prompt of {workload.name} has "
                f"{shortest:,}: choose shorter prompts, or another model"
            )
        self._points: dict[Key, Point] = {}
        self._moments: dict[Key, list[Moment]] = {}
        # The engine knows at most how long an answer may get; static batching reserves that much
        self.max_tokens = max(job.num_output_tokens for job in workload.jobs)

    def num_blocks(self, setting: Setting) -> int:
        """Blocks of the KV cache, as `cbserve sim` has them. Raises CBServeError where the weights do not fit."""
        if self._num_blocks is not None:
            return self._num_blocks
        budget = CHUNK["mixed"] if setting.batching == STATIC else setting.token_budget
        return self.device.room(UTILIZATION, budget, setting.max_num_seqs, self.cost.block_size)[0]

    def known(self, setting: Setting, rate: float, num_requests: int) -> Point | None:
        return self._points.get((setting, rate, num_requests))

    def point(self, setting: Setting, rate: float, num_requests: int) -> Point:
        """The run of the first `num_requests`, made now or before."""
        for _ in self.run(setting, rate, num_requests):
            pass
        return self._points[setting, rate, num_requests]

    def run(self, setting: Setting, rate: float, num_requests: int) -> Iterator[None]:
        """Make that run, if nobody has: yields after every answer, so that a control need not wait for the last one."""
        if (setting, rate, num_requests) not in self._points:
            yield from self._run((setting, rate, num_requests))

    def known_moments(self, setting: Setting, rate: float, num_requests: int) -> list[Moment]:
        """Telling moments of that run: none, or all once `find_moments` has ended."""
        return self._moments.get((setting, rate, num_requests), [])

    def find_moments(self, setting: Setting, rate: float, num_requests: int) -> Iterator[None]:
        """Find them, if nobody has, and make that run on the way; yields as `run` does."""
        key = setting, rate, num_requests
        if key not in self._moments:
            trace = yield from self._run(key)
            found = yield from moments(trace)
            _keep(self._moments, key, found, MAX_MOMENTS)

    def _run(self, key: Key) -> Generator[None, None, Trace]:
        setting, rate, num_requests = key
        workload = self.workload.first(num_requests).scaled(rate)
        window = Window.of(workload)
        run = yield from simulating(
            workload, self.cost, self.num_blocks(setting), self.cost.block_size, setting.make(),
            self.policies[setting.policy](), max_tokens=self.max_tokens, max_model_len=self.device.max_model_len,
            listeners=[window.add],
            meta={"model": self.cost.model.name, "device": f"{self.device.name} (simulated)"},
        )  # fmt: skip
        _keep(self._points, key, Point(setting, rate, len(workload), run.fold, window), MAX_RUNS)
        return run.trace

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Requests a second, two digits each, from a light load to more than the first setting carries: a batch that
        fills and runs empty gives less than a full one."""
        workload = self.workload.first(BACKLOG)
        workload = replace(workload, jobs=[replace(job, arrival_s=0.0) for job in workload.jobs])
        fold = simulate(
            workload, self.cost, self.num_blocks(Setting()), self.cost.block_size, Setting().make(),
            max_tokens=self.max_tokens, max_model_len=self.device.max_model_len, keep_trace=False,
        ).fold  # fmt: skip
        most = len(fold.e2e_s) / fold.makespan_s if fold.e2e_s else 1.0  # all are refused
        return tuple(dict.fromkeys(float(f"{most * share:.2g}") for share in SHARES))


def _keep(kept: dict[Key, Any], key: Key, value: Any, most: int) -> None:
    """The oldest one goes where there are too many."""
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
