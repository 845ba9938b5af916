"""Lab 1: the reference passes, and each slip hears the rule that it breaks."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from cbserve.core.bounds import harmonic, static_steps
from cbserve.course.checking import examine
from cbserve.course.exercises import get, ids_of

IDS = [f"lab1.ex{n}" for n in range(1, 6)]


def batches(T: list[int], B: int) -> list[list[int]]:
    return [T[i : i + B] for i in range(0, len(T), B)]


def utilisation(T):
    return sum(T) / (len(T) * max(T))


def waste(T, B):
    return sum(B * max(b) for b in batches(T, B)) - sum(T)


def steps(T, B, ends=lambda begin, batch: [begin + t for t in batch], pace=max):
    found, begin = [], 0
    for batch in batches(T, B):
        found += ends(begin, batch)
        begin += pace(batch)
    return found


def one_after_the_other(T, B):
    return [sum(T[: i + 1]) for i in range(len(T))]


def refilled(T, B):
    slots, done = [0] * B, []
    for t in T:
        slots.sort()
        slots[0] += t
        done.append(slots[0])
    return done


def handout(T, copies, bound=lambda queue, B: max(math.ceil(sum(queue) / B), max(queue)), endless=1.0):
    static = utilisation(T)
    if copies == math.inf:
        return [static, endless]
    queue = T * copies
    return [static, sum(queue) / (len(T) * bound(queue, len(T)))]


def rounded_down(T):
    return sum(T) // (len(T) * max(T))


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("lab1.ex1", lambda T: sum(T) / max(T), "multiply the steps by the number of slots"),
    ("lab1.ex1", lambda T: 1 - utilisation(T), "share that was used is asked"),
    ("lab1.ex1", lambda T: 100 * utilisation(T), "in percent"),
    ("lab1.ex1", lambda T: max(T) / sum(T), "stands on its head"),
    ("lab1.ex1", lambda T: sum(T) / (len(T) * T[-1]), "need not be the last"),
    ("lab1.ex1", lambda T: sum(T) / (len(T) * sorted(T)[0]), "not with its shortest"),
    ("lab1.ex1", lambda T: sum(T) / (len(T) * sum(T)), "side by side"),
    ("lab1.ex1", lambda T: sum(T) / (len(T) * (sum(T) / len(T))), "a finished slot still computes"),
    ("lab1.ex1", rounded_down, "divide with `/`"),
    ("lab1.ex1", lambda T: -0.3, "between 0 and 1"),
    ("lab1.ex1", lambda T: 0.123, "slots times the steps of the longest"),
    ("lab1.ex2", lambda T, B: sum(len(b) * max(b) for b in batches(T, B)) - sum(T), "empty slots are slots too"),
    ("lab1.ex2", lambda T, B: sum(B * max(b) - sum(b) for b in batches(T, B) if len(b) == B), "last batch is missing"),
    ("lab1.ex2", lambda T, B: waste(sorted(T), B), "order of arrival"),
    ("lab1.ex2", lambda T, B: waste(sorted(T, reverse=True), B), "order of arrival"),
    ("lab1.ex2", lambda T, B: len(T) * max(T) - sum(T), "one batch of all requests"),
    ("lab1.ex2", lambda T, B: B * max(T) - sum(T), "this is one batch"),
    ("lab1.ex2", lambda T, B: B * max(T) * len(batches(T, B)) - sum(T), "ends only its own batch"),
    ("lab1.ex2", lambda T, B: B * static_steps(T, B), "these are all slot-steps"),
    ("lab1.ex2", lambda T, B: sum(T), "these are the slot-steps that gave a token"),
    ("lab1.ex2", lambda T, B: waste(T, B) / (waste(T, B) + sum(T)), "this is a share"),
    ("lab1.ex2", lambda T, B: static_steps(T, B) - sum(T), "multiply the steps by it"),
    ("lab1.ex2", lambda T, B: -7, "never negative"),
    ("lab1.ex3", lambda B: 1 / B, "one busy slot"),
    ("lab1.ex3", lambda B: harmonic(B), "this is the longest answer in means"),
    ("lab1.ex3", lambda B: 1 / sum(1 / k for k in range(1, B)) if B > 1 else 1.0, "one term early"),
    ("lab1.ex3", lambda B: 1 / harmonic(B + 1), "one term too many"),
    ("lab1.ex3", lambda B: 1 / (math.log(B) + 0.5772156649015329), "close for large B only"),
    ("lab1.ex3", lambda B: 1 / math.log(B) if B > 1 else 1.0, "leaves out the constant"),
    ("lab1.ex3", lambda B: 1 - 1 / harmonic(B), "share that is used is asked"),
    ("lab1.ex3", lambda B: (B + 1) / (2 * B), "spread evenly"),
    ("lab1.ex4", lambda T, B: list(T), "the waiting is missing"),
    ("lab1.ex4", one_after_the_other, "run side by side"),
    ("lab1.ex4", lambda T, B: steps(T, B, lambda begin, b: [begin + max(b)] * len(b)), "at its own end"),
    ("lab1.ex4", lambda T, B: [s - 1 for s in steps(T, B)], "one too small"),
    ("lab1.ex4", lambda T, B: steps(T, B, pace=sum), "not as all of them together"),
    ("lab1.ex4", lambda T, B: steps(T, B, pace=min), "not with its shortest"),
    ("lab1.ex4", refilled, "admits nobody before the whole batch has ended"),
    ("lab1.ex4", lambda T, B: [*steps(T, B)[:-1], 0], "is the first that differs"),
    ("lab1.ex4", lambda T, B: sum(steps(T, B)), "a list is wanted"),
    ("lab1.ex4", lambda T, B: steps(T, B)[:-1], "items are wanted"),
    ("lab1.ex5", lambda T, n: [100 * x for x in handout(T, n)], "not percent"),
    ("lab1.ex5", lambda T, n: handout(T, n)[::-1], "wrong order"),
    ("lab1.ex5", lambda T, n: [sum(T) / (len(T) * T[-1]), handout(T, n)[1]], "need not be the last"),
    ("lab1.ex5", lambda T, n: handout(T, n, endless=0.999), "the value itself is asked"),
    ("lab1.ex5", lambda T, n: handout(T, n, endless=utilisation(T)), "how many slots are ever empty"),
    ("lab1.ex5", lambda T, n: [utilisation(T), 1.0], "needs a queue that never runs empty"),
    ("lab1.ex5", lambda T, n: handout(T, n, lambda q, B: max(sum(q) / B, max(q))), "steps are whole (round up)"),
    (
        "lab1.ex5",
        lambda T, n: handout(T, n, lambda q, B: max(q) * (len(q) // B)),
        "runs beside the first, not behind it",
    ),
    ("lab1.ex5", lambda T, n: handout(T, n, lambda q, B: math.ceil(sum(q) / B)), "a second lower bound"),
    (
        "lab1.ex5",
        lambda T, n: [utilisation(T), 1.0] if n == math.inf else handout(T, 1),
        "holds the list `copies` times",
    ),
]


def right(id: str) -> Callable[..., Any]:
    return {"lab1.ex1": utilisation, "lab1.ex2": waste, "lab1.ex4": steps, "lab1.ex5": handout}.get(
        id, lambda B: 1 / harmonic(B)
    )


def test_the_lab_has_five_exercises() -> None:
    assert ids_of("lab1") == IDS


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("seed", range(20))
def test_the_reference_and_a_plain_solution_pass(id: str, seed: int) -> None:
    exercise = get(id)
    for answer in (exercise.reference, right(id)):
        outcome = examine(exercise, answer, seed)
        assert outcome.status == "passed", outcome


@pytest.mark.parametrize(("id", "answer", "rule"), WRONG, ids=[f"{id} {rule}" for id, _, rule in WRONG])
@pytest.mark.parametrize("seed", range(5))
def test_a_slip_hears_the_rule_that_it_breaks(id: str, answer: Callable[..., Any], rule: str, seed: int) -> None:
    outcome = examine(get(id), answer, seed)
    assert outcome.status == "failed"
    assert rule in dict(outcome.lines)["rule"]


@pytest.mark.parametrize("id", IDS)
def test_a_stub_is_not_attempted(id: str) -> None:
    def stub(*args):
        """What the lab says."""
        ...

    assert examine(get(id), stub).status == "not-attempted"


@pytest.mark.parametrize("id", IDS)
def test_cases_are_the_same_for_the_same_seed_and_differ_between_seeds(id: str) -> None:
    cases = get(id).cases
    assert cases(3) == cases(3) != cases(4)


@pytest.mark.parametrize("id", IDS)
def test_a_constant_that_is_right_for_the_worked_example_does_not_pass(id: str) -> None:
    exercise = get(id)
    first = exercise.reference(*exercise.cases(0)[0])
    assert examine(exercise, lambda *args: first).status == "failed"


def test_the_handouts_numbers() -> None:
    assert get("lab1.ex1").reference([10, 100, 500]) == pytest.approx(0.4067, abs=5e-5)
    assert get("lab1.ex5").reference([50, 150, 400, 80, 200], math.inf) == pytest.approx([0.44, 1.0])
    assert get("lab1.ex5").reference([50, 150, 400, 80, 200], 1) == pytest.approx([0.44, 0.44])
