"""Exercise 4 of lab 1: predict the engine, step by step."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

from cbserve.core.batching import StaticBatching
from cbserve.core.trace import Finished
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.lab1.lengths import in_batches, random_lengths
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.serving import request_name, serve


def _finishing_steps(lengths: list[int], batch_size: int) -> list[int]:
    """From the engine's own trace: the step, counted from 1, in which each request gets its last token."""
    trace = serve(lengths, StaticBatching(batch_size))
    done = {event.request_id: event.step + 1 for event in trace.of(Finished)}
    return [done[request_name(i)] for i in range(len(lengths))]


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex4 {seed}")
    drawn: list[Case] = [(random_lengths(rng, rng.randint(6, 11), mean=12), rng.randint(2, 4)) for _ in range(4)]
    return [([10, 100, 50], 3), ([10, 100, 50, 20, 40], 3), *drawn, (random_lengths(rng, 4, mean=8), 1)]


def _offsets(lengths: list[int], batch_size: int, pace: Any = max) -> list[int]:
    """The step after which each request's batch begins, if a batch takes `pace(batch)` steps."""
    batches = in_batches(lengths, batch_size)
    begins = [0, *accumulate(pace(batch) for batch in batches)]
    return [begin for begin, batch in zip(begins, batches, strict=False) for _ in batch]


def _refilled(lengths: list[int], batch_size: int) -> list[int]:
    """When each would finish if a free slot were refilled at once."""
    slots, done = [0] * batch_size, []
    for length in lengths:
        slot = slots.index(min(slots))
        slots[slot] += length
        done.append(slots[slot])
    return done


def _shifted(lengths: list[int], batch_size: int, pace: Any = max) -> list[int]:
    return [offset + length for offset, length in zip(_offsets(lengths, batch_size, pace), lengths, strict=True)]


_SLIPS: list[Slip] = [
    (lambda T, B: list(T), "the waiting is missing: a batch begins when the batch before it has ended"),
    (lambda T, B: list(accumulate(T)), "the requests run one after the other here; those of a batch run side by side"),
    (
        lambda T, B: [
            o + max(b) for o, b in zip(_offsets(T, B), (b for b in in_batches(T, B) for _ in b), strict=True)
        ],
        "a request gets its last token at its own end; only its slot is held until the batch ends",
    ),
    (lambda T, B: [step - 1 for step in _shifted(T, B)], "each is one too small: the first step is number 1"),
    (lambda T, B: [step + 1 for step in _shifted(T, B)], "each is one too large: a request of 1 token ends in step 1"),
    (
        _refilled,
        "a slot was refilled when it became free; static batching admits nobody before the whole batch has ended",
    ),
    (
        lambda T, B: _shifted(T, B, sum),
        "a batch takes as many steps as its longest answer, not as all of them together",
    ),
    (
        lambda T, B: _shifted(T, B, lambda batch: batch[-1]),
        "a batch ends with its longest answer, not with its last one",
    ),
    (lambda T, B: _shifted(T, B, min), "a batch ends with its longest answer, not with its shortest"),
    (lambda T, B: _shifted(T, len(T)), "only `batch_size` requests fit into a batch; the others wait"),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SLIPS, args, value):
        return rule
    first = next(i for i, (a, b) in enumerate(zip(value, expected, strict=True)) if a != b)
    batch = first // args[1]
    where = "in the first batch: it ends at its own length" if not batch else f"in batch {batch + 1}: it begins late"
    return f"item {first} (request {request_name(first)}) is the first that differs from the engine's trace, {where}"


EXERCISE = Exercise(
    id="lab1.ex4",
    title="Predict the engine, step by step",
    difficulty=3,
    importance=4,
    minutes=10,
    points=4,
    hints=(
        "A request waits first and runs then. Which of the two depends on other requests?",
        "It waits for all batches before its own, each as long as its longest answer. Then it needs its own length, "
        "and nothing more.",
        "Keep a counter `begin`, 0 at first. For each batch append begin + length for each of its requests, and raise "
        "begin by the batch's longest.",
    ),
    cases=_cases,
    reference=_finishing_steps,
    diagnose=_diagnose,
)
