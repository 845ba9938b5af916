"""`simulate`: a workload through the one scheduler, on a virtual clock, with a cost model in place of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec

from cbserve.clock import VirtualClock
from cbserve.core.batching import Batching, ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import InvalidRequestError
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.policies import Policy
from cbserve.core.request import SamplingParams, Sequence
from cbserve.core.run_fold import RunFold
from cbserve.core.scheduler import Scheduler, require_scheduler_class
from cbserve.core.stopping import StopChecker
from cbserve.core.summary import Summary, summary_of
from cbserve.core.trace import Event, Trace
from cbserve.core.trace_file import TraceWriter
from cbserve.engine import Engine
from cbserve.executors.scripted import EOS
from cbserve.executors.simulated import CostModel, SimulatedExecutor
from cbserve.outputs import RequestOutput
from cbserve.viz.table import Table
from cbserve.workloads.arrivals import ClosedLoop
from cbserve.workloads.workload import Job, Workload

P = ParamSpec("P")


@dataclass(frozen=True, repr=False)
class Simulation:
    """What came of `simulate`: `fold` has the numbers, `trace` the events (none when they were not kept). Shown, it is
    a table."""

    trace: Trace
    fold: RunFold
    refused: tuple[tuple[str, str], ...]  # (request id, why) of the first few

    @property
    def summary(self) -> Summary:
        return summary_of(self.fold, int(self.trace.meta["num_slots"]))

    def goodput(self, **limits_s: float) -> float:
        """Requests a second that kept every limit: `goodput(ttft=0.5, itl=0.1)`. See `RunFold.goodput`."""
        return self.fold.goodput(limits_s)

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        return Table(["simulated", ""], self.summary.rows())


def simulating(
    workload: Workload | ClosedLoop,
    cost: CostModel,
    num_blocks: int,
    block_size: int = 16,
    batching: Batching | None = None,
    policy: Policy | None = None,
    scheduler: type[Scheduler] = Scheduler,
    enable_prefix_caching: bool = False,
    preemption: str | Callable[[Sequence], str] = "recompute",
    num_host_blocks: int = 0,
    max_tokens: int | None = None,
    max_model_len: int | None = None,
    keep_trace: bool = True,
    trace_path: str | Path | None = None,
    fast_forward: bool = True,
    progress: Callable[[RequestOutput], None] | None = None,
    listeners: Iterable[Callable[[Event], None]] = (),
    meta: Mapping[str, Any] | None = None,
) -> Generator[None, None, Simulation]:
    """Serve `workload` in simulated time. `simulate` does it at once; `simulating` pauses after every answer, for a
    caller who has other things to do meanwhile, and comes to the same `Simulation`.

    Args:
        cost: seconds of a step, a `hardware.Roofline` for instance.
        num_blocks, block_size: the KV pool; `kv_capacity` says how many blocks a GPU has room for.
        batching, policy, scheduler: as for `LLM`; `scheduler` is a class, so that a learner's duties run.
        preemption, num_host_blocks: "swap" needs a host pool.
        max_tokens: what each request asks for at most; None: as much as the engine allows. A static batch reserves room
            for that, so with None a pool has room for few requests at a time, often one.
        keep_trace: False: only the numbers are kept, for a million requests.
        trace_path: write the events to this file during the run (JSON lines; `Trace.load` reads it).
        fast_forward: False lives through every step, for comparison, and records block tables too.
        progress: called with each request's output when it ends.
        listeners: called with each event in order, some thousand at a time; a `step` may be a span, and tells no steady
            rows.
        meta: what the trace should know of model and device.

    Raises:
        InvalidRequestError: an argument is out of range or of a wrong kind.
        TraceError: `trace_path` cannot be written.
    """
    _require_sound(workload, cost, scheduler, fast_forward)
    listeners = _require_told(progress, listeners, meta)
    host_pool = BlockPool(num_host_blocks, block_size) if num_host_blocks else None
    if preemption != "recompute" and host_pool is None:
        raise InvalidRequestError(f"preemption={preemption!r} needs a host pool: give num_host_blocks")
    if preemption != "recompute" and hasattr(cost, "require_link"):
        cost.require_link()
    if host_pool is not None and getattr(cost, "block_size", block_size) != block_size:
        raise InvalidRequestError(
            f"block_size={block_size}, but the cost model swaps blocks of {cost.block_size} tokens; give it the same "
            "block_size"
        )
    loop = workload if isinstance(workload, ClosedLoop) else None
    lengths: dict[str, int] = {}
    engine = Engine(
        scheduler(
            KVCacheManager(BlockPool(num_blocks, block_size), enable_prefix_caching, host_pool),
            batching or ContinuousBatching(),
            policy,
            StopChecker([EOS]),
            max_model_len,
            preemption,
        ),
        SimulatedExecutor(cost, lengths if loop else workload.answer_lengths),
        VirtualClock(),
        meta={"model": "simulated", "device": "none", **(meta or {})},
        fast_forward=fast_forward,
    )
    trace, fold, refused = engine.trace, RunFold(), []
    writer = TraceWriter(trace_path, trace.meta) if trace_path is not None else None
    takers = [fold.add, *listeners, *([] if writer is None else [writer])]
    told = _Told(trace.events, takers, keep_trace)
    try:
        outputs = _closed(engine, loop, lengths, max_tokens) if loop else engine.replay(workload.requests(max_tokens))
        for output in outputs:
            if output.error and len(refused) < 10:
                refused.append((output.request_id, output.error))
            if progress is not None:
                progress(output)
            told.batch()
            yield
        told.rest()
        if writer is not None:
            writer.close()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return Simulation(trace, fold, tuple(refused))


def _at_once(parts: Callable[P, Generator[None, None, Simulation]]) -> Callable[P, Simulation]:
    """`parts` without its pauses, with the same arguments and words, as `simulate`."""

    @wraps(parts)
    def whole(*args: P.args, **options: P.kwargs) -> Simulation:
        with closing(parts(*args, **options)) as run:
            while True:
                try:
                    next(run)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]

    whole.__name__ = whole.__qualname__ = "simulate"
    whole.__signature__ = signature(parts).replace(return_annotation="Simulation")  # type: ignore[attr-defined]
    return whole


simulate = _at_once(simulating)


class _Told:
    """Hands events on a few thousand at a time. One by one, between two steps, each would take twice as long: by then
    the processor's caches hold the scheduler's code.

    Args:
        events: grows during the run.
        takers: called with each event.
        keep: False: events that were handed on are dropped.
    """

    BATCH = 4096  # some 7 ms: for so long `simulating` does not pause

    def __init__(self, events: list[Event], takers: list[Callable[[Event], None]], keep: bool) -> None:
        self._events, self._takers, self._keep = events, takers, keep
        self._num_told = 0

    def batch(self) -> None:
        """Hand on what has come, if it is enough."""
        if len(self._events) - self._num_told >= self.BATCH:
            self.rest()

    def rest(self) -> None:
        """Hand on what has come."""
        new = self._events[self._num_told :]
        for take in self._takers:
            for event in new:
                take(event)
        if not self._keep:
            self._events.clear()
        self._num_told = len(self._events)


def _require_sound(workload: Any, cost: Any, scheduler: Any, fast_forward: bool) -> None:
    if not isinstance(workload, Workload | ClosedLoop):
        raise InvalidRequestError(f"workload={str(workload)[:60]!r}: must be a Workload or a ClosedLoop")
    require_scheduler_class(scheduler)
    if not callable(cost):
        raise InvalidRequestError(f"cost={cost!r}: must give seconds of a plan when called, as a Roofline does")
    if fast_forward and not hasattr(cost, "ramp"):
        raise InvalidRequestError(f"cost={cost!r} has no `ramp`: take a Roofline, or fast_forward=False")


def _require_told(progress: Any, listeners: Any, meta: Any) -> list[Callable[[Event], None]]:
    """The listeners, when all who want to be told can be, and `meta` can stand in a trace."""
    if progress is not None and not callable(progress):
        raise InvalidRequestError(f"progress={progress!r}: must be a function of a RequestOutput, or None")
    told = list(listeners) if isinstance(listeners, Iterable) else [None]
    if not all(map(callable, told)):
        raise InvalidRequestError(
            f"listeners={listeners!r}: must be a list of functions of an Event, such as [fold.add]"
        )
    if meta is not None and not (isinstance(meta, Mapping) and all(isinstance(name, str) for name in meta)):
        raise InvalidRequestError(f"meta={meta!r}: must be a dict from names to values, such as {{'model': 'mine'}}")
    return told


def _closed(
    engine: Engine, loop: ClosedLoop, lengths: dict[str, int], max_tokens: int | None
) -> Iterator[RequestOutput]:
    """Each user asks again some time after the answer has ended."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    users: dict[str, str] = {}
    number = 0

    def ask(job: Job) -> None:
        nonlocal number
        request_id, number = str(number), number + 1
        lengths[request_id], users[request_id] = operator.index(job.num_output_tokens), job.client_id
        engine.add_request(job.request(request_id, params))

    try:
        for job in loop.start():
            ask(job)
        while engine.has_unfinished:
            for output in engine.step(partial=False):
                yield output
                del lengths[output.request_id]
                if (job := loop.on_finish(users.pop(output.request_id), engine.clock.now())) is not None:
                    ask(job)
    finally:
        engine.abort_all()
