"""What `lab`, `test`, `demo`, `notebooks`, `lint` and `clean` do once the environment is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cbserve.bootstrap import ROOT, hand_over, venv_folder
from cbserve.errors import CBServeError

START = "chapters/00_start_here.ipynb"
#: Tests that `test-fast` leaves out, besides everything outside tests/unit.
NOT_FAST = "not (model or notebook or browser or slow)"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def say(text: str) -> None:
    print(f"cbserve: {text}", flush=True)


def lab(arguments: Sequence[str]) -> int:
    """Open the course in JupyterLab; `arguments` go to JupyterLab, --no-browser for instance."""
    if not (ROOT / START).is_file():
        raise CBServeError(f"{ROOT / START} is missing; build the notebooks first: python -m cbserve notebooks build")
    from cbserve.course.lab import copy_labs

    fetch_or_warn()
    copied = [path.name for path in copy_labs(ROOT, ROOT / "work")]
    say(f"copied to work/: {', '.join(copied)}" if copied else "work/ holds your labs; nothing there was overwritten")
    trusted = trust(sorted((ROOT / "chapters").glob("*.ipynb")))
    if trusted:
        say(f"trusted {trusted} chapters, so that JupyterLab shows their figures")
    say("starting JupyterLab; Ctrl-C twice stops it")
    command = ["-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url=/lab/tree/{START}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    hand_over(Path(sys.executable), [*command, *arguments])


def test(arguments: Sequence[str]) -> int:
    """Run the whole suite; `arguments` go to pytest."""
    fetch_or_warn()
    install_chromium()
    return _pytest(arguments)


def test_fast(arguments: Sequence[str]) -> int:
    """Run the unit tests that need no weights, notebook or browser, on every core; `arguments` go to pytest."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a process a core is enough
    return _pytest(["tests/unit", "-m", NOT_FAST, "-n", "logical", "--dist", "worksteal", *arguments])


def lint() -> int:
    """Run ruff and mypy, all of it even when the first finds something."""
    failed = False
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "--strict", "cbserve/core"]):
        say(" ".join(command))
        failed |= subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode != 0
    return int(failed)


def clean() -> int:
    """Remove the environment and the caches. The learner's work/ and the model in its cache folder stay."""
    venv = venv_folder()
    folders = [venv] if venv else []
    folders += [ROOT / name for name in (".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build")]
    folders += [cache for part in ("cbserve", "tests") for cache in (ROOT / part).rglob("__pycache__")]
    for folder in folders:
        if folder.is_dir():
            say(f"removing {folder}")
            shutil.rmtree(folder)
    return 0


def fetch_or_warn() -> None:
    """Bring the model; without network the course still opens, and what needs the model says so."""
    from cbserve.models.fetch import fetch_model

    try:
        fetch_model()
    except CBServeError as error:
        say(f"going on without the model: {error}")


def lab_reset(id: str) -> int:
    """Put the stub of one exercise back into the learner's copy, and say where the copy as it was now lies."""
    from cbserve.course.lab import reset

    backup = reset(id, ROOT / "work", ROOT)
    say(f"{id} is back at its start; your notebook as it was: {backup}")
    return 0


def trust(notebooks: Sequence[Path]) -> int:
    """Sign the notebooks that this user's Jupyter does not trust yet; returns how many were signed."""
    import nbformat
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    signed = 0
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        if not notary.check_signature(notebook):
            notary.sign(notebook)
            signed += 1
    return signed


def install_chromium() -> None:
    """Install Chromium for the browser tests where that needs no question (root on Debian), else say how."""
    if any(shutil.which(name) for name in CHROMIUM):
        return
    cure = {
        "linux": "sudo apt-get install chromium (or your distribution's package)",
        "darwin": "brew install --cask chromium",
        "win32": "winget install Hibbiki.Chromium",
    }.get(sys.platform, "install Chromium and put it on PATH")
    apt = shutil.which("apt-get")
    if apt and hasattr(os, "geteuid") and os.geteuid() == 0:
        say("installing Chromium for the browser tests")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
            subprocess.run([apt, *command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if shutil.which("chromium"):
            return
    say(f"no Chromium, so the browser tests will be skipped. To run them: {cure}")


def _pytest(arguments: Sequence[str]) -> int:
    os.chdir(ROOT)
    hand_over(Path(sys.executable), ["-m", "pytest", *arguments])
