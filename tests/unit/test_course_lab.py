"""The learner's copies: never overwritten, and one exercise at a time comes back to its stub."""

from pathlib import Path

import nbformat
import pytest

from cbserve.course import builder
from cbserve.course.lab import LabError, copy_labs, reset

EXAMPLE = Path(__file__).parent.parent / "example_course"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course whose labs are built; a lab needs no kernel."""
    root = tmp_path / "course"
    for target in builder.targets(EXAMPLE):
        if not target.executed:
            path = root / target.path.relative_to(EXAMPLE)
            path.parent.mkdir(parents=True)
            nbformat.write(builder.template(EXAMPLE, target), path)
    return root


@pytest.fixture
def work(root: Path, tmp_path: Path) -> Path:
    """Copies in which both exercises are answered."""
    work = tmp_path / "work"
    copy_labs(root, work)
    edit(work, lambda cell: cell.update(source=f"{cell.source}\n# mine") if cell.id.startswith("exercise") else None)
    return work


def edit(work: Path, change) -> None:
    path = work / "lab0_example.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        change(cell)
    notebook.cells = [cell for cell in notebook.cells if not cell.metadata.get("gone")]
    nbformat.write(notebook, path)


def cells(folder: Path) -> list:
    return nbformat.read(folder / "lab0_example.ipynb", as_version=4).cells


def test_copies_are_made_once_and_never_overwritten(root: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert [path.name for path in copy_labs(root, work)] == ["lab0_example.ipynb"]
    (work / "lab0_example.ipynb").write_text("mine")
    assert copy_labs(root, work) == []
    assert (work / "lab0_example.ipynb").read_text() == "mine"


def test_reset_brings_back_one_exercise_and_keeps_a_backup(root: Path, work: Path) -> None:
    before = (work / "lab0_example.ipynb").read_bytes()
    backup = reset("lab0.sum", work, root)
    assert backup.read_bytes() == before
    changed = [(new.id, new.source) for new, old in zip(cells(work), cells(root / "labs"), strict=True) if new != old]
    assert len(changed) == 1 and changed[0][0] == "exercise-lab0-mean" and changed[0][1].endswith("# mine")
    assert reset("lab0.sum", work, root) != backup


@pytest.mark.parametrize("kept", ["tag", "first line"])
def test_an_answer_cell_is_found_by_its_tag_or_its_first_line(root: Path, work: Path, kept: str) -> None:
    def lose(cell) -> None:
        if cell.id == "exercise-lab0-sum" and kept == "tag":
            cell.source = cell.source.split("\n", 1)[1]
        elif cell.id == "exercise-lab0-sum":
            cell.metadata.pop("tags")

    edit(work, lose)
    reset("lab0.sum", work, root)
    assert [cell.id for cell in cells(work)] == [cell.id for cell in cells(root / "labs")]


def test_a_deleted_answer_cell_comes_back_above_its_check(root: Path, work: Path) -> None:
    edit(work, lambda cell: cell.metadata.update(gone=True) if cell.id == "exercise-lab0-sum" else None)
    reset("lab0.sum", work, root)
    assert [cell.id for cell in cells(work)] == [cell.id for cell in cells(root / "labs")]


def test_a_lab_that_was_not_opened_is_copied(root: Path, tmp_path: Path) -> None:
    reset("lab0.sum", tmp_path / "new", root)
    assert cells(tmp_path / "new") == cells(root / "labs")


def test_errors_name_the_ids_and_the_cure(root: Path, work: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"'lab0.mode'; the ids are: lab0.sum, lab0.mean"):
        reset("lab0.mode", work, root)
    (work / "lab0_example.ipynb").write_text("{")
    with pytest.raises(LabError, match="is no notebook"):
        reset("lab0.sum", work, root)
    with pytest.raises(LabError, match="notebooks build"):
        copy_labs(tmp_path / "empty", work)
