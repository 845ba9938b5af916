"""What a learner hears about an answer, and what is remembered of it."""

import linecache
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from cbserve.course import checking, exercises, store
from cbserve.course.checking import CheckFailed, card, check, hint, progress, solved
from cbserve.course.exercise import Exercise
from cbserve.course.exercises import UnknownExerciseError
from cbserve.course.store import Store
from cbserve.course.values import plain
from cbserve.errors import CBServeError


def reference(lengths: list[int]) -> float:
    return sum(lengths) / (len(lengths) * max(lengths))


def make(id: str = "lab0.use", **changes: object) -> Exercise:
    fields = {
        "title": "Slot utilisation",
        "difficulty": 2,
        "importance": 5,
        "minutes": 4,
        "points": 3,
        "hints": ("count the slot-steps", "which answer ends the batch?", "sum over B times the longest"),
        "cases": lambda seed: [([10, 100, 500],), ([1 + seed, 4],)],
        "reference": reference,
        "diagnose": lambda args, value, expected: "a batch lasts as long as its longest answer",
    }
    return Exercise(id=id, **{**fields, **changes})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry and a memory of this test's own."""
    monkeypatch.setattr(exercises, "_loaded", {})
    monkeypatch.setattr(checking, "_results", {})
    monkeypatch.setattr(checking, "_lab", "")
    monkeypatch.setattr(checking, "_progress", Store("progress"))
    monkeypatch.delenv("CBSERVE_STATE", raising=False)
    exercises.register(make())


@pytest.fixture
def learner(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a learner's kernel: nothing raises, and progress is kept in a folder."""
    be_strict(monkeypatch, False)
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))


