"""A trace as JSON lines: a header, one event a line, and a last line that says how many there were."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from cbserve.core.trace import EVENT_TYPES, Event, PagesEvent, StepEvent, StepRow, TraceError
from cbserve.files import put_in_place, temporary_beside

FORMAT_VERSION = 2
# By event: its fields that hold numbers.
_KINDS = {"int": int, "int | None": int, "float": int | float}
_NUMBERS = {
    name: [(field.name, _KINDS[str(field.type)]) for field in fields(cls) if field.type in _KINDS]
    for name, cls in EVENT_TYPES.items()
}


def header(meta: dict[str, Any]) -> str:
    return _json({"event": "header", "version": FORMAT_VERSION, "meta": meta}, sort_keys=True)


def end(count: int) -> str:
    return json.dumps({"event": "end", "count": count})


def line_of(event: Event) -> str:
    if isinstance(event, StepEvent):  # most of a file; asdict copies every row
        record = {name: getattr(event, name) for name in StepEvent.__slots__}
    else:
        record = asdict(event)
    return _json({"event": event.type, **record})


def _json(record: dict[str, Any], **options: Any) -> str:
    return json.dumps(record, default=_plain, **options)


def _plain(value: Any) -> int | float:
    """A number that JSON does not know, of numpy for instance. Raises TraceError when it is none."""
    if hasattr(value, "__index__"):
        return operator.index(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise TraceError(f"{value!r} cannot be written to a trace file; give numbers and text")


class TraceWriter:
    """Writes events to a file as they happen, so that a run of a million requests needs no memory for its trace.

    The file appears under its name when `close` is called: one that is cut short never stands there. What a killed
    process left beside it is removed by the next writer of the same path.

    Raises:
        TraceError: the file cannot be written.
    """

    def __init__(self, path: str | Path, meta: dict[str, Any]) -> None:
        try:
            self._path = Path(path)
        except TypeError as error:
            raise TraceError(f"cannot write to {path!r} ({error}); give the path of a file") from error
        if self._path.exists() and not self._path.is_file():
            raise TraceError(f"{self._path} is no regular file: nothing was written; give the path of a file")
        self._count = 0
        first = header(meta)
        with self._errors():
            self._temporary = temporary_beside(self._path)
            self._file = open(self._temporary, "w", encoding="utf-8")  # noqa: SIM115  (closed by `close` or `discard`)
        self._write(first)

    def __call__(self, event: Event) -> None:
        self._write(line_of(event))
        self._count += 1

    def _write(self, line: str) -> None:
        with self._errors():
            self._file.write(line + "\n")

    def close(self) -> None:
        """The run has ended: give the file its name."""
        try:
            self._write(end(self._count))
            with self._errors():
                self._file.close()
                put_in_place(self._temporary, self._path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """The run was broken off: leave nothing behind."""
        with suppress(OSError):  # what was not written yet does not fit on a full disk
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            raise TraceError(
                f"cannot write to {str(self._path)!r} ({error}); give a file in a folder that exists, can be written "
                "and has room"
            ) from error

    def __enter__(self) -> Callable[[Event], None]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def read(path: str | Path) -> tuple[dict[str, Any], list[Event]]:
    """Meta and events of a file. Raises TraceError naming file and line."""
    meta: dict[str, Any] = {}
    events: list[Event] = []
    ended = False
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = json.loads(line)
            kind = record.pop("event")
            if number == 1:
                if kind != "header" or record["version"] not in (1, FORMAT_VERSION):  # 2 added count and ramp
                    raise ValueError(f"want a header of version {FORMAT_VERSION}")
                meta = dict(record["meta"])
                size = meta.get("block_size")
                if meta.get("fast_forward") and not (isinstance(size, int) and size >= 1):
                    raise ValueError(f"block_size={size!r}: spans of steps need it")
            elif kind == "end":
                if record["count"] != len(events):
                    raise ValueError(f"{record['count']} events were written, {len(events)} are here")
                ended = True
            else:
                events.append(_event_from(kind, record))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{path}, line {number}: not a trace event ({error}); save the trace again") from error
    if not ended:
        raise TraceError(f"{path}: cut short, its last line is missing; save the trace again")
    return meta, events


def _event_from(kind: str, record: dict[str, Any]) -> Event:
    if kind not in EVENT_TYPES:
        raise ValueError(f"unknown event {kind!r}")
    for name, wanted in _NUMBERS[kind]:
        value = record.get(name, 0)
        if not isinstance(value, wanted) and not (value is None and name == "max_tokens"):
            raise ValueError(f"{name}={value!r}: must be a number")
    if kind == StepEvent.type:
        record["rows"] = tuple(_row(row) for row in record["rows"])
        record["ramp"] = _tuples(record.get("ramp", ()))
        count, told = record.get("count", 1), sum(n for n, _, _ in record["ramp"])
        if count < 1 or (count > 1 and count != told):
            raise ValueError(f"count={count} steps, but the ramp has {told}")
    elif kind == PagesEvent.type:
        record = {name: _tuples(value) for name, value in record.items()}
    return EVENT_TYPES[kind](**record)


def _row(row: Any) -> StepRow:
    if not isinstance(row, list):
        raise ValueError(f"row {row!r}: must be a list")
    return StepRow(*row)


def _tuples(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


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
