"""A notebook's text form: a jupytext percent file becomes a notebook with ids, tags and metadata of our own.

The format, in full (chapters/source/*.py, solutions/source/*.py):

`# %% [markdown]`, `# %%` and `# %% tags=["..."]` start cells, as in any jupytext percent file. Tags:

    parameters   exactly one a notebook: the cell that papermill replaces (device, seed, size)
    exercise     an answer cell. Its first line is `# exercise: <id>`; the builder adds the tag `exercise:<id>`.
                 The next code cell must call `check("<id>", ...)` and gets the tags `check` and `check:<id>`
    hide-input   the input is folded when the notebook is opened
    solution     the whole cell is left out of the lab

In an answer cell, of a solution only:

    # BEGIN SOLUTION      everything up to the end marker is what the learner writes; the solution notebook shows it
    # STUB: return None   without the markers, the lab shows the STUB lines, in this order, instead. `# STUB:` and one
                          space are cut off, the indentation of the BEGIN line is put in front. No STUB line: `...`
    # END SOLUTION

A stub runs without an error and defines the names that the check cell uses. Placeholders, each alone on its line:

    {{badges}}        Colab, Binder and GitHub badges of this notebook (markdown)
    {{card <id>}}     title, difficulty, importance, minutes and points of an exercise (markdown)
    # {{colab}}       the code that installs the course on Colab and does nothing elsewhere (a code cell of its own)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbserve.errors import CBServeError

BEGIN, END, STUB = "# BEGIN SOLUTION", "# END SOLUTION", "# STUB:"
_EXERCISE = re.compile(r"# exercise: (\S+)\s*$")
_STUB_LINE = re.compile(rf"{STUB} ?(.*)$")


class SourceError(CBServeError):
    """A notebook's text form breaks the format. Names file, cell and rule."""


def read_source(path: Path) -> Any:
    """The notebook (nbformat v4) that `path` describes: cells with ids and tags, solution markers still in.

    Raises SourceError for a file that breaks the format described above.
    """
    import jupytext

    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    cells = [cell for cell in notebook.cells if cell.cell_type != "raw"]
    if not cells:
        raise SourceError(f"{path.name} has no cells; a cell starts with `# %%` or `# %% [markdown]`")
    slug = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:48]
    for number, cell in enumerate(cells, start=1):
        # An ordinal, since jupytext makes new ids each time: the same text gives the same ids, in lab and solution.
        cell.id = f"{slug}-{number:03d}"
        cell.metadata = _metadata(cell.metadata.get("tags", []))
    notebook.cells = cells
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    _tag_exercises(path.name, cells)
    _demand_parameters(path.name, cells)
    return notebook


def solved_form(notebook: Any) -> Any:
    """The solution: what stands between the markers stays, the markers and stubs go."""
    for cell in notebook.cells:
        cell.source = _rewrite(cell, stubs=False)
    return notebook


def stub_form(notebook: Any) -> Any:
    """The lab: stubs in place of what stands between the markers; cells tagged `solution` are left out."""
    notebook.cells = [cell for cell in notebook.cells if "solution" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        cell.source = _rewrite(cell, stubs=True)
        if cell.cell_type == "code":
            _demand_compiles(cell)
    return notebook


def source_sha256(notebook: Any) -> str:
    """Digest of everything but outputs and counts: cell types, sources, ids and metadata, in order."""
    cells = [[cell.cell_type, cell.source, cell.id, cell.metadata] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def exercise_id(source: str) -> str | None:
    """The id in the first line of an answer cell; None if that line is something else."""
    match = _EXERCISE.match(source.split("\n", 1)[0])
    return match.group(1) if match else None


def _metadata(tags: Iterable[str]) -> dict[str, Any]:
    tags = list(tags)
    metadata: dict[str, Any] = {"tags": tags} if tags else {}
    if "hide-input" in tags:
        metadata["jupyter"] = {"source_hidden": True}
    return metadata


def _tag_exercises(name: str, cells: list[Any]) -> None:
    code = [cell for cell in cells if cell.cell_type == "code"]
    seen: set[str] = set()
    for position, cell in enumerate(code):
        tags = cell.metadata.get("tags", [])
        found = exercise_id(cell.source)
        if ("exercise" in tags) != (found is not None):
            raise SourceError(
                f"{name}, {cell.id}: an answer cell has the tag `exercise` and the first line `# exercise: <id>`, "
                f"and this cell has one of them; its tags are {tags}, it begins {cell.source[:40]!r}"
            )
        if found is None:
            continue
        if found in seen:
            raise SourceError(f"{name}, {cell.id}: exercise {found!r} has a second answer cell; an id is used once")
        seen.add(found)
        below = code[position + 1] if position + 1 < len(code) else None
        if below is None or not re.search(rf"""\bcheck\(\s*["']{re.escape(found)}["']""", below.source):
            raise SourceError(f'{name}, {cell.id}: the next code cell must be the check: check("{found}", ...)')
        cell.id, below.id = (f"{kind}-{re.sub(r'[^A-Za-z0-9_-]', '-', found)}" for kind in ("exercise", "check"))
        cell.metadata = _metadata([tag for tag in tags if not tag.startswith("exercise:")] + [f"exercise:{found}"])
        below.metadata = _metadata(["check", f"check:{found}"])
        for graded in (cell, below):
            graded.metadata["deletable"] = False


def _demand_parameters(name: str, cells: list[Any]) -> None:
    count = sum("parameters" in cell.metadata.get("tags", []) for cell in cells)
    if count != 1:
        raise SourceError(
            f'{name} has {count} cells tagged `parameters` and needs one: # %% tags=["parameters"], then device, seed, '
            "size with their default values, so that papermill can set them"
        )


def _rewrite(cell: Any, stubs: bool) -> str:
    """The cell's source with each marked region replaced by its stub or by its solution."""
    if cell.cell_type != "code":
        return str(cell.source)
    out: list[str] = []
    region: list[str] | None = None
    stub: list[str] = []
    indent = ""
    for line in cell.source.split("\n"):
        text = line.strip()
        if text == BEGIN:
            if region is not None:
                raise SourceError(f"{cell.id}: {BEGIN} inside a region; close the first with {END}")
            region, stub, indent = [], [], line[: len(line) - len(line.lstrip())]
        elif text == END:
            if region is None:
                raise SourceError(f"{cell.id}: {END} without {BEGIN}")
            out += [indent + line if line else "" for line in stub or ["...  # your code here"]] if stubs else region
            region = None
        elif region is None:
            if text.startswith(STUB):
                raise SourceError(f"{cell.id}: {STUB} belongs between {BEGIN} and {END}")
            out.append(line)
        elif match := _STUB_LINE.match(text):
            stub.append(match.group(1).rstrip())
        else:
            region.append(line)
    if region is not None:
        raise SourceError(f"{cell.id}: {BEGIN} without {END}")
    return "\n".join(out)


def _demand_compiles(cell: Any) -> None:
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        compile(TransformerManager().transform_cell(cell.source), cell.id, "exec")
    except SyntaxError as error:
        raise SourceError(f"{cell.id}: the lab's form of this cell is no Python ({error}); mend its STUBs") from error
