"""Where files are kept, and writing one whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from cbserve.errors import CBServeError


def cache_folder() -> Path:
    """What outlives a session: `$CBSERVE_HOME`, by default `~/.cache/cbserve`."""
    return Path(os.environ.get("CBSERVE_HOME") or Path.home() / ".cache" / "cbserve").expanduser()


def write_whole(path: str | os.PathLike[str], text: str, error: type[CBServeError]) -> None:
    """Write `text` as UTF-8; an interruption leaves the old file as it was.

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
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as cause:
        raise error(
            f"cannot write to {path!r} ({cause}); give the path of a file in a folder that exists and can be written"
        ) from cause
