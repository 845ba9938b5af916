"""What a caller gives: looked at before anything is done, and refused by name."""

from __future__ import annotations

import operator
from typing import Any

from cbserve.core.errors import InvalidRequestError


def integer(name: str, value: Any, least: int, also: str = "") -> int:
    """A whole number of at least `least`, one of numpy too. Raises InvalidRequestError for anything else; `also` is
    what else the message says that could be given."""
    if not is_integer(value) or value < least:
        raise InvalidRequestError(f"{name}={short(value)}: must be an integer of at least {least}{also}")
    return operator.index(value)


def is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def short(value: Any) -> str:
    return repr(value)[:60]
