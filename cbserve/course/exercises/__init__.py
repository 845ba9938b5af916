"""All exercises by id. Module or package `lab1` has those whose id begins with `lab1.`, in a tuple named EXERCISES."""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module

from cbserve.course.exercise import Exercise
from cbserve.errors import CBServeError

_loaded: dict[str, Exercise] = {}


class UnknownExerciseError(CBServeError):
    """No exercise has this id."""


def get(id: str) -> Exercise:
    """The exercise called `id`. Raises UnknownExerciseError, which names the ids there are."""
    if not isinstance(id, str):
        raise UnknownExerciseError(f"{id!r} is no id of an exercise: an id is text, such as 'lab1.ex1'")
    lab = id.split(".")[0]
    if id not in _loaded and lab in _modules():
        _load(lab)
    if id not in _loaded:
        ids = ids_of(lab) or [exercise.id for exercise in all_exercises()]
        near = difflib.get_close_matches(id, ids, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownExerciseError(f"there is no exercise {id!r}.{guess} The ids are: {', '.join(ids) or 'none yet'}")
    return _loaded[id]


def register(*exercises: Exercise) -> None:
    """Add exercises to the registry of this process; one with a known id takes its place."""
    for exercise in exercises:
        _loaded[exercise.id] = exercise


def all_exercises() -> list[Exercise]:
    """Every exercise of the course, lab by lab, in the order of the labs' modules."""
    for lab in _modules():
        _load(lab)
    return sorted(_loaded.values(), key=lambda exercise: exercise.id.split(".")[0])


def ids_of(lab: str) -> list[str]:
    """The ids of one lab, "lab1" for instance; none if there is no such lab."""
    if lab in _modules():
        _load(lab)
    return [id for id in _loaded if id.split(".")[0] == lab]


def _modules() -> list[str]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return sorted(names, key=lambda name: name.startswith("lab"))  # what comes before the labs comes first


def _load(lab: str) -> None:
    # A module without exercises helps the others.
    for exercise in getattr(import_module(f"{__name__}.{lab}"), "EXERCISES", ()):
        _loaded.setdefault(exercise.id, exercise)
