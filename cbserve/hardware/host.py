"""The memory of the machine that this runs on."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int | None:
    """All of it, or what this container may have; None where the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        try:
            import psutil

            total = int(psutil.virtual_memory().total)
        except Exception:
            return None
    limit = memory_limit_bytes()
    return total if limit is None else min(total, limit)


def memory_limit_bytes() -> int | None:
    """What the control group of a container allows (Binder: 2 GB); None where there is none, or no limit."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # not there, or the word "max"
        return None
