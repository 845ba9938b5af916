"""A JupyterLab that the tests start, and a notebook in it as a reader sees it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN = "browser-tests"  # of a server that lives for a minute on the loopback address
SHOTS = Path(__file__).parent / "screenshots"  # git-ignored, for eyes
START_S, OPEN_MS, RUN_MS = 90, 90_000, 300_000
#: What Jupyter shows where an output cannot be shown.
BROKEN = ("Error displaying widget", "model not found", "Loading widget", "<svg", "SVG object", "<IPython.core.display")
#: An error that a cell raised, and what was written to stderr: Jupyter shows both alike.
ERRORS = "[data-mime-type='application/vnd.jupyter.stderr'], [data-mime-type='application/vnd.jupyter.error']"
IDLE = ".jp-Notebook-ExecutionIndicator[data-status='idle']"


def jupyter_environment(scratch: Path, package: Path) -> dict[str, str]:
    """A shell's environment with a Jupyter that has no settings, trust or history, and the cbserve in `package`."""
    left_out = ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "CBSERVE_STRICT")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "CBSERVE_STATE"):
        own[name] = str(scratch / name.lower())
    own["JUPYTERLAB_SETTINGS_DIR"] = str(scratch / "settings")
    own["JUPYTERLAB_WORKSPACES_DIR"] = str(scratch / "workspaces")
    own["CBSERVE_VENV"] = "current"
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), own.get("PYTHONPATH", "")]))
    settings(Path(own["JUPYTERLAB_SETTINGS_DIR"]), theme="light")
    return own


def settings(folder: Path, theme: str) -> None:
    """All cells in the page at once, so that each can be asked; nothing saved, no question about news; the theme."""
    chosen = {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "docmanager-extension/plugin": {"autosave": False},  # a live run must not change the clone's notebook
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "apputils-extension/themes": {"theme": f"JupyterLab {theme.capitalize()}"},
    }
    for name, values in chosen.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


