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
num_swaps | one iteration was computed |
| `forked` | time_s, step, request_id, seq_id, parent_id, sample_index, slot | the prefill of n samples ended |
| `finished` | time_s, step, request_id, seq_id, reason, stop_reason, num_output_tokens | its answer is complete |
| `left` | time_s, step, request_id, seq_id, slot | its slot and blocks are free (static: after `finished`) |

Times are seconds on the engine's clock. A `step` of n means: the n-th iteration. A step's tokens are known at `end_s`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from math import isclose
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from cbserve.errors import CBServeError
from cbserve.files import write_whole

FORMAT_VERSION = 1


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


@dataclass(frozen=True, slots=True)
class Event:
    type: ClassVar[str]


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    type: ClassVar[str] = "arrived"
    time_s: float
    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    priority: int = 0
    client_id: str = ""
    num_samples: int = 1


@dataclass(frozen=True, slots=True)
class Refused(Event):
    type: ClassVar[str] = "refused"
    time_s: float
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class BlockedEvent(Event):
    type: ClassVar[str] = "blocked"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Forked(Event):
    type: ClassVar[str] = "forked"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    parent_id: int
    sample_index: int
    slot: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    type: ClassVar[str] = "finished"
    time_s: float
    step: int
    request_id: str
    seq_id: int
    reason: str
    stop_reason: int | str | None
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
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

    `meta` holds: batching, policy (their reprs), num_slots, num_blocks, block_size, max_num_batched_tokens, model,
    device, and `clock`: "measured" (a real clock) or "simulated" (a virtual one).
    """

    meta: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def of(self, *types: type[Event]) -> Iterator[Any]:
        """Events of these types, in order."""
        return (event for event in self.events if isinstance(event, types))

    @property
    def steps(self) -> list[StepEvent]:
        return list(self.of(StepEvent))

    def __repr__(self) -> str:
        num = len(self.steps)
        return f"Trace({len(self.events)} events, {num} steps, {self.meta.get('batching', 'unknown batching')})"

    # ---- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write JSON lines: a header, then one event a line. An interruption leaves the old file as it was.

        Raises:
            TraceError: nothing can be written there, or `path` is something that exists and is no regular file.
        """
        lines = [json.dumps({"event": "header", "version": FORMAT_VERSION, "meta": self.meta}, sort_keys=True)]
        lines += [json.dumps({"event": event.type, **asdict(event)}) for event in self.events]
        lines.append(json.dumps({"event": "end", "count": len(self.events)}))
        write_whole(path, "\n".join(lines) + "\n", TraceError)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            TraceError: the file cannot be read, is cut, of another version, or a line is no event; names file and line.
        """
        trace, ended = cls(), False
        for number, line in enumerate(_lines(path), start=1):
            try:
                record = json.loads(line)
                kind = record.pop("event")
                if number == 1:
                    if kind != "header" or record["version"] != FORMAT_VERSION:
                        raise ValueError(f"want a header of version {FORMAT_VERSION}")
                    trace.meta = dict(record["meta"])
                elif kind == "end":
                    if record["count"] != len(trace.events):
                        raise ValueError(f"{record['count']} events were written, {len(trace.events)} are here")
                    ended = True
                else:
                    trace.emit(_event_from(kind, record))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TraceError(f"{path}, line {number}: not a trace event ({error}); save the trace again") from error
        if not ended:
            raise TraceError(f"{path}: cut short, its last line is missing; save the trace again")
        return trace

    def save_chrome(self, path: str | Path) -> None:
        """Write the Chrome trace event format; open it in Perfetto or chrome://tracing. Raises TraceError, as `save`
        does."""
        write_whole(path, json.dumps(self.to_chrome()), TraceError)

    def to_chrome(self) -> dict[str, Any]:
        """Chrome trace events: one thread a slot, one slice for each run of steps of the same kind, counters for the
        queue and the pool. Times in microseconds."""
        events: list[dict[str, Any]] = [_chrome_name(0, "slots", "process_name")]
        names = {e.seq_id: e.request_id for e in self.of(Admitted, Forked)}
        open_slices: dict[int, dict[str, Any]] = {}
        for step in self.of(StepEvent):
            begin, end = step.start_s * 1e6, step.end_s * 1e6
            for row in step.rows:
                last = open_slices.get(row.slot)
                name = f"{names.get(row.seq_id, row.seq_id)} {row.kind}"
                if last and last["name"] == name and last["args"]["last_step"] == step.step - 1:
                    last["dur"] = end - last["ts"]
                    last["args"]["last_step"] = step.step
                    last["args"]["tokens"] += row.num_tokens
                else:
                    if row.slot not in open_slices:
                        events.append(_chrome_name(row.slot, f"slot {row.slot}", "thread_name"))
                    args = {"first_step": step.step, "last_step": step.step, "tokens": row.num_tokens}
                    slice_ = {"name": name, "cat": row.kind, "ph": "X", "pid": 0, "tid": row.slot}
                    open_slices[row.slot] = slice_ | {"ts": begin, "dur": end - begin, "args": args}
                    events.append(open_slices[row.slot])
            for name, value in (("waiting", step.num_waiting), ("used blocks", step.num_used_blocks)):
                events.append({"name": name, "ph": "C", "pid": 0, "tid": 0, "ts": begin, "args": {name: value}})
        for event in self.of(Preempted):
            name = f"preempted {event.request_id}: {event.cause}"
            slot, ts = event.slot, event.time_s * 1e6
            events.append({"name": name, "ph": "i", "s": "t", "pid": 0, "tid": slot, "ts": ts, "args": asdict(event)})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {k: str(v) for k, v in self.meta.items()}}

    # ---- comparison ---------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.difference(other) is None

    __hash__ = None  # type: ignore[assignment]

    def difference(self, other: Trace, rel_tol: float = 1e-9) -> str | None:
        """The first difference in words; None if all decisions are equal, in order, and times agree within
        `rel_tol`. Raises TraceError when `other` is no trace."""
        if not isinstance(other, Trace):
            raise TraceError(f"a trace is compared with another trace, not with {other!r}; Trace.load reads a file")
        for index, (mine, theirs) in enumerate(zip(self.events, other.events, strict=False)):
            if type(mine) is not type(theirs):
                return f"event {index}: {mine} against {theirs}"
            for f in fields(mine):
                a, b = getattr(mine, f.name), getattr(theirs, f.name)
                same = isclose(a, b, rel_tol=rel_tol, abs_tol=1e-12) if f.name.endswith("_s") else a == b
                if not same:
                    return f"event {index} ({mine.type}), {f.name}: {a!r} against {b!r}"
        if len(self.events) != len(other.events):
            return f"{len(self.events)} events against {len(other.events)}"
        return None


def _event_from(kind: str, record: dict[str, Any]) -> Event:
    if kind not in EVENT_TYPES:
        raise ValueError(f"unknown event {kind!r}")
    if kind == StepEvent.type:
        record["rows"] = tuple(StepRow(*row) for row in record["rows"])
    elif kind == PagesEvent.type:
        record = {name: _tuples(value) for name, value in record.items()}
    return EVENT_TYPES[kind](**record)


def _tuples(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _chrome_name(tid: int, name: str, what: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def _lines(path: str | Path) -> Iterator[str]:
    """Lines of a text file. Raises TraceError naming the file when it cannot be read, or holds no text."""
    try:
        if not Path(path).is_file() and Path(path).exists():  # a device has no end; a folder reads otherwise by system
            raise TraceError(f"{path} is no regular file; give the path of a file that Trace.save has written")
        with open(path, encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text ({error}); give a file that Trace.save has written") from error
    except (OSError, TypeError, ValueError) as error:
        raise TraceError(
            f"cannot read {path!r} ({error}); give the path of a file that Trace.save has written"
        ) from error
