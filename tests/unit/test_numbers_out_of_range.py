"""Numbers that make no sense, as a learner's slip gives them: refused with the value and the range, never computed."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cbserve
from cbserve import serve
from cbserve.core.errors import InvalidRequestError
from cbserve.core.trace import Trace

NO_SLOTS = Trace(events=serve([2]).events)  # it says neither slots nor pool
WRONG_CALLS = {
    "fixed": [(0, 3), (-1, 3), (1.5, 2), (3, -1), ("a", 2)],
    "exponential": [(0, 3), (-5, 3), (5, -1), (math.nan, 3), (math.inf, 3), (5, "a")],
    "lognormal": [(-5, 1, 3), (5, -1, 3), (5, 1e9, 3), (0, 1, 3), (math.nan, 1, 3), (5, 1, 2.5)],
    "azure": [("chat",), (None,), ([],)],
    "static_steps": [([], 3), ([1, 2], 0), ([1, 2], -1), ([-1], 2), (5, 2), ([1, 2], 1.5)],
    "static_utilisation": [([], 3), ([1, 2], 0), ([0, 0], 2)],
    "continuous_steps_bound": [([], 3), ([1], 0), ([1, 2], -1)],
    "step_speedup_bound": [([], 3), ([1], 0)],
    "harmonic": [(-1,), (1.5,), ("3",), (None,)],
    "slot_utilisation": [(serve([2]), n) for n in (0, -3, 1.5, "2")] + [(NO_SLOTS,)],
    "occupancy": [(serve([2]), 0), (NO_SLOTS,)],
    "summarize": [(serve([2]), -3), (NO_SLOTS,)],
    "tail_waste": [(NO_SLOTS,)],
    "StepTimes": [((),), (((1, 2.0),),), (((5, 2.0), (1, 3.0)),)],
}


@pytest.mark.parametrize(("name", "args"), [(name, args) for name, calls in WRONG_CALLS.items() for args in calls])
def test_a_wrong_number_is_refused(name, args):
    with pytest.raises(InvalidRequestError):
        getattr(cbserve, name)(*args)


@pytest.mark.parametrize("n", [-1, 2.5, "3"])
def test_a_wrong_number_of_samples_is_refused(n):
    with pytest.raises(InvalidRequestError, match="n="):
        cbserve.azure("conv").sample_output(n)


def no_time(plan):
    return None


WRONG_SERVE = [
    {"step_time_s": -1}, {"step_time_s": math.nan}, {"step_time_s": math.inf}, {"step_time_s": "x"},
    {"step_time_s": no_time}, {"prompt_tokens": 0}, {"prompt_tokens": -5}, {"prompt_tokens": 1.5},
    {"prompt_tokens": [1.5]}, {"prompt_tokens": True}, {"arrivals_s": 5}, {"arrivals_s": [-1]}, {"arrivals_s": ["x"]},
    {"priorities": [1.5]}, {"block_size": 0}, {"block_size": 1.5}, {"num_blocks": 0}, {"num_blocks": -1},
    {"batching": "static"}, {"batching": cbserve.StaticBatching}, {"policy": "fcfs"}, {"scheduler": 5},
    {"lengths": 5}, {"lengths": None}, {"lengths": [0]}, {"lengths": "abc"},
]  # fmt: skip


# not ids=str: the address of a function differs from process to process
@pytest.mark.parametrize(
    "wrong",
    WRONG_SERVE,
    ids=lambda wrong: "{}={}".format(*[getattr(x, "__name__", x) for x in (*wrong, *wrong.values())]),
)
def test_serve_refuses_what_makes_no_sense(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))[:6]):
        serve(**({"lengths": [3]} | wrong))


def test_serve_takes_arrays():
    plain = serve([3, 5], prompt_tokens=[4, 6], arrivals_s=[0, 1], priorities=[1, 0])
    arrays = {"prompt_tokens": np.array([4, 6]), "arrivals_s": np.array([0, 1]), "priorities": np.array([1, 0])}
    assert serve(np.array([3, 5]), **arrays) == plain
    assert serve([3], prompt_tokens=np.int64(4)) == serve([3], prompt_tokens=4)
