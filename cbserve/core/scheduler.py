"""The one scheduler: one iteration -> `StepPlan`; what came of it -> `StepUpdate`.

It asks its duties (see `duties.py`) for decisions, carries them out, and refuses those that cannot be.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from cbserve.core import batching as duty
from cbserve.core.batching import Batching
from cbserve.core.books import StepUpdate
from cbserve.core.cruise import Cruise
from cbserve.core.duties import Step
from cbserve.core.errors import InvalidRequestError, SchedulerError
from cbserve.core.fast_forward import FastForward, decides_by_itself
from cbserve.core.given import is_integer
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import Admission, Blocked, Preemption, Reason, Row, StepPlan, StepResult
from cbserve.core.policies import Policy
from cbserve.core.request import Sequence, SequenceState
from cbserve.core.stopping import StopChecker

UNLIMITED = 2**62  # tokens: a step without a budget


def _each(name: str, decided: Any) -> Iterator[Any]:
    """What a duty decided, which must be a list or a generator: a forgotten `return` gives None."""
    try:
        return iter(decided)
    except TypeError:
        raise SchedulerError(
            f"{name} returned {decided!r}; it must return a list or yield; an empty list is nobody"
        ) from None


def _require_sequence(name: str, seq: Any) -> None:
    if not isinstance(seq, Sequence):
        raise SchedulerError(f"{name} named {seq!r}, which is no Sequence; name those of `policy` or `running`")


def require_scheduler_class(scheduler: Any) -> None:
    """Raises InvalidRequestError for what is no scheduler's class."""
    if not isinstance(scheduler, type) or not issubclass(scheduler, Scheduler):
        raise InvalidRequestError(f"scheduler={scheduler!r}: must be Scheduler or a subclass of it, the class itself")


