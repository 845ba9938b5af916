"""What holds for every exercise, whatever it asks: each argument counts, what is handed over stays as it is, and a
value of the wrong kind, or a rounded one, is named as that."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cbserve.core.policies import Priority
from cbserve.core.scheduler import Scheduler
from cbserve.course.checking import examine
from cbserve.course.exercises import all_exercises, get
from cbserve.course.exercises.lab3.scaling import gains, scale_out
from cbserve.course.exercises.paging import tensors
from cbserve.course.exercises.pools import EnginePool
from cbserve.course.values import described
from cbserve.kernels.paged_attention import paged_attention

Function = Callable[..., Any]


def is_complete(tokens, max_tokens, eos, ignore_eos):
    return len(tokens) >= max_tokens or (tokens[-1] in eos and not ignore_eos)


def retire(self):
    return [seq for seq in self.running if seq.is_finished]


def admit(self, step):
    while (seq := self.policy.peek()) is not None and self.free_slots and (count := self.num_new_tokens(seq, step)):
        if self.kv.blocks_needed(seq, self.kv.num_cached_tokens(seq) + count) > self.kv.num_free_blocks:
            return
        yield seq


def displaces(self, candidate, running, now_s):
    victim = max(running, key=lambda seq: (seq.request.priority, seq.arrival_s))
    return victim if candidate.request.priority < victim.request.priority else None


def paged_decode(q, k_cache, v_cache, block_table, context_len, scale):
    lens = torch.tensor([context_len])
    return paged_attention(q[None], k_cache, v_cache, block_table[None], torch.tensor([0, 1]), lens, scale)[0]


def absorb(state, q, k, v, seen, scale):
    best, total, values = state
    scores = q @ k[:seen].T * scale
    top = torch.maximum(best, scores.amax(1))
    shrink, weights = torch.exp(best - top), torch.exp(scores - top[:, None])
    return top, total * shrink + weights.sum(1), values * shrink[:, None] + weights @ v[:seen]


def a_class(name: str, base: type, method: str) -> Callable[[Function], Any]:
    return lambda function: type(name, (base,), {method: lambda *args: function(*args)})


#: Each function that a learner writes -> (a right one, the answer made of it, the kinds of value that it may give)
WRITTEN: dict[str, tuple[Function, Callable[[Function], Any], tuple[type, ...]]] = {
    **{f"lab1.ex{n}": (get(f"lab1.ex{n}").reference, lambda f: f, (int, float)) for n in (1, 2, 3)},
    **{f"lab1.ex{n}": (get(f"lab1.ex{n}").reference, lambda f: f, (list,)) for n in (4, 5)},
    **{f"lab2.ex{n}": (get(f"lab2.ex{n}").reference, lambda f: f, (int, float)) for n in (3, 4, 5)},
    "lab2.ex1 is_complete": (is_complete, lambda f: (f, a_class("Retiring", Scheduler, "retire")(retire)), (bool,)),
    "lab2.ex1 retire": (retire, lambda f: (is_complete, a_class("Retiring", Scheduler, "retire")(f)), (list,)),
    "lab2.ex2 admit": (admit, a_class("Admitting", Scheduler, "admit"), (list,)),
    "lab2.ex6 displaces": (displaces, a_class("PremiumFirst", Priority, "displaces"), (type(None),)),
    "lab3.ex1 allocate": (EnginePool.allocate, a_class("MyPool", EnginePool, "allocate"), (list,)),
    "lab3.ex1 share": (EnginePool.share, a_class("MyPool", EnginePool, "share"), (object,)),  # nobody looks at it
    "lab3.ex2": (get("lab3.ex2").reference, lambda f: f, ()),
    "lab3.ex3": (paged_decode, lambda f: f, ()),
    "lab3.ex4 absorb": (absorb, lambda f: (None, f), ()),
    "lab3.ex5": (get("lab3.ex5").reference, lambda f: f, (dict,)),
    "lab3.ex6 gains": (gains, lambda f: (f, scale_out), (dict,)),
    "lab3.ex6 scale_out": (scale_out, lambda f: (gains, f), (dict,)),
}


def heard(name: str, function: Function, seed: int = 0) -> tuple[str, str]:
    """(status, all that a check says of an answer made of `function`)."""
    outcome = examine(get(name.split()[0]), WRITTEN[name][1](function), seed)
    return outcome.status, "\n".join(text for _, text in outcome.lines)


def test_every_exercise_of_a_lab_is_here() -> None:
    labs = {exercise.id for exercise in all_exercises() if exercise.id.startswith("lab")}
    assert labs == {name.split()[0] for name in WRITTEN}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_right_passes(name: str, seed: int) -> None:
    assert heard(name, WRITTEN[name][0], seed) == ("passed", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name} {type(value).__name__}")
        for name, (_, _, kinds) in WRITTEN.items()
        for value in (None, 7, "7", [7], {"a": 7})
        if not isinstance(value, kinds)
    ],
)
def test_a_value_of_the_wrong_kind_is_named_as_that(name: str, value: Any) -> None:
    status, said = heard(name, lambda *args: print("so that it is no stub") or value)
    assert status == "failed" or (status == "not-attempted" and value is None)
    assert ("return" in said) if value is None else (described(value) in said)
    assert "in the engine" not in said


@pytest.mark.parametrize("name", ["lab2.ex1 retire", "lab2.ex2 admit", "lab3.ex1 allocate", "lab1.ex4"])
def test_an_item_of_the_wrong_kind_is_named_too(name: str) -> None:
    status, said = heard(name, lambda *args: ["7"] * (args[-1] if name.startswith(("lab1", "lab3")) else 1))
    assert status == "failed" and "a string ('7')" in said


CHANGED = [
    *((f"lab1.ex{n}", 0) for n in (1, 2, 4, 5)),
    *(("lab2.ex1 is_complete", at) for at in (0, 2)),
    *((f"lab2.ex{n}", 0) for n in (3, 4)),
    ("lab2.ex6 displaces", 2),
    ("lab3.ex1 share", 1),
    ("lab3.ex2", 1),
    *(("lab3.ex3", at) for at in range(4)),
    *(("lab3.ex4 absorb", at) for at in (1, 2, 3)),
]


@pytest.mark.parametrize(("name", "at"), CHANGED)
def test_an_argument_that_was_changed_is_noticed_although_the_value_is_right(name: str, at: int) -> None:
    def spoils(*args: Any) -> Any:
        value = WRITTEN[name][0](*args[:at], copy.copy(args[at]), *args[at + 1 :])
        if isinstance(args[at], list):
            args[at].append(args[at][0])
        else:
            args[at].add_(1)
        return value

    status, said = heard(name, spoils)
    assert status == "failed" and "your function changed " in said and "belongs to the caller" in said


def test_the_argument_that_was_changed_has_its_name_and_both_values() -> None:
    def waste(lengths: list[int], batch_size: int) -> int:
        paid, tokens = 0, sum(lengths)
        while lengths:
            batch = [lengths.pop(0) for _ in range(min(batch_size, len(lengths)))]
            paid += batch_size * max(batch)
        return paid - tokens

    status, said = heard("lab1.ex2", waste)
    assert status == "failed" and "your function changed `lengths`: [10, 100, 500] became []" in said


def test_absorb_may_change_its_own_state() -> None:
    def in_place(state, *rest):
        for old, new in zip(state, absorb(state, *rest), strict=True):
            old.copy_(new)
        return state

    assert heard("lab3.ex4 absorb", in_place)[0] == "passed"


def cases_of(name: str, seed: int) -> list[tuple[Any, ...]]:
    """What the function is called with. (`absorb` gets a state for the query, and `seen` for the context.)"""
    cases, (id, *part) = get(name.split()[0]).cases(seed), name.split()
    if id in ("lab3.ex3", "lab3.ex4"):
        return [tensors(case) for (case,) in cases]
    return [case[1:] if part else case for case in cases if not part or case[0] in ("tokens", *part)]


ARGUMENTS = [name for name in WRITTEN if not name.endswith(("retire", "admit", "displaces", "allocate", "share"))]


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("seed", range(2))
def test_no_argument_can_be_left_out_for_its_usual_value(name: str, seed: int) -> None:
    """For each argument a number or list that some case has: an answer that takes it in every case does not pass."""
    right, cases = WRITTEN[name][0], cases_of(name, seed)
    for at in range(len(cases[0])):
        usual = {repr(case[at]): case[at] for case in cases if not isinstance(case[at], torch.Tensor)}
        for value in usual.values():
            assert heard(name, lambda *args, i=at, v=value: right(*args[:i], v, *args[i + 1 :]), seed)[0] != "passed"


def rounding(function: Function, digits: int) -> Function:
    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(map(rounded, value))
        return round(value, digits) if isinstance(value, float) else value

    return lambda *args: rounded(function(*args))


@pytest.mark.parametrize("digits", [2, 4])
@pytest.mark.parametrize(
    "name", ["lab1.ex1", "lab1.ex3", "lab1.ex5", "lab2.ex4", "lab3.ex5", "lab3.ex6 gains", "lab3.ex6 scale_out"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_rounded_number_is_called_rounded(name: str, digits: int, seed: int) -> None:
    status, said = heard(name, rounding(WRITTEN[name][0], digits), seed)
    assert status == "passed" or "this is rounded: return the full number" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("lab1.ex1", 0.4067), ("lab1.ex3", 0.6667), ("lab2.ex4", 1.286), ("lab1.ex5", [0.4067, 0.9997])],
)
def test_the_number_of_a_worked_example_is_called_rounded(name: str, value: Any) -> None:
    """In the case of the worked example; the other cases get the full number."""
    right = WRITTEN[name][0]

    def answer(*args: Any) -> Any:
        full = right(*args)
        return value if rounding(lambda: full, 4)() == value or rounding(lambda: full, 3)() == value else full

    status, said = heard(name, answer)
    assert status == "failed" and "this is rounded: return the full number" in said


def test_a_whole_number_is_no_rounding_of_one_beside_it() -> None:
    assert "needs a queue that never runs empty" in heard("lab1.ex5", lambda T, n: [sum(T) / len(T) / max(T), 1.0])[1]
