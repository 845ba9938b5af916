"""The work on which engines are compared: 64 requests, long-tailed answers, greedy, EOS ignored, at most 32 at a
time."""

from __future__ import annotations

import random

MAX_NUM_SEQS = 32


def workload(num_requests: int = 64, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """(prompts, answer lengths): 16 to 128 random token ids each; lognormal lengths, clipped to 4..256 tokens."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(num_requests):
        prompts.append([rng.randrange(5, 49_000) for _ in range(rng.randint(16, 128))])
    lengths = [min(256, max(4, int(rng.lognormvariate(3.6, 0.9)))) for _ in range(num_requests)]
    return prompts, lengths
