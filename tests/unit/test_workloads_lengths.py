"""Length distributions: the values that their formulas promise, and errors that name the argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads.lengths import empirical, pareto, uniform

DISTRIBUTIONS: list[Callable[..., list[int]]] = [
    lambda n, seed=0: uniform(3, 90, n, seed),
    lambda n, seed=0: pareto(10, 1.5, n, seed),
    lambda n, seed=0: pareto(10, 1.5, n, seed, maximum=1000),
    lambda n, seed=0: empirical([5, 6, 900], n, seed),
]


@pytest.mark.parametrize("draw", DISTRIBUTIONS)
def test_whole_tokens_and_the_same_for_the_same_seed(draw: Callable[..., list[int]]) -> None:
    lengths = draw(300, 1)
    assert len(lengths) == 300 and all(isinstance(n, int) and n >= 1 for n in lengths)
    assert lengths == draw(300, 1) != draw(300, 2)
    assert draw(0) == []
    for n in (-1, 2.5, True):
        with pytest.raises(InvalidRequestError, match="n="):
            draw(n)


def test_uniform_reaches_both_ends() -> None:
    lengths = uniform(3, 7, 5000)
    assert set(lengths) == {3, 4, 5, 6, 7}
    assert all(900 < lengths.count(n) < 1100 for n in range(3, 8))
    assert uniform(4, 4, 3) == [4, 4, 4]


@pytest.mark.parametrize("maximum", [None, 1000])
def test_pareto_tail(maximum: int | None) -> None:
    lengths = pareto(10, 1.5, 40_000, maximum=maximum)
    cut = 0 if maximum is None else (10 / maximum) ** 1.5
    assert min(lengths) == 10
    for x in (20, 50, 200):
        expected = ((10 / x) ** 1.5 - cut) / (1 - cut)
        assert sum(n >= x for n in lengths) / len(lengths) == pytest.approx(expected, rel=0.12)
    assert (max(lengths) <= 1000) is (maximum is not None)
    assert lengths.count(max(lengths)) < 10  # nothing piles up at the cut


def test_pareto_stays_finite_where_its_mean_does_not() -> None:
    assert max(pareto(1, 0.001, 1000)) <= 10**12


def test_empirical_keeps_the_frequencies() -> None:
    lengths = empirical([5, 5, 5, 900], 8000)
    assert set(lengths) == {5, 900}
    assert lengths.count(5) == pytest.approx(6000, rel=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform(0, 3, 1), "low=0"),
        (lambda: uniform(5, 3, 1), "high=3"),
        (lambda: pareto(0.5, 1, 1), "minimum=0.5"),
        (lambda: pareto(5, 0, 1), "alpha=0"),
        (lambda: pareto(5, 1, 1, maximum=5), "maximum=5"),
        (lambda: empirical([], 1), "values="),
        (lambda: empirical([3, 0], 1), r"values\[1\]=0"),
        (lambda: empirical([3, 1.5], 1), r"values\[1\]=1.5"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        call()