def be_strict(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    """pytest sets PYTEST_CURRENT_TEST anew for each phase of a test, so the question itself is answered here."""
    for module in (checking, store):
        monkeypatch.setattr(module, "strict", lambda: value)


def heard(capsys: pytest.CaptureFixture[str], answer: object, id: str = "lab0.use") -> str:
    check(id, answer)
    return capsys.readouterr().out


def test_a_right_answer_passes(learner, capsys) -> None:
    assert heard(capsys, reference) == "lab0.use · Slot utilisation: passed, 2 of 2 cases, 3 points\n"
    assert solved("lab0.use")


@pytest.mark.parametrize(
    "answer",
    [reference, lambda x: np.float64(reference(x)), lambda x: np.array(reference(x)), lambda x: reference(x) + 1e-12],
)
def test_what_counts_as_the_same_number(learner, capsys, answer) -> None:
    assert "passed" in heard(capsys, answer)


def stub(lengths):
    """What the lab says."""
    ...


def passing(lengths):
    pass


def refusing(lengths):
    raise NotImplementedError("your turn")


def busy_stub(lengths):
    count = len(lengths)
    if count:
        pass
    return None


class EmptyDuties:
    def admit(self, step): ...

    def retire(self):
        return None


@pytest.mark.parametrize(
    "answer",
    [None, ..., stub, passing, refusing, busy_stub, EmptyDuties, lambda lengths: None, {"a": None}, (None, ...)],
)
def test_a_stub_is_not_attempted(learner, capsys, answer) -> None:
    said = heard(capsys, answer)
    assert said.startswith("lab0.use · Slot utilisation: not attempted\n") and 'hint("lab0.use")' in said
    assert not solved("lab0.use")


def prints_a_lot(lengths):
    for _ in range(10_000):
        print("spam")
    return 0.1


def changes_its_argument(lengths):
    lengths.clear()
    return 0.1


def divides_by_zero(lengths):
    return sum(lengths) / 0  # the line


def leaves(lengths):
    sys.exit(0)


class Chameleon:
    def __eq__(self, other):
        return True

    __hash__ = None


WRONG = {
    "wrong number": (lambda lengths: 0.9, "a batch lasts as long as its longest answer"),
    "percent as text": (lambda lengths: "41 %", "a number is wanted, and this is a string ('41 %')"),
    "bool": (lambda lengths: True, "a number is wanted, and this is True or False"),
    "nan": (lambda lengths: float("nan"), "nan, not a number"),
    "list": (lambda lengths: [0.4], "a number is wanted, and this is a list ([0.4])"),
    "generator": (lambda lengths: (x for x in lengths), "is a generator; return list(...) of it"),
    "equal to everything": (lambda lengths: Chameleon(), "is a Chameleon; return a number"),
    "set": (lambda lengths: {1}, "is a set; return list(...) of it"),
    "spam": (prints_a_lot, "10000 lines, left out here"),
    "changes its argument": (changes_its_argument, "your function changed `lengths`: [10, 100, 500] became []"),
    "raises": (divides_by_zero, "ZeroDivisionError: division by zero"),
    "names the line": (divides_by_zero, "return sum(lengths) / 0  # the line"),
    "exits": (leaves, "SystemExit: 0"),
    "too few arguments": (lambda: 1, "TypeError"),
    "not a function": (0.9, "a batch lasts as long as its longest answer"),
    "an address": (lambda lengths: [object()], "is an object; return a number"),
}


@pytest.mark.parametrize(("answer", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_answer_hears_what_is_wrong(learner, capsys, answer, said) -> None:
    first = heard(capsys, answer)
    assert said in first
    assert "not yet, 0 of 2 cases right" in first and 'hint("lab0.use", 1)' in first
    assert len(first.splitlines()) < 15
    assert "Traceback" not in first and "0x" not in first and "cbserve/course" not in first
    assert "0.40" not in first, "the right value must not be shown"
    assert heard(capsys, answer) == first, "the same answer hears the same words"
    assert not solved("lab0.use")


@pytest.mark.parametrize("filename", ["/tmp/ipykernel_12/345.py", "<ipython-input-3-0a1b2c>"])
def test_an_exception_names_the_line_of_the_cell(learner, monkeypatch, capsys, filename) -> None:
    cell = "def use(lengths):\n    share = sum(lengths) / longest\n    return share\n"
    monkeypatch.setitem(linecache.cache, filename, (len(cell), None, cell.splitlines(keepends=True), filename))
    names: dict = {}
    exec(compile(cell, filename, "exec"), names)
    said = heard(capsys, names["use"])
    assert "NameError: name 'longest' is not defined" in said
    assert "2 of your cell: share = sum(lengths) / longest" in said and filename not in said


def test_the_first_wrong_case_is_shown_and_the_right_ones_are_counted(learner, capsys) -> None:
    said = heard(capsys, lambda lengths: 610 / 1500)
    assert "1 of 2 cases right" in said and "([1, 4])" in said


def test_cases_follow_the_seed(learner, capsys) -> None:
    seen: list[list[int]] = []
    check("lab0.use", lambda lengths: seen.append(lengths) or reference(lengths), seed=3)
    assert seen == [[10, 100, 500], [4, 4]]


def test_several_answers_and_an_exercise_without_arguments(learner, capsys) -> None:
    exercises.register(make("lab0.two", cases=lambda seed: [()], reference=lambda: (0.44, 1.0)))
    check("lab0.two", 0.44, 1.0)
    check("lab0.two", 0.44, None)
    passed, half = capsys.readouterr().out.split("\n", 1)
    assert passed.endswith("passed, 1 of 1 case, 3 points")
    assert "item 1: there is no value" in half


def test_an_exercise_may_run_its_answer_in_its_own_way(learner, capsys) -> None:
    class Engine:
        def admit(self, waiting: list[int]) -> list[int]:
            return waiting[:2]

    exercises.register(
        make(
            "lab0.duty",
            cases=lambda seed: [([3, 1, 2],)],
            run=lambda answer, args: answer().admit(*args),
            reference=lambda waiting: Engine().admit(waiting),
            words=lambda answer, args: f"the engine with {answer.__name__} on {args[0]}",
            figure=lambda args, value, expected: f"<svg><title>{value}</title></svg>",
        )
    )
    check("lab0.duty", Engine)
    check("lab0.duty", type("Greedy", (), {"admit": lambda self, waiting: waiting}))
    check("lab0.duty", type("Lost", (), {"admit": lambda self, waiting: waiting + missing}))  # noqa: F821
    said = capsys.readouterr().out
    assert "passed" in said and "the engine with Greedy on [3, 1, 2]" in said
    assert "2 items are wanted, and this has 3" in said and "NameError: name 'missing'" in said


def test_a_diagnosis_that_fails_is_not_the_learners_traceback(learner, capsys) -> None:
    exercises.register(make(diagnose=lambda args, value, expected: 1 / 0))
    assert "cannot be compared (ZeroDivisionError)" in heard(capsys, lambda lengths: 0.9)


@pytest.mark.parametrize("variable", ["PYTEST_CURRENT_TEST", "CBSERVE_STRICT"])
@pytest.mark.parametrize("answer", [stub, lambda lengths: 0.9])
def test_a_strict_run_prints_and_raises(monkeypatch, capsys, variable, answer) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(CheckFailed) as failed:
        check("lab0.use", answer)
    assert capsys.readouterr().out.startswith(str(failed.value))
    assert failed.value._render_traceback_() == [f"CheckFailed: {failed.value}"]
    check("lab0.use", reference)


def test_a_strict_run_neither_reads_nor_changes_the_learners_progress(tmp_path, monkeypatch, learner, capsys) -> None:
    heard(capsys, reference)
    before = (tmp_path / "course" / "progress.json").read_bytes()
    monkeypatch.setattr(checking, "_results", {})
    be_strict(monkeypatch, True)
    assert not solved("lab0.use")
    with pytest.raises(CheckFailed):
        check("lab0.use", stub)
    hint("lab0.use")
    assert (tmp_path / "course" / "progress.json").read_bytes() == before


def test_hints_come_in_order_and_are_counted(learner, capsys) -> None:
    for level in (1, 2, 3, 3):
        hint("lab0.use")
        assert f"hint {level} of 3: {make().hints[level - 1]}" in capsys.readouterr().out
    check("lab0.use", lambda lengths: 0.9)
    assert 'hint("lab0.use", 3)' in capsys.readouterr().out
    progress()
    assert "3 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("level", [0, 4, -1, True, "2"])
def test_there_are_three_hints(level) -> None:
    with pytest.raises(CBServeError, match=r"there are 1, 2 and 3"):
        hint("lab0.use", level)


def test_progress_outlives_the_kernel(learner, monkeypatch, capsys) -> None:
    exercises.register(make("lab0.other", points=4))
    heard(capsys, reference)
    monkeypatch.setattr(checking, "_results", {})
    monkeypatch.setattr(checking, "_progress", Store("progress"))
    assert solved("lab0.use") and not solved("lab0.other")
    check("lab0.other", lambda lengths: 0.9)
    capsys.readouterr()
    monkeypatch.setattr(checking, "all_exercises", lambda: list(exercises._loaded.values()))
    progress()
    table = capsys.readouterr().out
    assert "solved" in table and "tried" in table and table.endswith("3 of 7 points\n")


def test_an_unsolved_copy_guards_its_later_cells_even_when_it_was_solved_before(learner, capsys) -> None:
    heard(capsys, reference)
    heard(capsys, stub)
    assert not solved("lab0.use"), "the cell below would call the stub"
    checking._results.clear()
    assert solved("lab0.use"), "what was earned stays earned"


def test_progress_and_the_check_say_which_result_they_mean(learner, monkeypatch, capsys) -> None:
    monkeypatch.setattr(checking, "all_exercises", lambda: list(exercises._loaded.values()))
    heard(capsys, reference)
    for answer in (stub, lambda lengths: 0.9):
        said = heard(capsys, answer)
        assert "it was solved, and its points stay; cells further down go by the answer above" in said
        progress()
        table = capsys.readouterr().out
        assert "solved before, not in this notebook now" in table and table.endswith("3 of 3 points\n")
        assert not solved("lab0.use")
    assert "before" not in heard(capsys, reference)
    progress()
    assert "solved before" not in capsys.readouterr().out


def test_an_unknown_id_is_told_the_ids_there_are() -> None:
    with pytest.raises(UnknownExerciseError, match=r"'lab0.usa'. Did you mean 'lab0.use'\? The ids are: lab0.use"):
        check("lab0.usa", reference)
    with pytest.raises(CBServeError, match="got no answer"):
        check("lab0.use")


@pytest.mark.parametrize("use", [lambda id: check(id, 1), hint, solved, checking.card])
@pytest.mark.parametrize("id", [[], {}, 5, None])
def test_an_id_that_is_no_text_is_named(use, id) -> None:
    with pytest.raises(UnknownExerciseError, match=re.escape(f"{id!r} is no id of an exercise")):
        use(id)


def test_the_card_shows_what_an_exercise_costs(capsys) -> None:
    card("lab0.use")
    assert "2 of 5" in capsys.readouterr().out
    assert "| 2 of 5 | 5 of 5 | 4 | 3 |" in make().markdown()


@pytest.mark.parametrize("change", [{"difficulty": 6}, {"importance": 0}, {"hints": ("one",)}, {"id": "nodot"}])
def test_an_exercise_with_a_broken_card_is_refused(change: dict) -> None:
    with pytest.raises(ValueError):
        make(**change)


def test_the_tools_load_without_torch_numpy_or_ipython() -> None:
    script = (
        "import sys; from cbserve.course import check, hint, solved, progress, claim, ledger, doctor, card;"
        "assert callable(doctor) and callable(check);"
        "print([name for name in ('torch', 'numpy', 'IPython', 'nbformat') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "[]", done.stderr


def test_every_exercise_of_the_course_is_sound() -> None:
    """Right answers pass, a stub does not, and cases are the same for the same seed."""
    for exercise in exercises.all_exercises():
        for seed in (0, 7):
            cases = exercise.cases(seed)
            assert cases and exercise.cases(seed) == cases, exercise.id
            for args in cases:
                assert exercise.judge(args, plain(exercise.reference(*args))) == "", exercise.id
                assert exercise.judge(args, None) != "", exercise.id
