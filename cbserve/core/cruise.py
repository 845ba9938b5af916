"""Sequences that decode in every step, kept as one group: a step costs what changes in it, not what runs.

Between joining and leaving, a member gets one token a step. Its own books (`output_token_ids`, `num_computed_tokens`)
are brought up to date only when somebody needs them: when it fills a block that others may find, or leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from cbserve.core.request import Sequence


class Member:
    """A sequence in the group, since the step `joined`."""

    __slots__ = ("base", "joined", "last", "num_given", "order", "seq")

    def __init__(self, seq: Sequence, joined: int, order: tuple[Any, ...]) -> None:
        self.seq, self.joined, self.order = seq, joined, order
        self.base = seq.num_computed_tokens  # tokens with K and V before its first step here
        self.num_given = len(seq.output_token_ids)  # tokens of its answer before that
        self.last = joined + seq.max_tokens - self.num_given - 1  # the step that ends it by its length

    def sync(self, done: int) -> None:
        """Bring the sequence's books to the end of step `done`."""
        seq = self.seq
        count = self.base + done - self.joined + 1 - seq.num_computed_tokens
        if count:
            seq.num_computed_tokens += count
            token = seq.output_token_ids[-1] + 1
            seq.output_token_ids.extend(range(token, token + count))


class Cruise:
    """The group. Steps count from 1; `step` is the one that was scheduled last.

    Tokens go on from a member's last one, as `executors.SimulatedExecutor` has them.

    Attributes:
        context_len: tokens in the KV cache after the last scheduled step, of all members together.
        joined, left: members that came and went since `take_changes` was called last.
    """

    def __init__(self, block_size: int, publishes: bool) -> None:
        self.members: dict[int, Member] = {}
        self.step = 0
        self.context_len = 0
        self.latest: tuple[Any, ...] | None = None  # nobody here comes after this in the policy's order
        self.joined: list[Member] = []
        self.left: list[int] = []
        self._block_size = block_size
        self._publishes = publishes
        self._growing: dict[int, list[Member]] = {}  # by the step that needs a block
        self._filling: dict[int, list[Member]] = {}  # by the step that fills one
        self._lasts: list[tuple[int, int, Member]] = []  # a heap: who ends by length, and when; ties by number
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self.members)

    def join(self, seq: Sequence, table_len: int, order: tuple[Any, ...]) -> None:
        """`seq` decodes from the next step on; its table has `table_len` blocks."""
        size, member = self._block_size, Member(seq, self.step + 1, order)
        self.members[seq.seq_id] = member
        self.joined.append(member)
        self.context_len += member.base
        if self.latest is None or order > self.latest:
            self.latest = order
        room = table_len * size - member.base
        self._growing.setdefault(member.joined + room, []).append(member)
        if self._publishes:
            self._filling.setdefault(self.step + size - member.base % size, []).append(member)
        self._num_joined += 1
        heapq.heappush(self._lasts, (member.last, self._num_joined, member))

    def leave(self, seq: Sequence) -> None:
        """`seq` decodes no more; its books are up to date."""
        member = self.members.pop(seq.seq_id)
        member.sync(self.step)
        self.context_len -= seq.num_computed_tokens
        if member in self.joined:  # nobody was told yet
            self.joined.remove(member)
        else:
            self.left.append(seq.seq_id)
        if not self.members:
            self.latest = None

    def take_changes(self) -> tuple[list[Member], list[int]]:
        """Who joined and left since this was called last."""
        joined, left = self.joined, self.left
        self.joined, self.left = [], []
        return joined, left

    def begin_step(self) -> list[Member]:
        """One token more for everybody. Returns, in order, who needs a block for it."""
        self.step += 1
        self.context_len += len(self.members)
        due = self._growing.pop(self.step, None)
        return self._due(self._growing, due) if due else []

    def num_needing_blocks(self, step: int) -> int:
        """How many blocks `step` will need."""
        return sum(map(self._is_here, self._growing.get(step, ())))

    def end_step(self) -> list[Member]:
        """The step was computed. Returns, in order, who has filled a block that others may now find; the books of those
        are up to date."""
        due = self._filling.pop(self.step, None) if self._publishes else None
        full = self._due(self._filling, due) if due else []
        for member in full:
            member.sync(self.step)
        return full

    def fills_at(self, most: int) -> int:
        """The first step of the next `most` in which somebody fills a block; `most` when nobody does."""
        for ahead in range(most):
            if any(map(self._is_here, self._filling.get(self.step + ahead, ()))):
                return ahead
        return most

    def steps_left(self) -> int:
        """Steps until somebody ends by length, the scheduled one included."""
        while self._lasts and not self._is_here(self._lasts[0][2]):
            heapq.heappop(self._lasts)
        return self._lasts[0][0] - self.step + 1

    def ending(self, ended: Iterable[int]) -> list[Member]:
        """Members that end in this step, by their length or because their ids are in `ended`, in order."""
        found = {seq_id: self.members[seq_id] for seq_id in ended}
        while self._lasts and (self._lasts[0][0] <= self.step or not self._is_here(self._lasts[0][2])):
            member = heapq.heappop(self._lasts)[2]
            if self._is_here(member):
                found[member.seq.seq_id] = member
        return sorted(found.values(), key=lambda member: member.order)

    def _due(self, calendar: dict[int, list[Member]], due: list[Member]) -> list[Member]:
        here = sorted(filter(self._is_here, due), key=lambda member: member.order)
        calendar.setdefault(self.step + self._block_size, []).extend(here)
        return here

    def _is_here(self, member: Member) -> bool:
        return self.members.get(member.seq.seq_id) is member
