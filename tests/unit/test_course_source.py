"""The text form of a notebook: stubs, tags, ids, and what a broken source hears."""

from pathlib import Path

import pytest

from cbserve.course.hosts import badges, colab_cell
from cbserve.course.notebook_rules import rule_faults
from cbserve.course.source import SourceError, read_source, solved_form, source_sha256, stub_form
from cbserve.errors import CBServeError

EXAMPLE = Path(__file__).parent.parent / "example_course"
LAB = EXAMPLE / "solutions" / "source" / "lab0_example.py"
HEAD = '# %% tags=["parameters"]\nseed = 0\n\n'
EXERCISE = '# %% tags=["exercise"]\n# exercise: lab0.a\n{body}\n\n# %%\ncheck("lab0.a", a)\n'


def read(tmp_path: Path, text: str):
    path = tmp_path / "lab0_x.py"
    path.write_text(text)
    return read_source(path)


def code(notebook, id: str) -> str:
    return next(cell.source for cell in notebook.cells if cell.id == id)


def test_lab_and_solution_come_from_one_text() -> None:
    solution, lab = solved_form(read_source(LAB)), stub_form(read_source(LAB))
    assert code(solution, "exercise-lab0-sum") == "# exercise: lab0.sum\ndef total(numbers):\n    return sum(numbers)"
    assert code(lab, "exercise-lab0-sum") == "# exercise: lab0.sum\ndef total(numbers):\n    ...  # your code here"
    assert code(lab, "exercise-lab0-mean").splitlines()[2:] == [
        "    count = len(numbers)",
        "    if count:",
        "        pass  # your code here",
        "    return None",
    ]
    left_out = {cell.id for cell in solution.cells} - {cell.id for cell in lab.cells}
    assert [code(solution, id) for id in left_out] == ['print("only in the solution")']
    for notebook in (solution, lab):
        assert not any("SOLUTION" in cell.source or "STUB" in cell.source for cell in notebook.cells)


def test_ids_and_tags_are_the_same_each_time() -> None:
    one, two = read_source(LAB), read_source(LAB)
    assert one == two and source_sha256(one) == source_sha256(two)
    ids = [cell.id for cell in one.cells]
    assert len(set(ids)) == len(ids) and ids[0] == "lab0-example-001"
    tags = {cell.id: cell.metadata.get("tags") for cell in one.cells}
    assert tags["exercise-lab0-sum"] == ["exercise", "exercise:lab0.sum"]
    assert tags["check-lab0-sum"] == ["check", "check:lab0.sum"]


@pytest.mark.parametrize("change", ["\n# more", 'tags=["hide-input"]'])
def test_the_digest_follows_the_source(tmp_path, change) -> None:
    text = HEAD + "# %%\nx = 1\n"
    changed = text + change if change[0] == "\n" else text.replace("# %%\nx", f"# %% {change}\nx")
    assert source_sha256(read(tmp_path, text)) != source_sha256(read(tmp_path, changed))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no cells"),
        ("# %%\nx = 1\n", "0 cells tagged `parameters`"),
        (HEAD + HEAD, "2 cells tagged `parameters`"),
        (HEAD + '# %% tags=["exercise"]\nx = 1\n', "this cell has one of them"),
        (HEAD + "# %%\n# exercise: lab0.a\nx = 1\n", "this cell has one of them"),
        (HEAD + '# %% tags=["exercise"]\n# exercise: lab0.a\nx = 1\n', "must be the check"),
        (HEAD + EXERCISE.format(body="a = 1").replace('check("lab0.a"', 'check("lab0.b"'), "must be the check"),
        (HEAD + 2 * EXERCISE.format(body="a = 1"), "second answer cell"),
        (HEAD + EXERCISE.format(body="# BEGIN SOLUTION\na = 1"), "without # END"),
        (HEAD + EXERCISE.format(body="a = 1\n# END SOLUTION"), "without # BEGIN"),
        (HEAD + EXERCISE.format(body="# BEGIN SOLUTION\n# BEGIN SOLUTION"), "inside a region"),
        (HEAD + EXERCISE.format(body="# STUB: a = None\na = 1"), "belongs between"),
        (HEAD + EXERCISE.format(body="# BEGIN SOLUTION\n# STUB: a = (\na = 1\n# END SOLUTION"), "no Python"),
    ],
)
def test_a_broken_source_is_refused_with_its_cell_and_rule(tmp_path, text, said) -> None:
    with pytest.raises(SourceError, match=said):
        stub_form(read(tmp_path, text))


def test_badges_and_colab_cell_come_from_one_setting(tmp_path, capsys) -> None:
    row = badges(EXAMPLE, "chapters/x.ipynb")
    assert row.count("![") == row.count("](https://") - row.count("[![") == 3
    assert "https://github.com/example/cbserve/blob/v0.1.0/chapters/x.ipynb" in row
    cell = colab_cell(EXAMPLE)
    assert "--no-deps" in cell and "git+https://github.com/example/cbserve@v0.1.0" in cell and '"gguf"' in cell
    exec(compile(cell, "colab", "exec"), {})
    assert capsys.readouterr() == ("", ""), "elsewhere it does nothing"
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1"\ndependencies = []\n')
    with pytest.raises(CBServeError, match=r"\[project.urls\] Repository"):
        badges(tmp_path, "x.ipynb")


@pytest.mark.parametrize(
    ("markdown", "faults"),
    [
        ("# One\n\n## Two\n\n### Three\n\n## Two again", []),
        ("# One\n\n### Three", ["a heading of level 3 follows level 1"]),
        ("## Two", ["a heading of level 2 follows level 0"]),
        ("# One\n\n# Two", ["a second heading of level 1"]),
        ("text", ["has no heading"]),
        ("# One\n\n```python\n# a comment\n```", []),
        ("# One\n\n![](x.png)", ["an image without alt text"]),
        ('# One\n\n<img src="x">', ["an <img> without alt text"]),
        ('# One\n\n<img src="x" alt="a slot">', []),
        ("# One\n\n<svg><rect/></svg>", ["an <svg> without a title"]),
        ("# One\n\n<svg><title>a slot</title></svg>", []),
        ("# One\n\nsee /home/ann/x.py", ["is a path of one machine"]),
        ("# One\n\nsee https://example.org/home/ann", []),
        ("# One\n\n<Engine object at 0x7f00aa12bc10>", ["is a memory address"]),
    ],
)
def test_rules_of_a_finished_notebook(tmp_path, markdown, faults) -> None:
    commented = "\n".join(f"# {line}".rstrip() for line in markdown.split("\n"))
    notebook = read(tmp_path, f"{HEAD}# %% [markdown]\n{commented}\n")
    found = rule_faults(notebook, size_bytes=1000)
    assert len(found) == len(faults) and all(fault in line for fault, line in zip(faults, found, strict=True)), found


def test_size_widgets_and_number_of_cells_are_limited(tmp_path) -> None:
    notebook = read(tmp_path, HEAD + "# %% [markdown]\n# # One\n" + "\n# %%\nx = 1\n" * 60)
    notebook.metadata["widgets"] = {}
    found = " ".join(rule_faults(notebook, size_bytes=1_000_001))
    assert "metadata.widgets" in found and "1,000,001 bytes" in found and "62 cells" in found
    assert "cells" not in " ".join(rule_faults(notebook, size_bytes=1000, kind="labs"))
