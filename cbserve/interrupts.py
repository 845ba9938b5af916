"""Ctrl-C at the right moment."""

from __future__ import annotations

import signal
import threading
from typing import Any


class interrupts_held_back:  # noqa: N801  (a context manager, called like a function)
    """Ctrl-C waits until the books are in order: a KeyboardInterrupt within would leave a block or a slot with
    nobody."""

    def __enter__(self) -> None:
        self._caught: tuple[Any, ...] | None = None
        # only the main thread is interrupted, and only there may a handler be set
        self._is_main = threading.current_thread() is threading.main_thread()
        self._is_main &= signal.getsignal(signal.SIGINT) is not None  # set by C code: Python cannot put it back
        if self._is_main:
            self._handler = signal.signal(signal.SIGINT, self._catch)

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None and callable(self._handler):
                self._handler(*self._caught)

    def _catch(self, *args: Any) -> None:
        self._caught = args
