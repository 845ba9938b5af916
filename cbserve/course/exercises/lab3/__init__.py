"""Lab 3, PagedAttention: the block pool, the look-up, decode attention in torch and Triton, exercises 4 and 5."""

from __future__ import annotations

from cbserve.course.exercises.lab3 import decode, lookup, online, pool, preemption, scaling

EXERCISES = (
    pool.EXERCISE,
    lookup.EXERCISE,
    decode.EXERCISE,
    online.EXERCISE,
    preemption.EXERCISE,
    scaling.EXERCISE,
)
