"""Exercise 1 of lab 1: the utilisation of one static batch."""

from __future__ import annotations

import random
from typing import Any

from cbserve.core.bounds import static_utilisation
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.lab1.lengths import random_lengths
from cbserve.course.exercises.slips import Slip, named_slip


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex1 {seed}")
    drawn = [(random_lengths(rng, rng.randint(3, 12)),) for _ in range(4)]
    return [([10, 100, 500],), ([500, 10, 100],), *drawn, ([7] * rng.randint(2, 5),), ([rng.randint(1, 90)],)]


SLIPS: list[Slip] = [
    (lambda T: sum(T) / max(T), "every slot runs for all the steps: multiply the steps by the number of slots, B"),
    (lambda T: 1 - sum(T) / (len(T) * max(T)), "this is the share thrown away; the share that was used is asked"),
    (lambda T: 100 * sum(T) / (len(T) * max(T)), "this is in percent; return a share between 0 and 1"),
    (lambda T: max(T) / sum(T), "the fraction stands on its head: useful slot-steps go above, all slot-steps below"),
    (lambda T: len(T) * max(T) / sum(T), "the fraction stands on its head: useful slot-steps go above"),
    (lambda T: sum(T) / (len(T) * T[-1]), "the batch ends with its longest answer, which need not be the last"),
    (lambda T: sum(T) / (len(T) * min(T)), "the batch ends with its longest answer, not with its shortest"),
    (lambda T: sum(T) / (len(T) * T[0]), "the batch ends with its longest answer, which need not be the first"),
    (lambda T: 1.0, "useful and computed slot-steps were counted as equal: a finished slot still computes"),
    (
        lambda T: 1 / len(T),
        "the slots run side by side: a batch takes as many steps as its longest answer, not as all together",
    ),
    (lambda T: sum(T) // (len(T) * max(T)), "`//` cuts the share down to 0; divide with `/`"),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(SLIPS, args, value):
        return rule
    if not 0 < value <= 1:
        return "a share lies between 0 and 1: useful slot-steps are a part of all slot-steps"
    return (
        "useful slot-steps are the sum of the answers; all slot-steps are slots times the steps of the longest answer"
    )


EXERCISE = Exercise(
    id="lab1.ex1",
    title="Utilisation of one static batch",
    difficulty=1,
    importance=5,
    minutes=5,
    points=2,
    hints=(
        "Draw three rows and 500 columns, one for each step. Colour the cells that gave a token. How many are "
        "coloured, and how many are there?",
        "Useful slot-steps are the tokens of all answers. The batch ends with one of them: which one sets the "
        "number of columns?",
        "Divide the sum of the list by two numbers multiplied: how many requests there are, and how long "
        "the longest is.",
    ),
    cases=_cases,
    reference=lambda lengths: static_utilisation(lengths, len(lengths)),
    diagnose=_diagnose,
)
