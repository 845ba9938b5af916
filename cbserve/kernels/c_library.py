"""The C files in `c/` become a library: compiled once on each machine, with its own C compiler, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

from cbserve.errors import CBServeError
from cbserve.files import cache_folder, temporary_beside
from cbserve.kernels.jit import KernelError

# No -ffast-math: linking with it would change how every thread of the process rounds tiny numbers.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_LIMIT_S = 30  # it takes 1 to 3 s; nobody should wait for long for a compiler that hangs
_too_slow: set[Path] = set()  # what took longer is not tried again by this process
_compiling = threading.Lock()

LANES = 8  # as in c/vectors.h: vectors of other lengths than its multiples are left to torch


@functools.cache
def c_library() -> ctypes.CDLL:
    """The compiled functions, from the cache folder when they were compiled before for such a processor.

    Raises:
        KernelError: not Linux, no C compiler, or it fails; the message has what it said.
    """
    if sys.platform != "linux":
        raise KernelError(f"C kernels are compiled on Linux only, this is {sys.platform}; use backend='torch'")
    try:
        library = ctypes.CDLL(str(_compiled(_compiler())))
        for name, letters in _ARGUMENTS.items():
            function = getattr(library, name)  # AttributeError: CC has arguments that hide it
            function.argtypes = [_TYPES[letter] for letter in letters]
            function.restype = ctypes.c_int64 if name == "store_kv" else None
    except KernelError:
        raise
    except (OSError, CBServeError, AttributeError, subprocess.CalledProcessError) as cause:
        said = (getattr(cause, "stderr", None) or str(cause)).strip()[:500]
        raise KernelError(f"the C kernels cannot be compiled or loaded: {said}; use backend='torch'") from cause
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


def _compiler() -> list[str]:
    """$CC, with its arguments, or cc."""
    named = os.environ.get("CC") or "cc"
    with suppress(ValueError):  # a quote that is not closed
        command = [named] if shutil.which(named) else shlex.split(named)
        if command and shutil.which(command[0]):
            return command
    raise KernelError(
        f"there is no C compiler {named!r}; install one (Debian, Ubuntu: apt-get install gcc) or use backend='torch'"
    )


def _compiled(compiler: list[str]) -> Path:
    """The library's file, compiled unless it is there, and whole."""
    sources = sorted(Path(__file__).with_name("c").glob("*.[ch]"))
    what = [*compiler, *_FLAGS, _processor(), *(path.name + path.read_text(encoding="utf-8") for path in sources)]
    key = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"cbserve-{key}.so"
    with _compiling:
        if not _is_whole(library):
            _compile(compiler, [str(source) for source in sources if source.suffix == ".c"], library)
    return library


def _is_whole(library: Path) -> bool:
    """Whether it ends with the digest of what goes before: to load one that was cut short would crash the process."""
    content = library.read_bytes() if library.exists() else b""
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compile(compiler: list[str], sources: list[str], library: Path) -> None:
    """Under another name first, so that nobody loads a half-written file."""
    too_slow = KernelError(f"compiling the C kernels takes more than {_LIMIT_S} s; use backend='torch'")
    if library in _too_slow:
        raise too_slow
    library.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(library)
    command = [*compiler, *_FLAGS, "-o", str(temporary), *sources, "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
        digest = hashlib.sha256(temporary.read_bytes()).digest()
        with open(temporary, "ab") as file:
            file.write(digest)
        os.replace(temporary, library)
    except subprocess.TimeoutExpired:
        _too_slow.add(library)
        raise too_slow from None
    finally:
        temporary.unlink(missing_ok=True)


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines with other processors."""
    wanted = ("model name", "flags", "Features", "CPU part")
    with open("/proc/cpuinfo") as lines:
        first = [line for line in lines.read().split("\n\n")[0].splitlines() if line.startswith(wanted)]
    return "\n".join([platform.machine(), *first])
