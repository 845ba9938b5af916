"""`check`, `hint`, `solved` and `progress`: what a learner hears about an answer.

A check always shows its result. It raises `CheckFailed` only under pytest or nbval, or with CBSERVE_STRICT=1, so that
Run All goes on past an unsolved exercise while `pytest --nbval-lax` fails it. An answer that never returns is not cut
off here: interrupt the kernel. The grader, which runs answers in a process of their own, has a time limit.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbserve.course.exercise import BrokenRuleError, Case, Exercise
from cbserve.course.exercises import all_exercises, get
from cbserve.course.show import badge, escape, facts, show, svg_image, table
from cbserve.course.store import Store, strict
from cbserve.course.values import NotPlainError, scrubbed, shown
from cbserve.errors import CBServeError

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_SAID = {  # status -> words and badge
    "passed": ("passed", "good"),
    "failed": ("not yet", "bad"),
    "error": ("not yet", "bad"),
    "not-attempted": ("not attempted", "none"),
}
_progress = Store("progress")
_results: dict[str, bool] = {}  # the last check of each exercise in this process
_lab = ""  # "lab 2" once this process has checked, or asked for, an exercise of lab 2


class CheckFailed(CBServeError, AssertionError):
    """An exercise is not solved yet. Shown without a traceback, which would lead into the course's own code."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


@dataclass(frozen=True)
class Outcome:
    """How an answer did: `status` is passed, failed, error or not-attempted; the rest tells of the first wrong case."""

    status: str
    right: int
    total: int
    lines: tuple[tuple[str, str], ...] = ()  # (what it is, text)
    figure: str = ""  # SVG


def check(id: str, *answers: Any, seed: int = 0) -> None:
    """Try an answer on the exercise's cases from `seed` and say how it did; several answers are taken as a tuple.

    Raises UnknownExerciseError, and CheckFailed for an unsolved exercise in a strict run (see above).
    """
    exercise = _here(id)
    if not answers:
        raise CBServeError(f'check("{id}", ...) got no answer; pass the name that your cell defines')
    outcome = examine(exercise, answers[0] if len(answers) == 1 else answers, seed)
    passed = outcome.status == "passed"
    _results[id] = passed

    def record(kept: dict[str, Any]) -> None:
        entry = kept.setdefault(id, {})
        if outcome.status != "not-attempted":
            entry["tries"] = entry.get("tries", 0) + 1
        entry["solved"] = entry.get("solved", False) or passed

    _progress.update(record)
    headline, lines = _report(exercise, outcome)
    if not passed and _earned(id):
        lines.append(("before", "it was solved, and its points stay; cells further down go by the answer above"))
    text = "\n".join([headline, *(f"  {name:<7} {value}" for name, value in lines)])
    said, kind = _SAID[outcome.status]
    title, _, counts = headline.partition(f": {said}")
    html = f"<p>{badge(said, kind)} <strong>{escape(title)}</strong>{escape(counts)}</p>"
    html += facts(lines, code=("ran", "gave", "raised", "line")) if lines else ""
    if outcome.figure:
        html += svg_image(outcome.figure, f"The first step at which the answer to {id} differs")
    show(text, html)
    if strict() and not passed:
        raise CheckFailed(headline)


def examine(exercise: Exercise, answer: Any, seed: int = 0) -> Outcome:
    """Run `answer` on all cases of `seed` and judge each value; never raises for what an answer does."""
    cases = exercise.cases(seed)
    if not exercise.written(answer):
        return Outcome("not-attempted", 0, len(cases))
    right, first = 0, None
    empty = 0  # cases that gave no value at all
    for args in cases:
        outcome, value = _try(exercise, answer, args, len(cases), draw=first is None)
        if outcome is None:
            right += 1
        else:
            first = first or outcome
            empty += value is None or value is ...
    if first is None:
        return Outcome("passed", right, len(cases))
    if empty == len(cases):
        return Outcome("not-attempted", 0, len(cases), (("note", "each case gave None: is a `return` missing?"),))
    return Outcome(first.status, right, len(cases), first.lines, first.figure)


def _try(exercise: Exercise, answer: Any, args: Case, total: int, draw: bool) -> tuple[Outcome | None, Any]:
    """None for a right value, else what went wrong (drawn if `draw`); beside it the value, False if there is none."""
    ran = ("ran", scrubbed(exercise.words(answer, args)))
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            value = exercise.obtain(answer, args)
    except NotImplementedError as error:
        return Outcome("not-attempted", 0, total, (("note", str(error)),) if str(error) else ()), None
    except NotPlainError as error:
        return Outcome("failed", 0, total, (ran, ("gave", str(error)))), False
    except BrokenRuleError as error:
        return Outcome("failed", 0, total, (ran, ("rule", scrubbed(str(error))))), False
    except (Exception, SystemExit) as error:
        return Outcome("error", 0, total, (ran, *_own_words(error))), False
    figure, gave = "", shown(value)
    try:
        fault = exercise.judge(args, value)
        if not fault:
            return None, value
        gave = exercise.gave(value)
        if draw and exercise.figure:
            figure = exercise.figure(args, value, exercise.reference(*args))
    except Exception as error:  # a value so odd that comparing, naming or drawing it fails: still the learner's turn
        fault = f"this value cannot be compared ({type(error).__name__})"
    lines = [ran, ("gave", scrubbed(gave)), ("rule", fault)]
    if noise.getvalue():
        lines.insert(2, ("printed", f"{len(noise.getvalue().splitlines())} lines, left out here"))
    return Outcome("failed", 0, total, tuple(lines), figure), value


