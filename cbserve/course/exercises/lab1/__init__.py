"""Lab 1, static batching: utilisation, waste, the expected value, a predicted run, exercise 1 of the handout."""

from __future__ import annotations

from cbserve.course.exercises.lab1 import expected, handout, many_batches, one_batch, predict

EXERCISES = (
    one_batch.EXERCISE,
    many_batches.EXERCISE,
    expected.EXERCISE,
    predict.EXERCISE,
    handout.EXERCISE,
)
