"""Workloads: jobs in order, requests without the length of their answers, statistics."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from dataclasses import replace

import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads.tokens import own_tokens
from cbserve.workloads.workload import Job, Workload


def jobs(*arrivals: float) -> list[Job]:
    return [Job(t, own_tokens(i, 10 * (i + 1)), i + 1) for i, t in enumerate(arrivals)]


def test_requests_carry_everything_but_the_length_of_the_answer() -> None:
    job = Job(1.5, range(7), 3, priority=2, client_id="c", cache_salt="s", session=4)
    first, second = Workload("w", [*jobs(1.0), job]).requests(max_tokens=9)
    assert (first.request_id, second.request_id) == ("0", "1")
    assert first.params is second.params
    assert (second.params.max_tokens, second.params.temperature) == (9, 0)
    assert second.prompt_token_ids is job.prompt
    assert (second.arrival_s, second.priority, second.client_id, second.cache_salt) == (1.5, 2, "c", "s")
    assert second.expected_output_tokens is None
    (unlimited,) = Workload("w", jobs(1.0)).requests()
    assert unlimited.params.max_tokens is None


def test_answer_lengths_by_request_id() -> None:
    workload = Workload("w", jobs(0, 0, 1))
    assert workload.answer_lengths == {"0": 1, "1": 2, "2": 3}
    assert [request.request_id for request in workload.requests()] == list(workload.answer_lengths)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(0.5, range(1), 1), r"jobs\[2\]: arrival_s=0.5 comes after 1.0: sort"),
        (Job(math.nan, range(1), 1), r"jobs\[2\]: arrival_s=nan: must be a finite"),
        (Job(math.inf, range(1), 1), r"jobs\[2\]: arrival_s=inf: must be a finite"),
        (Job(2.0, range(1), 0), r"jobs\[2\]: num_output_tokens=0: must be a whole number of at least 1"),
        (Job(2.0, range(0), 1), r"jobs\[2\]: its prompt is empty"),
    ],
)
def test_a_wrong_job_is_named(job: Job, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Workload("w", [*jobs(0.0, 1.0), job])
    with pytest.raises(InvalidRequestError, match=r"jobs\[0\]: arrival_s=-1"):
        Workload("w", jobs(-1.0))


def test_scaled_has_the_rate_that_was_asked_for_and_says_so() -> None:
    workload = Workload("w", jobs(1.0, 2.0, 5.0), note="as measured")
    assert workload.rate == 0.5
    faster = workload.scaled(rate=2.0)
    assert faster.rate == pytest.approx(2.0)
    assert [job.arrival_s for job in faster.jobs] == [0.25, 0.5, 1.25]
    assert faster.note == "as measured; arrivals scaled from 0.5 to 2 a second"
    full = Job(4.0, range(7), 3, priority=2, client_id="c", cache_salt="s", session=4)
    assert Workload("w", [*jobs(0.0), full]).scaled(rate=0.5).jobs[1] == replace(full, arrival_s=2.0)
    with pytest.raises(InvalidRequestError, match="all at once"):
        Workload("w", jobs(1.0, 1.0)).scaled(rate=2.0)
    for rate in (0, -1, math.inf, math.nan, "2"):
        with pytest.raises(InvalidRequestError, match="rate="):
            workload.scaled(rate=rate)


def test_first() -> None:
    workload = Workload("w", jobs(1.0, 2.0, 5.0))
    assert [job.arrival_s for job in workload.first(2).jobs] == [1.0, 2.0]
    assert workload.first(2).note == "first 2 of 3 requests"
    assert workload.first(7) is workload
    for n in (0, -1, 1.5, True):
        with pytest.raises(InvalidRequestError, match="n="):
            workload.first(n)


def test_summary() -> None:
    rows = Workload("w", jobs(1.0, 2.0, 5.0)).summary()
    assert rows == {
        "requests": 3, "duration_s": 4.0, "rate_per_s": 0.5, "gap_cv": 0.5,
        "prompt_mean": 20, "prompt_p50": 20, "prompt_p90": 28, "prompt_p99": pytest.approx(29.8), "prompt_max": 30,
        "prompt_total": 60, "output_mean": 2, "output_p50": 2, "output_p90": pytest.approx(2.8),
        "output_p99": pytest.approx(2.98), "output_max": 3, "output_total": 6,
    }  # fmt: skip
    assert math.isnan(Workload("w", jobs(1.0, 1.0)).summary()["rate_per_s"])
    empty = Workload("w", []).summary()
    assert empty["requests"] == 0 and math.isnan(empty["prompt_p50"]) and empty["prompt_total"] == 0


def test_shows_and_pickles_itself() -> None:
    workload = Workload("w", jobs(1.0, 2.0), "source", "note")
    assert repr(workload) == "Workload('w', 2 requests in 1 s)"
    assert pickle.loads(pickle.dumps(workload)) == workload


def test_a_million_jobs_fit_in_a_few_hundred_megabytes() -> None:
    tracemalloc.start()
    workload = Workload("w", [Job(i * 0.1, own_tokens(i, 1000 + i % 7), 300) for i in range(10_000)])
    lengths = workload.answer_lengths
    assert sum(1 for _ in workload.requests()) == len(lengths) == 10_000
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / 10_000 < 450  # bytes a job
