"""How a figure looks: palette, letters, patterns, glyph widths, round ticks.

Colours are those of Okabe and Ito (2008, "Color Universal Design"), which stay apart for colour-blind eyes. A request's
letter, colour and pattern depend only on its place in the order of arrival, so that it looks the same in every figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
INKS = ("#ffffff", "#111111", "#111111", "#111111", "#111111", "#111111", "#111111")  # letters on them: 4.5:1 and more
NUM_PATTERNS = 4  # plain, diagonals, dots, bars; 7 and 4 share no factor: 28 looks before one comes again
NUM_LOOKS = len(COLOURS) * NUM_PATTERNS


def letter(index: int) -> str:
    """A..Z, then A1..Z1, A2.. for the request that arrived as number `index`."""
    return chr(65 + index % 26) + (str(index // 26) if index >= 26 else "")


def index_of_letter(name: str) -> int | None:
    """The inverse of `letter`; None if `name` is not one of its values."""
    found = re.fullmatch(r"([A-Z])([1-9]\d{0,5})?", name)
    return ord(found[1]) - 65 + 26 * int(found[2] or 0) if found else None


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def ink(index: int) -> str:
    return INKS[index % len(COLOURS)]


def pattern(name: str, index: int) -> str:
    """An SVG `<pattern>` with id `name`: the look of request `index`."""
    mark = "#fff" if ink(index) == "#ffffff" else "#000"
    size, shape = [
        (8, ""),
        (7, f'<path d="M-1 8L8-1M-1 1L1-1M6 8L8 6" stroke="{mark}" stroke-opacity=".3" stroke-width="1.5"/>'),
        (6, f'<circle cx="3" cy="3" r="1.2" fill="{mark}" fill-opacity=".38"/>'),
        (5, f'<path d="M0 2.5H5" stroke="{mark}" stroke-opacity=".25" stroke-width="1.4"/>'),
    ][index % NUM_PATTERNS]
    tile = f'<rect width="{size}" height="{size}" fill="{colour(index)}"/>{shape}'
    return f'<pattern id="{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">{tile}</pattern>'


@lru_cache(4096)  # breaking lines asks for the same words again and again
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Pixels that `text` takes at most in the usual sans-serif fonts (DejaVu Sans, the widest, sets the numbers)."""
    return sum(_EM.get(char, 0.7 if char.isupper() else 0.61) for char in text) * size * (1.1 if bold else 1.0)


_EM = {
    **dict.fromkeys("iljI.,:;'|!· ", 0.34), **dict.fromkeys("tfr()[]/-", 0.41), **dict.fromkeys("mwMW%@→", 0.95),
    **dict.fromkeys("0123456789", 0.64),
}  # fmt: skip


def wrap(text: str, width: float, size: float, bold: bool = False) -> list[str]:
    """Break `text` at spaces into as few lines of at most `width` pixels as it takes, about equally long."""
    lines = _fill(text, width, size, bold)
    while len(narrower := _fill(text, width - 12, size, bold)) == len(lines) and width > 24:
        lines, width = narrower, width - 12
    return lines


def _fill(text: str, width: float, size: float, bold: bool) -> list[str]:
    lines = [""]
    for word in re.split(" (?!%)", text):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size, bold) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten) from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * m for m in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.15g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def percent(share: float) -> str:
    """0.40667 -> "40.7 %"; a share that is not a number -> "no value"."""
    return "no value" if math.isnan(share) else f"{100 * share:.1f}".removesuffix(".0") + " %"


def number(value: float) -> str:
    """At most four significant digits, thousands with commas: 1234.5 -> "1,234", 0.01234 -> "0.01234"."""
    if isinstance(value, int) and abs(value) >= 10**300:  # more than a float holds
        return f"{Decimal(value):.4g}"
    if math.isfinite(value) and abs(value) >= 1e15:
        return f"{value:.4g}"
    if isinstance(value, int) or (math.isfinite(value) and (value == int(value) or abs(value) >= 1000)):
        return f"{value:,.0f}"
    return f"{value:.4g}" if math.isfinite(value) else "no value"


def tick_names(values: Sequence[float]) -> list[str]:
    """What stands beside ticks: `number`, or with the decimals of their step where two would read the same."""
    names = list(map(number, values))
    if len(set(names)) < len(names):
        step = min(after - before for before, after in pairwise(values))
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        names = [f"{value:,.{decimals}f}" for value in values]
    return names


def said_s(seconds: float) -> str:
    """Three digits in the unit that suits: 0.01234 -> "12.3 ms", 1.234 -> "1.23 s", 1234.5 -> "1,234 s"; nan -> "no
    value"."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    return "no value" if math.isnan(seconds) else f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def round_ms(seconds: float) -> str:
    """A round number of seconds, a limit, with all its digits: 0.075 -> "75 ms", 2.0 -> "2 s"."""
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def printable(text: str) -> str:
    """`text` as XML and UTF-8 can hold it: lone surrogates and control characters become U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text)


_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
