"""What a maker of workloads is given: each argument looked at before anything is drawn, and refused by name."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer, is_integer, short

__all__ = ["generator", "integer", "listed", "number", "positive", "seed"]


def number(name: str, value: Any, within: Callable[[float], bool], wanted: str) -> float:
    """A number for which `within` holds. Raises InvalidRequestError for anything else: it must be `wanted`."""
    try:
        if isinstance(value, bool | str | bytes | bytearray) or not within(found := float(value)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{name}={short(value)}: must be {wanted}") from None
    return found


def positive(name: str, value: Any) -> float:
    return number(name, value, lambda v: 0 < v < float("inf"), "a number above 0")


def seed(value: Any) -> int:
    """Raises InvalidRequestError for what is no integer: None, for instance, would draw something else every time."""
    if not is_integer(value):
        raise InvalidRequestError(f"seed={short(value)}: must be an integer; the same one draws the same again")
    return operator.index(value)


def generator(value: Any) -> random.Random:
    """The random stream of a seed. Raises InvalidRequestError as `seed` does."""
    return random.Random(seed(value))


def listed(name: str, values: Any) -> list[Any]:
    """Raises InvalidRequestError for what holds no values."""
    if not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name}={short(values)}: must be a list")
    return list(values)
