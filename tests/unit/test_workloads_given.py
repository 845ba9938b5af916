"""What the makers of workloads, and `simulate`, are given: whatever it is, it works or is refused by its name."""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from cbserve import (
    ClosedLoop,
    Job,
    Roofline,
    Workload,
    all_at_once,
    azure,
    azure_twin,
    chat_workload,
    empirical,
    exponential,
    fixed,
    gamma,
    lognormal,
    multi_turn,
    on_off,
    pareto,
    poisson,
    shared_prefix,
    simulate,
    synthesize,
    uniform,
)  # fmt: skip
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import CBServeError

JOBS = [Job(0.0, range(40), 5), Job(0.0, range(40), 7)]
SOUND: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (all_at_once, {"n": 3}),
    (poisson, {"n": 3, "rate": 2.0}),
    (gamma, {"n": 3, "rate": 2.0, "cv": 2.0}),
    (on_off, {"n": 3, "rate_on": 2.0, "on_s": 1.0, "off_s": 1.0}),
    (fixed, {"length": 3, "n": 3}),
    (exponential, {"mean": 50, "n": 3}),
    (lognormal, {"median": 50, "sigma": 1.0, "n": 3}),
    (uniform, {"low": 1, "high": 500, "n": 3}),
    (pareto, {"minimum": 20, "alpha": 1.0, "n": 3}),
    (empirical, {"values": list(range(1, 500)), "n": 3}),
    (azure("conv").sample_output, {"n": 3}),
    (azure("code").sample_prompt, {"n": 3}),
    (azure, {"name": "conv"}),
    (synthesize, {"n": 3, "arrivals": partial(poisson, rate=2.0), "prompt": 5, "output": [1, 2, 3]}),
    (azure_twin, {"name": "conv", "n": 3}),
    (shared_prefix, {
        "n": 9, "num_prefixes": 9, "prefix_tokens": 5, "prompt_tokens": 4, "output_tokens": 3, "arrivals": all_at_once,
    }),
    (multi_turn, {
        "num_sessions": 2, "turns": 2, "user_tokens": 3, "output_tokens": 3, "arrivals": all_at_once, "think_s": 1.0,
    }),
    (ClosedLoop, {"jobs": JOBS, "users": 1, "think_s": 1.0, "exponential": True}),
    (chat_workload, {"num_requests": 3}),
    (Workload, {"name": "work", "jobs": JOBS}),
    (simulate, {
        "workload": Workload("work", JOBS), "cost": Roofline.on("a100-80", "llama-3.1-8b"), "num_blocks": 100,
    }),
]  # fmt: skip
ARGUMENTS = [(make, sound, name) for make, sound in SOUND for name in inspect.signature(make).parameters]
WRONG = [None, "x", b"x", "", 1.5, [3], (1, 2), {}, {3: 4}, object(), -1, 0, math.nan, True, lambda: 3]
SEEDED = [(make, sound) for make, sound in SOUND if "seed" in inspect.signature(make).parameters]


def told(make: Callable[..., Any], sound: dict[str, Any], **more: Any) -> Any:
    made = make(**sound, **more)
    if isinstance(made, ClosedLoop):
        first = made.start()[0]
        return made.on_finish(first.client_id, 1.0)
    return made


@pytest.mark.parametrize(("make", "sound", "name"), ARGUMENTS, ids=[f"{make.__name__}-{n}" for make, _, n in ARGUMENTS])
def test_whatever_an_argument_is_it_works_or_is_refused_by_name(
    make: Callable[..., Any], sound: dict[str, Any], name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is the path of a trace, for instance
    for wrong in WRONG:
        if name == "progress" and callable(wrong):  # what it raises is the caller's own
            continue
        try:
            make(**sound | {name: wrong})
        except CBServeError as error:
            assert len(str(error)) > 15 and "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("listeners", wrong) for wrong in (None, 5, "x", [3], [print, None], print, {"a": 1})),
        *(("progress", wrong) for wrong in (5, "x", [print], True)),
        *(("meta", wrong) for wrong in (5, "x", [("a", 1)], {1: 2})),
    ],
)
def test_who_wants_to_be_told_of_a_simulation_must_be_callable(name: str, wrong: Any, tmp_path: Any) -> None:
    make, sound = SOUND[-1]
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(f'{name}={wrong!r}: must be ')}"):
        make(**sound, **{name: wrong}, trace_path=tmp_path / "run.jsonl")
    assert not list(tmp_path.iterdir())


def test_listeners_may_come_from_a_generator() -> None:
    heard: list[Any] = []
    simulation = simulate(**SOUND[-1][1], listeners=(listen for listen in [heard.append]), progress=heard.append)
    assert len(heard) == len(simulation.trace.events) + len(JOBS)


@pytest.mark.parametrize(("make", "sound"), SEEDED, ids=[getattr(make, "__name__", "") for make, _ in SEEDED])
def test_a_seed_is_an_integer_and_draws_the_same_again(make: Callable[..., Any], sound: dict[str, Any]) -> None:
    for wrong in (None, "3", 3.0, True, [3], random.Random(3), np.array([3, 4])):
        with pytest.raises(InvalidRequestError, match=r"^seed=.*: must be an integer"):
            make(**sound, seed=wrong)
    assert told(make, sound, seed=3) == told(make, sound, seed=np.int64(3))
    if make is not all_at_once:
        assert told(make, sound, seed=3) != told(make, sound, seed=4)


@pytest.mark.parametrize("wrong", [lambda: 3, int, partial(lognormal, 200)])
def test_a_function_that_takes_no_n_and_seed_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^output=.*cannot be called with n= and seed="):
        synthesize(3, all_at_once, 5, wrong)
