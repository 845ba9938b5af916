"""Exercise 6 of lab 3: exercise 5 of the handout, when scaling is super-linear."""

from __future__ import annotations

import random
from typing import Any

from cbserve.course.exercise import BrokenRuleError, Case, Exercise, call
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.course.values import close


def gains(prefill_share: float, hit_rate: float, memory: int, context: int, shared: int) -> dict[str, float]:
    """How much a prefix cache gains on one GPU: in compute (Amdahl's law) and in the size of the batch.

    memory, context, shared: tokens of KV that fit, that a request has, that all requests have in common.
    """
    own = context - shared
    batch = ((memory - shared) / own) / (memory / context)
    return {"compute": 1 / (1 - prefill_share * hit_rate), "batch": batch}


def scale_out(replicas: int, prefill_share: float, hit_one: float, hit_many: float) -> dict[str, Any]:
    """Throughput of `replicas` GPUs over that of one, whose hit rate is `hit_one`."""
    times = replicas * (1 - prefill_share * hit_one) / (1 - prefill_share * hit_many)
    return {"times": times, "super_linear": times > replicas}


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex6 {seed}")
    cases: list[Case] = [
        ("gains", 0.6, 0.5, 10_000, 2_000, 1_000),
        ("gains", 0.8, 0.9, 100_000, 1_200, 1_000),
        ("gains", 0.3, 0.0, 50_000, 500, 0),
        ("scale_out", 4, 0.5, 0.25, 0.75),
        ("scale_out", 4, 0.5, 0.5, 0.5),
        ("scale_out", 8, 0.75, 0.5, 0.25),
        ("scale_out", 2, 0.0, 0.25, 0.75),
    ]
    for _ in range(3):
        shared = rng.randint(100, 900)
        f, h = (round(rng.uniform(0.2, 0.9), 2) for _ in range(2))
        cases.append(("gains", f, h, rng.randint(20_000, 400_000), shared + rng.randint(50, 2000), shared))
        low, high = sorted(round(rng.uniform(0.05, 0.95), 2) for _ in range(2))
        high = high if high > low else high + 0.02
        hits = (low, high) if rng.random() < 0.6 else (high, low)
        cases.append(("scale_out", rng.randint(2, 16), f, *hits))
    return cases


def _run(answer: Any, args: Case) -> Any:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BrokenRuleError('two answers are wanted: check("lab3.ex6", gains, scale_out)')
    return call(answer[args[0] == "scale_out"], args[1:])


_COMPUTE_SLIPS: list[Slip] = [
    (
        lambda f, h, M, c, s: 1 / (1 - h),
        "a hit saves prefill alone: only the share of time that prefill takes can shrink (Amdahl's law)",
    ),
    (lambda f, h, M, c, s: 1 / (1 - f), "this is the bound, with every token a hit; the hit rate is missing"),
    (lambda f, h, M, c, s: 1 - f * h, "this is the time that is left: the gain is its inverse"),
    (lambda f, h, M, c, s: f * h, "this is the share of time that is saved: the gain is 1 over what is left"),
    (lambda f, h, M, c, s: 1 / (f * h), "divide by the time that is left, 1 - f h, not by the time that is saved"),
    (lambda f, h, M, c, s: 1 + f * h, "time saved is no throughput won: the gain is 1 over the time that is left"),
    (
        lambda f, h, M, c, s: 1 / (f * (1 - h)),
        "decode takes its time as before: 1 - f stays beside what is left of prefill",
    ),
]
_BATCH_SLIPS: list[Slip] = [
    (lambda f, h, M, c, s: (M - s) / (c - s), "this is the new batch; the gain is the new batch over the old, M / c"),
    (lambda f, h, M, c, s: M / c, "this is the batch without sharing; the gain is the new batch over it"),
    (
        lambda f, h, M, c, s: c / (c - s),
        "this is the bound: the shared tokens take memory too, once: (M - s) / (c - s)",
    ),
    (lambda f, h, M, c, s: M / (c - s), "the shared tokens take memory too, once; and the gain is over M / c"),
    (
        lambda f, h, M, c, s: ((M - s) / c) / (M / c),
        "each request stores only its own tokens, c - s; the shared ones are there already",
    ),
    (
        lambda f, h, M, c, s: (M / c) / ((M - s) / (c - s)),
        "the fraction stands on its head: the batch with sharing over the batch without",
    ),
    (
        lambda f, h, M, c, s: ((M - s) // (c - s)) / (M // c),
        "leave the batches unrounded here: the bound is a limit for large memory",
    ),
]
_TIMES_SLIPS: list[Slip] = [
    (lambda n, f, a, b: n, "each replica's hit rate changes with n; n times is what comes out if it does not"),
    (
        lambda n, f, a, b: n / (1 - f * b),
        "one replica has a cache too: compare with its throughput, at hit_one",
    ),
    (
        lambda n, f, a, b: n * (1 - f * b) / (1 - f * a),
        "upside down: a higher hit rate means less time, and more throughput",
    ),
    (lambda n, f, a, b: (1 - f * a) / (1 - f * b), "this is the gain of each replica; there are n of them"),
    (lambda n, f, a, b: n * (1 - a) / (1 - b), "a hit saves prefill alone: the share of prefill is missing"),
    (lambda n, f, a, b: n * b / a, "throughput is not in proportion to the hit rate: a hit saves prefill alone"),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    numbers = args[1:]
    if args[0] == "gains":
        if not close(value["compute"], expected["compute"]):
            return named_slip(_COMPUTE_SLIPS, numbers, value["compute"]) or "'compute': 1 over the share of time left"
        return named_slip(_BATCH_SLIPS, numbers, value["batch"]) or "'batch': the batch with sharing over M / c"
    if not close(value["times"], expected["times"]):
        return named_slip(_TIMES_SLIPS, numbers, value["times"]) or "'times': n, times each replica's own gain"
    replicas, _, one, many = numbers
    if one == many or numbers[1] == 0:
        return "exactly n times is linear: super-linear is more than n times the throughput of one"
    if many < one:
        return "more replicas are faster, but by less than their number: super-linear means more than n times"
    return "the hit rate rises with the pooled cache, so each replica is faster than one alone: that is super-linear"


EXERCISE = Exercise(
    id="lab3.ex6",
    title="Exercise 5 of the handout: when is scaling super-linear?",
    difficulty=3,
    importance=4,
    minutes=15,
    points=3,
    hints=(
        "A hit saves prefill and nothing else. What part of the time can it save at most?",
        "Time that is left: 1 - f h. Tokens that a request stores by itself: c - s, beside s once for all. For n "
        "replicas compare n times the throughput at the new hit rate with one at its own.",
        "compute is 1 over the time that is left. batch is the number of requests with sharing over the number "
        "without. times: write one replica's speed as 1 over its time left, once with hit_many and once with hit_one; "
        "then n of the first over one of the second.",
    ),
    cases=_cases,
    reference=lambda kind, *args: (gains if kind == "gains" else scale_out)(*args),
    diagnose=_diagnose,
    run=_run,
    words=lambda answer, args: f"{args[0]}({', '.join(map(str, args[1:]))})",
)
