"""The learner's own answer lengths: read from a line of text, within what a picture can show at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cbserve.errors import CBServeError

MAX_REQUESTS, MAX_LENGTH, MAX_TOKENS = 40, 1000, 4000


class LengthError(CBServeError, ValueError):
    """The learner's lengths cannot be served; the message names value and cure."""


def parse_lengths(text: str) -> list[int]:
    """ "10, 100 500" -> [10, 100, 500]. Raises LengthError naming the value and the cure."""
    words = re.split(r"[\s,;]+", text.strip(" \t\n,;[]()"))
    if words == [""]:
        raise LengthError("No length given: write whole numbers, such as 10, 100, 500.")
    for word in words:
        if not re.fullmatch(r"\d+", word) or not 1 <= int(word) <= MAX_LENGTH:
            raise LengthError(
                f"{word!r} is no length: write whole numbers from 1 to {MAX_LENGTH:,}, such as 10, 100, 500."
            )
    if len(words) > MAX_REQUESTS:
        raise LengthError(f"{len(words)} lengths are too many to draw: give at most {MAX_REQUESTS}.")
    return [int(word) for word in words]


def require_quick(lengths: Sequence[int]) -> None:
    """Raises LengthError when serving `lengths` would take so many steps that the picture does not answer at once."""
    if sum(lengths) > MAX_TOKENS:
        raise LengthError(
            f"{len(lengths)} requests of these lengths are {sum(lengths):,} tokens, more than {MAX_TOKENS:,}: "
            "the picture would not answer at once; choose fewer requests or shorter answers."
        )
