"""Exercise 2 of lab 1: the waste over many batches."""

from __future__ import annotations

import random
from typing import Any

from cbserve.core.bounds import static_steps, static_utilisation
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.lab1.lengths import in_batches, random_lengths
from cbserve.course.exercises.slips import Slip, named_slip


def waste(lengths: list[int], batch_size: int) -> int:
    """Slot-steps without a token: B slots in each step of each batch, less the tokens. Empty slots count."""
    return batch_size * static_steps(lengths, batch_size) - sum(lengths)


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex2 {seed}")
    drawn: list[Case] = []
    for full in (True, False, False, True):
        size = rng.randint(2, 6)
        count = size * rng.randint(2, 4) + (0 if full else rng.randint(1, size - 1))
        drawn.append((random_lengths(rng, count), size))
    return [
        ([10, 100, 500], 3),
        ([10, 100, 500, 20, 60], 3),
        ([10, 100, 500, 20, 20, 80], 3),
        *drawn,
        (random_lengths(rng, 5), 1),
        (random_lengths(rng, 3), 8),
    ]


_SLIPS: list[Slip] = [
    (
        lambda T, B: sum(len(b) * max(b) - sum(b) for b in in_batches(T, B)),
        "the last batch has fewer requests, and its empty slots are slots too: nobody else can use them",
    ),
    (
        lambda T, B: sum(B * max(b) - sum(b) for b in in_batches(T, B) if len(b) == B),
        "the last batch is missing: it runs too, with empty slots",
    ),
    (
        lambda T, B: waste(sorted(T), B),
        "the lengths were sorted first; batches are filled in order of arrival, since nobody knows a length beforehand",
    ),
    (
        lambda T, B: waste(sorted(T, reverse=True), B),
        "the lengths were sorted first; batches are filled in order of arrival, since nobody knows a length beforehand",
    ),
    (lambda T, B: len(T) * max(T) - sum(T), "this is one batch of all requests; a batch holds `batch_size` of them"),
    (
        lambda T, B: B * max(T) - sum(T),
        "this is one batch; each batch of `batch_size` requests has its own longest answer",
    ),
    (
        lambda T, B: B * len(in_batches(T, B)) * max(T) - sum(T),
        "each batch has its own longest answer; the longest of all ends only its own batch",
    ),
    (lambda T, B: sum(T), "these are the slot-steps that gave a token; the others are asked"),
    (lambda T, B: B * static_steps(T, B), "these are all slot-steps; take away those that gave a token"),
    (lambda T, B: static_steps(T, B), "these are steps; a step has B slots, and the useful slot-steps come off"),
    (
        lambda T, B: static_steps(T, B) - sum(T),
        "a step has `batch_size` slots: multiply the steps by it before you subtract",
    ),
    (lambda T, B: 1 - static_utilisation(T, B), "this is a share; the number of slot-steps is asked"),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SLIPS, args, value):
        return rule
    if value < 0:
        return "waste is never negative: each batch computes at least as many slot-steps as it has tokens"
    return "for each batch: `batch_size` slots times its longest answer, less its tokens; then the sum over the batches"


EXERCISE = Exercise(
    id="lab1.ex2",
    title="Waste over many batches",
    difficulty=2,
    importance=4,
    minutes=10,
    points=3,
    hints=(
        "Cut the list into batches first, in the order in which the requests came. What does each batch cost?",
        "A batch costs `batch_size` slots for as many steps as its own longest answer. The last batch costs that too, "
        "even when it is not full.",
        "Loop over range(0, len(lengths), batch_size) and slice. Add batch_size * max(batch) for each, and take the "
        "tokens away at the end.",
    ),
    cases=_cases,
    reference=waste,
    diagnose=_diagnose,
)
