"""Exercise 3 of lab 1: the utilisation to expect from exponential lengths."""

from __future__ import annotations

import math
import random
from typing import Any

from cbserve.core.bounds import harmonic
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.slips import Slip, named_slip


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex3 {seed}")
    return [(2,), (3,), (8,), (64,), (1,), (rng.randint(4, 40),), (rng.randint(100, 400),)]


_EULER = 0.5772156649015329
_SLIPS: list[Slip] = [
    (
        lambda B: 1 / B,
        "that would be one busy slot; the other answers also run for a while: the longest is H_B means long",
    ),
    (harmonic, "this is the longest answer in means; the utilisation is one mean divided by that"),
    (lambda B: 100 / harmonic(B), "this is in percent; return a share between 0 and 1"),
    (
        lambda B: 1 / harmonic(B - 1),
        "the sum ends one term early: H_B goes from 1 to 1/B, and range() leaves its end out",
    ),
    (lambda B: 1 / harmonic(B + 1), "the sum has one term too many: H_B ends with 1/B"),
    (lambda B: 1 / (harmonic(B) - 1), "the sum begins with 1, not with 1/2: somebody must finish first"),
    (lambda B: 1 / math.log(B), "ln B leaves out the constant; the sum 1 + 1/2 + ... + 1/B is exact"),
    (lambda B: 1 / (math.log(B) + _EULER), "ln B + 0.577 is close for large B only; add up the sum"),
    (lambda B: 1 - 1 / harmonic(B), "this is the share thrown away; the share that is used is asked"),
    (lambda B: B / harmonic(B), "this is the number of busy slots; divide by B"),
    (
        lambda B: 0.5,
        "half would be right if lengths were spread evenly and B were large; exponential lengths have a long tail",
    ),
    (
        lambda B: (B + 1) / (2 * B),
        "this is for lengths spread evenly between 0 and a limit; exponential ones have a long tail",
    ),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SLIPS, args, value, rel=1e-9):
        return rule
    if not 0 < value <= 1:
        return "a share lies between 0 and 1"
    return "the mean length divided by the expected longest of B, which is the mean times 1 + 1/2 + ... + 1/B"


EXERCISE = Exercise(
    id="lab1.ex3",
    title="What to expect from exponential lengths",
    difficulty=3,
    importance=3,
    minutes=10,
    points=3,
    hints=(
        "Of B answers, wait for the first to end, then for the second. How does the waiting time change "
        "when fewer run?",
        "With k answers still running, the next one ends after 1/k of a mean, because any of the k may be it. Add the "
        "waiting times from k = B down to k = 1.",
        "The longest of B is 1 + 1/2 + ... + 1/B means long. Utilisation is one mean over that. "
        "range(1, batch_size + 1) has the right ends.",
    ),
    cases=_cases,
    reference=lambda batch_size: 1 / harmonic(batch_size),
    diagnose=_diagnose,
)
