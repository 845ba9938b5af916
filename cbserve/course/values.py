"""Plain values: what an answer may be, since only those can be compared, sent between processes and shown.

Plain are None, `...`, bool, int, float, str, and lists, tuples and dicts of them; numpy and torch values become those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from cbserve.errors import CBServeError

_MAX_DEPTH = 20


class NotPlainError(CBServeError):
    """A value is an object of a kind that no exercise asks for."""


def plain(value: Any, _depth: int = 0) -> Any:
    """`value` as plain Python values. Exact types only: an object that claims to equal everything is refused.

    Raises NotPlainError for everything else, a generator or a nesting of more than 20 levels for instance.
    """
    kind = type(value)
    if value is None or value is ... or kind in (bool, int, float, str):
        return value
    if _depth >= _MAX_DEPTH:
        raise NotPlainError(f"is nested deeper than {_MAX_DEPTH} levels; return a flat list or dict")
    if kind in (list, tuple, range):
        items = [plain(item, _depth + 1) for item in value]
        return tuple(items) if kind is tuple else items
    if kind is dict:
        return {plain(key, _depth + 1): plain(item, _depth + 1) for key, item in value.items()}
    if kind.__module__.split(".")[0] in ("numpy", "torch") and hasattr(value, "tolist"):
        return plain(value.tolist(), _depth + 1)
    cure = "return list(...) of it" if hasattr(kind, "__iter__") else "return a number, a string, a list or a dict"
    raise NotPlainError(f"is {with_article(kind.__name__)}; {cure}")


def close(value: Any, expected: Any, rel: float = 1e-6, abs_: float = 1e-9) -> bool:
    """Whether two plain values agree: numbers within `rel` or `abs_`, lists and tuples item by item, the rest exactly.

    A bool is no number, a string of digits is none either, and NaN agrees with NaN alone.
    """
    if shape_fault(value, expected):
        return False
    if isinstance(expected, list | tuple):
        return all(close(a, b, rel, abs_) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        return all(close(value[key], expected[key], rel, abs_) for key in expected)
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        if math.isnan(expected):
            return math.isnan(value)
        return math.isclose(value, expected, rel_tol=rel, abs_tol=abs_)
    return bool(value == expected)


def rounded(value: Any, expected: Any) -> bool:
    """Whether `value` is wrong only in that its numbers are those of `expected`, rounded to 2 or more decimals.

    A whole number proves no rounding: 1.0 in place of 0.9997 is more likely another slip.
    """
    if shape_fault(value, expected):
        return False
    wrong = [(a, b) for a, b in _leaves(value, expected) if not close(a, b)]
    return any(a % 1 for a, _ in wrong if isinstance(a, float)) and any(
        all(isinstance(b, float) and close(a, round(b, digits)) for a, b in wrong) for digits in range(2, 7)
    )


def _leaves(value: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """(value, expected) for each number or word in two values of one shape."""
    if isinstance(expected, list | tuple | dict):
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            yield from _leaves(value[key], expected[key])
    else:
        yield value, expected


def shape_fault(value: Any, expected: Any) -> str:
    """What is wrong with the kind of `value`, beside a value of the right kind; "" if the kind is right."""
    if value is None or value is ...:
        return "" if value is expected else "there is no value: nothing was returned, or the name still holds its stub"
    if isinstance(expected, bool) or expected is None:
        return "" if type(value) is type(expected) else f"{wanted(expected)} is wanted, and this is {described(value)}"
    if isinstance(expected, int | float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"a number is wanted, and this is {described(value)}"
        if math.isnan(value) and not math.isnan(expected):
            return "this is nan, not a number: look for 0/0, or for inf - inf"
        return ""
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple):
            return f"a list is wanted, and this is {described(value)}"
        if len(value) != len(expected):
            return f"{_count(len(expected), 'item')} are wanted, and this has {len(value)}"
        for index, (a, b) in enumerate(zip(value, expected, strict=True)):
            if fault := shape_fault(a, b):
                return f"item {index}: {fault}"
        return ""
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return f"a dict is wanted, and this is {described(value)}"
        if missing := [key for key in expected if key not in value]:
            return f"the key {missing[0]!r} is missing"
        if extra := [key for key in value if key not in expected]:
            return f"the key {extra[0]!r} has no place here"
        for key in expected:
            if fault := shape_fault(value[key], expected[key]):
                return f"{key!r}: {fault}"
        return ""
    return "" if type(value) is type(expected) else f"{wanted(expected)} is wanted, and this is {described(value)}"


def described(value: Any) -> str:
    """A value with the name of its kind: "a string ('0.4')"."""
    return "None: is a `return` missing?" if value is None else f"{wanted(value)} ({shown(value, 40)})"


def wanted(value: Any) -> str:
    if value is None:
        return "None"
    names = {bool: "True or False", str: "a string", list: "a list", tuple: "a tuple", dict: "a dict"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value)) or with_article(type(value).__name__)


def with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def shown(value: Any, width: int = 100) -> str:
    """The repr of `value` on one line of at most `width` characters, without memory addresses."""
    if type(value) is float:
        text = repr(round(value, 6)) if math.isfinite(value) and abs(value) >= 1e-3 else repr(value)
    else:
        try:
            text = repr(value)
        except Exception:  # the learner's own __repr__
            text = f"<{type(value).__name__}>"
    text = scrubbed(" ".join(text.split()))
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def scrubbed(text: str) -> str:
    """`text` without memory addresses, which differ in each run."""
    return re.sub(r" at 0x[0-9a-fA-F]+|0x[0-9a-fA-F]{6,}", "", text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
