"""What lies where a run will write: looked at before it starts."""

from __future__ import annotations

from pathlib import Path

from cbserve.errors import CBServeError

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