class Scheduler(FastForward):
    """Decides, iteration by iteration, who runs.

    Args:
        kv: the block tables and their pool.
        batching: how much may join a step.
        policy: who goes first and who yields.
        stop_checker: when an answer ends.
        max_model_len: most tokens of prompt and answer together; None: as many as the pool holds.
        preemption: what becomes of a victim's K and V: "recompute" (given up), "swap" (copied to the host pool of `kv`,
            as long as that has room), or a function (sequence) -> one of the two.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        batching: Batching | None = None,
        policy: Policy | None = None,
        stop_checker: StopChecker | None = None,
        max_model_len: int | None = None,
        preemption: str | Callable[[Sequence], str] = "recompute",
    ) -> None:
        if not callable(preemption) and preemption not in ("recompute", "swap"):
            raise InvalidRequestError(f"preemption={preemption!r}: must be 'recompute', 'swap' or a function")
        super().__init__(kv, batching, policy, stop_checker, max_model_len)
        self.preemption = preemption
        self._step = 0
        self._prefill_streak = 0
        self._decides_by_itself = decides_by_itself(type(self))
        self._skipped = False  # a decode got no row in the last step, for want of budget

    # ---- the iteration ------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan:
        """Plan one iteration."""
        plan, budget = StepPlan(self._step), self.batching.max_num_batched_tokens or UNLIMITED
        step = Step(plan, now_s, budget, budget, not (self.running or self.padding))
        if self.cruise is not None:
            self._cruise(self.cruise, step)
            if plan.steady is not None and not step.loose and not len(self.policy):  # nothing is left to decide
                return self._finish_plan(step)
        streak = self._prefill_streak
        if streak and all(seq.is_prefilling for seq in self.running):
            streak = 0  # nobody waits for a decode
        for name in self.batching.duties(streak):
            if name == duty.DISPLACE:
                for pair in _each("displace", self.displace(step)):
                    self._displace(pair, step)
            elif name == duty.ADMIT and not plan.preemptions:
                for seq in _each("admit", self.admit(step)):
                    self._admit(seq, step)
            elif name == duty.GROW_DECODES and step.rows:
                break  # prefill first: decodes wait for a step without prefills
            elif name != duty.ADMIT:
                self._grow_all(name, step)
        return self._finish_plan(step)

    def update(self, plan: StepPlan, result: StepResult, now_s: float, changed: StepUpdate | None = None) -> StepUpdate:
        """Take in what a step gave. A finished sequence's blocks are free when this returns (static batching: when its
        batch ends). Rows of sequences that were aborted meanwhile are ignored. `changed`: to be filled and returned, so
        that it says what was taken in where a duty fails."""
        if len(result.sampled) != len(plan.rows):
            raise SchedulerError(
                f"the executor answered {len(result.sampled)} rows of {len(plan.rows)}; one answer a row"
            )
        changed = StepUpdate() if changed is None else changed
        if plan.steady is not None and self.cruise is not None:
            self._steady_done(self.cruise, result, changed)
        if plan.rows:
            self._rows_done(plan, result, changed)
        for key in result.completions:
            self.complete(key)
        if changed.finished or self.cruise is None:  # its own duty names only those that have just finished
            for seq in list(_each("retire", self.retire())):
                changed.left += self._retire(seq)
        return changed

    def _steady_done(self, cruise: Cruise, result: StepResult, changed: StepUpdate) -> None:
        changed.published += self._publish(cruise)
        for member in cruise.ending(result.ended):
            seq = member.seq
            cruise.leave(seq)
            if (last := result.ended.get(seq.seq_id)) is not None:
                seq.output_token_ids[-1] = last
            self.stop_checker.check(seq)
            if seq.is_finished:  # else it goes on outside the group: an EOS that it ignores
                changed.finished.append(seq)

    def _rows_done(self, plan: StepPlan, result: StepResult, changed: StepUpdate) -> None:
        logprobs = result.logprobs or [None] * len(plan.rows)
        for row, sampled, row_logprobs in zip(plan.rows, result.sampled, logprobs, strict=True):
            seq = self._by_id.get(row.seq_id)
            if row.is_padding or seq is None or seq.state is not SequenceState.RUNNING:
                continue
            if len(sampled) != row.num_samples:
                raise SchedulerError(
                    f"row of {row.request_id!r}: {len(sampled)} tokens sampled, {row.num_samples} wanted"
                )
            seq.num_computed_tokens = row.end
            seq.num_scheduled_tokens = 0
            if published := self.kv.step_done(seq):
                changed.published += published
            samples = self._fork(seq, changed) if row.num_samples > 1 else [seq]
            for i, (sample, token) in enumerate(zip(samples, sampled, strict=False)):
                sample.output_token_ids.append(token)
                self.stop_checker.check(sample)
                changed.new_tokens.append((sample, row_logprobs[i] if row_logprobs else None))
                if sample.is_finished:
                    changed.finished.append(sample)
            self.policy.served(seq, len(row.token_ids))

    # ---- carrying decisions out ---------------------------------------------------------------------------------

    def _grow_all(self, name: str, step: Step) -> None:
        loose = self.running if step.loose is None else step.loose
        for seq in self.policy.order(loose):  # most urgent first, so that victims are not yet in the step
            if seq.state is not SequenceState.RUNNING or seq.seq_id in step.rows:
                continue
            if (name == duty.GROW_PREFILLS and not seq.is_prefilling) or (
                name == duty.GROW_DECODES and seq.is_prefilling
            ):
                continue
            count = self.num_new_tokens(seq, step)
            if not is_integer(count):
                raise SchedulerError(f"num_new_tokens returned {count!r}; it must be a number of tokens, 0 to wait")
            if not count:
                continue
            num_tokens = seq.num_computed_tokens + count
            while (victim := self.grow(seq, num_tokens, step)) is not None:
                _require_sequence("grow", victim)
                need = self.kv.blocks_needed(seq, num_tokens)
                numbers: dict[str, int | float | str] = {"need": need, "free": self.kv.num_free_blocks}
                numbers |= {"grower": seq.request.request_id, "victim": victim.request.request_id}
                self._preempt(victim, "out_of_blocks", Reason("out_of_blocks", numbers), step)
                if victim is seq:
                    break
            else:
                self._schedule_row(seq, count, step)

    def _displace(self, pair: tuple[Sequence, Sequence], step: Step) -> None:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise SchedulerError(f"displace named {pair!r}; it must name pairs (candidate, victim)")
        candidate, victim = pair
        _require_sequence("displace", candidate)
        _require_sequence("displace", victim)
        numbers: dict[str, int | float | str] = {
            "candidate": candidate.request.request_id,
            "why": f"priority {candidate.request.priority} before {victim.request.priority}",
        }
        self._preempt(victim, "displaced", Reason("displaced", numbers), step)
        if candidate in self.policy and self.blocked(candidate, step) is None:
            self._admit(candidate, step)

    def _admit(self, seq: Sequence, step: Step) -> None:
        _require_sequence("admit", seq)
        if seq not in self.policy:
            raise SchedulerError(f"admit returned {seq!r}, which is not waiting; return sequences of `policy`")
        if not self._decides_by_itself and (reason := self.blocked(seq, step)) is not None:
            raise SchedulerError(f"admit returned {seq!r}, which has no room: {reason}; stop before it")
        if len(self.free_slots) < seq.pending_samples:  # `blocked` looks too, unless a subclass says otherwise
            raise SchedulerError(
                f"{seq!r} needs {seq.pending_samples} slots, {len(self.free_slots)} are free; let it wait"
            )
        self.policy.remove(seq)
        if self.batching.keeps_finished:
            step.reserved_blocks += self.most_blocks(seq)
        swaps, num_cached = self.kv.admit(seq)
        step.plan.swap_ins += swaps
        slots = [heapq.heappop(self.free_slots) for _ in range(seq.pending_samples)]
        seq.slot, self._sample_slots[seq.seq_id] = slots[0], slots[1:]
        seq.state = SequenceState.RUNNING
        is_decode = seq.num_output_tokens > 0 and seq.num_computed_tokens == seq.num_tokens - 1  # all of it came back
        seq.admission_tokens = seq.num_computed_tokens if is_decode else seq.num_tokens
        self.running.append(seq)
        resumed = seq.num_preemptions > 0
        request_id = seq.request.request_id
        step.plan.decisions.append(Admission(seq.seq_id, request_id, seq.slot, resumed, num_cached, len(swaps)))
        self._schedule_row(seq, self.num_new_tokens(seq, step), step)

    def _schedule_row(self, seq: Sequence, count: int, step: Step) -> None:
        start = seq.num_computed_tokens
        if not 1 <= count <= seq.num_tokens - start:
            raise SchedulerError(
                f"{count} tokens of {seq!r} were to be computed; its step takes 1 to {seq.num_tokens - start}"
            )
        step.copies[seq.seq_id] = self.kv.allocate(seq, start + count)
        step.budget_left -= count
        seq.num_scheduled_tokens = count
        step.rows[seq.seq_id] = Row(
            seq_id=seq.seq_id,
            request_id=seq.request.request_id,
            slot=seq.slot if seq.slot is not None else -1,
            start=start,
            token_ids=seq.tokens(start, start + count),
            block_table=self.kv.tables[seq.seq_id],
            params=seq.request.params,
            num_prompt_tokens=seq.num_prompt_tokens,
            sample_index=seq.sample_index,
            num_samples=seq.pending_samples if start + count == seq.num_tokens else 0,
            is_prefill=seq.is_prefilling,
        )

    def _preempt(self, victim: Sequence, cause: str, reason: Reason, step: Step) -> None:
        """All its blocks are given back, and it queues again by its key. Its K and V are lost, or wait in the host
        pool."""
        if victim.state is not SequenceState.RUNNING or victim.is_finished:
            raise SchedulerError(f"{victim!r} cannot yield: it does not run; name one of `running`")
        mode = self.preemption(victim) if callable(self.preemption) else self.preemption
        if mode not in ("recompute", "swap"):
            raise SchedulerError(f"preemption({victim!r}) returned {mode!r}; it must be 'recompute' or 'swap'")
        if step.rows.pop(victim.seq_id, None) is not None:
            step.budget_left += victim.num_scheduled_tokens
        copies = step.copies.pop(victim.seq_id, [])
        slot, computed = self._release_slot(victim), victim.num_computed_tokens
        step.plan.swap_ins = [
            pair for pair in step.plan.swap_ins if pair[0] not in self.kv.coming_in.get(victim.seq_id, ())
        ]
        swaps = self.kv.swap_out(victim, copies) if mode == "swap" else None
        step.plan.swap_outs += swaps or []
        num_blocks = self.kv.free(victim) if swaps is not None else self.kv.forget(victim)
        how = "recompute" if swaps is None else "swap"
        step.plan.decisions.append(
            Preemption(
                victim.seq_id,
                victim.request.request_id,
                slot,
                cause,
                reason,
                how,
                computed,
                num_blocks,
                len(swaps or ()),
            )
        )
        if swaps is None:
            victim.num_computed_tokens = 0
        victim.num_scheduled_tokens = 0
        victim.num_preemptions += 1
        victim.state = SequenceState.WAITING
        self.running.remove(victim)
        self.policy.push(victim)

    def _finish_plan(self, step: Step) -> StepPlan:
        plan = step.plan
        if plan.decisions and plan.preemptions and plan.blocked is None and (first := self.policy.peek()):
            plan.blocked = Blocked(first.seq_id, first.request.request_id, Reason("preempted_this_step"))
        if plan.blocked is not None and not isinstance(plan.blocked.reason, Reason):
            raise SchedulerError(
                f"blocked returned {plan.blocked.reason!r}; it must be a Reason, or None where there is room"
            )
        is_prefill = False
        if step.rows:
            plan.rows = [*step.rows.values(), *[padding.row for padding in self.padding]]
            plan.copies = [pair for pairs in step.copies.values() for pair in pairs]
            is_prefill = any(row.is_prefill for row in plan.rows)
        self._prefill_streak = self._prefill_streak + 1 if is_prefill else 0
        if self.cruise is not None and plan.steady is None:
            self._skipped = any(not s.is_prefilling and s.seq_id not in step.rows for s in self.running)
        plan.num_waiting = len(self.policy) + len(self.held)
        plan.num_running = len(self.running)
        plan.num_used_blocks = self.kv.pool.num_used
        plan.evicted += self.kv.pool.take_evicted()
        if not plan.is_empty:
            self._step += 1
        return plan

    def _retire(self, seq: Sequence) -> list[tuple[Sequence, int]]:
        _require_sequence("retire", seq)
        if seq.state is not SequenceState.RUNNING or seq not in self.running:
            raise SchedulerError(f"retire returned {seq!r}, which does not run; return sequences of `running`")
        if not seq.is_finished:
            raise SchedulerError(f"retire returned {seq!r}, which is not finished; return only finished ones")
        return self._leave(seq)
