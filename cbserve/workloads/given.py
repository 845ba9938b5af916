"""What a maker of workloads is given: each argument looked at before anything is drawn, and refused by name."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer, is_integer, number, positive, short

__all__ = ["generator", "integer", "listed", "number", "positive", "seed"]


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
