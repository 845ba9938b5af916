"""Where files are kept, reading one that holds JSON, and writing one whole or not at all."""

from __future__ import annotations

import glob
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from cbserve.core.given import short
from cbserve.errors import CBServeError


def cache_folder() -> Path:
    """What outlives a session: `$CBSERVE_HOME`, by default `~/.cache/cbserve`. Raises CBServeError as `at_home`."""
    return at_home(os.environ.get("CBSERVE_HOME") or "~/.cache/cbserve")


def at_home(path: str | os.PathLike[str]) -> Path:
    """The path with "~" as that person's folder. Raises CBServeError where nobody is called so."""
    found = os.path.expanduser(path)
    if str(found).startswith("~"):
        raise CBServeError(f"{str(path)!r}: there is no home directory of that name; give the path of another folder")
    return Path(found)


def tilde(path: Path) -> str:
    """The path as a person writes it, "~" for their home."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)


def read_object(path: str | os.PathLike[str], error: type[CBServeError], cure: str) -> dict[str, Any]:
    """The JSON object that a file holds. Raises `error`, with the file and `cure`, when there is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read ({getattr(cause, 'strerror', None) or cause}); {cure}") from cause
    if not isinstance(found, dict):
        raise error(f"{path} holds {short(found)}, which is no JSON object; {cure}")
    return found


def temporary_beside(target: Path) -> Path:
    """A hidden name beside `target`, for what this process writes of it. What killed processes left of it is removed;
    what a living one is writing stays."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        pid = left.name[len(target.name) + 2 : -len(".tmp")]
        if pid.isdecimal() and not _may_live(int(pid)):
            with suppress(OSError):
                left.unlink()
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _may_live(pid: int) -> bool:
    if os.name == "nt":
        return pid == os.getpid()  # of another, Windows itself refuses to remove a file that is open
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True


def put_in_place(temporary: Path, target: Path) -> None:
    """Give the written file its name. One that was there before passes its permissions on."""
    if target.exists():
        shutil.copymode(target, temporary)
    os.replace(temporary, target)


def write_whole(path: str | os.PathLike[str], text: str, error: type[CBServeError]) -> None:
    """Write `text` as UTF-8, its line ends as they are; an interruption leaves the old file as it was. A file that is
    replaced keeps its permissions.

    Raises:
        CBServeError: of the type `error`: `path` is no path, names something that is no regular file (a folder, a
            device), or cannot be written.
    """
    try:
        target = Path(path)
        if target.exists() and not target.is_file():
            # os.replace would put a regular file in a device's place
            kind = "a folder" if target.is_dir() else "no regular file"
            raise error(f"{target} is {kind}: nothing was written; give the path of a file")
        temporary = temporary_beside(target)
        try:
            temporary.write_text(text, encoding="utf-8", newline="")
            put_in_place(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as cause:
        why = getattr(cause, "strerror", None) or cause
        raise error(
            f"cannot write to {str(path)!r} ({why}); give the path of a file in a folder that exists and can be written"
        ) from cause


def require_writable(path: Path) -> None:
    """Looked at before hours of work whose result goes there. Nothing is left behind, and a file that is there stays as
    it is.

    Raises:
        CBServeError: names a folder or a device, lies in a folder that is missing, or may not be written.
    """
    try:
        if os.path.isdir(path) or not path.name:
            raise CBServeError(f"{path} is a folder; give the path of a file")
        if os.path.exists(path) and not os.path.isfile(path):
            raise CBServeError(f"{path} is no regular file; give the path of a file")
        if not os.path.isdir(path.parent):
            raise CBServeError(f"{path}: there is no folder {path.parent}; make it first")
        probe = temporary_beside(path)
        probe.touch()
        probe.unlink()
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "the file is read-only")
    except (OSError, ValueError) as error:  # ValueError: a null in the name
        why = getattr(error, "strerror", None) or error
        raise CBServeError(f"cannot write {str(path)!r} ({why}); give a file in a folder of yours") from None
