"""Lab 2, continuous batching: the duties retire, admit and displace, bounds in steps, exercise 2 of the handout."""

from __future__ import annotations

from cbserve.course.exercises.lab2 import admit, bounds, displace, memory, retire

EXERCISES = (
    retire.EXERCISE,
    admit.EXERCISE,
    bounds.FEWEST_STEPS,
    bounds.SPEEDUP,
    memory.EXERCISE,
    displace.EXERCISE,
)
