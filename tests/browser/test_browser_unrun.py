"""What a reader of a fresh clone sees before anything was run: the notebooks are not trusted, and no kernel helps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage, figures

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
NOTEBOOKS = [
    path.relative_to(ROOT).as_posix() for kind in ("chapters", "labs") for path in sorted((ROOT / kind).glob("*.ipynb"))
]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_every_figure_is_seen_and_nothing_is_wider_than_the_page(
    open_page: Callable[..., LabPage], clone: Path, path: str, theme: str
) -> None:
    if not (clone / path).is_file():
        pytest.skip(f"{path} is not committed")
    subprocess.run(
        ["git", "-C", str(clone), "checkout", "-q", "--", path], check=True
    )  # as cloned, whoever ran it live
    notebook = open_page(path, theme=theme)
    assert notebook.page.locator(f"body[data-jp-theme-light={str(theme == 'light').lower()}]").count() == 1
    assert not notebook.is_trusted()
    faults = []
    for width in (1400, 700):
        notebook.shoot(f"{Path(path).stem}-{theme}-{width}", width)
        faults += [f"{width} px: {fault}" for fault in notebook.missing_figures() + notebook.overflow()]
    assert notebook.broken() + faults == []


def test_every_chapter_has_a_figure(clone: Path) -> None:
    without = [path.name for path in (clone / "chapters").glob("*.ipynb") if not figures(json.loads(path.read_text()))]
    assert without == []


def test_what_an_untrusted_notebook_cannot_show_is_noticed(open_page: Callable[..., LabPage], clone: Path) -> None:
    """The checks above, on a notebook that has all the faults."""
    raised = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["ValueError: no"]}
    outputs = [
        _shown({"text/html": '<img alt="" src="data:image/svg+xml;base64,PHN2Zy8+">'}),
        _shown({"image/svg+xml": "<svg/>", "text/plain": "<IPython.core.display.SVG object>"}),
        _shown({"text/html": '<img alt="a picture of a plan" src="" style="width:3000px;height:9px;max-width:none">'}),
        raised,
    ]
    write(clone / "faulty.ipynb", ["1"] * 4, outputs)
    notebook = open_page("faulty.ipynb")
    seen = " ".join(notebook.broken())
    assert "SVG object" in seen and "ValueError: no" in seen, seen
    assert [fault.split(":")[0] for fault in notebook.missing_figures()] == ["cell 0", "cell 2"]
    assert any("a figure ends at" in fault for fault in notebook.overflow())


def test_what_fails_while_a_notebook_runs_is_noticed(open_page: Callable[..., LabPage], clone: Path) -> None:
    view = {"application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": "gone"}}
    sources = [f"from IPython.display import display\ndisplay({view}, raw=True)", "raise ValueError('no')", "1"]
    write(clone / "failing.ipynb", sources)
    notebook = open_page("failing.ipynb")
    notebook.run_all()
    notebook.page.get_by_text("Error displaying widget").wait_for()
    seen = " ".join(notebook.broken())
    assert "Error displaying widget" in seen and "ValueError: no" in seen, seen
    assert notebook.prompts() == ["[1]:", "[2]:", "[ ]:"]


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": data}


def write(path: Path, sources: list[str], outputs: Sequence[dict[str, Any]] = ()) -> None:
    """A notebook of code cells, the first ones with an output each."""
    cells = [
        {"cell_type": "code", "id": f"c{n}", "execution_count": None, "metadata": {}, "source": source, "outputs": []}
        for n, source in enumerate(sources)
    ]
    for cell, output in zip(cells, outputs, strict=False):
        cell["outputs"] = [output]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    path.write_text(json.dumps({"cells": cells, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}))