def _own_words(error: BaseException) -> list[tuple[str, str]]:
    """The learner's exception: type, message, and the last line of their own code that it went through."""
    message = " ".join(scrubbed(str(error)).split())
    lines = [("raised", f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__)]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if own:
        text = (linecache.getline(own[-1].filename, own[-1].lineno or 0) or own[-1].line or "").strip()
        lines.append(("line", f"{own[-1].lineno} of your cell: {text[:100]}"))
    else:
        lines.append(("where", "in the engine, on what your answer gave it"))
    return lines


def _is_own(filename: str) -> bool:
    """Whether a frame lies in the learner's code: neither in this package nor in Python's library."""
    library = os.sep + "lib" + os.sep + "python" in filename or "site-packages" in filename
    return not (filename.startswith((_OURS, "<frozen")) or library)


def _report(exercise: Exercise, outcome: Outcome) -> tuple[str, list[tuple[str, str]]]:
    name = f"{exercise.id} · {exercise.title}"
    cases = f"{outcome.right} of {outcome.total} case{'' if outcome.total == 1 else 's'}"
    points = f"{exercise.points} point{'' if exercise.points == 1 else 's'}"
    headline = f"{name}: {_SAID[outcome.status][0]}"
    if outcome.status == "passed":
        return f"{headline}, {cases}, {points}", []
    if outcome.status == "not-attempted":
        return headline, [*outcome.lines, ("next", f'replace the stub, or ask hint("{exercise.id}")')]
    level = min(_hints_asked(exercise.id) + 1, 3)
    more = f'hint("{exercise.id}", {level})'
    return f"{headline}, {cases} right", [*outcome.lines, ("next", f"{more} helps with this step")]


def hint(id: str, level: int | None = None) -> None:
    """Show hint 1, 2 or 3 of an exercise; without a level the next one that was not shown yet."""
    exercise = get(id)
    asked = _hints_asked(id)
    if level is None:
        level = min(asked + 1, 3)
    if isinstance(level, bool) or level not in (1, 2, 3):
        raise CBServeError(f'hint level {level!r}: there are 1, 2 and 3; hint("{id}") gives the next one')

    def record(kept: dict[str, Any]) -> None:
        entry = kept.setdefault(id, {})
        entry["hints"] = max(entry.get("hints", 0), level)

    _progress.update(record)
    left = "that was the last one" if level == 3 else f'hint("{id}", {level + 1}) says more'
    text = exercise.hints[level - 1]
    name = f"{id}, hint {level} of 3"
    show(
        f"{name}: {text}\n({left})",
        f"<p><strong>{name}.</strong> {escape(text)}</p><p><em>{escape(left)}</em></p>",
    )


def solved(id: str) -> bool:
    """Whether the last check of this process passed; without one, whether any check passed before.

    It guards the cells that run the answer, so it goes by this notebook; `progress` counts what was ever earned.
    """
    _here(id)
    return _results.get(id, _earned(id))


def progress() -> None:
    """Show all exercises with points, status and hints used, and the sum of points: the best of all checks so far.

    Where this notebook's own last check says otherwise, the status says so.
    """
    kept = _progress.read()
    exercises = all_exercises()
    rows, points = [], 0
    for exercise in exercises:
        entry = kept.get(exercise.id, {})
        done = bool(entry.get("solved"))
        points += exercise.points * done
        status = "solved" if done else "tried" if entry.get("tries") else "not attempted"
        if done and not solved(exercise.id):
            status = "solved before, not in this notebook now"
        rows.append([exercise.id, exercise.title, str(exercise.points), status, f"{entry.get('hints', 0)} of 3"])
    text, html = table(["exercise", "title", "points", "status", "hints"], rows)
    total = f"{points} of {sum(exercise.points for exercise in exercises)} points"
    show(f"{text}\n{total}", f"{html}<p><strong>{total}</strong></p>")


def card(id: str) -> None:
    """Show the card of an exercise."""
    exercise = get(id)
    header = ["exercise", "difficulty", "importance", "minutes", "points"]
    ranks = [f"{exercise.difficulty} of 5", f"{exercise.importance} of 5"]
    row = [id, *ranks, str(exercise.minutes), str(exercise.points)]
    text, html = table(header, [row])
    show(f"{exercise.title}\n{text}", f"<p><strong>{escape(exercise.title)}</strong></p>{html}")


def lab_here() -> str:
    """Whose lab this process runs: "lab 2"; "" where no exercise of a lab was checked or asked for."""
    return _lab


def _here(id: str) -> Exercise:
    global _lab
    exercise = get(id)
    name, number = exercise.id[:3], exercise.id.split(".")[0][3:]
    if name == "lab":
        _lab = f"lab {number}"
    return exercise


def _earned(id: str) -> bool:
    """Whether any check ever passed, here or before a restart."""
    return bool(_progress.read().get(id, {}).get("solved"))


def _hints_asked(id: str) -> int:
    return int(_progress.read().get(id, {}).get("hints", 0))
