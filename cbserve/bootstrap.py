"""Make `.venv` and install into it, on the standard library alone, for `make` and for `python -m cbserve`.

Two profiles: `learn` (requirements.txt) and `test` (requirements-dev.txt, which contains the former). A stamp
in the environment holds the digest of what was installed, so a second call returns at once.

Environment variables:
    CBSERVE_VENV   folder of the environment (default `.venv` in the repository); `current` uses the running
                   interpreter as it is and installs nothing
    TORCH_INDEX    package index to take torch from, https://download.pytorch.org/whl/cpu for a small CPU build
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cbserve.errors import CBServeError

ROOT = Path(__file__).resolve().parent.parent
_PATIENCE_S = 15  # for an answer of a package index
PROFILES = {"learn": "requirements.txt", "test": "requirements-dev.txt"}
_INPUTS = ("pyproject.toml", "constraints.txt", *PROFILES.values())


def in_checkout() -> bool:
    """Whether this package runs from a clone of the repository, with the files that the set-up needs."""
    return all((ROOT / name).is_file() for name in _INPUTS)


def venv_folder() -> Path | None:
    """The environment to use, or None to stay in the running interpreter."""
    chosen = os.environ.get("CBSERVE_VENV", "").strip()
    return None if chosen == "current" else Path(chosen).absolute() if chosen else ROOT / ".venv"


def venv_python(venv: Path) -> Path:
    return venv / "Scripts" / "python.exe" if os.name == "nt" else venv / "bin" / "python"


def ensure(profile: str) -> Path:
    """Bring the environment to `profile` and return its interpreter; prints what it does, when it does something.

    Raises CBServeError outside a clone, when no environment can be made, and when pip fails.
    """
    if not in_checkout():
        raise CBServeError(
            f"this command needs a clone of the cbserve repository, and {ROOT} is none. "
            "Clone it and call the command there; an installed package alone has no chapters or tests."
        )
    venv = venv_folder()
    if venv is None:
        return Path(sys.executable)
    python = venv_python(venv)
    if not _works(python):
        _say_small_torch()
        _create(venv)
        python = venv_python(venv)
    wanted = _digest(python)
    # The test profile contains the learner's, so either stamp will do for `learn`.
    stamps = [_stamp(venv, "test")] if profile == "test" else [_stamp(venv, name) for name in PROFILES]
    if any(stamp.is_file() and stamp.read_text().strip() == wanted for stamp in stamps):
        return python
    _install(python, profile)
    _stamp(venv, profile).write_text(wanted + "\n")
    return python


def hand_over(python: Path, arguments: Sequence[str]) -> NoReturn:
    """Go on as `python arguments...`; this process becomes that one where the system can."""
    command = [str(python), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execv(command[0], command)
    child = subprocess.Popen(command)
    while True:
        try:
            sys.exit(child.wait())
        except KeyboardInterrupt:
            continue  # Ctrl-C reaches the child as well, which decides: JupyterLab asks before it stops


def is_running(python: Path) -> bool:
    """Whether this process runs in the environment of `python`. Compares folders: an executable there is a link."""
    return str(python) == sys.executable or python.parent.parent.resolve() == Path(sys.prefix).resolve()


def _works(python: Path) -> bool:
    """An interpreter that a system upgrade has removed leaves a dangling environment: see whether it starts."""
    if not python.exists():
        return False
    check = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    return subprocess.run([str(python), "-c", check], capture_output=True).returncode == 0


def _say_small_torch() -> None:
    """Before anything is made, while another choice costs nothing."""
    if not _index() and sys.platform == "linux" and not shutil.which("nvidia-smi"):
        print(
            "cbserve: no NVIDIA driver found, yet torch from PyPI brings its CUDA libraries, gigabytes of them. For a "
            "small build: Ctrl-C, and make lab TORCH_INDEX=https://download.pytorch.org/whl/cpu",
            flush=True,
        )


def _index() -> str:
    return os.environ.get("TORCH_INDEX", "").strip()


def _why_silent(index: str) -> str:
    """Why nobody answers there, nothing if somebody does. pip has proxies and certificates of its own: it may reach
    what this does not."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(index, timeout=_PATIENCE_S):
            return ""
    except (HTTPError, ValueError):  # an answer; or no URL, but a folder
        return ""
    except OSError as error:  # URLError is one
        return str(getattr(error, "reason", error))


def _create(venv: Path) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"cbserve: making {venv} with Python {version}", flush=True)
    base = getattr(sys, "_base_executable", None) or sys.executable
    made = subprocess.run([base, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        why = (made.stdout + made.stderr).strip()
        raise CBServeError(
            f"could not make {venv} with {base}:\n{why}\n"
            "On Debian and Ubuntu: sudo apt-get install python3-venv. Elsewhere choose another interpreter: "
            "make lab PYTHON=python3.12."
        )


def _install(python: Path, profile: str) -> None:
    requirements, index = PROFILES[profile], _index()
    print(f"cbserve: installing {requirements} into {python.parent.parent} (minutes, once)", flush=True)
    if index and (why := _why_silent(index)):
        print(
            f"cbserve: TORCH_INDEX={index} does not answer ({why}). pip tries it once more; what it does not find "
            "there comes from PyPI, torch with gigabytes of CUDA. If that is not wanted: Ctrl-C, and look at the "
            "address and the network",
            flush=True,
        )
    started = time.monotonic()
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    command += [] if sys.stdout.isatty() else ["--quiet"]  # a log needs no progress bars
    # As an extra index: there the local version 2.x+cpu sorts above PyPI's 2.x, and all else comes from PyPI.
    # pip asks it for each package, and would wait for a minute at each that gets no answer.
    command += ["--extra-index-url", index, "--retries", "1", "--timeout", f"{_PATIENCE_S}"] if index else []
    if subprocess.run([*command, "-r", requirements], cwd=ROOT).returncode:
        raise CBServeError(
            f"pip could not install {requirements}; its message stands above. Without network, or with too little "
            "disk, that is expected; otherwise remove the environment (make clean) and try again."
        )
    print(f"cbserve: installed in {time.monotonic() - started:.0f} s", flush=True)


def _stamp(venv: Path, profile: str) -> Path:
    return venv / f"cbserve-{profile}.stamp"


def _digest(python: Path) -> str:
    """What the installation depends on: the requirement files, the interpreter and the index of torch."""
    digest = hashlib.sha256()
    for name in _INPUTS:
        digest.update((ROOT / name).read_bytes())
    config = python.parent.parent / "pyvenv.cfg"
    digest.update(config.read_bytes() if config.is_file() else b"")
    digest.update(_index().encode())
    # An editable install points at the clone: a moved clone needs a new one.
    digest.update(str(ROOT).encode())
    return digest.hexdigest()
