"""The notebook builder on a small course of one chapter and one lab, with real kernels."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from running import checks, nbval, not_completed, papermill

from cbserve.course import builder
from cbserve.course.builder import BuildError

pytestmark = pytest.mark.notebook
EXAMPLE = Path(__file__).parent.parent / "example_course"
NOTEBOOKS = ["chapters/01_example.ipynb", "labs/lab0_example.ipynb", "solutions/lab0_example.ipynb"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built") / "course"
    shutil.copytree(EXAMPLE, root)
    assert [path.relative_to(root).as_posix() for path in builder.build(root)] == NOTEBOOKS
    return root


@pytest.fixture
def course(built: Path, tmp_path: Path) -> Path:
    """A copy of the built course, to be spoilt."""
    return Path(shutil.copytree(built, tmp_path / "course"))


def outputs(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    return [repr(output) for cell in notebook.cells for output in cell.get("outputs", [])]


def test_what_is_built_passes_its_own_check(built: Path) -> None:
    assert builder.check(built) == []


def test_building_again_changes_nothing(course: Path) -> None:
    before = {name: (course / name).read_bytes() for name in NOTEBOOKS}
    builder.build(course)
    assert {name: (course / name).read_bytes() for name in NOTEBOOKS} == before
    assert not list(course.rglob(".*ipynb*")), "no temporary file is left"


def test_a_chapter_shows_its_outputs_but_no_widget_and_no_stderr(built: Path) -> None:
    shown = outputs(built / NOTEBOOKS[0])
    assert any("Claim static-40.7: holds" in output for output in shown)
    assert any("Ledger: 1 of" in output for output in shown)
    assert not any("widget" in output or "progress bar" in output for output in shown)
    assert "badge" in (built / NOTEBOOKS[0]).read_text()
    assert outputs(built / NOTEBOOKS[1]) == []


def edit_source(cell) -> None:
    cell.source += " "


def edit_tags(cell) -> None:
    cell.metadata["tags"] = ["raises-exception"]


def edit_id(cell) -> None:
    cell.id = "other"


def edit_count(cell) -> None:
    cell.execution_count = 7


def edit_error(cell) -> None:
    cell.outputs = [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        *[(name, edit_source, "source is not what the source makes") for name in NOTEBOOKS],
        (NOTEBOOKS[2], edit_tags, "metadata is not what the source makes"),
        (NOTEBOOKS[2], edit_id, "the first that differs: other"),
        (NOTEBOOKS[2], edit_count, "was executed as number 7"),
        (NOTEBOOKS[1], edit_count, "without outputs and counts"),
        (NOTEBOOKS[2], edit_error, "its output is an error"),
    ],
)
def test_check_finds_an_edit_by_hand(course: Path, name: str, edit, said: str) -> None:
    notebook = nbformat.read(course / name, as_version=4)
    edit(next(cell for cell in notebook.cells if cell.cell_type == "code"))
    nbformat.write(notebook, course / name)
    faults = builder.check(course)
    assert len(faults) == 1 and faults[0].startswith(name) and said in faults[0], faults


def test_check_finds_missing_stray_broken_and_outdated_notebooks(course: Path) -> None:
    (course / NOTEBOOKS[0]).unlink()
    shutil.copy(course / NOTEBOOKS[1], course / "labs" / "stray.ipynb")
    (course / NOTEBOOKS[1]).write_text("{")
    source = course / "solutions" / "source" / "lab0_example.py"
    source.write_text(source.read_text().replace("return sum(numbers)\n", "return sum(list(numbers))\n"))
    faults = "\n".join(builder.check(course))
    for said in (
        "labs/stray.ipynb has no source",
        "chapters/01_example.ipynb is missing",
        "labs/lab0_example.ipynb is no valid notebook",
        "cell exercise-lab0-sum: its source",
        "its metadata differs in cbserve",
    ):
        assert said in faults


@pytest.mark.parametrize(
    ("code", "timeout_s", "said"),
    [("1 / 0", 60, r"cell 02-bad-003 failed\n(.|\n)*ZeroDivisionError"), ("while True: pass", 2, "longer than 2 s")],
)
def test_a_failing_cell_leaves_the_old_notebook(course: Path, code: str, timeout_s: int, said: str) -> None:
    (course / "chapters" / "02_bad.ipynb").write_text("old")
    (course / "chapters" / "source" / "02_bad.py").write_text(
        f'# %% [markdown]\n# # Bad\n\n# %% tags=["parameters"]\nseed = 0\n\n# %%\n{code}\n'
    )
    with pytest.raises(BuildError, match=said):
        builder.build(course, only=["02_bad"], cell_timeout_s=timeout_s)
    assert (course / "chapters" / "02_bad.ipynb").read_text() == "old"


def test_a_wrong_solution_and_an_unknown_name_are_refused(course: Path) -> None:
    source = course / "solutions" / "source" / "lab0_example.py"
    source.write_text(source.read_text().replace("return sum(numbers)\n", "return 7\n"))
    with pytest.raises(BuildError, match="cell check-lab0-sum failed"):
        builder.build(course, only=["lab0_example"])
    with pytest.raises(BuildError, match=re.escape("no source is named lab9; there are 01_example, lab0_example")):
        builder.build(course, only=["lab9"])


def test_nbval_fails_exactly_the_checks_of_unsolved_exercises(built: Path, tmp_path: Path) -> None:
    passed = nbval(built / NOTEBOOKS[1], tmp_path / "report.xml")
    lab = nbformat.read(built / NOTEBOOKS[1], as_version=4)
    assert {number for number, ok in passed.items() if not ok} == checks(lab) and len(checks(lab)) == 2


def test_nbval_passes_the_solution(built: Path, tmp_path: Path) -> None:
    passed = nbval(built / NOTEBOOKS[2], tmp_path / "report.xml")
    assert len(passed) == 8 and all(passed.values())


@pytest.mark.parametrize("name", NOTEBOOKS[1:])
def test_papermill_completes_lab_and_solution(built: Path, tmp_path: Path, monkeypatch, name: str) -> None:
    done = papermill(built / name, tmp_path, monkeypatch, device="cpu", seed=3, size=5)
    assert not_completed(done) == []
    said = str([cell.get("outputs") for cell in done.cells])
    assert ("not attempted" in said) == name.startswith("labs/")
    assert ("the sum of 1 to 10 is 55" in said) == name.startswith("solutions/")
    assert (tmp_path / "state" / "progress.json").is_file()
