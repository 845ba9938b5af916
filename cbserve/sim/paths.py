"""Files that a run will write: looked at before it starts, so that an hour of simulation is not lost to a typo."""

from __future__ import annotations

import os
from pathlib import Path

from cbserve.errors import CBServeError
from cbserve.files import temporary_beside

TRACE, POINT = b'{"event": "header"', b'{"key": '  # how their files begin


def require_no_other_file(path: Path) -> None:
    """A trace may be replaced by a trace; a sweep, say, is hours of work.

    Raises:
        CBServeError: something else lies there.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(len(TRACE))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CBServeError(f"{path}: cannot be read ({error.strerror})") from None
    if start not in (b"", TRACE):
        what = "holds the points of a sweep" if start.startswith(POINT) else "is no trace"
        raise CBServeError(f"{path} {what}; give another --out, or delete the file")


def require_writable(path: Path) -> None:
    """Nothing is left behind, and a file that is there stays as it is.

    Raises:
        CBServeError: names a folder or a device, lies in a folder that is missing, or may not be written.
    """
    if path.is_dir():
        raise CBServeError(f"{path} is a folder; give the path of a file")
    if path.exists() and not path.is_file():
        raise CBServeError(f"{path} is no regular file; give the path of a file")
    if not path.parent.is_dir():
        raise CBServeError(f"{path}: there is no folder {path.parent}; make it first")
    probe = temporary_beside(path)
    try:
        probe.touch()
        probe.unlink()
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "the file is read-only")
    except OSError as error:
        raise CBServeError(f"cannot write {path} ({error.strerror}); give a file in a folder of yours") from None
