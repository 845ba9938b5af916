"""A C file becomes a library: compiled once a machine with its own C compiler, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from cbserve.files import cache_folder
from cbserve.kernels.jit import KernelError

# No -ffast-math: linking with it would change how every thread of the process rounds tiny numbers.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_LIMIT_S = 60


@functools.cache
def c_library(source: Path) -> ctypes.CDLL:
    """The compiled `source`, from the cache folder when it was compiled before for such a processor.

    Raises:
        KernelError: not Linux, no C compiler, or it fails; the message has what it said.
    """
    if sys.platform != "linux":
        raise KernelError(f"C kernels are compiled on Linux only, this is {sys.platform}; use backend='torch'")
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise KernelError(
            f"there is no C compiler {compiler!r}; install one (Debian, Ubuntu: apt-get install gcc) or use "
            "backend='torch'"
        )
    key = hashlib.sha256("\0".join([source.read_text(), compiler, *_FLAGS, _processor()]).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as cause:
        said = (getattr(cause, "stderr", None) or str(cause)).strip()[:500]
        raise KernelError(f"{source.name} cannot be compiled or loaded: {said}; use backend='torch'") from cause


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Under another name first, so that nobody loads a half-written file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = library.with_name(f".{library.name}.{os.getpid()}.tmp")
    command = [compiler, *_FLAGS, "-o", str(temporary), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        os.replace(temporary, library)
    finally:
        temporary.unlink(missing_ok=True)


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines with other processors."""
    wanted = ("model name", "flags", "Features", "CPU part")
    with open("/proc/cpuinfo") as lines:
        first = [line for line in lines.read().split("\n\n")[0].splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *first])


def shares_torchs_threads() -> bool:
    """Whether the OpenMP of C kernels is the one that torch uses: two of them would fight for the cores. True once
    torch and a library are loaded and the process has a single libgomp."""
    with open("/proc/self/maps") as lines:
        found = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}
    return len(found) == 1
