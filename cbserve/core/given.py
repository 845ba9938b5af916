"""What a caller gives: looked at before anything is done, and refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from cbserve.core.errors import InvalidRequestError

Kind = TypeVar("Kind")


def integer(name: str, value: Any, least: int, also: str = "", most: int | None = None) -> int:
    """A whole number from `least` to `most`, one of numpy too. Raises InvalidRequestError for anything else; `also` is
    what else the message says that could be given."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise InvalidRequestError(f"{name}={short(value)}: must be an integer of at least {least}{limit}{also}")
    return operator.index(value)


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


def instance(name: str, value: Any, kind: type[Kind], wanted: str) -> Kind:
    """Raises InvalidRequestError for what is no `kind`: it must be `wanted`, the name of that in words."""
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name}={short(value)}: must be {wanted}")
    return value


def is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def short(value: Any) -> str:
    return repr(value)[:60]
