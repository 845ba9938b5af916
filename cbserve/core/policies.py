"""Who goes first, who yields when blocks run out, who may displace whom."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.core.request import Sequence


class Policy:
    """Owns the waiting queue. The order is `key(seq)`, smallest first: override that one method for a new policy.

    A preempted sequence is pushed again and finds its place by its key; for FCFS that is the front.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Sequence]] = []
        self._waiting: dict[int, tuple[Any, int, Sequence]] = {}  # removed entries stay in the heap until they surface

    def key(self, seq: Sequence) -> Any:
        """Smaller is served sooner. Ties go to the sequence that was added first."""
        return seq.arrival_s

    def push(self, seq: Sequence) -> None:
        entry = (self.key(seq), seq.seq_id, seq)
        self._waiting[seq.seq_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Sequence | None:
        """The next to be admitted, or None."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence | None:
        seq = self.peek()
        if seq is not None:
            self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> bool:
        """Take `seq` out of the queue, wherever it is. False if it was not waiting."""
        removed = self._waiting.pop(seq.seq_id, None) is not None
        if len(self._heap) > 2 * len(self._waiting) + 64:  # mostly removed ones: rebuild
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return removed

    def _is_live(self, entry: tuple[Any, int, Sequence]) -> bool:
        return self._waiting.get(entry[1]) is entry

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences in the order in which they would be served now."""
        return iter(self.order(entry[2] for entry in self._waiting.values()))

    def order(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Most urgent first."""
        return sorted(seqs, key=lambda seq: (self.key(seq), seq.seq_id))

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who yields when blocks run out: the least urgent."""
        return max(running, key=lambda seq: (self.key(seq), seq.seq_id))

    def displaces(self, candidate: Sequence, running: list[Sequence], now_s: float) -> Sequence | None:
        """The running sequence whose place `candidate` takes when there is no room for it; None: it waits."""
        return None

    @property
    def may_displace(self) -> bool:
        """False: `displaces` names nobody, whoever waits and whatever the time."""
        return type(self).displaces is not Policy.displaces

    def served(self, seq: Sequence, num_tokens: int) -> None:
        """Told after each step what a sequence got; fair-sharing policies count it."""


class FCFS(Policy):
    """First come, first served: by arrival time."""


class Priority(Policy):
    """Lower `priority` first, ties by arrival.

    Args:
        displace: a more urgent arrival takes the place of a less urgent running sequence when there is no room (the
            lecture's fourth duty). False: it waits for room, and only running out of blocks preempts.
    """

    def __init__(self, displace: bool = False) -> None:
        super().__init__()
        self.displace = displace

    def key(self, seq: Sequence) -> Any:
        return seq.request.priority, seq.arrival_s

    @property
    def may_displace(self) -> bool:
        return self.displace or type(self).displaces is not Priority.displaces

    def displaces(self, candidate: Sequence, running: list[Sequence], now_s: float) -> Sequence | None:
        if not self.displace or not running:
            return None
        victim = self.victim(running)
        return victim if candidate.request.priority < victim.request.priority else None


def require_policy(policy: Any) -> None:
    """Raises InvalidRequestError for what is no policy and not None."""
    if not isinstance(policy, Policy | None):
        raise InvalidRequestError(f"policy={policy!r}: must be an object such as FCFS() or Priority()")
