"""Known slips: what a wrong value most often comes from, and the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cbserve.course.exercise import Case
from cbserve.course.values import close

#: A formula with the slip in it, called with the case's arguments, and the rule that it breaks.
Slip = tuple[Callable[..., Any], str]


def named_slip(slips: Sequence[Slip], args: Case, value: Any, rel: float = 1e-6) -> str:
    """The rule of the first slip that gives `value` for `args`; "" if none does."""
    for formula, rule in slips:
        try:
            if close(value, formula(*args), rel):
                return rule
        except (ArithmeticError, ValueError, IndexError):  # the slip has no value here: 1 / ln 1
            continue
    return ""
