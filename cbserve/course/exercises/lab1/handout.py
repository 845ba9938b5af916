"""Exercise 5 of lab 1: exercise 1 of the handout, with its assumption."""

from __future__ import annotations

import math
import random
from typing import Any

from cbserve.core.bounds import continuous_steps_bound, static_utilisation
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.lab1 import one_batch
from cbserve.course.exercises.lab1.lengths import random_lengths
from cbserve.course.exercises.slips import Slip, named_slip

HANDOUT = [50, 150, 400, 80, 200]


def compare(lengths: list[int], copies: float) -> list[float]:
    """(static, best continuous) utilisation on len(lengths) slots; the queue holds `lengths` `copies` times."""
    slots = len(lengths)
    if copies == math.inf:
        return [static_utilisation(lengths, slots), 1.0]
    queue = lengths * int(copies)
    return [static_utilisation(queue, slots), sum(queue) / (slots * continuous_steps_bound(queue, slots))]


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex5 {seed}")
    drawn: list[Case] = [
        (random_lengths(rng, rng.randint(3, 8)), copies) for copies in (1, 2, rng.randint(3, 9), math.inf)
    ]
    fixed: list[Case] = [(HANDOUT, math.inf), ([10, 100, 500], 1), ([10, 100, 500], 10), (HANDOUT, 1), (HANDOUT, 2)]
    return [*fixed, *drawn]


_CONTINUOUS_SLIPS: list[Slip] = [
    (  # also the missing round-up: sum/B steps, where sum/B is no whole number
        lambda T, copies: 1.0,
        "exactly 100 % needs a queue that never runs empty; with so many copies steps are whole (round up), and the "
        "longest answer may have to run on alone",
    ),
    (
        lambda T, copies: static_utilisation(T, len(T)),
        "the queue holds the list `copies` times, and a second copy of the longest answer runs beside the first, not "
        "behind it",
    ),
    (
        lambda T, copies: sum(T) * copies / (len(T) * math.ceil(sum(T) * copies / len(T))),
        "the longest answer gives one token a step, whatever the others do: it is a second lower bound on the steps",
    ),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    (lengths, copies), (static, continuous) = args, value
    if any(share > 1.5 for share in value):
        return "return shares between 0 and 1, not percent"
    if abs(static - expected[0]) > 1e-6:
        if abs(static - expected[1]) < 1e-6:
            return "the two are in the wrong order: static first, then continuous"
        rule = named_slip(one_batch.SLIPS, (lengths,), static)
        return f"static: {rule or 'each batch is the list itself, so your utilisation() gives it'}"
    if copies == math.inf:
        if 0.9 < continuous < 1:
            return "continuous, infinite queue: the value itself is asked under that assumption, not one near it"
        return (
            "continuous, infinite queue: a slot that becomes free is refilled at once; how many slots are ever empty?"
        )
    if rule := named_slip(_CONTINUOUS_SLIPS, args, continuous):
        return f"continuous: {rule}"
    return "continuous: tokens over slots times the fewest steps: the larger of sum/B, rounded up, and the longest"


EXERCISE = Exercise(
    id="lab1.ex5",
    title="Exercise 1 of the handout, with its assumption",
    difficulty=3,
    importance=5,
    minutes=10,
    points=3,
    hints=(
        "Two things keep the run from being shorter: the slots together give at most B tokens a step, and one slot "
        "gives at most one.",
        "The fewest steps are the larger of two numbers: all tokens over the slots, rounded up, and the longest "
        "single answer. With an infinite queue no slot is ever empty.",
        "queue = lengths * copies for a finite number. Then steps = max(ceil(sum / B), longest), and utilisation is "
        "tokens over B times steps. Treat math.inf before that, in a line of its own.",
    ),
    cases=_cases,
    reference=compare,
    diagnose=_diagnose,
)
