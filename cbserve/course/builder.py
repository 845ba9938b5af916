"""Every committed notebook is made here from its text form (source.py), and `check` says where one was not.

What is made of which source:

    chapters/source/x.py   -> chapters/x.ipynb    executed
    solutions/source/x.py  -> solutions/x.ipynb   executed, solved
                           -> labs/x.ipynb        not executed, stubs in place of the solutions
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbserve.course.hosts import badges, colab_cell
from cbserve.course.notebook_rules import MAX_BYTES, WARN_BYTES, rule_faults
from cbserve.course.source import SourceError, read_source, solved_form, source_sha256, stub_form
from cbserve.errors import CBServeError
from cbserve.files import write_whole

CELL_TIMEOUT_S = 120
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_PACKAGES = Path(__file__).resolve().parents[2]  # what the kernel must find to import cbserve
_PLACEHOLDER = re.compile(r"^(?:# )?\{\{(badges|colab|card)(?: (\S+))?\}\}[ \t]*$", re.MULTILINE)


class BuildError(CBServeError):
    """A notebook cannot be built: a cell failed, ran too long, or the result is too large."""


@dataclass(frozen=True)
class Target:
    """One notebook to make: its place, its text form, and whether it is executed."""

    path: Path
    source: Path
    executed: bool
    form: Callable[[Any], Any]


def targets(root: Path) -> list[Target]:
    """All notebooks that the sources under `root` describe, chapters first, in the order of their names."""
    found = [
        Target(root / "chapters" / f"{source.stem}.ipynb", source, True, solved_form)
        for source in sorted((root / "chapters" / "source").glob("*.py"))
    ]
    for source in sorted((root / "solutions" / "source").glob("*.py")):
        found.append(Target(root / "labs" / f"{source.stem}.ipynb", source, False, stub_form))
        found.append(Target(root / "solutions" / f"{source.stem}.ipynb", source, True, solved_form))
    return found


def build(root: Path, only: Iterable[str] | None = None, cell_timeout_s: int = CELL_TIMEOUT_S) -> list[Path]:
    """Make all notebooks, or those whose file stem is in `only`, and return their paths.

    A notebook is replaced in one move when it is complete; one that fails leaves the old one as it was.
    Raises SourceError for a broken text form, BuildError for a failing cell, one over `cell_timeout_s` seconds,
    a notebook above 1 MB, or an unknown name in `only`.
    """
    root = Path(root).resolve()
    chosen = targets(root)
    if only is not None:
        wanted, known = set(only), {target.path.stem for target in chosen}
        if unknown := sorted(wanted - known):
            raise BuildError(f"no source is named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        chosen = [target for target in chosen if target.path.stem in wanted]
    # The learner's own progress and ledger stay out; one ledger runs through all chapters of a build.
    with tempfile.TemporaryDirectory(prefix="cbserve-build-") as scratch:
        built = []
        for target in chosen:
            notebook = template(root, target)
            if target.executed:
                _execute(notebook, target, Path(scratch), cell_timeout_s)
            _write(target.path, notebook)
            built.append(target.path)
    return built


def check(root: Path) -> list[str]:
    """What differs between the committed notebooks and what `build` makes, one line each; empty when all is well.

    Cell types, sources, ids, tags and metadata are compared exactly. Outputs are not, since timings differ; an executed
    notebook must have every code cell executed in order, from this very source, without an error output.
    """
    import nbformat

    root = Path(root).resolve()
    faults: list[str] = []
    made = targets(root)
    for folder in ("chapters", "labs", "solutions"):
        for stray in sorted(set((root / folder).glob("*.ipynb")) - {target.path for target in made}):
            faults.append(f"{stray.relative_to(root)} has no source; write one, or remove the notebook")
    for target in made:
        name = target.path.relative_to(root).as_posix()
        if not target.path.is_file():
            faults.append(f"{name} is missing; run: python -m cbserve notebooks build")
            continue
        try:
            wanted = template(root, target)
        except CBServeError as error:
            faults.append(f"{target.source.relative_to(root).as_posix()}: {error}")
            continue
        text = target.path.read_text(encoding="utf-8")
        try:
            committed = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
            nbformat.validate(committed)
        except Exception as error:
            faults.append(f"{name} is no valid notebook: {str(error).splitlines()[0][:200]}")
            continue
        found = list(_differences(committed, wanted)) or list(_execution_faults(committed, target.executed))
        found += rule_faults(committed, len(text.encode()), kind=target.path.parent.name)
        faults += [f"{name}: {fault}" for fault in found]
    return faults


def template(root: Path, target: Target) -> Any:
    """The notebook before it is executed: source form, placeholders filled, ids, tags, and the source's digest."""
    try:
        notebook = target.form(read_source(target.source))
    except SourceError as error:
        raise SourceError(f"{target.source.name}: {error}") from None
    place = target.path.relative_to(root).as_posix()
    for cell in notebook.cells:
        cell.source = _PLACEHOLDER.sub(lambda match: _fill(root, place, match), cell.source)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata["cbserve"] = {
        "source": target.source.relative_to(root).as_posix(),
        "source_sha256": source_sha256(notebook),
    }
    return notebook


