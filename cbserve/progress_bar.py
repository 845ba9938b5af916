"""Progress of what takes long: a bar on a terminal and in a notebook; in a log, where each redraw of a bar would be a
line, one line at the beginning and one at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

_IS_WIDGET = any(kind.__module__ == "tqdm.notebook" for kind in tqdm.__mro__)


def shows_bars() -> bool:
    """Whether a bar can be redrawn where it goes."""
    return _IS_WIDGET or sys.stderr.isatty()


@contextmanager
def told(what: str, is_silent: bool = False) -> Iterator[None]:
    """Say that `what` begins, and that it is done and how long it took, where no bar shows it."""
    lines = not is_silent and not shows_bars()
    began = time.perf_counter()
    if lines:
        print(f"cbserve: {what} ...", file=sys.stderr, flush=True)
    yield
    if lines:
        print(f"cbserve: {what}: done in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def bar(is_silent: bool = False, **options: Any) -> tqdm:
    """A bar with the options of tqdm, which goes when it is full; none where it could not be redrawn."""
    return tqdm(disable=is_silent or not shows_bars(), leave=False, **options)
