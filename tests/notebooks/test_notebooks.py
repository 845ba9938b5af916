"""Every committed notebook: made by the builder, and run as learners and graders run it."""

from pathlib import Path

import nbformat
import pytest
from running import checks, nbval, not_completed, papermill

from cbserve.course import builder

pytestmark = pytest.mark.notebook
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for kind in ("chapters", "labs", "solutions") for path in (ROOT / kind).glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")


def test_every_source_has_its_notebooks_and_they_are_what_the_builder_makes() -> None:
    assert NOTEBOOKS, "no notebook is committed; run: python -m cbserve notebooks build"
    assert builder.check(ROOT) == []


@each
def test_nbval_fails_the_unsolved_exercises_and_nothing_else(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    passed = nbval(path, tmp_path / "report.xml")
    unsolved = checks(notebook) if path.parent.name == "labs" else set()
    assert {number for number, ok in passed.items() if not ok} == unsolved
    assert len(passed) == sum(cell.cell_type == "code" for cell in notebook.cells)


@each
def test_papermill_runs_it_with_other_parameters(path: Path, tmp_path: Path, monkeypatch) -> None:
    from papermill import inspect_notebook

    defaults = inspect_notebook(path)
    assert {"device", "seed", "size"} <= set(defaults), "papermill must be able to set device, seed and size"
    done = papermill(path, tmp_path, monkeypatch, device="cpu", seed=1)
    assert not_completed(done) == []
