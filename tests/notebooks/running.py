"""Run notebooks as learners and graders do: nbval from a shell, papermill from top to bottom."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parents[2]
CELL_TIMEOUT_S = 120


def environment(state: Path | None = None) -> dict[str, str]:
    """This process's environment as a shell outside pytest has it; progress goes to `state`."""
    left_out = ("PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "CBSERVE_STRICT", "CBSERVE_STATE")
    clean = {name: value for name, value in os.environ.items() if name not in left_out}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGES), clean.get("PYTHONPATH", "")]))
    return clean | ({"CBSERVE_STATE": str(state)} if state else {})


def nbval(path: Path, report: Path) -> dict[int, bool]:
    """`pytest --nbval-lax PATH`: whether each code cell passed, by its number among code cells from 0."""
    # The dead kernel of a hanging cell is noticed only after nbval's timeout, so that one is set.
    command = [
        "--nbval-lax",
        f"--nbval-cell-timeout={CELL_TIMEOUT_S}",
        f"--junitxml={report}",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command, str(path)],
        cwd=path.parent.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert report.is_file(), done.stdout + done.stderr
    cases = ElementTree.parse(report).getroot().iter("testcase")
    passed = {int(case.get("name", "").removeprefix("Cell ")): len(case) == 0 for case in cases}
    assert done.returncode == (0 if all(passed.values()) else 1), done.stdout[-4000:]
    return passed


def papermill(path: Path, folder: Path, monkeypatch: Any, **parameters: Any) -> Any:
    """Run the notebook from top to bottom with `parameters`; returns the executed notebook (nbformat)."""
    from papermill import execute_notebook

    clean = environment(folder / "state")
    for name in os.environ.keys() - clean.keys():
        monkeypatch.delenv(name)  # the kernel inherits this process's environment
    for name, value in clean.items():
        monkeypatch.setenv(name, value)
    return execute_notebook(
        path,
        folder / path.name,
        parameters=parameters,
        cwd=folder,
        kernel_name="python3",
        execution_timeout=CELL_TIMEOUT_S,
        progress_bar=False,
    )


def checks(notebook: Any) -> set[int]:
    """The numbers, among code cells from 0, of the check cells."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {number for number, cell in enumerate(code) if "check" in cell.metadata.get("tags", [])}


def not_completed(notebook: Any) -> list[str]:
    """Ids of code cells that papermill did not run to their end: it returns in peace after a `sys.exit(0)`."""
    return [cell.id for cell in notebook.cells if cell.metadata.get("papermill", {}).get("status") != "completed"]
