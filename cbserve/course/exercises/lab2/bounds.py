"""Exercises 3 and 4 of lab 2: bounds in steps, for any scheduler and for what refilling gains."""

from __future__ import annotations

import math
import random
from typing import Any

from cbserve.core.bounds import continuous_steps_bound, harmonic, static_steps, step_speedup_bound
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.slips import Slip, named_slip


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2 bounds {seed}")
    drawn: list[Case] = []
    for heavy in (False, True, False):
        lengths = [1 + int(rng.expovariate(1 / 20)) for _ in range(rng.randint(7, 20))]
        if heavy:  # one answer is longer than all others together over the slots
            lengths[len(lengths) // 2] = sum(lengths)
        slots = rng.randint(2, 5)
        if sum(lengths) % slots == 0:
            lengths[0] += 1
        drawn.append((lengths, slots))
    return [([10, 100, 500, 30, 60, 21], 3), ([4, 4, 4, 4, 5], 3), ([9, 8, 7, 9, 6, 8, 7], 2), *drawn]


_BOUND_SLIPS: list[Slip] = [
    (
        lambda T, S: max(sum(T) / S, max(T)),
        "steps are whole: round the tokens over the slots up, since the last step may be half full",
    ),
    (
        lambda T, S: max(sum(T) // S, max(T)),
        "`//` rounds down, and the tokens that are left over need a step of their own",
    ),
    (
        lambda T, S: math.ceil(sum(T) / S),
        "one answer gives one token a step: no number of slots makes the run shorter than the longest answer",
    ),
    (
        lambda T, S: sum(T) / S,
        "one answer gives one token a step: the longest answer is a second bound, and steps are whole",
    ),
    (lambda T, S: max(T), "the slots together give at most `slots` tokens a step: that is the other bound"),
    (lambda T, S: static_steps(T, S), "these are the steps of static batching; no scheduler at all is meant here"),
    (lambda T, S: sum(T), "this is one slot alone; there are `slots` of them"),
    (
        lambda T, S: math.ceil(sum(T) / S) + max(T),
        "both limits hold at the same time, so the larger one counts, not their sum",
    ),
    (
        lambda T, S: min(math.ceil(sum(T) / S), max(T)),
        "the run must respect both limits, so it is at least as long as the larger one",
    ),
]


def _diagnose_bound(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_BOUND_SLIPS, args, value):
        return rule
    return "the larger of two limits: all tokens over the slots, rounded up, and the longest single answer"


FEWEST_STEPS = Exercise(
    id="lab2.ex3",
    title="The fewest steps that any scheduler can need",
    difficulty=2,
    importance=4,
    minutes=7,
    points=2,
    hints=(
        "What limits a run when there are many short answers? And what when there is one very long one?",
        "All slots full in every step is the best case for the sum. One token a step is the best case for one answer. "
        "Both limits hold.",
        "Divide the sum by the slots and round up, math.ceil does; then take the larger of that and "
        "the longest answer.",
    ),
    cases=_cases,
    reference=continuous_steps_bound,
    diagnose=_diagnose_bound,
)

_SPEEDUP_SLIPS: list[Slip] = [
    (lambda T, S: 1 / step_speedup_bound(T, S), "the fraction stands on its head: how many times fewer steps is asked"),
    (lambda T, S: static_steps(T, S) / math.ceil(sum(T) / S), "the longest answer limits continuous batching too"),
    (
        lambda T, S: S * static_steps(T, S) / sum(T),
        "1 / utilisation would be right with slots that are always full; use the bound in whole steps",
    ),
    (lambda T, S: static_steps(T, S) / max(T), "the slots limit continuous batching too"),
    (lambda T, S: harmonic(S), "H_B is what exponential lengths give on average; here are the lengths themselves"),
    (
        lambda T, S: static_steps(T, S) - continuous_steps_bound(T, S),
        "this is how many steps are saved; the ratio is asked",
    ),
    (
        lambda T, S: len(T) * max(T) / sum(T),
        "static batching takes one batch of `slots` requests after the other, each as long as its own longest",
    ),
    (
        lambda T, S: max(T) * math.ceil(len(T) / S) / continuous_steps_bound(T, S),
        "each static batch is as long as its own longest answer, not as the longest of all",
    ),
    (lambda T, S: 1.0, "both ways of batching were counted the same"),
    (
        lambda T, S: static_steps(sorted(T), S) / continuous_steps_bound(T, S),
        "the lengths were sorted first; static batches are filled in order of arrival",
    ),
]


def _diagnose_speedup(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SPEEDUP_SLIPS, args, value):
        return rule
    return "the steps of static batching (each batch as long as its longest) over the bound of exercise 3"


SPEEDUP = Exercise(
    id="lab2.ex4",
    title="The most that refilling can gain",
    difficulty=2,
    importance=4,
    minutes=7,
    points=2,
    hints=(
        "Compare two runs of the same requests on the same slots. Which number of steps do you have already?",
        "Lab 1 counted static steps: each batch, in order of arrival, is as long as its longest. Your bound counts "
        "the fewest steps.",
        "Sum max(batch) over slices of `slots` requests, and divide by continuous_bound(lengths, slots).",
    ),
    cases=_cases,
    reference=step_speedup_bound,
    diagnose=_diagnose_speedup,
)
