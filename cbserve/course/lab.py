"""The learner's own copies of the labs: made once, never overwritten, one exercise at a time put back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from cbserve.course.source import exercise_id
from cbserve.errors import CBServeError
from cbserve.files import write_whole


class LabError(CBServeError):
    """A lab or an exercise is not where it should be."""


def copy_labs(root: Path, work: Path) -> list[Path]:
    """Copy from `root/labs` what `work` lacks and return the new paths. What the learner has is never touched."""
    labs = sorted((root / "labs").glob("*.ipynb"))
    if not labs:
        raise LabError(f"{root / 'labs'} holds no notebooks; make them: python -m cbserve notebooks build")
    work.mkdir(parents=True, exist_ok=True)
    copied = []
    for lab in labs:
        target = work / lab.name
        if not target.exists():
            shutil.copyfile(lab, target)
            copied.append(target)
    return copied


def reset(id: str, work: Path, root: Path) -> Path:
    """Put the stub of exercise `id` back into the learner's copy; returns the backup of the copy as it was.

    A lab that the learner has not opened yet is copied. Other cells stay as they are, and an answer cell that was
    deleted comes back above its check cell. Close the notebook first: an editor that holds it saves its own version.
    Raises LabError for an unknown id (it names those there are) and for a copy that is no notebook.
    """
    starters: dict[str, tuple[Path, Any]] = {}
    for path in sorted((root / "labs").glob("*.ipynb")):
        for cell in _read(path).cells:
            if found := _id_of(cell):
                starters[found] = (path, cell)
    if id not in starters:
        raise LabError(f"there is no exercise {id!r}; the ids are: {', '.join(starters) or 'none, labs/ is empty'}")
    lab, stub = starters[id]
    copy = work / lab.name
    if not copy.exists():
        copy_labs(root, work)
    notebook = _read(copy)
    backup = _backup(copy)
    answers = [index for index, cell in enumerate(notebook.cells) if _id_of(cell) == id]
    checks = [index for index, cell in enumerate(notebook.cells) if f"check:{id}" in cell.metadata.get("tags", [])]
    if answers:
        place = answers[0]
        notebook.cells = [cell for index, cell in enumerate(notebook.cells) if index not in answers]
    else:
        place = checks[0] if checks else len(notebook.cells)
    notebook.cells.insert(place, stub)
    _write(copy, notebook)
    return backup


def _id_of(cell: Any) -> str | None:
    """The exercise that a cell answers, by its tag or its first line: editors lose one of them."""
    if cell.cell_type != "code":
        return None
    tags = [tag.removeprefix("exercise:") for tag in cell.metadata.get("tags", []) if tag.startswith("exercise:")]
    return tags[0] if tags else exercise_id(cell.source)


def _read(path: Path) -> Any:
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise LabError(f"{path} is no notebook ({type(error).__name__}); move it away, then copy it again") from error


def _write(path: Path, notebook: Any) -> None:
    import nbformat

    write_whole(path, nbformat.writes(notebook).rstrip("\n") + "\n", LabError)


def _backup(path: Path) -> Path:
    number = 1
    while (backup := path.with_name(f"{path.stem}.backup-{number}{path.suffix}")).exists():
        number += 1
    shutil.copyfile(path, backup)
    return backup
