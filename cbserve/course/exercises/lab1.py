"""Lab 1, static batching: utilisation, waste, the expected value, a predicted run, exercise 1 of the handout."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from typing import Any

from cbserve.core.batching import StaticBatching
from cbserve.core.bounds import continuous_steps_bound, harmonic, static_steps, static_utilisation
from cbserve.core.trace import Finished
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.serving import request_name, serve

HANDOUT = [50, 150, 400, 80, 200]


def _batches(lengths: list[int], batch_size: int) -> list[list[int]]:
    return [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]


def _lengths(rng: random.Random, n: int, mean: float = 40) -> list[int]:
    """`n` lengths, the longest neither first nor last where there is a middle, so that no slip hides."""
    lengths = [1 + int(rng.expovariate(1 / mean)) for _ in range(n)]
    if n > 2:
        lengths[rng.randrange(1, n - 1)] = max(lengths) + rng.randint(1, 20)
    return lengths


# ---- ex1: one batch -------------------------------------------------------------------------------------------------


def _one_batch_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex1 {seed}")
    drawn = [(_lengths(rng, rng.randint(3, 12)),) for _ in range(4)]
    return [([10, 100, 500],), ([500, 10, 100],), *drawn, ([7] * rng.randint(2, 5),), ([rng.randint(1, 90)],)]


_ONE_BATCH_SLIPS: list[Slip] = [
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


def _diagnose_one_batch(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_ONE_BATCH_SLIPS, args, value):
        return rule
    if not 0 < value <= 1:
        return "a share lies between 0 and 1: useful slot-steps are a part of all slot-steps"
    return (
        "useful slot-steps are the sum of the answers; all slot-steps are slots times the steps of the longest answer"
    )


# ---- ex2: many batches ----------------------------------------------------------------------------------------------


def waste(lengths: list[int], batch_size: int) -> int:
    """Slot-steps without a token: B slots in each step of each batch, less the tokens. Empty slots count."""
    return batch_size * static_steps(lengths, batch_size) - sum(lengths)


def _many_batches_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex2 {seed}")
    drawn: list[Case] = []
    for full in (True, False, False, True):
        size = rng.randint(2, 6)
        count = size * rng.randint(2, 4) + (0 if full else rng.randint(1, size - 1))
        drawn.append((_lengths(rng, count), size))
    return [
        ([10, 100, 500], 3),
        ([10, 100, 500, 20, 60], 3),
        ([10, 100, 500, 20, 20, 80], 3),
        *drawn,
        (_lengths(rng, 5), 1),
        (_lengths(rng, 3), 8),
    ]


_MANY_BATCHES_SLIPS: list[Slip] = [
    (
        lambda T, B: sum(len(b) * max(b) - sum(b) for b in _batches(T, B)),
        "the last batch has fewer requests, and its empty slots are slots too: nobody else can use them",
    ),
    (
        lambda T, B: sum(B * max(b) - sum(b) for b in _batches(T, B) if len(b) == B),
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
        lambda T, B: B * len(_batches(T, B)) * max(T) - sum(T),
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


def _diagnose_many_batches(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_MANY_BATCHES_SLIPS, args, value):
        return rule
    if value < 0:
        return "waste is never negative: each batch computes at least as many slot-steps as it has tokens"
    return "for each batch: `batch_size` slots times its longest answer, less its tokens; then the sum over the batches"


# ---- ex3: the expected value ----------------------------------------------------------------------------------------


def _expected_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex3 {seed}")
    return [(2,), (3,), (8,), (64,), (1,), (rng.randint(4, 40),), (rng.randint(100, 400),)]


_EULER = 0.5772156649015329
_EXPECTED_SLIPS: list[Slip] = [
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


def _diagnose_expected(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_EXPECTED_SLIPS, args, value, rel=1e-9):
        return rule
    if not 0 < value <= 1:
        return "a share lies between 0 and 1"
    return "the mean length divided by the expected longest of B, which is the mean times 1 + 1/2 + ... + 1/B"


# ---- ex4: predict the engine ----------------------------------------------------------------------------------------


def _finishing_steps(lengths: list[int], batch_size: int) -> list[int]:
    """From the engine's own trace: the step, counted from 1, in which each request gets its last token."""
    trace = serve(lengths, StaticBatching(batch_size))
    done = {event.request_id: event.step + 1 for event in trace.of(Finished)}
    return [done[request_name(i)] for i in range(len(lengths))]


def _predict_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex4 {seed}")
    drawn: list[Case] = [(_lengths(rng, rng.randint(6, 11), mean=12), rng.randint(2, 4)) for _ in range(4)]
    return [([10, 100, 50], 3), ([10, 100, 50, 20, 40], 3), *drawn, (_lengths(rng, 4, mean=8), 1)]


def _offsets(lengths: list[int], batch_size: int, pace: Any = max) -> list[int]:
    """The step after which each request's batch begins, if a batch takes `pace(batch)` steps."""
    batches = _batches(lengths, batch_size)
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


