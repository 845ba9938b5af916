"""What arithmetic says about batches of answers before anything runs. Lengths: output tokens, in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer


def static_steps(lengths: Sequence[int], batch_size: int) -> int:
    """Steps of static batching: each batch, in order of arrival, takes as long as its longest answer.

    Raises:
        InvalidRequestError: here and in the others: no lengths, a length or a batch size below 1.
    """
    _require_work(lengths, batch_size)
    return sum(max(batch) for batch in _batches(lengths, batch_size))


def static_utilisation(lengths: Sequence[int], batch_size: int) -> float:
    """Slot utilisation of static batching, pooled over batches: sum(T) / (B x steps). [10, 100, 500], B = 3: 610 /
    1500."""
    return sum(lengths) / (batch_size * static_steps(lengths, batch_size))


def continuous_steps_bound(lengths: Sequence[int], batch_size: int) -> int:
    """Fewest steps that any scheduler can need on `batch_size` slots: max(ceil(sum T / B), max T).

    All slots full all the time, or the longest answer alone: neither can be beaten.
    """
    _require_work(lengths, batch_size)
    return max(-(-sum(lengths) // batch_size), max(lengths))


def step_speedup_bound(lengths: Sequence[int], batch_size: int) -> float:
    """Most that continuous batching can gain over static batching at the same number of slots, counted in steps."""
    return static_steps(lengths, batch_size) / continuous_steps_bound(lengths, batch_size)


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n. The longest of n exponential lengths is H_n times the mean, so a static batch of n
    uses 1 / H_n of its slots (Renyi 1953). Raises InvalidRequestError for n below 0."""
    return sum(1 / k for k in range(1, integer("n", n, 0) + 1))


def _require_work(lengths: Sequence[int], batch_size: int) -> None:
    integer("batch_size", batch_size, 1)
    if not hasattr(lengths, "__len__") or not len(lengths) or min(lengths) < 1:
        raise InvalidRequestError(f"lengths={lengths!r}: must be a list of at least one length, each at least 1 token")


def _batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    rest = iter(lengths)
    return list(iter(lambda: list(islice(rest, batch_size)), []))
