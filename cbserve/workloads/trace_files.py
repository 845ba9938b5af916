"""Lines and rows of a trace file, plain or gzipped, here or behind a URL; what is wrong is named by its line."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, BinaryIO, TypeVar
from urllib.request import urlopen

from cbserve.errors import CBServeError

Source = str | os.PathLike[str]
Row = TypeVar("Row")

TIMEOUT_S = 30.0


class TraceFileError(CBServeError, ValueError):
    """A trace file cannot be read: names the file, the line and what is wrong with it."""


def read_lines(source: Source) -> Iterator[tuple[int, str, bool]]:
    """(number from 1, text, is it known to be whole) of all lines that are not blank. A last line without a line feed
    is whole where the file is: a .gz has a check sum, an answer of a server a length.

    A URL (http, https, file) is fetched whole; a file here is read as it is needed.

    Raises:
        TraceFileError: it cannot be opened or fetched, is empty, a web page, no text, or a .gz that ends early.
    """
    number, found = 0, False
    try:
        with closing(_open(source)) as file:
            for number, line in enumerate(file, start=1):  # noqa: B007
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                if not found and text.startswith("<"):
                    raise TraceFileError(f"{source}, line {number}: is a web page (HTML); take the raw file's address")
                found = True
                yield number, text, line.endswith(b"\n") or not isinstance(file, io.BufferedReader)
    except EOFError:
        raise TraceFileError(
            f"{source}, after line {number}: the .gz file ends early, it is cut: fetch it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceFileError(f"{source}, after line {number}: the .gz file is damaged ({error})") from None
    except UnicodeDecodeError:
        raise TraceFileError(f"{source}, line {number}: is no UTF-8 text; give a .csv or .jsonl, or its .gz") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a null in the name, a bad address
        raise TraceFileError(f"{source}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not found:
        raise TraceFileError(f"{source}: is empty")


def _open(source: Source) -> BinaryIO | gzip.GzipFile:
    path = os.fspath(source)
    if path.startswith(("http://", "https://", "file:")):
        with urlopen(path, timeout=TIMEOUT_S) as response:
            raw: BinaryIO = io.BytesIO(response.read())  # `read` notices a cut answer; line by line it would just end
    else:
        raw = open(os.path.expanduser(path), "rb")  # noqa: SIM115  # closed by `read_lines`
    is_gzip = raw.read(2) == b"\x1f\x8b"  # by content: a URL need not end in .gz
    raw.seek(0)
    return _Gunzip(raw) if is_gzip else raw


class _Gunzip(gzip.GzipFile):
    """Closes the file beneath it too."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(fileobj=raw)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


def rows_of(source: Source, lines: Iterator[tuple[int, str, bool]], parse: Callable[[str], Row]) -> Iterator[Row]:
    """Each line parsed; a ValueError of `parse` says what is wrong with it.

    Raises:
        TraceFileError: names the line; a last line without an end is said to be cut.
    """
    for number, text, whole in lines:
        try:
            yield parse(text)
        except ValueError as error:
            cut = "" if whole else " (this last line has no end: the file is cut, fetch it again)"
            raise TraceFileError(f"{source}, line {number}: {error}{cut}") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"is no JSON: {_short(text)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, is {_short(text)}")
    return row


def field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f'has no "{name}"; it has {", ".join(row) or "nothing"}')
    return row[name]


def integer(row: dict[str, Any], name: str, least: int, most: int = 2**62) -> int:
    """A whole number of the row, a JSON number or the text of one."""
    value = field(row, name)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"{name}={_short(value)}: is no whole number") from None
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"{name}={_short(value)}: is no whole number")
    if not least <= number <= most:
        raise ValueError(f"{name}={_short(value)}: must be at least {least} and at most {most}")
    return number


def number(row: dict[str, Any], name: str) -> float:
    """A finite number of at least 0."""
    value = field(row, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name}={_short(value)}: is no number")
    if not 0 <= value < 1e300 or math.isnan(value):
        raise ValueError(f"{name}={_short(value)}: must be a finite number of at least 0")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
