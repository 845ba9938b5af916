"""Sequences that decode in every step, kept as one group: a step costs what changes in it, not what runs.

Between joining and leaving, a member gets one token a step. Its own books (`output_token_ids`, `num_computed_tokens`)
are brought up to date only when somebody needs them: when it fills a block that others may find, or leaves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from cbserve.core.request import Sequence

_NEVER = 2**62
_order = attrgetter("order")


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

    Tokens go on from a member's last one, as `executors.SimulatedExecutor` has them. Who needs a block in a step needs
    the next one `block_size` steps later, so members stand in a ring of that many lists.

    Attributes:
        context_len: tokens in the KV cache after the last scheduled step, of all members together.
        joined, left: members that came and went since `take_changes` was called last.
    """

    def __init__(self, block_size: int) -> None:
        self.members: dict[int, Member] = {}
        self.step = 0
        self.context_len = 0
        self.latest: tuple[Any, ...] | None = None  # nobody here comes after this in the policy's order
        self.joined: list[Member] = []
        self.left: list[int] = []
        self._block_size = block_size
        self._growing: list[list[Member]] = [[] for _ in range(block_size)]  # by step % block_size, each in order
        self._no_end_before = _NEVER  # the step before which nobody ends by its length

    def __len__(self) -> int:
        return len(self.members)

    def join(self, seq: Sequence, order: tuple[Any, ...]) -> None:
        """`seq` decodes from the next step on; its blocks hold what is computed, and no token more than they must."""
        member = Member(seq, self.step + 1, order)
        self.members[seq.seq_id] = member
        self.joined.append(member)
        self.context_len += member.base
        if self.latest is None or order > self.latest:
            self.latest = order
        insort(self._growing_of(member), member, key=_order)
        self._no_end_before = min(self._no_end_before, member.last)

    def leave(self, seq: Sequence) -> None:
        """`seq` decodes no more; its books are up to date."""
        member = self.members.pop(seq.seq_id)
        member.sync(self.step)
        self.context_len -= seq.num_computed_tokens
        self._growing_of(member).remove(member)
        if member in self.joined:  # nobody was told yet
            self.joined.remove(member)
        else:
            self.left.append(seq.seq_id)
        if not self.members:
            self.latest, self._no_end_before = None, _NEVER

    def take_changes(self) -> tuple[tuple[tuple[int, str, int], ...], tuple[int, ...]]:
        """Who joined and left since this was called last, as `Steady` has them."""
        if not self.joined and not self.left:
            return (), ()
        joined = tuple([(m.seq.seq_id, m.seq.request.request_id, m.num_given) for m in self.joined])
        left = tuple(self.left)
        self.joined, self.left = [], []
        return joined, left

    def begin_steps(self, count: int = 1) -> list[Sequence]:
        """`count` tokens more for everybody. Returns, in order, who needs a block for them, once for each block."""
        first, self.step = self.step + 1, self.step + count
        self.context_len += count * len(self.members)
        growing, size = self._growing, self._block_size
        return [member.seq for step in range(first, first + count) for member in growing[step % size]]

    def num_needing_blocks(self, step: int) -> int:
        """How many blocks `step` will need."""
        return len(self._growing[step % self._block_size])

    def end_step(self) -> list[Member]:
        """The step was computed. Returns, in order, who has filled a block that others may now find; the books of those
        are up to date."""
        full = self._growing[(self.step + 1) % self._block_size]
        for member in full:
            member.sync(self.step)
        return full

    def fills_at(self, most: int) -> int:
        """The first step of the next `most` in which somebody fills a block; `most` when nobody does."""
        for ahead in range(min(most, self._block_size)):
            if self.num_needing_blocks(self.step + ahead + 1):
                return ahead
        return most

    def steps_left(self) -> int:
        """For so many steps, the scheduled one included, nobody ends by its length before the last of them."""
        return max(1, self._no_end_before - self.step + 1)

    def ending(self, ended: Collection[int]) -> list[Member]:
        """Members that end in this step, by their length or because their ids are in `ended`, in order."""
        found = [self.members[seq_id] for seq_id in ended]
        if self._no_end_before <= self.step:
            members = self.members.values()
            found += [member for member in members if member.last <= self.step and member.seq.seq_id not in ended]
            self._no_end_before = min((m.last for m in members if m.last > self.step), default=_NEVER)
        return sorted(found, key=_order) if len(found) > 1 else found

    def _growing_of(self, member: Member) -> list[Member]:
        """The list of those that need a block in the same steps as `member`."""
        return self._growing[(member.joined - member.base) % self._block_size]
