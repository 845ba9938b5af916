"""A run that takes equal steps at once says the same as one that takes them one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbserve.clock import VirtualClock
from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import InvalidRequestError
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.metrics import sequence_metrics
from cbserve.core.plan import Ramp, StepPlan
from cbserve.core.policies import FCFS, Policy, Priority
from cbserve.core.request import FinishReason, Request, SamplingParams
from cbserve.core.scheduler import Scheduler
from cbserve.core.stopping import StopChecker
from cbserve.core.summary import summarize
from cbserve.core.trace import PagesEvent, Trace
from cbserve.engine import Engine
from cbserve.executors.scripted import EOS
from cbserve.executors.simulated import SimulatedExecutor
from cbserve.simulation import simulate
from cbserve.workloads.arrivals import ClosedLoop
from cbserve.workloads.workload import Job


@dataclass(frozen=True)
class KinkedCost:
    """The larger of two linear functions of the context, as a roofline is."""

    per_token_s: float = 0.003
    per_context_s: float = 0.0001
    floor_s: float = 0.02

    def seconds(self, tokens: int, context: int) -> float:
        return max(self.floor_s, self.per_token_s * tokens + self.per_context_s * context)

    takes_steady: bool = True

    def __call__(self, plan: StepPlan) -> float:
        return self.seconds(plan.num_tokens, plan.context_len)

    def ramp(self, plan: StepPlan, count: int) -> Ramp:
        growing = plan.num_tokens - sum(row.is_padding for row in plan.rows)
        tokens, context = plan.num_tokens, plan.context_len
        flat = (self.floor_s - self.per_token_s * tokens) / self.per_context_s  # no kink below this context
        num_flat = min(count, max(0, math.floor((flat - context) / growing) + 1))
        rest = self.seconds(tokens, context + growing * num_flat)
        segments = (num_flat, self.floor_s, 0.0), (count - num_flat, rest, growing * self.per_context_s)
        return Ramp(tuple(s for s in segments if s[0]))


def run(jobs, fast_forward, batching, policy=FCFS, num_blocks=64, prefix=False, swap=False, lazily=False) -> Engine:
    """jobs: (arrival_s, prompt tokens, answer tokens, priority, samples, group of equal beginnings)."""
    host = BlockPool(8, 4) if swap else None
    engine = Engine(
        Scheduler(
            KVCacheManager(BlockPool(num_blocks, 4), prefix, host), batching, policy(), StopChecker([EOS]),
            preemption="swap" if swap else "recompute",
        ),
        SimulatedExecutor(KinkedCost(), {str(i): job[2] for i, job in enumerate(jobs)}),
        VirtualClock(), debug=True, fast_forward=fast_forward,
    )  # fmt: skip
    requests = [
        Request(
            str(i), range(1000 * group, 1000 * group + prompt),
            SamplingParams(max_tokens=40, temperature=0, n=samples), arrival, priority,
        )
        for i, (arrival, prompt, _, priority, samples, group) in enumerate(jobs)
    ]  # fmt: skip
    list(engine.replay(requests) if lazily else engine.stream(requests, partial=False))
    return engine


def without_pages(trace: Trace) -> Trace:
    return Trace(trace.meta, [event for event in trace.events if not isinstance(event, PagesEvent)])


def num_lines(trace: Trace) -> int:
    return sum(event.type == "step" for event in trace.events)


BATCHINGS = [
    ContinuousBatching(max_num_seqs=4, max_num_batched_tokens=16),
    ContinuousBatching(max_num_seqs=4, max_num_batched_tokens=64, mixed=False, max_prefill_streak=2),
    ContinuousBatching(max_num_seqs=3, max_num_batched_tokens=64, chunked=False),
    StaticBatching(3),
]
job = st.tuples(
    st.floats(0, 2), st.integers(1, 20), st.integers(1, 45), st.integers(0, 2), st.integers(1, 2), st.integers(0, 3)
)


@settings(max_examples=100, deadline=None)
@given(
    jobs=st.lists(job, min_size=1, max_size=10),
    batching=st.sampled_from(BATCHINGS),
    policy=st.sampled_from([FCFS, Priority, lambda: Priority(displace=True)]),
    num_blocks=st.integers(19, 60),
    prefix=st.booleans(),
    swap=st.booleans(),
)
def test_the_trace_is_that_of_single_steps(jobs, batching, policy, num_blocks, prefix, swap):
    jobs = sorted(jobs)
    slowly, quickly = (run(jobs, fast, batching, policy, num_blocks, prefix, swap) for fast in (False, True))
    one, other = without_pages(slowly.trace), quickly.trace
    assert one.difference(other) is None
    a, b = slowly.scheduler.kv.pool, quickly.scheduler.kv.pool
    assert a.findable() == b.findable() and list(a._free) == list(b._free)  # the same blocks in the same order
    want, got = summarize(one), summarize(other)
    for name in want.__slots__:
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-9, nan_ok=True), name


def test_long_answers_take_few_events():
    jobs = [(0.0, 5, 30, 0, 1, 0), (0.5, 5, 40, 0, 1, 1)]
    engine = run(jobs, True, BATCHINGS[0])
    assert len(engine.trace.steps) > 40 and num_lines(engine.trace) < 10
    assert [len(m.token_times_s) for m in sequence_metrics(engine.trace)] == [30, 40]


def test_a_trace_with_spans_is_saved_and_loaded(tmp_path):
    trace = run([(0.0, 5, 30, 0, 1, 0)], True, BATCHINGS[0]).trace
    trace.save(tmp_path / "run.jsonl")
    again = Trace.load(tmp_path / "run.jsonl")
    assert again == trace and again.events == trace.events and len(again.to_chrome()["traceEvents"]) > 5


def test_requests_are_read_when_their_time_is_near():
    read = []

    def jobs():
        for i in range(50):
            read.append(i)
            yield Request(str(i), range(10), SamplingParams(max_tokens=3), arrival_s=float(i))

    engine = run([], True, BATCHINGS[0])
    outputs = engine.replay(jobs())
    first = next(outputs)
    assert first.request_id == "0" and len(read) <= 2
    assert [output.request_id for output in outputs] == [str(i) for i in range(1, 50)]


@pytest.mark.parametrize("taken_back", ["1", "4"])
def test_a_request_of_a_replay_that_is_taken_back_takes_none_with_it(taken_back):
    engine = run([], True, BATCHINGS[0])
    jobs = (Request(str(i), range(10), SamplingParams(max_tokens=3), arrival_s=10.0 * i) for i in range(5))
    served = []
    for output in engine.replay(jobs):
        served.append(output.request_id)
        if int(output.request_id) == int(taken_back) - 1:
            assert engine.abort(taken_back).outputs[0].finish_reason == FinishReason.ABORT
    assert served == [i for i in "01234" if i != taken_back]


def test_a_request_that_was_added_for_later_holds_no_replay_up():
    engine = run([], True, BATCHINGS[0])
    engine.add_request(Request("late", range(10), SamplingParams(max_tokens=3), arrival_s=100.0))
    jobs = (Request(str(i), range(10), SamplingParams(max_tokens=3), arrival_s=10.0 * i) for i in range(3))
    assert [output.request_id for output in engine.replay(jobs)] == ["0", "1", "2", "late"]


def test_a_second_replay_waits_for_the_end_of_the_first():
    def jobs(name):
        return [Request(f"{name}{i}", range(10), SamplingParams(max_tokens=3), arrival_s=9.0 * i) for i in range(3)]

    engine = run([], True, BATCHINGS[0])
    first = engine.replay(jobs("a"))
    served = [next(first).request_id]
    with pytest.raises(InvalidRequestError, match="another replay"):
        next(engine.replay(jobs("b")))
    assert served + [output.request_id for output in first] == ["a0", "a1", "a2"]
    assert len(list(engine.replay(jobs("b")))) == 3


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_eos_that_is_ignored_ends_nothing_with_and_without_spans(ignore_eos):
    traces = []
    for fast in (False, True):
        scheduler = Scheduler(KVCacheManager(BlockPool(64, 4)), BATCHINGS[0], stop_checker=StopChecker([EOS]))
        engine = Engine(scheduler, SimulatedExecutor(KinkedCost(), {"a": 3, "b": 9}), VirtualClock(), fast_forward=fast)
        params = SamplingParams(max_tokens=12, ignore_eos=ignore_eos)
        engine.run([Request(name, range(5), params) for name in "ab"])
        assert [m.num_output_tokens for m in sequence_metrics(engine.trace)] == ([12, 12] if ignore_eos else [3, 9])
        traces.append(engine.trace)
    assert without_pages(traces[0]).difference(traces[1]) is None


def test_replay_gives_the_trace_of_stream():
    jobs = sorted((0.3 * i, 5 + i, 7 + 3 * i, 0, 1, i) for i in range(12))
    assert run(jobs, True, BATCHINGS[0]).trace == run(jobs, True, BATCHINGS[0], lazily=True).trace


@pytest.mark.parametrize("duty", ["retire", "admit", "grow", "displace", "blocked"])
def test_a_duty_that_a_learner_wrote_is_asked_in_every_step(duty):
    class Mine(Scheduler):
        pass

    setattr(Mine, duty, lambda self, *args: getattr(Scheduler, duty)(self, *args))
    scheduler = Mine(KVCacheManager(BlockPool(64, 4)), BATCHINGS[0], stop_checker=StopChecker([EOS]))
    engine = Engine(scheduler, SimulatedExecutor(KinkedCost(), {"a": 30}), VirtualClock(), fast_forward=True)
    engine.run([Request("a", range(5), SamplingParams(max_tokens=40))])
    assert num_lines(engine.trace) == 30


def test_a_policy_that_counts_service_counts_all_of_it():
    class Counting(Policy):
        def __init__(self):
            super().__init__()
            self.got = {}

        def served(self, seq, num_tokens):
            self.got[seq.request.request_id] = self.got.get(seq.request.request_id, 0) + num_tokens

    jobs = [(0.0, 5, 30, 0, 1, 0), (0.5, 6, 40, 0, 1, 1)]
    got = [run(jobs, fast, BATCHINGS[0], Counting).scheduler.policy.got for fast in (False, True)]
    assert got[0] == got[1] == {"0": 34, "1": 45}


segment = st.tuples(st.integers(1, 9), st.floats(0.001, 1), st.floats(0, 0.1))


@given(st.lists(segment, min_size=1, max_size=3), st.data())
def test_a_ramp_adds_up(segments, data):
    ramp = Ramp(tuple(segments))
    durations = list(ramp.durations())
    count = data.draw(st.integers(1, len(durations)))
    assert ramp.count == len(durations) and ramp.total(count) == pytest.approx(sum(durations[:count]))
    assert list(ramp.cut(count).durations()) == durations[:count]
    start, until = data.draw(st.floats(0, 10)), data.draw(st.floats(0, 10 + 2 * sum(durations)))
    ends = list(accumulate(durations, initial=start))
    num_steps, end = ramp.run(start, until)
    assert end == ends[num_steps] == pytest.approx(start + ramp.total(num_steps))
    assert num_steps == ramp.count or end >= until
    assert num_steps == 1 or ends[num_steps - 1] < until
    assert ramp.run(start) == (ramp.count, ends[-1])


def test_who_was_refused_asks_again_before_others_decode_on():
    """A refusal is heard when the step ends in which it was said, not when the span would."""
    too_long = Job(0.0, range(10_000), 1)
    jobs = [Job(0.0, range(20), 100), *[too_long] * 5, Job(0.0, range(20), 5), Job(0.0, range(20), 5)]
    slowly, quickly = (
        simulate(ClosedLoop(jobs, users=2, think_s=0.05), KinkedCost(), 40, 4, fast_forward=fast)
        for fast in (False, True)
    )
    assert without_pages(slowly.trace).difference(quickly.trace) is None
    assert slowly.fold.num_refused == quickly.fold.num_refused == 5


class Turning(Policy):
    """Whom it names as the next depends on how many tokens were given, so it changes while nobody joins."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def served(self, seq, num_tokens):
        self.count += num_tokens

    def peek(self):
        waiting = sorted(entry[1:] for entry in self._waiting.values())
        return waiting[self.count % len(waiting)][1] if waiting else None


def test_a_queue_that_a_learner_wrote_is_asked_in_every_step():
    jobs = [(0.1 * i, 1 + 7 * i % 20, 5 + 11 * i % 35, 0, 1, i) for i in range(20)]
    slowly, quickly = (run(jobs, fast, BATCHINGS[0], Turning, num_blocks=30) for fast in (False, True))
    assert without_pages(slowly.trace).difference(quickly.trace) is None
