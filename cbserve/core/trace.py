"""What happened: typed events, kept in order, saved as JSON lines, exported as a Chrome trace.

| event | fields | when |
|---|---|---|
| `arrived` | time_s, request_id, num_prompt_tokens, max_tokens, priority, client_id, num_samples | it is queued |
| `refused` | time_s, request_id, reason | a request can never be served |
| `admitted` | time_s, step, request_id, seq_id, slot, resumed, num_cached_tokens, num_swapped_blocks | it gets a slot |
| `blocked` | time_s, step, request_id, seq_id, code, reason | the first in the queue is not admitted; once a reason |
| `preempted` | time_s, step, request_id, seq_id, slot, cause, reason, how, num_computed_tokens, num_blocks | yields |
| `pages` | time_s, step, released, grown, swapped_out, evicted, findable | block tables or findable blocks changed |
| `step` | step, start_s, end_s, rows, num_waiting, num_running, num_used_blocks, num_copies, num_evictions, \
num_swaps, count, ramp, last_used_blocks, num_steady | one iteration, or `count` that differ in lengths only |
| `forked` | time_s, step, request_id, seq_id, parent_id, sample_index, slot | the prefill of n samples ended |
| `finished` | time_s, step, request_id, seq_id, reason, stop_reason, num_output_tokens | its answer is complete |
| `left` | time_s, step, request_id, seq_id, slot | its slot and blocks are free (static: after `finished`) |

Nobody changes an event; they are not frozen, because that makes them twice as dear, and a simulation makes millions.
Times are seconds on the engine's clock. A `step` of n means: the n-th iteration. A step's tokens are known at `end_s`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from math import isclose
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cbserve.core.plan import Ramp
from cbserve.errors import CBServeError
from cbserve.files import write_whole


class TraceError(CBServeError):
    """A trace file cannot be used, is cut, mixed up or of another version; the message names file and line."""


class StepRow(NamedTuple):
    """One row of a step: what a slot did."""

    seq_id: int
    slot: int
    kind: str  # "prefill", "decode" or "padding"
    num_tokens: int  # tokens computed
    num_sampled: int  # tokens given: 0 in mid-prefill and for padding
    context_len: int  # tokens in the KV cache after the step


@dataclass(slots=True)
class Event:
    type: ClassVar[str]


@dataclass(slots=True)
class Arrived(Event):
    type: ClassVar[str] = "arrived"
    time_s: float
    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    priority: int = 0
    client_id: str = ""
    num_samples: int = 1


@dataclass(slots=True)
class Refused(Event):
    type: ClassVar[str] = "refused"
    time_s: float
    request_id: str
    reason: str


@dataclass(slots=True)
class Admitted(Event):
    type: ClassVar[str] = "admitted"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    slot: int
    resumed: bool
    num_cached_tokens: int = 0
    num_swapped_blocks: int = 0


@dataclass(slots=True)
class BlockedEvent(Event):
    type: ClassVar[str] = "blocked"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    code: str
    reason: str


@dataclass(slots=True)
class Preempted(Event):
    type: ClassVar[str] = "preempted"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    slot: int
    cause: str
    reason: str
    how: str
    num_computed_tokens: int
    num_blocks: int

    @property
    def way_back(self) -> str:
        """How the K and V of its computed tokens come back, in words."""
        return "copied back from the host" if self.how == "swap" else "computed again"


@dataclass(slots=True)
class PagesEvent(Event):
    """What is new in the block tables; `core.pages` folds it, with `forked` and `left`, to the state of every block.

    An entry of `grown` is (seq_id, index of the first block, blocks). An index within the table replaces a block: it
    was copied on write. A block that is findable and not evicted is shared, not written. A sequence that was swapped
    out and grows again comes back from the host.
    """

    type: ClassVar[str] = "pages"
    time_s: float
    step: int
    released: tuple[int, ...] = ()  # preempted sequences that gave their tables back
    grown: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    swapped_out: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (seq_id, host blocks)
    evicted: tuple[int, ...] = ()  # free blocks whose content is lost
    findable: tuple[int, ...] = ()  # blocks whose content can be found from now on


@dataclass(slots=True)
class StepEvent(Event):
    type: ClassVar[str] = "step"
    step: int
    start_s: float
    end_s: float
    rows: tuple[StepRow, ...]
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_copies: int = 0  # blocks copied on write
    num_evictions: int = 0  # cached blocks that lost their content
    num_swaps: int = 0  # blocks copied to or from the host
    count: int = 1  # so many steps in a row that differ in lengths only, the first of them told here
    ramp: tuple[tuple[int, float, float], ...] = ()  # their durations, as `core.plan.Ramp` has them
    last_used_blocks: int = 0  # with the last of them, when there are several
    num_steady: int = 0  # further rows: they gave a token in the step before, and each gives one more in every step

    def ends(self) -> Iterator[float]:
        """When each of the `count` steps ended."""
        if self.count == 1:
            yield self.end_s
            return
        ramp = Ramp(self.ramp)
        for count in range(1, self.count):
            yield self.start_s + ramp.total(count)
        yield self.end_s

    def singly(self, block_size: int) -> Iterator[StepEvent]:
        """The same as `count` events of one step: each row but padding has one token more in each."""
        if self.count == 1:
            yield self
            return
        rows, rooms = self.rows, [-row.context_len % block_size for row in self.rows if row.kind != "padding"]
        # A row takes a new block when the last one is full; blocks that held nothing go first, then cached ones.
        new = [sum(i > room and (i - room - 1) % block_size == 0 for room in rooms) for i in range(self.count)]
        evicted = max(0, self.num_evictions - sum(new))  # by the first step itself: then all later ones evict too
        empty = sum(new) - (self.num_evictions - evicted)
        start, used = self.start_s, self.num_used_blocks
        for i, end in enumerate(self.ends()):
            used += new[i]
            evicted += max(0, new[i] - empty)
            empty = max(0, empty - new[i])
            counts = self.num_waiting, self.num_running, used
            yield StepEvent(self.step + i, start, end, rows, *counts, num_evictions=evicted)
            start, evicted = end, 0
            rows = tuple(
                row if row.kind == "padding" else row._replace(context_len=row.context_len + 1) for row in rows
            )


@dataclass(slots=True)
class Forked(Event):
    type: ClassVar[str] = "forked"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    parent_id: int
    sample_index: int
    slot: int


@dataclass(slots=True)
class Finished(Event):
    type: ClassVar[str] = "finished"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    reason: str
    stop_reason: int | str | None
    num_output_tokens: int


@dataclass(slots=True)
class Left(Event):
    type: ClassVar[str] = "left"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    slot: int


EVENT_TYPES: dict[str, type[Event]] = {
    cls.type: cls
    for cls in (Arrived, Refused, Admitted, BlockedEvent, Preempted, PagesEvent, StepEvent, Forked, Finished, Left)
}


@dataclass
class Trace:
    """Events of one run in order, and what it ran on.

    `events` is what was recorded, spans of steps as one; iterating gives single steps.

    `meta` holds: batching, policy (their reprs), num_slots, num_blocks, block_size, max_num_batched_tokens, model,
    device, fast_forward (steps may be spans), and `clock`: "measured" (a real clock) or "simulated" (a virtual one).
    """

    meta: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        """Every event in order. Steps that were recorded at once come one by one, with all of their rows."""
        return _one_by_one(self.events, self.meta["block_size"]) if self.meta.get("fast_forward") else iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def of(self, *types: type[Event]) -> Iterator[Any]:
        """Events of these types, in order."""
        return (event for event in self if isinstance(event, types))

    @property
    def steps(self) -> list[StepEvent]:
        return list(self.of(StepEvent))

    def __repr__(self) -> str:
        num = sum(event.count for event in self.events if isinstance(event, StepEvent))
        return f"Trace({len(self.events)} events, {num} steps, {self.meta.get('batching', 'unknown batching')})"

    # ---- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write JSON lines: a header, then one event a line. An interruption leaves the old file as it was.

        Raises:
            TraceError: nothing can be written there, or `path` is something that exists and is no regular file.
        """
        from cbserve.core import trace_file

        lines = [trace_file.header(self.meta), *map(trace_file.line_of, self.events), trace_file.end(len(self.events))]
        write_whole(path, "\n".join(lines) + "\n", TraceError)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` or a `TraceWriter` wrote.

        Raises:
            TraceError: the file cannot be read, is cut, of another version, or a line is no event; names file and line.
        """
        from cbserve.core.trace_file import read

        return cls(*read(path))

    def save_chrome(self, path: str | Path) -> None:
        """Write the Chrome trace event format; open it in Perfetto or chrome://tracing. Raises TraceError, as `save`
        does."""
        write_whole(path, json.dumps(self.to_chrome()), TraceError)

    def to_chrome(self) -> dict[str, Any]:
        """Chrome trace events: one thread a slot, one slice for each run of steps of the same kind, counters for the
        queue and the pool. Times in microseconds."""
        from cbserve.core.chrome_trace import events_of

        return events_of(self)

    # ---- comparison ---------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.difference(other) is None

    __hash__ = None  # type: ignore[assignment]

    def difference(self, other: Trace, rel_tol: float = 1e-9) -> str | None:
        """The first difference in words; None if all decisions are equal, in order, and times agree within
        `rel_tol`. Raises TraceError when `other` is no trace."""
        if not isinstance(other, Trace):
            raise TraceError(f"a trace is compared with another trace, not with {other!r}; Trace.load reads a file")
        for index, (mine, theirs) in enumerate(zip_longest(self, other)):
            if mine is None or theirs is None:
                return f"event {index}: {mine or 'the end'} against {theirs or 'the end'}"
            if type(mine) is not type(theirs):
                return f"event {index}: {mine} against {theirs}"
            for f in fields(mine):
                a, b = getattr(mine, f.name), getattr(theirs, f.name)
                close = f.name.endswith("_s") and isclose(a, b, rel_tol=rel_tol, abs_tol=1e-12)
                same = close or a == b or _in_any_order(a) == _in_any_order(b)
                if not same:
                    return f"event {index} ({mine.type}), {f.name}: {a!r} against {b!r}"
        return None


def _one_by_one(events: list[Event], block_size: int) -> Iterator[Event]:
    """Raises TraceError when a step counts steady rows that no step before it has told."""
    going: dict[int, StepRow] = {}  # rows that gave a token in the last step
    for event in events:
        if isinstance(event, StepEvent):
            steady = [
                row._replace(kind="decode", num_tokens=1, context_len=row.context_len + 1) for row in going.values()
            ]
            if event.num_steady and event.num_steady != len(steady):
                raise TraceError(
                    f"step {event.step}: {event.num_steady} steady rows, {len(steady)} are known; save again"
                )
            rows = (*steady, *event.rows) if event.num_steady else event.rows
            single = event
            for single in replace(event, rows=rows, num_steady=0).singly(block_size):
                yield single
            going = {row.seq_id: row for row in single.rows if row.num_sampled and row.kind != "padding"}
        else:
            if isinstance(event, Preempted | Finished):
                going.pop(event.seq_id, None)
            yield event


def _in_any_order(value: Any) -> Any:
    """Rows of a step are a set: in which order they were computed decides nothing."""
    return sorted(value) if isinstance(value, tuple) and value and isinstance(value[0], StepRow) else value
