"""Exercise 5 of lab 3: exercise 4 of the handout, what a preemption moves."""

from __future__ import annotations

import random
from typing import Any

from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.course.values import close

GB, KB, KIB = 10**9, 10**3, 2**10


def preemption_cost(
    num_tokens: int, kv_bytes_per_token: float, link_bytes_per_s: float, prefill_tokens_per_s: float
) -> dict[str, float]:
    """What it costs to swap a request out and in again, and what to compute its tokens anew; times in milliseconds."""
    num_bytes = num_tokens * kv_bytes_per_token
    out_ms = 1000 * num_bytes / link_bytes_per_s
    recompute_ms = 1000 * num_tokens / prefill_tokens_per_s
    return {"bytes": num_bytes, "out_ms": out_ms, "round_trip_ms": 2 * out_ms, "recompute_ms": recompute_ms}


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex5 {seed}")
    fixed: list[Case] = [(4096, 160 * KB, 32 * GB, 10_000), (4096, 512 * KIB, 32 * GB, 16_000)]
    drawn: list[Case] = [
        (
            rng.randint(100, 9000),
            rng.choice((56, 128, 320, 800)) * KIB,
            rng.choice((5, 12.5, 26, 64)) * GB,
            rng.choice((2_500, 15_800, 45_500)),
        )
        for _ in range(5)
    ]
    return fixed + drawn


_SLIPS: dict[str, list[Slip]] = {
    "bytes": [
        (lambda n, k, link, rate: k, "every cached token has its K and V: multiply by the number of tokens"),
        (lambda n, k, link, rate: 2 * n * k, "kv_bytes_per_token holds K and V already: no further factor of 2"),
        (lambda n, k, link, rate: n * k * 1024, "the arguments are bytes already: convert units where you call it"),
        (lambda n, k, link, rate: n * k * 1000, "the arguments are bytes already: convert units where you call it"),
        (lambda n, k, link, rate: n * k / 1e6, "bytes are asked, not megabytes"),
        (lambda n, k, link, rate: n * k / 2**20, "bytes are asked, not MiB"),
    ],
    "out_ms": [
        (lambda n, k, link, rate: n * k / link, "these are seconds: milliseconds are asked"),
        (lambda n, k, link, rate: 2000 * n * k / link, "out is one way; the round trip is the one that counts twice"),
        (lambda n, k, link, rate: 8000 * n * k / link, "the link is given in bytes a second: there are no bits here"),
        (lambda n, k, link, rate: 500 * n * k / link, "the link's rate holds in one direction: do not double it"),
        (lambda n, k, link, rate: link / (n * k), "the fraction stands on its head: bytes over bytes a second"),
        (lambda n, k, link, rate: 1000 * link / (n * k), "the fraction stands on its head: bytes over bytes a second"),
    ],
    "round_trip_ms": [
        (lambda n, k, link, rate: 1000 * n * k / link, "what went out must come in again before it can go on: twice"),
        (lambda n, k, link, rate: 2 * n * k / link, "these are seconds: milliseconds are asked"),
        (
            lambda n, k, link, rate: 1000 * n * k / link + 1000 * n / rate,
            "what is swapped in is not computed again: the round trip is two transfers",
        ),
        (lambda n, k, link, rate: 4000 * n * k / link, "the round trip is out and in: twice, not four times"),
    ],
    "recompute_ms": [
        (lambda n, k, link, rate: n / rate, "these are seconds: milliseconds are asked"),
        (lambda n, k, link, rate: rate / n, "the fraction stands on its head: tokens over tokens a second"),
        (lambda n, k, link, rate: 1000 * rate / n, "the fraction stands on its head: tokens over tokens a second"),
        (
            lambda n, k, link, rate: 2000 * n / rate,
            "computing the tokens once is enough: there is no way back to pay for",
        ),
        (
            lambda n, k, link, rate: 1000 * n * k / rate,
            "prefill computes tokens, not bytes: tokens over tokens a second",
        ),
    ],
}
_RULES = {
    "bytes": "cached tokens times bytes a token",
    "out_ms": "bytes over bytes a second, in milliseconds",
    "round_trip_ms": "out and in again",
    "recompute_ms": "one prefill of all cached tokens, in milliseconds",
}


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    for key, rule in _RULES.items():
        if not close(value[key], expected[key]):
            return f"{key!r}: {named_slip(_SLIPS[key], args, value[key]) or rule}"
    return ""


EXERCISE = Exercise(
    id="lab3.ex5",
    title="Exercise 4 of the handout: what a preemption moves",
    difficulty=2,
    importance=4,
    minutes=10,
    points=3,
    hints=(
        "What has to cross the link, in bytes? And what has to be computed if nothing crosses it?",
        "Every cached token crosses once on the way out and once on the way in. Recomputing is one prefill of "
        "the same tokens.",
        "An amount over a rate a second gives seconds, for bytes over the link as for tokens over the prefill; a "
        "second has 1,000 ms. K and V are both in kv_bytes_per_token already.",
    ),
    cases=_cases,
    reference=preemption_cost,
    diagnose=_diagnose,
)
