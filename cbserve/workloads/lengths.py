"""How long answers are: quantile tables of real traces, and samples from them and from textbook distributions."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads import given


@dataclass(frozen=True)
class LengthTable:
    """Quantiles of a trace's lengths in tokens: (percent, tokens) pairs, rising.

    `source` and `licence` say where the trace is from; show them beside every figure that is drawn from it.
    """

    name: str
    num_requests: int
    output: tuple[tuple[float, float], ...]
    prompt: tuple[tuple[float, float], ...]
    output_mean: float
    prompt_mean: float
    source: str
    licence: str

    def sample_output(self, n: int, seed: int = 0) -> list[int]:
        """`n` output lengths, independent, at least 1: the inverse of the table's distribution function.

        Raises InvalidRequestError when `n` is no integer of at least 0.
        """
        return _sample(self.output, self.num_requests, n, seed)

    def sample_prompt(self, n: int, seed: int = 0) -> list[int]:
        """`n` prompt lengths, independent of the outputs (their correlation in these traces is below 0.1)."""
        return _sample(self.prompt, self.num_requests, n, seed)


def azure(name: str) -> LengthTable:
    """The Azure LLM inference trace of 2023: "conv" (chat) or "code" (completion). Patel et al. 2024, Splitwise.

    Raises:
        InvalidRequestError: another name.
    """
    if not isinstance(name, str) or name not in ("conv", "code"):
        raise InvalidRequestError(f"azure({name!r}): there are 'conv' and 'code'")
    data = _azure_tables()
    table = data[name]
    return LengthTable(
        f"Azure {name} 2023",
        table["requests"],
        tuple(map(tuple, table["output"])),
        tuple(map(tuple, table["prompt"])),
        table["output_mean"],
        table["prompt_mean"],
        data["source"],
        data["licence"],
    )


@cache
def _azure_tables() -> dict[str, Any]:
    text: str = (files("cbserve.workloads") / "data" / "azure_2023.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def fixed(length: int, n: int) -> list[int]:
    """`n` equal lengths: static batching wastes nothing on them.

    Raises:
        InvalidRequestError: `length` is below 1, or `n` below 0.
    """
    given.integer("length", length, 1)
    given.integer("n", n, 0)
    return [length] * n


def exponential(mean: float, n: int, seed: int = 0) -> list[int]:
    """`n` exponential lengths, rounded up to whole tokens.

    Raises:
        InvalidRequestError: `mean` is not above 0, or `n` below 0.
    """
    _require_scale("mean", mean)
    given.integer("n", n, 0)
    rng = given.generator(seed)
    return [math.ceil(rng.expovariate(1 / mean)) or 1 for _ in range(n)]


def lognormal(median: float, sigma: float, n: int, seed: int = 0) -> list[int]:
    """`n` lognormal lengths: the logarithm has standard deviation `sigma`; at least 1 token.

    Raises:
        InvalidRequestError: `median` is not above 0, `sigma` not in 0..10, or `n` below 0.
    """
    _require_scale("median", median)
    given.number("sigma", sigma, lambda v: 0 <= v <= 10, "a number from 0 to 10 (1 is long-tailed already)")
    given.integer("n", n, 0)
    rng = given.generator(seed)
    return [max(1, round(median * math.exp(rng.gauss(0.0, sigma)))) for _ in range(n)]


def uniform(low: int, high: int, n: int, seed: int = 0) -> list[int]:
    """`n` lengths, every one from `low` to `high` equally likely, both included.

    Raises:
        InvalidRequestError: `low` is below 1, `high` below `low`, or `n` below 0.
    """
    given.integer("low", low, 1)
    given.integer("high", high, low)
    given.integer("n", n, 0)
    rng = given.generator(seed)
    return [rng.randint(low, high) for _ in range(n)]


def pareto(minimum: float, alpha: float, n: int, seed: int = 0, maximum: float | None = None) -> list[int]:
    """`n` Pareto lengths: the share that is longer than x is (minimum / x) ** alpha. Rounded down to whole tokens.

    The mean is infinite for `alpha` up to 1, the variance up to 2. With a `maximum` the distribution is cut there and
    what lies beyond is drawn anew, so that nothing piles up at the limit.

    Raises:
        InvalidRequestError: `minimum` is below 1, `alpha` not above 0, `maximum` not above `minimum`, or `n` below 0.
    """
    for name, value in (("minimum", minimum), ("alpha", alpha)):
        _require_scale(name, value)
    if minimum < 1:
        raise InvalidRequestError(f"minimum={minimum!r}: must be at least 1 token")
    if maximum is not None:
        given.number("maximum", maximum, lambda v: minimum < v < 1e12, f"above minimum={minimum!r}, or None")
    given.integer("n", n, 0)
    rng = given.generator(seed)
    longer = 0.0 if maximum is None else (minimum / maximum) ** alpha  # the share that the cut takes away
    # 1 - random() lies in (0, 1]; shares below 1e-12 of an alpha near 0 would leave the range of whole numbers
    shares = (longer + (1 - longer) * (1 - rng.random()) for _ in range(n))
    return [int(min(1e12, minimum * math.exp(min(50.0, -math.log(share) / alpha)))) for share in shares]


def empirical(values: Sequence[int], n: int, seed: int = 0) -> list[int]:
    """`n` lengths drawn from `values` that somebody measured, each as likely as it is frequent (a bootstrap).

    Raises:
        InvalidRequestError: `values` is empty, one of them is no integer of at least 1, or `n` is below 0.
    """
    values = given.listed("values", values)
    if not values:
        raise InvalidRequestError("values=[]: must hold at least one length to draw from")
    for index, value in enumerate(values):
        given.integer(f"values[{index}]", value, 1)
    given.integer("n", n, 0)
    return given.generator(seed).choices(values, k=n)


def _require_scale(name: str, value: float) -> None:
    given.number(name, value, lambda v: 0 < v < 1e12, "a number of tokens above 0, below 1e12")


def _sample(quantiles: tuple[tuple[float, float], ...], num_requests: int, n: int, seed: int) -> list[int]:
    """Between two quantiles: linear up to the median, above it a power law of the share that is longer (a straight line
    on log-log axes), because the tail of a table is coarse and lengths are long-tailed. The longest of n requests
    stands at a share of 1 / (n + 1)."""
    given.integer("n", n, 0)
    rng = given.generator(seed)
    shortest_share = 100 / (num_requests + 1)
    percents = [percent for percent, _ in quantiles]
    longer = [math.log(max(100 - percent, shortest_share)) for percent in percents]  # log of the share that is longer

    def quantile(percent: float) -> float:
        right = max(1, bisect_left(percents, percent))
        (low, a), (high, b) = quantiles[right - 1 : right + 1]
        if low < 50:
            return a + (b - a) * (percent - low) / (high - low)
        share = math.log(max(100 - percent, shortest_share))
        return a * math.pow(b / a, (longer[right - 1] - share) / (longer[right - 1] - longer[right]))

    return [max(1, round(quantile(100 * rng.random()))) for _ in range(n)]
