"""What a figure takes: each argument looked at before anything is drawn, and refused by name."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from cbserve.core.trace import Trace
from cbserve.errors import FigureError

MOST_PIXELS = 10_000
SMALLEST, LARGEST = 1e-150, 1e150  # beyond these, ratios and differences leave the range of a float


def pixels(name: str, value: Any, least: int) -> None:
    """Raises FigureError for a width or a height that no figure can have."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value <= MOST_PIXELS:  # nan is neither
        raise FigureError(
            f"{name}={value!r}: must be at least {least} pixels and at most {MOST_PIXELS:,}; "
            "a page shrinks the figure by itself"
        )


def frame(title: Any, caption: Any, width: Any, height: Any = 240) -> None:
    """What every chart takes. Raises FigureError."""
    text("title", title)
    if caption is not None:
        text("caption", caption)
    pixels("width", width, 240)
    pixels("height", height, 200)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FigureError(f"{name}={value!r}: must be text")
    return value


def texts(name: str, values: Any) -> list[str]:
    """A list of texts; numbers become text."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable):
        raise FigureError(f"{name}={values!r}: must be a list of texts")
    return [str(value) for value in values]


def integer(name: str, value: Any, least: int | None = None) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or (least is not None and value < least):
        raise FigureError(f"{name}={value!r}: must be an integer" + ("" if least is None else f" of at least {least}"))


def mapping(name: str, value: Any, of: str) -> None:
    if not isinstance(value, Mapping):
        raise FigureError(f"{name}={value!r}: must be a dict, {of}")


def numbers(name: str, values: Any) -> list[Any]:
    """A list of int and float, of a list, an array or a tensor; nan and inf may be among them."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise FigureError(f"{name} is {values!r}: must be a list of numbers")
    return [number(name, value) for value in values]


def number(name: str, value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real):
        raise FigureError(f"{name}: {_short(value)} is no number")
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if value and is_finite and not SMALLEST <= abs(value) <= LARGEST:
        raise FigureError(
            f"{name}: {_short(value)} is beyond what can be drawn, {SMALLEST} to {LARGEST}; choose another unit"
        )
    return value


def finite(name: str, value: Any) -> Any:
    if not math.isfinite(number(name, value)):
        raise FigureError(f"{name}: {value!r} cannot be drawn; give a finite number")
    return value


def _short(value: Any) -> str:
    """A value as a message shows it: a huge integer as a power of ten."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"about {'-' if value < 0 else ''}10**{int(value.bit_length() * math.log10(2))}"
    return reprlib.repr(value)


def only_traces(traces: tuple[Any, ...]) -> tuple[Trace, ...]:
    """The traces that were given one by one, or as one list."""
    if len(traces) == 1 and isinstance(traces[0], list | tuple):
        traces = tuple(traces[0])
    if not traces:
        raise FigureError("timeline() got no trace; give at least one, as serve(...) returns it")
    for wrong in (trace for trace in traces if not isinstance(trace, Trace)):
        raise FigureError(f"{wrong!r} is no trace; give what serve(...) returns")
    return traces
