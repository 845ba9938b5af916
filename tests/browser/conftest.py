"""One clone, one JupyterLab and one Chromium for the whole folder; every test opens a page of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage, Server, jupyter_environment, start

from cbserve.targets import CHROMIUM

ROOT = Path(__file__).parents[2]
# The sandbox needs rights that containers and root lack; nothing but this machine's own pages is opened.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium as the system brings it."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright; bring it with: pip install -e .[test]"
    )
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        pytest.skip("no Chromium on PATH; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commit that is checked out, as a learner gets it: no work/, no widget state, trusted by nobody."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git checkout: a fresh clone cannot be made")
    folder = tmp_path_factory.mktemp("fresh") / "cbserve"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="package")
def server(browser: Any, clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A plain `jupyter lab` in the clone; its kernels import the cbserve of this checkout."""
    scratch = tmp_path_factory.mktemp("jupyter")
    environment = jupyter_environment(scratch, ROOT)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--ServerApp.root_dir={clone}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    with start(command, environment, clone, scratch / "server.log") as running:
        yield running


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Callable[..., LabPage]]:
    """`open_page(path, theme="dark")` -> the notebook in a browser window of its own. Its kernel ends with the test."""
    with server.pages(browser) as opened:
        yield opened


@pytest.fixture(scope="package")
def cached_model() -> None:
    """The chapters serve the real model, and tests never fetch it."""
    from cbserve.models.fetch import model_path

    if model_path("smollm2-135m") is None:
        pytest.skip("SmolLM2-135M is not in the cache; bring it with: python -m cbserve model fetch")
