"""Lists of answer lengths for the cases of lab 1, and how they fall into batches."""

from __future__ import annotations

import random


def in_batches(lengths: list[int], batch_size: int) -> list[list[int]]:
    return [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]


def random_lengths(rng: random.Random, n: int, mean: float = 40) -> list[int]:
    """`n` lengths, the longest neither first nor last where there is a middle, so that no slip hides."""
    lengths = [1 + int(rng.expovariate(1 / mean)) for _ in range(n)]
    if n > 2:
        lengths[rng.randrange(1, n - 1)] = max(lengths) + rng.randint(1, 20)
    return lengths