_PREDICT_SLIPS: list[Slip] = [
    (lambda T, B: list(T), "the waiting is missing: a batch begins when the batch before it has ended"),
    (lambda T, B: list(accumulate(T)), "the requests run one after the other here; those of a batch run side by side"),
    (
        lambda T, B: [o + max(b) for o, b in zip(_offsets(T, B), (b for b in _batches(T, B) for _ in b), strict=True)],
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


def _diagnose_predict(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_PREDICT_SLIPS, args, value):
        return rule
    first = next(i for i, (a, b) in enumerate(zip(value, expected, strict=True)) if a != b)
    batch = first // args[1]
    where = "in the first batch: it ends at its own length" if not batch else f"in batch {batch + 1}: it begins late"
    return f"item {first} (request {request_name(first)}) is the first that differs from the engine's trace, {where}"


# ---- ex5: exercise 1 of the handout ---------------------------------------------------------------------------------


def compare(lengths: list[int], copies: float) -> list[float]:
    """(static, best continuous) utilisation on len(lengths) slots; the queue holds `lengths` `copies` times."""
    slots = len(lengths)
    if copies == math.inf:
        return [static_utilisation(lengths, slots), 1.0]
    queue = lengths * int(copies)
    return [static_utilisation(queue, slots), sum(queue) / (slots * continuous_steps_bound(queue, slots))]


def _compare_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab1.ex5 {seed}")
    drawn: list[Case] = [(_lengths(rng, rng.randint(3, 8)), copies) for copies in (1, 2, rng.randint(3, 9), math.inf)]
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


def _diagnose_compare(args: Case, value: Any, expected: Any) -> str:
    (lengths, copies), (static, continuous) = args, value
    if any(share > 1.5 for share in value):
        return "return shares between 0 and 1, not percent"
    if abs(static - expected[0]) > 1e-6:
        if abs(static - expected[1]) < 1e-6:
            return "the two are in the wrong order: static first, then continuous"
        rule = named_slip(_ONE_BATCH_SLIPS, (lengths,), static)
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


EXERCISES = (
    Exercise(
        id="lab1.ex1",
        title="Utilisation of one static batch",
        difficulty=1,
        importance=5,
        minutes=5,
        points=2,
        hints=(
            "Draw three rows and 500 columns, one for each step. Colour the cells that gave a token. How many are "
            "coloured, "
            "and how many are there?",
            "Useful slot-steps are the tokens of all answers. The batch ends with one of them: which one sets the "
            "number of "
            "columns?",
            "Divide the sum of the list by two numbers multiplied: how many requests there are, and how long the "
            "longest is.",
        ),
        cases=_one_batch_cases,
        reference=lambda lengths: static_utilisation(lengths, len(lengths)),
        diagnose=_diagnose_one_batch,
    ),
    Exercise(
        id="lab1.ex2",
        title="Waste over many batches",
        difficulty=2,
        importance=4,
        minutes=10,
        points=3,
        hints=(
            "Cut the list into batches first, in the order in which the requests came. What does each batch cost?",
            "A batch costs `batch_size` slots for as many steps as its own longest answer. The last batch costs that "
            "too, "
            "even when it is not full.",
            "Loop over range(0, len(lengths), batch_size) and slice. Add batch_size * max(batch) for each, and take "
            "the "
            "tokens away at the end.",
        ),
        cases=_many_batches_cases,
        reference=waste,
        diagnose=_diagnose_many_batches,
    ),
    Exercise(
        id="lab1.ex3",
        title="What to expect from exponential lengths",
        difficulty=3,
        importance=3,
        minutes=10,
        points=3,
        hints=(
            "Of B answers, wait for the first to end, then for the second. How does the waiting time change when "
            "fewer run?",
            "With k answers still running, the next one ends after 1/k of a mean, because any of the k may be it. Add "
            "the "
            "waiting times from k = B down to k = 1.",
            "The longest of B is 1 + 1/2 + ... + 1/B means long. Utilisation is one mean over that. range(1, "
            "batch_size + 1) "
            "has the right ends.",
        ),
        cases=_expected_cases,
        reference=lambda batch_size: 1 / harmonic(batch_size),
        diagnose=_diagnose_expected,
    ),
    Exercise(
        id="lab1.ex4",
        title="Predict the engine, step by step",
        difficulty=3,
        importance=4,
        minutes=10,
        points=4,
        hints=(
            "A request waits first and runs then. Which of the two depends on other requests?",
            "It waits for all batches before its own, each as long as its longest answer. Then it needs its own "
            "length, and "
            "nothing more.",
            "Keep a counter `begin`, 0 at first. For each batch append begin + length for each of its requests, and "
            "raise "
            "begin by the batch's longest.",
        ),
        cases=_predict_cases,
        reference=_finishing_steps,
        diagnose=_diagnose_predict,
    ),
    Exercise(
        id="lab1.ex5",
        title="Exercise 1 of the handout, with its assumption",
        difficulty=3,
        importance=5,
        minutes=10,
        points=3,
        hints=(
            "Two things keep the run from being shorter: the slots together give at most B tokens a step, and one "
            "slot gives "
            "at most one.",
            "The fewest steps are the larger of two numbers: all tokens over the slots, rounded up, and the longest "
            "single "
            "answer. With an infinite queue no slot is ever empty.",
            "queue = lengths * copies for a finite number. Then steps = max(ceil(sum / B), longest), and utilisation "
            "is "
            "tokens over B times steps. Treat math.inf before that, in a line of its own.",
        ),
        cases=_compare_cases,
        reference=compare,
        diagnose=_diagnose_compare,
    ),
)
