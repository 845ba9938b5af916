"""The loop: requests in, iterations, outputs out. It knows no torch and keeps no statistics; it writes the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import RLock
from typing import Any

from cbserve.clock import Clock, RealClock
from cbserve.core.books import StepUpdate, in_use
from cbserve.core.errors import InvalidRequestError, SchedulerError
from cbserve.core.plan import Reason, StepPlan, StepResult
from cbserve.core.request import FinishReason, Request
from cbserve.core.scheduler import Scheduler
from cbserve.core.trace import Arrived, Refused, Trace
from cbserve.executors.protocol import Executor, ForeseeingExecutor
from cbserve.incoming import Incoming, require_request
from cbserve.interrupts import interrupts_held_back
from cbserve.outputs import OutputBuilder, RequestOutput, unserved_output
from cbserve.recorder import Recorder, rows_of

_FREE = nullcontext()
_LISTEN_S = 0.02  # at most so long after another thread brought something it is seen


class Engine:
    """Serves requests iteration by iteration. While one thread does, others may add requests and abort them; not in a
    simulation.

    Args:
        scheduler: decides who runs.
        executor: computes a step.
        clock: real or virtual; real by default.
        meta: what the trace should know of model and device.
        debug: check conservation of blocks, slots and sequences after every step.
        fast_forward: with a simulating executor, take steps that differ in lengths only at once. The trace says the
            same, except that it has no `pages` events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock | None = None,
        meta: dict[str, Any] | None = None,
        debug: bool = False,
        fast_forward: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock: Clock = clock or RealClock()
        self.debug = debug
        self._foresees = executor if isinstance(executor, ForeseeingExecutor) and fast_forward else None
        if self._foresees and self._foresees.takes_steady:
            scheduler.keep_cruise()
        self._meta = meta or {}
        self._builders: dict[str, OutputBuilder] = {}
        self._incoming = Incoming()
        self._is_stalled = False
        self._lock = RLock()
        self._pending: list[RequestOutput] = []  # refusals and aborts, given out by the next step
        self.new_trace()

    def new_trace(self) -> Trace:
        """Begin a new trace and return it; the old one stays as it is. An idle engine's clock starts at 0 again."""
        if not self.has_unfinished:
            self.clock.restart()
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        meta = {
            "batching": repr(scheduler.batching),
            "policy": type(scheduler.policy).__name__,
            "num_slots": scheduler.batching.max_num_seqs,
            "max_num_batched_tokens": scheduler.batching.max_num_batched_tokens,
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "prefix_caching": scheduler.kv.enable_prefix_caching,
            "clock": self.clock.kind,
            "fast_forward": self._foresees is not None,
        }
        if own := sorted(meta.keys() & self._meta.keys()):
            raise InvalidRequestError(f"meta has {', '.join(own)}, which the engine itself says; take other names")
        self._recorder = Recorder(Trace(meta | self._meta), scheduler, simulates=self._foresees is not None)
        return self.trace

    @property
    def trace(self) -> Trace:
        """What happened since the engine, or the trace, was new."""
        return self._recorder.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._recorder.trace = trace

    # ---- requests -----------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request for its `arrival_s`. One that can never be served ends at once with finish_reason "error".

        Raises:
            InvalidRequestError: its id is in use, or it is no Request.
        """
        require_request(request)
        with self._books():
            if request.request_id in self._incoming:
                raise in_use(request)
            if (request.arrival_s or 0.0) > self.clock.now():
                self._require_new(request)
                self._incoming.add(request)
            else:
                self._arrive(request)

    def _require_new(self, request: Request) -> None:
        if request.request_id in self._builders:
            raise in_use(request)

    def _arrive(self, request: Request) -> None:
        self._require_new(request)
        if request.arrival_s is None:
            request = replace(request, arrival_s=self.clock.now())
        self._note_arrival(request)
        self._is_stalled = False
        added = self.scheduler.add(request)
        if isinstance(added, Reason):
            self._refuse(request, str(added))
            return
        builder = self._builders[request.request_id] = OutputBuilder(request, request.arrival_s or 0.0)
        builder.samples[0] = added

    def _note_arrival(self, request: Request) -> None:
        params, prompt = request.params, request.prompt_token_ids
        self.trace.emit(
            Arrived(
                request.arrival_s or 0.0, request.request_id, len(prompt), params.max_tokens, request.priority,
                request.client_id, params.n,
            )
        )  # fmt: skip

    def refuse(self, request: Request, message: str) -> None:
        """End a request, new here, at once with finish_reason "error"; the next step gives it out."""
        with self._books():
            self._note_arrival(request)
            self._refuse(request, message)

    def _refuse(self, request: Request, message: str) -> None:
        now = self.clock.now()
        self.trace.emit(Refused(now, request.request_id, message))
        self._pending.append(unserved_output(request, now, FinishReason.ERROR, message))

    def abort(self, request_id: str) -> RequestOutput | None:
        """Take a request back, wherever it is. Returns what it got so far; None if the id is unknown or finished. One
        that had not arrived yet leaves nothing in the trace."""
        with self._books():
            if (request := self._incoming.remove(request_id)) is not None:
                return unserved_output(request, self.clock.now(), FinishReason.ABORT)
            builder = self._builders.get(request_id)
            if builder is None:
                return None
            self._is_stalled = False  # its blocks may be what others wait for
            changed = self.scheduler.abort(request_id)
            for index in range(1, builder.request.params.n):  # samples that were not forked yet end with the first
                builder.samples.setdefault(index, builder.samples[0])
            outputs = self._take_in(changed)
            return outputs[0] if outputs else None

    def abort_all(self) -> list[RequestOutput]:
        """Abort everything; afterwards the pool is free and the engine can be used again."""
        with self._held():
            outputs = [self.abort(request_id) for request_id in list(self._builders)]
            now = self.clock.now()
            outputs += [unserved_output(request, now, FinishReason.ABORT) for request in self._incoming.clear()]
            for request_id in list(self.scheduler.requests):  # finished, but a learner's duty never retired it
                self._recorder.update(self.scheduler.abort(request_id), now)
            self._builders.clear()  # of what left in an update that failed before it was recorded
            self._pending.clear()
            return [output for output in outputs if output is not None]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._builders or self._incoming or self._pending)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def step(self, partial: bool = True) -> list[RequestOutput]:
        """One iteration. Returns the requests that got tokens or ended in it; with partial=False only those that ended.

        An exception from the scheduler or the executor aborts what runs: copies and swaps of a plan that was not
        carried out whole are lost, so the K and V of its sequences cannot be trusted any more.

        Raises:
            SchedulerError: requests wait, but nothing can ever run.
        """
        self._wait_for_arrivals()
        try:
            done = self._iterate(partial)
        except BaseException:
            self.abort_all()
            raise
        return self._nothing_to_run(done) if isinstance(done, StepPlan) else done

    def _iterate(self, partial: bool) -> list[RequestOutput] | StepPlan:
        """Plan, compute, take in. Returns the outputs, or the plan when there was nothing to compute."""
        with self._books():
            self._let_arrive()
            if not self.scheduler.has_unfinished:
                return self._take_pending()
            start = self.clock.now()
            plan = self.scheduler.schedule(start)
            self._recorder.decisions(plan, start)
            self._note_admissions(plan, start)
            if plan.is_empty:
                self._recorder.tables(plan, start)
                return plan
            if self._foresees is not None:
                return self._fast_forward(self._foresees, plan, start, partial)
            self._recorder.tables(plan, start)
        result = self.executor.execute(plan)
        with self._books():
            return self._end_step(plan, result, start, partial)

    def _end_step(self, plan: StepPlan, result: StepResult, start: float, partial: bool) -> list[RequestOutput]:
        self.clock.advance(result.duration_s)
        end = self.clock.now()
        self._recorder.step(plan, start, end)
        return self._update(plan, result, end, partial)

    def _update(self, plan: StepPlan, result: StepResult, end: float, partial: bool) -> list[RequestOutput]:
        changed = StepUpdate()
        try:
            self.scheduler.update(plan, result, end, changed)
        finally:  # who had ended before a duty failed is told too
            outputs = self._take_in(changed, partial) if changed.anything else []
        if self.debug:
            self.scheduler.check()
        return self._take_pending() + outputs if self._pending else outputs

    def _books(self) -> AbstractContextManager[object]:
        """Held around a change of the books. A simulation that is interrupted is thrown away."""
        return _FREE if self._foresees else self._held()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock, interrupts_held_back():
            yield

    def _fast_forward(
        self, executor: ForeseeingExecutor, plan: StepPlan, start: float, partial: bool
    ) -> list[RequestOutput]:
        """Take `plan` and the steps after it that differ in lengths only at once; only the last can end anything."""
        # a refusal is given out when this step ends, and whoever hears it may ask again
        most = 1 if self._pending else self.scheduler.horizon(plan)
        if most > 1:
            ramp = executor.ramp(plan, most)
            count, end = ramp.run(start, self._incoming.next_s)
            if count > 1:
                rows = rows_of(plan)
                self.scheduler.advance(plan, count, executor.foresee(plan, count - 1) if rows else [])
                self.clock.advance_to(end)
                self._recorder.span(rows, plan, count, ramp.cut(count), start, end)
                return self._update(plan, executor.answer(plan), end, partial)
        return self._end_step(plan, executor.execute(plan), start, partial)

    def replay(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Serve requests that come in order of arrival and are read when their time is near, so that a million need
        not be in memory. Yields each when it has ended. Leaving early aborts what still runs.

        Raises:
            InvalidRequestError: one arrives before the one that it follows, or another replay is under way.
        """
        self._incoming.follow(requests)
        try:
            while self.has_unfinished:
                yield from self.step(partial=False)
        finally:
            self.abort_all()

    def stream(self, requests: Iterable[Request] = (), partial: bool = True) -> Iterator[RequestOutput]:
        """Add requests and yield outputs as they grow, until all have ended.

        Leaving early (break, an exception, Ctrl-C) aborts what still runs.
        """
        try:
            for request in requests:
                self.add_request(request)
            while self.has_unfinished:
                yield from self.step(partial)
        finally:
            self.abort_all()

    def run(self, requests: Iterable[Request] = ()) -> list[RequestOutput]:
        """Serve requests to their end. Returns their outputs in the order of ending."""
        return list(self.stream(requests, partial=False))

    def _wait_for_arrivals(self) -> None:
        """Unless there is something to do, which another thread may bring at any time."""
        while self._incoming and (self._is_stalled or not self.scheduler.has_unfinished) and not self._pending:
            until, now = self._incoming.next_s, self.clock.now()
            if until <= now:
                break
            self.clock.wait_until(until if self.clock.kind == "simulated" else min(until, now + _LISTEN_S))
        self._is_stalled = False

    def _let_arrive(self) -> None:
        for request in self._incoming.due(self.clock.now()):
            self._arrive(request)

    def _nothing_to_run(self, plan: StepPlan) -> list[RequestOutput]:
        """An empty plan: wait for the next arrival, or say that nothing will ever move."""
        pending = self._take_pending()
        if pending or plan.preemptions:
            return pending
        if self._incoming:
            self._is_stalled = True  # the next step waits for the next arrival
            return []
        stuck = [seq for seq in self.scheduler.running if seq.is_finished]
        if stuck:
            raise SchedulerError(
                f"{stuck[0]!r} is finished but was never retired: it keeps its slot and blocks; retire it"
            )
        why = f"the first in the queue: {plan.blocked.reason}" if plan.blocked else "the admit duty names nobody"
        raise SchedulerError(
            f"{plan.num_waiting} requests wait, {plan.num_running} run, and nothing can be scheduled; {why}"
        )

    # ---- the outputs --------------------------------------------------------------------------------------------

    def _note_admissions(self, plan: StepPlan, now: float) -> None:
        for admission in plan.admissions:
            builder = self._builders.get(admission.request_id)
            if builder is not None and builder.times.admitted_s is None:
                builder.times.admitted_s = now

    def _take_in(self, changed: StepUpdate, partial: bool = True) -> list[RequestOutput]:
        """Record what changed, and build the outputs of those that it touched."""
        now = self.clock.now()
        touched: dict[str, OutputBuilder] = {}
        self._recorder.update(changed, now)
        for _, child in changed.forked:
            self._builders[child.request.request_id].samples[child.sample_index] = child
        for seq, logprobs in changed.new_tokens:
            builder = self._builders[seq.request.request_id]
            if builder.times.first_token_s is None:
                builder.times.first_token_s = now
            if logprobs is not None:
                builder.logprobs.setdefault(seq.sample_index, []).append(logprobs)
            if partial:
                touched[seq.request.request_id] = builder
        for seq in changed.finished:
            request_id = seq.request.request_id
            touched[request_id] = self._builders[request_id]
        outputs = []
        for request_id, builder in touched.items():
            if builder.finished:
                builder.times.finished_s = now
                del self._builders[request_id]
            elif not partial:
                continue
            outputs.append(builder.build())
        return outputs

    def _take_pending(self) -> list[RequestOutput]:
        pending, self._pending = self._pending, []
        return pending
