"""One workload at many rates, under settings that a learner chooses: each run is simulated once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cbserve.core.metrics import mean
from cbserve.core.plan import StepPlan
from cbserve.core.policies import Policy
from cbserve.core.run_fold import RunFold
from cbserve.core.summary import Summary, summary_of
from cbserve.core.trace import StepEvent, Trace
from cbserve.executors.timing import timing_row
from cbserve.explorers.setting import Setting
from cbserve.hardware.capacity import kv_capacity
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import model_shape
from cbserve.hardware.roofline import Roofline
from cbserve.simulation import simulate
from cbserve.workloads.workload import Workload

SHARES = (0.15, 0.3, 0.5, 0.7, 0.85, 1.0)  # of what the hardware can do: the rates of a curve
MAX_RUNS = 400


@dataclass(frozen=True)
class Point:
    """One run: `setting` at `rate` requests a second. Seconds; rates per second."""

    setting: Setting
    rate: float
    fold: RunFold
    num_refused: int

    @cached_property
    def summary(self) -> Summary:
        return summary_of(self.fold, self.setting.max_num_seqs)

    @property
    def answer_rate(self) -> float:
        """Answers a second over the whole run, the last ones included."""
        return len(self.fold.e2e_s) / self.fold.makespan_s

    @property
    def in_flight(self) -> float:
        """Requests in the system on average, waiting ones included: Little's law, answers a second x mean E2E."""
        return self.answer_rate * self.summary.e2e_mean_s

    def keeps(self, ttft_s: float, itl_s: float) -> bool:
        """Whether the 99th percentiles stay within both limits, and nobody was refused."""
        said = self.summary
        return self.num_refused == 0 and said.ttft_p99_s <= ttft_s and not said.itl_p99_s > itl_s


class Sweep:
    """Runs of one workload on one GPU with one model.

    Args:
        gpu, model: by their names in the tables.
        workload: jobs that do not all arrive at once; its arrivals are stretched to each rate.
        policies: name -> what makes a policy for a run.

    Raises:
        InvalidRequestError: no such GPU, the weights do not fit (with the arithmetic), or the workload has no rate.
    """

    def __init__(self, gpu: str, model: str, workload: Workload, policies: Mapping[str, Callable[[], Policy]]) -> None:
        self.gpu, self.model = find_gpu(gpu), model_shape(model)
        self.cost = Roofline.on(self.gpu, self.model)
        self.num_blocks = kv_capacity(self.model, self.gpu).num_blocks
        self.workload, self.policies = workload, policies
        self._at: dict[float, Workload] = {}
        self._points: dict[tuple[Setting, float], Point] = {}
        self._traces: dict[tuple[Setting, float, int], Trace] = {}
        # The engine knows at most how long an answer may get; static batching reserves that much
        self.max_tokens = max(job.num_output_tokens for job in workload.jobs)

    def point(self, setting: Setting, rate: float) -> Point:
        """The run, made now or before."""
        key = setting, rate
        if key not in self._points:
            self._points[key] = self._run(setting, rate)[0]
            if len(self._points) > MAX_RUNS:
                del self._points[next(iter(self._points))]
        return self._points[key]

    def known(self, setting: Setting, rate: float) -> Point | None:
        return self._points.get((setting, rate))

    def trace(self, setting: Setting, rate: float, num_steps: int) -> Trace:
        """The first steps of the run, for a timeline."""
        key = setting, rate, num_steps
        if key not in self._traces:
            self._traces[key] = first_steps(self._run(setting, rate, keep_trace=True)[1], num_steps)
            if len(self._traces) > 16:
                del self._traces[next(iter(self._traces))]
        return self._traces[key]

    def _run(self, setting: Setting, rate: float, keep_trace: bool = False) -> tuple[Point, Trace]:
        if rate not in self._at:
            self._at[rate] = self.workload.scaled(rate)
        run = simulate(
            self._at[rate], self.cost, self.num_blocks, batching=setting.make(), policy=self.policies[setting.policy](),
            max_tokens=self.max_tokens, keep_trace=keep_trace, meta={"model": self.model.name, "device": self.gpu.name},
        )  # fmt: skip
        return Point(setting, rate, run.fold, run.fold.num_refused), run.trace

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Requests a second, from a light load to about what the hardware can do, two digits each."""
        most = 1 / self._seconds_each(128)
        return tuple(dict.fromkeys(float(f"{most * share:.2g}") for share in SHARES))

    def _seconds_each(self, batch: int) -> float:
        """Seconds of the hardware that a mean request takes: its prefill, and its part of full decode steps."""
        prompt = round(mean([len(job.prompt) for job in self.workload.jobs]))
        answer = mean([job.num_output_tokens for job in self.workload.jobs])
        context = prompt + round(answer / 2)
        batch = max(1, min(batch, self.num_blocks // -(-context // self.cost.block_size)))
        decodes = [timing_row(context, 1, ())] * batch
        return self.cost(StepPlan(0, [timing_row(0, prompt, ())])) + answer * self.cost(StepPlan(0, decodes)) / batch


def first_steps(trace: Trace, num_steps: int) -> Trace:
    """The events up to the end of step `num_steps` - 1."""
    events = []
    for event in trace:
        if isinstance(event, StepEvent) and event.step >= num_steps:
            break
        events.append(event)
    return Trace(trace.meta, events)
