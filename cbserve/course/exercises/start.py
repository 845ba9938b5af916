"""The one exercise of the start notebook: it shows how checks and hints work."""

from __future__ import annotations

from cbserve.course.exercise import Exercise


def _diagnose(args: tuple[object, ...], value: object, expected: object) -> str:
    return "the useful work is one token for each step in which a request is still answering: add the three lengths"


EXERCISES = [
    Exercise(
        id="start.ex1",
        title="Useful tokens",
        difficulty=1,
        importance=2,
        minutes=1,
        points=1,
        hints=(
            "Each request gives one token in each step until it is complete.",
            "So a request of 10 tokens does useful work in 10 steps, whatever its neighbours do.",
            "Add the lengths of the three requests.",
        ),
        cases=lambda seed: [()],
        reference=lambda: sum([10, 100, 500]),
        diagnose=_diagnose,
    )
]