@contextmanager
def start(command: Sequence[str], environment: dict[str, str], folder: Path, log: Path) -> Iterator[Server]:
    """Run `command`, which starts a JupyterLab in `folder`, on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"]
    options += [f"--IdentityProvider.token={TOKEN}"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, *options], cwd=folder, env=environment, stdout=out, stderr=out)
    server = Server(f"http://127.0.0.1:{port}", folder, Path(environment["JUPYTERLAB_SETTINGS_DIR"]))
    try:
        end = time.monotonic() + START_S
        while not server.answers():
            assert process.poll() is None and time.monotonic() < end, f"JupyterLab did not start:\n{log.read_text()}"
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()  # JupyterLab ends its kernels
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


class Server:
    """A running JupyterLab whose root is `folder`."""

    def __init__(self, url: str, folder: Path, settings_folder: Path) -> None:
        self.url, self.folder, self._settings = url, folder, settings_folder

    def answers(self) -> bool:
        try:
            self._api("GET", "api")
        except (OSError, urllib.error.URLError):
            return False
        return True

    @contextmanager
    def pages(self, browser: Any) -> Iterator[Callable[..., LabPage]]:
        """A function that opens notebooks; all that it opened, and their kernels, end with the block."""
        contexts, paths = [], []

        def opened(path: str, *, theme: str = "light", width: int = 1400, place: str = "doc/tree/") -> LabPage:
            settings(self._settings, theme)
            # An image asks the system for its theme, not the page
            context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=theme)
            contexts.append(context)
            paths.append(path)
            page = context.new_page()
            page.goto(f"{self.url}/{place}{path}?token={TOKEN}", timeout=OPEN_MS)
            return LabPage(page, json.loads((self.folder / path).read_text(encoding="utf-8")) if path else None)

        try:
            yield opened
        finally:
            for context in contexts:
                context.close()
            for session in self._api("GET", "api/sessions"):
                if session["path"] in paths:
                    self._api("DELETE", f"api/sessions/{session['id']}")

    def _api(self, method: str, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        request.add_header("Authorization", f"token {TOKEN}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None


class LabPage:
    """A notebook that is open in the browser. Cells are numbered from 0, as in the file."""

    def __init__(self, page: Any, notebook: Any = None) -> None:
        self.page, self.notebook = page, notebook
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=OPEN_MS)
        page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=OPEN_MS)
        if notebook is not None:
            page.wait_for_function(
                "n => document.querySelectorAll('.jp-Notebook .jp-Cell').length === n",
                arg=len(notebook["cells"]),
                timeout=OPEN_MS,
            )
        self.settle()

    def cell(self, number: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def is_trusted(self) -> bool:
        """Whether Jupyter lets the outputs do what they want, scripts and widgets included."""
        return self.page.locator(".jp-OutputArea-output.jp-mod-trusted").count() > 0

    def broken(self) -> list[str]:
        """What Jupyter shows instead of an output, and the errors that cells raised."""
        shown = self.page.locator(".jp-Notebook .jp-OutputArea").all_inner_texts()
        found = [f"output shows {mark!r}" for mark in BROKEN if any(mark in text for text in shown)]
        return found + [text.strip()[-300:] for text in self.page.locator(ERRORS).all_inner_texts()]

    def missing_figures(self) -> list[str]:
        """The cells whose file holds an image that the page does not show, or shows without alternative text."""
        faults = []
        for number, wanted in figures(self.notebook).items():
            shown = self.cell(number).evaluate(
                """cell => [...cell.querySelectorAll('.jp-OutputArea-output img')].filter(
                     img => img.complete && img.naturalWidth > 0 && img.getBoundingClientRect().width > 100
                            && img.alt.trim().length > 10).length
                   + [...cell.querySelectorAll('.jupyter-widgets svg[role=img]')].filter(
                     svg => svg.getBoundingClientRect().width > 100
                            && svg.querySelector('title').textContent).length"""
            )
            if shown < wanted:
                faults.append(f"cell {number}: {shown} of {wanted} figures are visible")
        return faults

    def overflow(self) -> list[str]:
        """Figures wider than their cell, and a notebook that scrolls sideways."""
        return self.page.evaluate(
            """() => {
              const faults = [], panel = document.querySelector('.jp-Notebook')
              for (const box of [panel, panel.querySelector('.jp-WindowedPanel-outer')])
                if (box && box.scrollWidth > box.clientWidth + 1)
                  faults.push(`${box.className} is ${box.clientWidth} wide and scrolls to ${box.scrollWidth}`)
              panel.querySelectorAll('.jp-OutputArea-output').forEach(output => {
                const edge = output.getBoundingClientRect().right + 1
                output.querySelectorAll('img, svg[role=img]').forEach(figure => {
                  const right = figure.getBoundingClientRect().right
                  if (right > edge) faults.push(`a figure ends at ${right}, its cell at ${edge}`)
                })
              })
              return faults
            }"""
        )

    def resize(self, width: int, height: int = 1000) -> None:
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_timeout(300)  # the layout follows the window in its own time

    def shoot(self, name: str, width: int, height: int = 6000) -> None:
        """Screenshots of the whole notebook, in a window of this size, as SHOTS/`name`-1.png and so on."""
        SHOTS.mkdir(exist_ok=True)
        self.resize(width, height)
        panel = self.page.locator(".jp-WindowedPanel-outer").first
        reached, part = -1, 1
        while (top := panel.evaluate("e => e.scrollTop")) > reached:
            self.page.screenshot(path=SHOTS / f"{name}-{part}.png")
            panel.evaluate("e => e.scrollBy(0, e.clientHeight - 60)")
            self.page.wait_for_timeout(200)
            reached, part = top, part + 1

    def prompts(self) -> list[str]:
        """What stands left of each code cell that has code: "[3]:", "[*]:", "[ ]:"."""
        code = [n for n, c in enumerate(self.notebook["cells"]) if c["cell_type"] == "code" and "".join(c["source"])]
        found = self.page.locator(".jp-Notebook .jp-Cell").evaluate_all(
            "cells => cells.map(c => c.querySelector('.jp-InputPrompt')?.textContent ?? '')"
        )
        return [found[number] for number in code]

    def settle(self) -> None:
        """Wait until the kernel has nothing left to do, and has told the page so."""
        self.page.wait_for_selector(IDLE, timeout=OPEN_MS)

    def run_all(self) -> None:
        """Run > Run All Cells, as a reader does it; returns when the kernel has answered all, or a cell failed."""
        self._menu("Edit", "Clear Outputs of All Cells")  # so that no number of an earlier run is taken for a new one
        assert not any(map(re.compile(r"\d").search, self.prompts()))
        self._menu("Run", "Run All Cells")
        end, again = time.monotonic() + RUN_MS / 1e3, time.monotonic() + 10
        while time.monotonic() < end:
            prompts = self.prompts()
            ran = any(re.search(r"\d", prompt) for prompt in prompts)
            if time.monotonic() > again and not ran and not any("*" in prompt for prompt in prompts):
                self._menu("Run", "Run All Cells")  # on a busy machine a fresh page may not hear the first click
                again = end
            if not any("*" in prompt for prompt in prompts) and (ran or self.broken()):
                break
            self.page.wait_for_timeout(250)
        self.settle()

    def _menu(self, menu: str, entry: str) -> None:
        self.page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{menu}$")).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile(f"^{entry}")).first.click()


def figures(notebook: Any) -> dict[int, int]:
    """For each cell with images in its outputs, how many there are."""
    found = {}
    for number, cell in enumerate(notebook["cells"]):
        data = [output.get("data", {}) for output in cell.get("outputs", [])]
        count = sum("".join(d.get("text/html", "")).count("<img ") + ("image/png" in d) for d in data)
        if count:
            found[number] = count
    return found