def _fill(root: Path, place: str, match: re.Match[str]) -> str:
    kind, argument = match.groups()
    if kind == "badges":
        return badges(root, place)
    if kind == "colab":
        return colab_cell(root)
    from cbserve.course.exercises import get

    return get(argument or "").markdown()


def _execute(notebook: Any, target: Target, scratch: Path, cell_timeout_s: int) -> None:
    """Run all cells in a fresh kernel and keep what a reader needs of the outputs."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    state, empty = scratch / "state", scratch / target.path.stem
    empty.mkdir(parents=True, exist_ok=True)  # what leans on files beside the notebook fails here, as on Colab
    environment = {
        **os.environ,
        "CBSERVE_STRICT": "1",
        "CBSERVE_STATE": str(state),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH", "")])),
    }
    client = NotebookClient(
        notebook,
        timeout=cell_timeout_s,
        startup_timeout=120,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=False,
        extra_arguments=["--IPKernelApp.log_level=40"],
        resources={"metadata": {"path": str(empty)}},
    )
    name = f"{target.path.parent.name}/{target.path.name}"
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        cell = next((c for c in notebook.cells if any(o.output_type == "error" for o in c.get("outputs", []))), None)
        where = f"cell {cell.id}" if cell else "a cell"
        trace = re.sub(r"\x1b\[[0-9;]*m", "", error.traceback or f"{error.ename}: {error.evalue}")
        raise BuildError(f"{name}: {where} failed\n{trace[-4000:]}") from None
    except CellTimeoutError:
        raise BuildError(f"{name}: a cell ran longer than {cell_timeout_s} s; make its default size smaller") from None
    except DeadKernelError:
        raise BuildError(f"{name}: the kernel died, mostly for want of memory; make the notebook smaller") from None
    # nbclient writes what the kernel says of itself into the metadata; the template's is the one to keep.
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = list(_kept_outputs(cell, name))


def _kept_outputs(cell: Any, name: str) -> Iterator[Any]:
    """Outputs without widget views, whose model is not there in a fresh clone, and without stderr."""
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            # Progress bars and warnings carry times and paths of the building machine.
            print(f"cbserve: {name}, {cell.id}: left out on stderr: {output.text.strip()[-200:]}", file=sys.stderr)
            continue
        data = output.get("data", {})
        if data.pop(_WIDGET_VIEW, None) is not None and not set(data) - {"text/plain"}:
            continue  # what remains is the widget's repr; the static twin is an output of its own
        yield output


def _write(path: Path, notebook: Any) -> None:
    import nbformat

    nbformat.validate(notebook)
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    size = len(text.encode())
    if size > MAX_BYTES:
        raise BuildError(f"{path.name} would have {size:,} bytes, and the limit is {MAX_BYTES:,}; shrink its outputs")
    if size > WARN_BYTES:
        print(f"cbserve: {path.name} has {size:,} bytes; aim at {WARN_BYTES:,}", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, BuildError)


def _differences(committed: Any, wanted: Any) -> Iterator[str]:
    """Where the committed notebook is not what the source says."""
    ids = [cell.get("id") for cell in committed.cells]
    wanted_ids = [cell.id for cell in wanted.cells]
    if ids != wanted_ids:
        odd = next((a for a, b in zip(ids, wanted_ids, strict=False) if a != b), "at the end")
        yield f"has {len(ids)} cells and the source makes {len(wanted_ids)}; the first that differs: {odd}"
        return
    for cell, want in zip(committed.cells, wanted.cells, strict=True):
        for key in ("cell_type", "source", "metadata"):
            if cell.get(key) != want.get(key):
                yield f"cell {want.id}: its {key} is not what the source makes; rebuild, and edit only the source"
    if committed.metadata != wanted.metadata:
        keys = set(committed.metadata) | set(wanted.metadata)
        odd = sorted(key for key in keys if committed.metadata.get(key) != wanted.metadata.get(key))
        yield f"its metadata differs in {', '.join(odd)}; rebuild"
    if (committed.nbformat, committed.nbformat_minor) != (wanted.nbformat, wanted.nbformat_minor):
        yield f"is of format {committed.nbformat}.{committed.nbformat_minor}, and the builder writes 4.5"


def _execution_faults(committed: Any, executed: bool) -> Iterator[str]:
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, start=1):
        if not executed:
            if cell.execution_count is not None or cell.outputs:
                yield f"cell {cell.id}: a lab is committed without outputs and counts"
        elif cell.execution_count != count:
            yield f"cell {cell.id}: was executed as number {cell.execution_count}, and a run from the top gives {count}"
        elif any(output.output_type == "error" for output in cell.outputs):
            yield f"cell {cell.id}: its output is an error"
