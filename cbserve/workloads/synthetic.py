"""Workloads made up from distributions, and twins of the Azure traces for those without the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads import given
from cbserve.workloads.arrivals import gamma, on_off
from cbserve.workloads.lengths import azure
from cbserve.workloads.tokens import own_tokens
from cbserve.workloads.workload import Job, Workload

#: One length for all, one a request, or a function that is called with n= and seed=: partial(lognormal, 200, 1).
Lengths = int | Sequence[int] | Callable[..., Sequence[int]]
#: A time for each request, or a function that is called with n= and seed=, such as partial(poisson, rate=5).
Arrivals = Sequence[float] | Callable[..., Sequence[float]]

# Gaps of Azure conv: coefficient of variation 1.094 at 5.530 requests a second, so nearly Poisson.
CONV_ARRIVALS = partial(gamma, rate=5.530, cv=1.094)
# Azure code comes in bursts: 2.566 a second on the mean, coefficient of variation 13.15, 56 % of all windows of 10 s
# empty. The formulas of `on_off` leave one parameter free, which the empty windows decide.
CODE_ARRIVALS = partial(on_off, rate_on=9.0, on_s=18.7, off_s=46.9)


def synthesize(
    n: int, arrivals: Arrivals, prompt: Lengths, output: Lengths, seed: int = 0, name: str = "synthetic"
) -> Workload:
    """`n` requests that share nothing; arrivals, prompt and output lengths are independent of each other.

    `synthesize(1000, partial(poisson, rate=5), prompt=512, output=partial(exponential, 200))`

    Raises:
        InvalidRequestError: a list has another length than `n`, or a value is out of range.
    """
    times, prompts, outputs = draw(n, seed, arrivals=arrivals, prompt=prompt, output=output)
    jobs = [
        Job(at, own_tokens(i, p), o) for i, (at, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
    ]  # fmt: skip
    return Workload(name, jobs)


def azure_twin(name: str, n: int, seed: int = 0, rate: float | None = None) -> Workload:
    """`n` made up requests like those of the Azure trace "conv" (chat) or "code" (completion) of 2023.

    Lengths are drawn from the trace's quantiles, prompt and output independently; arrivals are nearly Poisson for conv,
    in bursts for code. What a twin lacks: the drift of the load over minutes, and any structure beyond these figures.

    Args:
        rate: requests a second; None: about the trace's own, 5.530 or 2.566.

    Raises:
        InvalidRequestError: another name, or a value is out of range.
    """
    table = azure(name)
    arrivals: Arrivals = CONV_ARRIVALS if name == "conv" else CODE_ARRIVALS
    twin = synthesize(n, arrivals, table.sample_prompt, table.sample_output, seed)
    twin = Workload(
        f"{table.name} (synthetic twin)",
        twin.jobs,
        f"{table.source}; {table.licence}",
        "synthetic: lengths drawn from the trace's quantiles, arrivals from a "
        + ("Gamma process" if name == "conv" else "Poisson process that is switched on and off"),
    )
    return twin if rate is None else twin.scaled(rate)


def draw(n: int, seed: int, **what: Lengths | Arrivals) -> list[Sequence[Any]]:
    """`n` values of each, from random streams of their own: one stream for all would correlate them.

    Raises:
        InvalidRequestError: there are not `n` values, or one is no integer of at least 1 (a time: no number).
    """
    n, streams = given.integer("n", n, 0), given.generator(seed)
    drawn: list[Sequence[Any]] = []
    for name, values in what.items():
        stream = streams.getrandbits(62)
        if callable(values):
            try:
                values = values(n=n, seed=stream)
            except TypeError as error:
                raise InvalidRequestError(
                    f"{name}={str(values)[:60]}: cannot be called with n= and seed= ({error}); give all other "
                    "arguments before, as partial(poisson, rate=5) does"
                ) from error
        elif isinstance(values, int):
            values = [values] * n
        if not hasattr(values, "__len__") or len(values) != n:
            raise InvalidRequestError(f"{name}={str(values)[:60]}: must be {n} values, one for each")
        kind, wanted = (int | float, "a number") if name == "arrivals" else (int, "an integer of at least 1")
        for index, value in enumerate(values):
            if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 1):
                raise InvalidRequestError(f"{name}[{index}]={value!r}: must be {wanted}")
        drawn.append(values)
    return drawn
