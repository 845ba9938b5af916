"""What the course remembers across restarts: one JSON file for progress, one for the ledger.

Folder: `$CBSERVE_STATE`, by default `$CBSERVE_HOME/course`, by default `~/.cache/cbserve/course`. A run under pytest or
nbval (PYTEST_CURRENT_TEST is set there) or with CBSERVE_STRICT=1 keeps everything in this process, unless CBSERVE_STATE
names a folder: a test run must neither read nor change what a learner has done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cbserve.errors import CBServeError
from cbserve.files import at_home, cache_folder, write_whole

_LOCK_WAIT_S = 2.0  # a lock older than this was left by a process that died


def strict() -> bool:
    """Whether a failing check raises: under pytest or nbval, or with CBSERVE_STRICT=1."""
    return bool(os.environ.get("PYTEST_CURRENT_TEST")) or os.environ.get("CBSERVE_STRICT", "") not in ("", "0")


def state_folder() -> Path | None:
    """Where the files lie; None: nothing is kept beyond this process."""
    if chosen := os.environ.get("CBSERVE_STATE"):
        return at_home(chosen)
    if strict():
        return None
    return cache_folder() / "course"


class _NotWrittenError(CBServeError):
    """The file cannot be written; `Store` goes on in memory."""


class Store:
    """A dict in a file. `read` always gives a dict; `update` changes it in one move, safe beside other kernels."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._memory: dict[str, Any] = {}
        self._warned = False

    def read(self) -> dict[str, Any]:
        """What is kept: from the file where there is one, else from this process. A broken file is moved aside."""
        folder = state_folder()
        if folder is None:
            return self._memory
        path = folder / f"{self.name}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(kept, dict) and all(isinstance(entry, dict) for entry in kept.values()):
                return kept
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._say(f"{path} cannot be read ({error.strerror}); what you do now lasts until the kernel stops")
            return self._memory
        except ValueError:
            pass
        aside = path.with_name(f"{self.name}.broken-{time.time_ns()}.json")
        with suppress(OSError):
            os.replace(path, aside)
        print(f"cbserve: the file with your {self.name} was damaged. It is kept as {aside.name}; a new one is begun.")
        return {}

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Apply `change` to what is kept. Where nothing can be written, says so once and goes on in memory."""
        folder = state_folder()
        if folder is None:
            change(self._memory)
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{self.name}.lock"):
                kept = self.read()
                change(kept)
                write_whole(folder / f"{self.name}.json", json.dumps(kept, indent=1), _NotWrittenError)
        except (OSError, _NotWrittenError) as error:
            why = getattr(error.__cause__ or error, "strerror", None) or error
            self._say(f"{folder} cannot be written ({why}); what you do now lasts until the kernel stops")
            change(self._memory)

    def _say(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            print(f"cbserve: {text}. Set CBSERVE_HOME to a folder that you own.")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                break  # taken over from a process that died; writing is atomic in any case
            time.sleep(0.01)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
