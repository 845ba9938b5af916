"""Exercise 5 of lab 2: exercise 2 of the handout, with its units."""

from __future__ import annotations

import math
import random
from typing import Any

from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.slips import Slip, named_slip

GB, KB, GIB, KIB = 10**9, 10**3, 2**30, 2**10


def max_requests(
    gpu_bytes: float, weights_bytes: float, kv_bytes_per_token: float, context_tokens: int, memory_share: float = 1.0
) -> int:
    """How many contexts of full length fit beside the weights into the share of memory that may be used."""
    room = memory_share * gpu_bytes - weights_bytes
    return max(0, math.floor(room / (kv_bytes_per_token * context_tokens)))


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex5 {seed}")
    fixed: list[Case] = [
        (80 * GB, 14 * GB, 160 * KB, 2048, 1.0),
        (80 * GB, 14 * GB, 160 * KB, 2048, 0.9),
        (80 * GIB, 14 * GIB, 160 * KIB, 2048, 1.0),
        (16 * GB, 14 * GB, 160 * KB, 2048, 0.85),
    ]
    drawn: list[Case] = [
        (
            rng.choice((24, 40, 48, 80, 141)) * GB,
            rng.randint(2, 16) * GB,
            rng.choice((56, 128, 160, 512)) * KIB,
            rng.choice((700, 1366, 4096)),
            rng.choice((0.85, 0.9, 0.95)),
        )
        for _ in range(5)
    ]
    return fixed + drawn


_SLIPS: list[Slip] = [
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (k * c)),
        "less than no room is no request: never return less than 0",
    ),
    (lambda g, w, k, c, s: (s * g - w) / (k * c), "requests are whole: round down, half a request cannot run"),
    (lambda g, w, k, c, s: math.ceil((s * g - w) / (k * c)), "round down: the last one would not fit"),
    (lambda g, w, k, c, s: round((s * g - w) / (k * c)), "round down: the last one would not fit"),
    (lambda g, w, k, c, s: max(0, math.floor((g - w) / (k * c))), "memory_share is not used"),
    (
        lambda g, w, k, c, s: max(0, math.floor(s * (g - w) / (k * c))),
        "the share is of the whole memory, and the weights come out of it: share * gpu - weights",
    ),
    (lambda g, w, k, c, s: math.floor(s * g / (k * c)), "the weights lie in the same memory: take them off first"),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / k),
        "this is how many tokens fit; a request holds `context_tokens` of them",
    ),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (2 * k * c)),
        "kv_bytes_per_token holds K and V already: no further factor of 2",
    ),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (k * 1024 * c)),
        "the arguments are bytes already: convert units where you call it, not in here",
    ),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (k * 1000 * c)),
        "the arguments are bytes already: convert units where you call it, not in here",
    ),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SLIPS, args, value):
        return rule
    return "bytes that are left for K and V, over the bytes of one context, rounded down; all arguments are in bytes"


EXERCISE = Exercise(
    id="lab2.ex5",
    title="Exercise 2 of the handout, with its units",
    difficulty=2,
    importance=5,
    minutes=12,
    points=3,
    hints=(
        "Write down what lies in GPU memory beside K and V, and what one request of full length needs.",
        "The share applies to the whole memory, and the weights come out of that share. What is left is divided among "
        "requests, and a request is whole.",
        "room = memory_share * gpu_bytes - weights_bytes. Divide by kv_bytes_per_token * context_tokens, round down "
        "with math.floor, and never go below 0.",
    ),
    cases=_cases,
    reference=max_requests,
    diagnose=_diagnose,
)
