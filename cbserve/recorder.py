"""From plans, and what came of them, to the events of one trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from cbserve.core.books import StepUpdate
from cbserve.core.plan import Admission, Ramp, StepPlan
from cbserve.core.scheduler import Scheduler
from cbserve.core.table_log import TableLog
from cbserve.core.trace import (
    Admitted,
    BlockedEvent,
    Finished,
    Forked,
    Left,
    PagesEvent,
    Preempted,
    StepEvent,
    StepRow,
    Trace,
)  # fmt: skip

logger = logging.getLogger("cbserve")

#: Cause of a preemption -> what to do about it.
_CURES = {
    "out_of_blocks": "A larger pool or fewer slots avoid it.",
    "displaced": "The policy asked for it.",
}


@contextmanager
def quiet() -> Iterator[None]:
    """No warning of preemptions, where a figure or a check shows them anyway."""
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(level)


class Recorder:
    """Writes one trace, whose steps count from 0.

    Args:
        trace: what is written to.
        scheduler: whose block tables `pages` events tell.
        simulates: no `pages` events, since spans of steps have none, and no warning of preemptions.
    """

    def __init__(self, trace: Trace, scheduler: Scheduler, simulates: bool) -> None:
        self.trace = trace
        self.last_step = 0
        self._pool = scheduler.kv.pool
        self._tables = None if simulates else TableLog(scheduler.kv)
        self._offset: int | None = None
        self._last_blocked: tuple[int, str] | None = None
        self._unwarned = {} if simulates else dict(_CURES)

    def number(self, plan: StepPlan) -> int:
        if self._offset is None:
            self._offset = plan.step
        return plan.step - self._offset

    def decisions(self, plan: StepPlan, now_s: float) -> None:
        """Who was admitted and who yielded, as it was decided; why the first in the queue was not admitted."""
        step, emit = self.number(plan), self.trace.emit
        for taken in plan.decisions:
            who = taken.request_id, taken.seq_id, taken.slot
            if isinstance(taken, Admission):
                places = taken.resumed, taken.num_cached_tokens, taken.num_swapped_blocks
                emit(Admitted(now_s, step, *who, *places))
            else:
                what = taken.cause, str(taken.reason), taken.how, taken.num_computed_tokens, taken.num_blocks
                event = Preempted(now_s, step, *who, *what)
                emit(event)
                self._warn(event)
        if (blocked := plan.blocked) is not None:
            key = (blocked.seq_id, blocked.reason.code)
            if key != self._last_blocked:
                emit(BlockedEvent(now_s, step, blocked.request_id, *key, str(blocked.reason)))
            self._last_blocked = key

    def _warn(self, event: Preempted) -> None:
        """Once a trace for each cause."""
        if (cure := self._unwarned.pop(event.cause, None)) is None:
            return
        logger.warning(
            "request %s was preempted (%s): %s. Its %d tokens will be %s. %s It is the first of its cause; the "
            "trace has all.",
            event.request_id, event.cause.replace("_", " "), event.reason, event.num_computed_tokens, event.way_back,
            cure,
        )  # fmt: skip

    def tables(self, plan: StepPlan, now_s: float) -> None:
        """What is new in the block tables."""
        if self._tables is not None and (pages := self._tables.changes(plan, now_s, self.number(plan))) is not None:
            self.trace.emit(pages)

    def step(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        """One step was computed."""
        self.last_step = self.number(plan)
        num_steady = plan.steady.num_rows if plan.steady is not None else 0
        self.trace.emit(
            StepEvent(
                self.last_step, start_s, end_s, rows_of(plan), plan.num_waiting, plan.num_running,
                plan.num_used_blocks, len(plan.copies), len(plan.evicted), len(plan.swap_outs) + len(plan.swap_ins),
                num_steady=num_steady,
            )
        )  # fmt: skip

    def span(
        self, rows: tuple[StepRow, ...], plan: StepPlan, count: int, ramp: Ramp, start_s: float, end_s: float
    ) -> None:
        """`count` steps that differ in lengths only: `rows` are those of the first, `plan` is now that of the last."""
        first, num_steady = self.number(plan), plan.steady.num_rows if plan.steady is not None else 0
        self.last_step = first + count - 1
        self.trace.emit(
            StepEvent(
                first, start_s, end_s, rows, plan.num_waiting, plan.num_running, plan.num_used_blocks, 0,
                len(plan.evicted), 0, count, ramp.segments, self._pool.num_used, num_steady,
            )
        )  # fmt: skip

    def update(self, changed: StepUpdate, now_s: float) -> None:
        """What the last step, or an abort, changed: who forked, ended, left."""
        step, emit, tables = self.last_step, self.trace.emit, self._tables
        if changed.published and tables is not None:
            emit(PagesEvent(now_s, step, findable=tuple(changed.published)))
        for parent, child in changed.forked:
            slot = child.slot if child.slot is not None else -1
            if tables is not None:
                tables.fork(parent.seq_id, child.seq_id)
            ids = child.request.request_id, child.seq_id, parent.seq_id
            emit(Forked(now_s, step, *ids, child.sample_index, slot))
        for seq in changed.finished:
            why = str(seq.finish_reason), seq.stop_reason
            emit(Finished(now_s, step, seq.request.request_id, seq.seq_id, *why, seq.num_output_tokens))
        for seq, slot in changed.left:
            if tables is not None:
                tables.leave(seq.seq_id)
            emit(Left(now_s, step, seq.request.request_id, seq.seq_id, slot))


def rows_of(plan: StepPlan) -> tuple[StepRow, ...]:
    """The rows that a plan tells, as a trace has them."""
    return tuple(
        [
            StepRow(
                row.seq_id,
                row.slot,
                "padding" if row.is_padding else "prefill" if row.is_prefill else "decode",
                len(row.token_ids),
                row.num_samples,
                row.end,
            )
            for row in plan.rows
        ]
    )
