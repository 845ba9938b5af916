"""Arrival processes have the rate and the burstiness that they promise; a closed loop waits for its answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads.arrivals import ClosedLoop, all_at_once, gamma, on_off, poisson
from cbserve.workloads.workload import Job


def rate_and_cv(times: list[float]) -> tuple[float, float]:
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    return 1 / mean, math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


PROCESSES: list[Callable[..., list[float]]] = [
    all_at_once,
    lambda n, seed=0: poisson(n, 5.0, seed),
    lambda n, seed=0: gamma(n, 5.0, 3.0, seed),
    lambda n, seed=0: on_off(n, 20.0, 2.0, 6.0, seed),
]


@pytest.mark.parametrize("process", PROCESSES)
def test_sorted_and_the_same_for_the_same_seed(process: Callable[..., list[float]]) -> None:
    times = process(500, seed=3)
    assert times == sorted(times) == process(500, seed=3)
    assert len(times) == 500 and times[0] >= 0
    assert process(200, seed=3) == times[:200]
    assert process is all_at_once or process(500, seed=4) != times
    assert process(0) == []
    for n in (-1, 1.5, True, None):
        with pytest.raises(InvalidRequestError, match="n="):
            process(n)


@pytest.mark.parametrize(
    ("times", "rate", "cv"),
    [
        (poisson(50_000, 5.53, 1), 5.53, 1.0),
        (gamma(50_000, 2.0, 0.5, 1), 2.0, 0.5),
        (gamma(50_000, 2.0, 3.0, 1), 2.0, 3.0),
        (gamma(1000, 2.0, 0.0), 2.0, 0.0),
        # rate 20 * 2/8; cv**2 = 1 + 2*20*2*6**2 / 8**2
        (on_off(50_000, 20.0, 2.0, 6.0, 1), 5.0, math.sqrt(46)),
    ],
)
def test_rate_and_burstiness(times: list[float], rate: float, cv: float) -> None:
    measured_rate, measured_cv = rate_and_cv(times)
    assert measured_rate == pytest.approx(rate, rel=0.05)
    assert measured_cv == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_poisson_gaps_have_no_memory() -> None:
    gaps = sorted(b - a for a, b in pairwise(poisson(20_000, 1.0, 5)))
    for q in (0.1, 0.5, 0.9, 0.99):
        assert gaps[int(q * len(gaps))] == pytest.approx(-math.log(1 - q), rel=0.08)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poisson(3, 0.0), "rate=0.0"),
        (lambda: poisson(3, math.nan), "rate=nan"),
        (lambda: gamma(3, -1.0, 1.0), "rate=-1.0"),
        (lambda: gamma(3, 1.0, -0.1), "cv=-0.1"),
        (lambda: gamma(3, 1.0, math.inf), "cv=inf"),
        (lambda: on_off(3, 1.0, 0.0, 1.0), "on_s=0.0"),
        (lambda: on_off(3, 1.0, 1.0, -1.0), "off_s=-1.0"),
        (lambda: on_off(3, "4", 1.0, 1.0), "rate_on='4'"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call()


def ask(n: int, sessions: list[object] | None = None) -> list[Job]:
    return [Job(0.0, range(100 * i, 100 * i + 5), i + 1, session=sessions[i] if sessions else None) for i in range(n)]


def run(loop: ClosedLoop, order: random.Random) -> dict[str, list[tuple[float, int]]]:
    """Answers take 1 s; among those who wait, `order` says who is answered first."""
    waiting, asked = loop.start(), {}
    while waiting:
        job = waiting.pop(order.randrange(len(waiting)))
        asked.setdefault(job.client_id, []).append((job.arrival_s, job.num_output_tokens))
        following = loop.on_finish(job.client_id, job.arrival_s + 1)
        if following is not None:
            waiting.append(following)
    return asked


def test_closed_loop_deals_jobs_in_turn_and_waits_for_the_answer() -> None:
    asked = run(ClosedLoop(ask(5), users=2, think_s=3.0), random.Random(0))
    assert asked == {"0": [(0.0, 1), (4.0, 3), (8.0, 5)], "1": [(0.0, 2), (4.0, 4)]}


@pytest.mark.parametrize("exponential", [False, True])
def test_closed_loop_does_not_depend_on_who_is_answered_first(exponential: bool) -> None:
    loop = ClosedLoop(ask(60), users=7, think_s=2.0, exponential=exponential, seed=5)
    assert run(loop, random.Random(1)) == run(loop, random.Random(2))
    other = ClosedLoop(ask(60), users=7, think_s=2.0, exponential=exponential, seed=6)
    assert (run(other, random.Random(1)) == run(loop, random.Random(1))) is not exponential


def test_closed_loop_think_times_are_exponential() -> None:
    asked = run(ClosedLoop(ask(4000), users=4, think_s=2.0, exponential=True), random.Random(0))
    thought = [b[0] - a[0] - 1 for jobs in asked.values() for a, b in pairwise(jobs)]
    assert len(thought) == 3996
    assert sum(thought) / len(thought) == pytest.approx(2.0, rel=0.06)
    assert sorted(thought)[len(thought) // 2] == pytest.approx(2 * math.log(2), rel=0.08)


def test_closed_loop_keeps_a_session_with_one_user_in_order() -> None:
    asked = run(ClosedLoop(ask(6, ["a", "b", "a", None, "b", "a"]), users=2), random.Random(0))
    assert {user: [tokens for _, tokens in jobs] for user, jobs in asked.items()} == {"0": [1, 3, 6, 4], "1": [2, 5]}


def test_closed_loop_with_more_users_than_jobs() -> None:
    loop = ClosedLoop(ask(2), users=5)
    assert [job.client_id for job in loop.start()] == ["0", "1"]
    assert loop.on_finish(0, 1.0) is None
    for user in (0, 2, 5, -1, "x", "-1"):  # answered already, never asked, or no user at all
        with pytest.raises(InvalidRequestError, match="user="):
            loop.on_finish(user, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"users": 0}, "users=0"), ({"users": 1.5}, "users=1.5"), ({"users": 1, "think_s": -1}, "think_s=-1")],
)
def test_closed_loop_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ClosedLoop(ask(1), **arguments)  # type: ignore[arg-type]
