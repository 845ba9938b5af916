"""The C files in `c/` become a library: compiled once on each machine, with its own C compiler, and kept."""

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

import torch

from cbserve.files import cache_folder, temporary_beside
from cbserve.kernels.jit import KernelError

# No -ffast-math: linking with it would change how every thread of the process rounds tiny numbers.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_LIMIT_S = 60


LANES = 8  # as in c/vectors.h: vectors of other lengths than its multiples are left to torch


@functools.cache
def c_library() -> ctypes.CDLL:
    """The compiled functions, from the cache folder when they were compiled before for such a processor.

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
    sources = sorted(Path(__file__).with_name("c").glob("*.[ch]"))
    what = [compiler, *_FLAGS, _processor(), *(path.name + path.read_text(encoding="utf-8") for path in sources)]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"cbserve-{key}.so"
    try:
        if not path.exists():
            _compile(compiler, [source for source in sources if source.suffix == ".c"], path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as cause:
        said = (getattr(cause, "stderr", None) or str(cause)).strip()[:500]
        raise KernelError(f"the C kernels cannot be compiled or loaded: {said}; use backend='torch'") from cause
    for name, letters in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = ctypes.c_int64 if name == "store_kv" else None
    return library


# The arguments of each function in c/: p a pointer, l a long, i an int, f a float.
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
_ARGUMENTS = {
    "paged_decode": "plppppppiiiiifi",
    "add_rms_norm": "ppppplifi",
    "rotary": "plppliii",
    "silu_and_mul": "pplii",
    "store_kv": "plplppplll",
}


def num_threads() -> int:
    """How many threads a C function may use."""
    return torch.get_num_threads() if _shares_torchs_threads() else 1


@functools.cache
def _shares_torchs_threads() -> bool:
    """Whether the OpenMP of the library is the one that torch uses: two of them would fight for the cores. It is when
    both are loaded and the process has a single one."""
    with open("/proc/self/maps") as lines:
        found = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}
    return len(found) == 1


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    """Under another name first, so that nobody loads a half-written file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(library)
    command = [compiler, *_FLAGS, "-o", str(temporary), *map(str, sources), "-lm"]
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
