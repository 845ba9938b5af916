"""Which block holds what, at every step: a fold over the events of a trace.

The state of step k is the one in which step k computes: after its decisions, with the tokens that it writes in their
places. What ended with step k is gone in the state of step k + 1; the last state, one past the last step, is the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cbserve.core.errors import InvalidRequestError
from cbserve.core.trace import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Forked,
    Left,
    PagesEvent,
    Preempted,
    StepEvent,
    Trace,
)  # fmt: skip

FREE, CACHED, USED = "free", "cached", "used"


class Change(NamedTuple):
    """Something that happened to blocks since the step before.

    `kind` is "allocated"; "hit" (found in the prefix cache); "shared" (a sample begins with its parent's blocks);
    "copied" (on write: `sources` -> `blocks`); "freed"; "swapped_out" (`sources` -> host `blocks`); "swapped_in" (host
    `sources` -> `blocks`); "evicted" (content of a free block lost; `seq_id` is who held it last, -1: an earlier run).
    """

    kind: str
    seq_id: int
    blocks: tuple[int, ...]
    sources: tuple[int, ...] = ()
    reason: str = ""


class Page(NamedTuple):
    """One block: `state` is "free", "cached" (free, but its content can be found) or "used"."""

    block: int
    state: str
    holders: tuple[tuple[int, int], ...]  # (seq_id, index in its table); a cached block: who held it last
    num_tokens: int  # filled places

    @property
    def ref_count(self) -> int:
        return len(self.holders) if self.state == USED else 0


@dataclass(frozen=True)
class PageState:
    """All blocks at one step.

    Args:
        step: the step that computes; one past the last: the end of the run.
        tables: seq_id -> its block table, in the order of admission.
        num_tokens: seq_id -> tokens in the cache when the step ends, for running and swapped sequences.
        swapped: seq_id -> host blocks of sequences that are swapped out.
        coming_in: seq_id -> host blocks that this step copies back.
        cached: free block -> (seq_id, index) of who held it last.
        findable: blocks, in use or free, whose content can be found.
        padding: sequences that are complete and still hold their blocks (static batching).
        changes: what happened since the step before, in order.
        owners: seq_id -> (request_id, sample index), of all sequences so far.
        arrived: request ids so far, in order of arrival.
    """

    step: int
    num_blocks: int
    block_size: int
    tables: dict[int, tuple[int, ...]]
    num_tokens: dict[int, int]
    swapped: dict[int, tuple[int, ...]]
    coming_in: dict[int, tuple[int, ...]]
    cached: dict[int, tuple[int, int]]
    findable: frozenset[int]
    padding: frozenset[int]
    changes: tuple[Change, ...]
    owners: dict[int, tuple[str, int]]
    arrived: tuple[str, ...] = ()

    def pages(self) -> list[Page]:
        """One page for each block of the pool, by id."""
        holders: dict[int, list[tuple[int, int]]] = {}
        filled: dict[int, int] = {}
        for seq_id, table in self.tables.items():
            for index, block in enumerate(table):
                holders.setdefault(block, []).append((seq_id, index))
                filled[block] = max(filled.get(block, 0), self.filled(seq_id, index))
        found = []
        for block in range(self.num_blocks):
            if block in holders:
                found.append(Page(block, USED, tuple(holders[block]), filled[block]))
            elif block in self.cached:
                found.append(Page(block, CACHED, (self.cached[block],), self.block_size))
            else:
                found.append(Page(block, FREE, (), 0))
        return found

    def filled(self, seq_id: int, index: int) -> int:
        """Tokens in entry `index` of a sequence's table."""
        return min(max(self.num_tokens[seq_id] - index * self.block_size, 0), self.block_size)


class PageFold:
    """Events in, states out: `apply` each event; `snapshot` is what they have come to; `end_step` after each step."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        self.num_tokens: dict[int, int] = {}
        self.ref_counts: dict[int, int] = {}
        self.findable: set[int] = set()
        self.swapped: dict[int, tuple[int, ...]] = {}
        self.coming_in: dict[int, tuple[int, ...]] = {}
        self.padding: set[int] = set()
        self.owners: dict[int, tuple[str, int]] = {}
        self.arrived: dict[str, None] = {}
        self.changes: list[Change] = []
        self._last_holder: dict[int, tuple[int, int]] = {}
        self._preempted: dict[int, str] = {}  # reasons, until the tables are given back
        self._finished: dict[int, str] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, PagesEvent):
            self._pages(event)
        elif isinstance(event, StepEvent):
            for row in event.rows:
                self.num_tokens[row.seq_id] = row.context_len
            self.padding = {row.seq_id for row in event.rows if row.kind == "padding"}
        elif isinstance(event, Arrived):
            self.arrived[event.request_id] = None
        elif isinstance(event, Admitted):
            self.owners.setdefault(event.seq_id, (event.request_id, 0))
            self.num_tokens[event.seq_id] = self.num_tokens.get(event.seq_id, 0) or event.num_cached_tokens
        elif isinstance(event, Preempted):
            self._preempted[event.seq_id] = event.reason
            if event.how == "recompute":
                self.num_tokens[event.seq_id] = 0
                self.swapped.pop(event.seq_id, None)
        elif isinstance(event, Forked):
            self.owners[event.seq_id] = (event.request_id, event.sample_index)
            table = self.tables[event.seq_id] = list(self.tables[event.parent_id])
            self.num_tokens[event.seq_id] = self.num_tokens[event.parent_id]
            for block in table:
                self.ref_counts[block] += 1
            reason = "same prompt, stored once"
            self.changes.append(Change("shared", event.seq_id, tuple(table), reason=reason))
        elif isinstance(event, Finished):
            self._finished[event.seq_id] = event.reason
            self.swapped.pop(event.seq_id, None)
            if event.seq_id not in self.tables:
                self.num_tokens.pop(event.seq_id, None)
        elif isinstance(event, Left):
            self.coming_in.pop(event.seq_id, None)
            reason = {"abort": "it was aborted"}.get(self._finished.pop(event.seq_id, ""), "its answer is complete")
            self._release(event.seq_id, reason)
            self.num_tokens.pop(event.seq_id, None)

    def end_step(self) -> None:
        """What comes now belongs to the next step; host blocks that came in are free."""
        self.changes = []
        self.coming_in = {}

    def snapshot(self, step: int, num_blocks: int, block_size: int) -> PageState:
        cached = {b: self._last_holder[b] for b in sorted(self.findable) if not self.ref_counts.get(b)}
        return PageState(
            step,
            num_blocks,
            block_size,
            {seq_id: tuple(table) for seq_id, table in self.tables.items()},
            dict(self.num_tokens),
            dict(self.swapped),
            dict(self.coming_in),
            cached,
            frozenset(self.findable),
            frozenset(self.padding & self.tables.keys()),
            tuple(self.changes),
            dict(self.owners),
            tuple(self.arrived),
        )

    def _pages(self, event: PagesEvent) -> None:
        host = dict(event.swapped_out)
        for seq_id in event.released:
            if seq_id in host:
                sources = tuple(self.tables[seq_id][: len(host[seq_id])])
                self.changes.append(Change("swapped_out", seq_id, host[seq_id], sources, self._preempted[seq_id]))
            self._release(seq_id, self._preempted[seq_id])
        self.swapped |= host
        self.findable.update(event.findable)
        for block in event.findable:
            self._last_holder.setdefault(block, (-1, 0))  # left by an earlier run
        for block in event.evicted:
            self.findable.discard(block)
            seq_id = self._last_holder.pop(block, (-1, 0))[0]
            reason = "no other page was free, and it was used least recently"
            self.changes.append(Change("evicted", seq_id, (block,), reason=reason))
        for seq_id, first, blocks in event.grown:
            self._grow(seq_id, first, blocks)

    def _grow(self, seq_id: int, first: int, blocks: tuple[int, ...]) -> None:
        table = self.tables.setdefault(seq_id, [])
        if first < len(table):
            sources = tuple(table[first : first + len(blocks)])
            count = self.ref_counts[sources[0]]
            table[first : first + len(blocks)] = blocks
            for block in sources:
                self._drop(block, seq_id, first)
            self._hold(blocks)
            reason = f"it writes into a page that {count} hold"
            self.changes.append(Change("copied", seq_id, blocks, sources, reason))
            return
        hits = 0
        while hits < len(blocks) and blocks[hits] in self.findable:
            hits += 1
        self._hold(blocks)
        table += blocks
        new = blocks[hits:]
        if hits:
            self.changes.append(Change("hit", seq_id, blocks[:hits], reason="the prefix cache knows this content"))
        if seq_id in self.swapped:
            host = self.coming_in[seq_id] = self.swapped.pop(seq_id)
            reason = "there is room for it again"
            self.changes.append(Change("swapped_in", seq_id, new[: len(host)], host, reason))
            new = new[len(host) :]
        if new:
            self.changes.append(Change("allocated", seq_id, new, reason="its tokens need room"))

    def _hold(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.ref_counts[block] = self.ref_counts.get(block, 0) + 1

    def _drop(self, block: int, seq_id: int, index: int) -> None:
        self.ref_counts[block] -= 1
        self._last_holder[block] = (seq_id, index)

    def _release(self, seq_id: int, reason: str) -> None:
        table = self.tables.pop(seq_id, [])
        for index in range(len(table) - 1, -1, -1):
            self._drop(table[index], seq_id, index)
        if table:
            self.changes.append(Change("freed", seq_id, tuple(table), reason=reason))


def page_states(trace: Trace) -> Iterator[PageState]:
    """The state of each step, then that of the end.

    Raises InvalidRequestError when the trace does not say how large its pool is.
    """
    size = pool_size(trace)
    step = -1
    fold = PageFold()
    for event in trace:
        fold.apply(event)
        if isinstance(event, StepEvent):
            step = event.step
            yield fold.snapshot(step, *size)
            fold.end_step()
    yield fold.snapshot(step + 1, *size)


def page_state(trace: Trace, step: int | None = None) -> PageState:
    """The state of one step; None: the step that uses the most blocks.

    Raises:
        InvalidRequestError: the trace has no such step; its last step + 1 is the end.
    """
    size, steps = pool_size(trace), trace.steps
    if step is None:
        step = max(steps, key=lambda s: s.num_used_blocks).step if steps else 0
    first, end = (steps[0].step, steps[-1].step + 1) if steps else (0, 0)
    if not isinstance(step, int) or not first <= step <= end:
        raise InvalidRequestError(f"step={step!r}: must be from {first} to {end}; {end} is the end of the run")
    fold = PageFold()
    for event in trace:
        fold.apply(event)
        if isinstance(event, StepEvent):
            if event.step == step:
                break
            fold.end_step()
    return fold.snapshot(step, *size)


def pool_size(trace: Trace) -> tuple[int, int]:
    """(blocks in the pool, tokens a block). Raises InvalidRequestError when the trace does not say, or has no block
    tables."""
    if trace.meta.get("fast_forward") and any(isinstance(event, StepEvent) for event in trace.events):
        raise InvalidRequestError("a run with fast_forward=True has no block tables; take fast_forward=False")
    try:
        return int(trace.meta["num_blocks"]), int(trace.meta["block_size"])
    except KeyError as error:
        raise InvalidRequestError(
            f"the trace does not say {error} of its pool; take one that an engine has written"
        ) from None
