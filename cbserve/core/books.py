"""Who is known to a scheduler: which sequences wait, run or pad, and which slots and blocks they hold."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from cbserve.core.batching import Batching, ContinuousBatching, require_batching
from cbserve.core.blocks import Lease
from cbserve.core.cruise import Cruise
from cbserve.core.errors import ConservationError, InvalidRequestError, SchedulerError
from cbserve.core.given import integer
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.limits import Limits
from cbserve.core.plan import Reason, Row
from cbserve.core.policies import FCFS, Policy, require_policy
from cbserve.core.request import FinishReason, Request, Sequence, SequenceState
from cbserve.core.stopping import StopChecker


@dataclass(slots=True)
class StepUpdate:
    """What a step changed."""

    new_tokens: list[tuple[Sequence, dict[int, float] | None]] = field(default_factory=list)  # with log-probabilities
    forked: list[tuple[Sequence, Sequence]] = field(default_factory=list)  # (parent, child)
    finished: list[Sequence] = field(default_factory=list)
    left: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, slot), with its blocks free now
    published: list[int] = field(default_factory=list)  # blocks whose content can be found from now on

    @property
    def anything(self) -> bool:
        """False: nobody got a token that is told one by one, or ended, and nothing else changed."""
        return bool(self.new_tokens or self.finished or self.left or self.published or self.forked)


@dataclass(slots=True)
class Padding:
    """A finished sequence of a static batch that still takes part: its row, its slot and a lease on its blocks."""

    seq: Sequence
    row: Row
    lease: Lease


class Books:
    """Every way in and out, so that nothing is lost; `check` says whether all is accounted for. The arguments are those
    of `Scheduler`."""

    def __init__(
        self,
        kv: KVCacheManager,
        batching: Batching | None,
        policy: Policy | None,
        stop_checker: StopChecker | None,
        max_model_len: int | None,
    ) -> None:
        require_batching(batching)
        require_policy(policy)
        if max_model_len is not None:
            max_model_len = integer("max_model_len", max_model_len, 1, ", or None")
        self.kv = kv
        self.batching = batching or ContinuousBatching()
        self.policy = FCFS() if policy is None else policy  # an empty queue is falsy
        self.stop_checker = stop_checker or StopChecker()
        self.limits = Limits(kv, self.batching, self.stop_checker, max_model_len)
        self.running: list[Sequence] = []
        self.padding: list[Padding] = []
        self.held: dict[int, Sequence] = {}  # wait for something outside the step
        self.requests: dict[str, list[Sequence]] = {}  # unfinished sequences by request id
        self.free_slots = list(range(self.batching.max_num_seqs))
        self.cruise: Cruise | None = None  # those who decode in every step, when they are kept as a group
        self._by_id: dict[int, Sequence] = {}  # unfinished, and finished ones that still hold a slot
        self._sample_slots: dict[int, list[int]] = {}  # slots kept for the samples that a prefill will fork
        self._next_seq_id = 0

    def add(self, request: Request, waiting_for: str | None = None) -> Sequence | Reason:
        """Queue a request, or say why it can never be served (then nothing is kept).

        Raises:
            InvalidRequestError: its id is in use.
        """
        if request.request_id in self.requests:
            raise in_use(request)
        reason = self.limits.refuses(request)
        if reason is not None:
            return reason
        seq = Sequence(request, self._next_seq_id, self.limits.max_tokens(request))
        self._next_seq_id += 1
        self.requests[request.request_id] = [seq]
        self._by_id[seq.seq_id] = seq
        if waiting_for is None:
            self.policy.push(seq)
        else:
            seq.waiting_for = waiting_for
            self.held[seq.seq_id] = seq
        return seq

    def abort(self, request_id: str) -> StepUpdate:
        """End every unfinished sample of a request now. Unknown or finished ids are ignored."""
        changed = StepUpdate()
        for seq in list(self.requests.get(request_id, ())):
            if not seq.is_finished:
                seq.finish_reason = FinishReason.ABORT
                changed.finished.append(seq)
            changed.left += self._leave(seq)
        return changed

    def complete(self, key: str) -> None:
        """Something that sequences waited for outside the step has ended: they queue at their old place."""
        for seq in [seq for seq in self.held.values() if seq.waiting_for == key]:
            seq.waiting_for = None
            del self.held[seq.seq_id]
            self.policy.push(seq)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def _fork(self, parent: Sequence, changed: StepUpdate) -> list[Sequence]:
        """The prefill of n samples is done: the other n - 1 share its blocks and run on their own from here."""
        children = []
        slots = self._sample_slots.pop(parent.seq_id)
        for index, slot in enumerate(slots, start=1):
            child = Sequence(parent.request, self._next_seq_id, parent.max_tokens, index)
            self._next_seq_id += 1
            child.num_computed_tokens, child.admission_tokens = parent.num_computed_tokens, parent.admission_tokens
            child.state, child.slot, child.pending_samples = SequenceState.RUNNING, slot, 1
            self.kv.fork(parent, child)
            self._by_id[child.seq_id] = child
            self.requests[parent.request.request_id].append(child)
            self.running.append(child)
            children.append(child)
            changed.forked.append((parent, child))
        parent.pending_samples = 1
        return [parent, *children]

    def _leave(self, seq: Sequence) -> list[tuple[Sequence, int]]:
        """A sequence ends: take every trace of it away. In a static batch its row stays, on a lease, until all are
        done.

        Returns the (sequence, slot) pairs that became free.
        """
        left: list[tuple[Sequence, int]] = []
        if self.cruise is not None and seq.seq_id in self.cruise.members:
            self.cruise.leave(seq)
        if seq in self.running:
            self.running.remove(seq)
            if self.batching.keeps_finished and seq.num_computed_tokens:
                self._pad(seq)
            else:
                left.append((seq, self._release_slot(seq)))
        else:
            self.policy.remove(seq)
            self.held.pop(seq.seq_id, None)
            if seq.slot is not None:  # a learner's duty took it out of `running` by hand
                left.append((seq, self._release_slot(seq)))
        self.kv.forget(seq)
        seq.state = SequenceState.FINISHED
        del self._by_id[seq.seq_id]
        siblings = self.requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request.request_id]
        if not self.running:
            for padding in self.padding:
                self.kv.pool.release(padding.lease)
                left.append((padding.seq, self._release_slot(padding.seq)))
            self.padding.clear()
        return left

    def _pad(self, seq: Sequence) -> None:
        """Keep a finished row in the forward pass: it recomputes the last token that it computed, for nothing."""
        last = seq.num_computed_tokens - 1
        lease = self.kv.lease(seq, f"padding row of {seq.request.request_id!r}")
        row = Row(
            seq_id=seq.seq_id,
            request_id=seq.request.request_id,
            slot=seq.slot if seq.slot is not None else -1,
            start=last,
            token_ids=seq.tokens(last, last + 1),
            block_table=lease.block_ids,
            params=seq.request.params,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_samples=0,
            is_padding=True,
        )
        self.padding.append(Padding(seq, row, lease))

    def _release_slot(self, seq: Sequence) -> int:
        slot = seq.slot
        if slot is None:
            raise SchedulerError(f"{seq!r} holds no slot")
        for free in (slot, *self._sample_slots.pop(seq.seq_id, ())):
            heapq.heappush(self.free_slots, free)
        seq.slot = None
        return slot

    def check(self) -> None:
        """Conservation of blocks, slots and sequences. Raises ConservationError."""
        self.kv.check()
        strangers = set(self.kv.tables) - {seq.seq_id for seq in self.running}
        if strangers:
            raise ConservationError(f"sequences {sorted(strangers)} hold blocks but do not run")
        strangers = set(self.kv.swapped) - {seq.seq_id for seq in self.policy}
        if strangers:
            raise ConservationError(f"sequences {sorted(strangers)} are swapped out but do not wait")
        slots = sorted(self.free_slots)
        for seq in [*self.running, *(padding.seq for padding in self.padding)]:
            slots += [-1 if seq.slot is None else seq.slot, *self._sample_slots.get(seq.seq_id, ())]
        if sorted(slots) != list(range(self.batching.max_num_seqs)):
            raise ConservationError(f"slots lost or held twice: {sorted(slots)}")
        known = len(self.running) + len(self.policy) + len(self.held)
        if known != len(self._by_id) or len(self._by_id) != sum(map(len, self.requests.values())):
            raise ConservationError(f"{len(self._by_id)} sequences known, {known} queued or running")


def in_use(request: Request) -> InvalidRequestError:
    """The id of `request` is that of an unfinished one."""
    return InvalidRequestError(f"request_id={request.request_id!r} is in use by an unfinished request; take another")
