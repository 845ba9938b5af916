"""The timeline as text, for a terminal: one line a slot, one column a step (or several steps)."""

from __future__ import annotations

import os
import sys
from itertools import groupby

from cbserve.core.trace import Trace
from cbserve.viz.findings import end_step, num_slots, panel_heading, panel_numbers
from cbserve.viz.spans import Span, letters, order_of_arrival, spans
from cbserve.viz.style import COLOURS, INKS

BLOCKS = {"decode": "━", "prefill": "▒", "padding": "/", "held": "-", "": "·"}
ASCII = {"decode": "=", "prefill": "#", "padding": "/", "held": "-", "": "."}
MAX_SLOTS = 64


def timeline_text(trace: Trace, width: int = 100, color: bool | None = None) -> str:
    """Draw what each slot did in each step.

    A request's bar begins with its letter; then its prefill and decode steps. `/` is padding: computed and thrown away.
    Where steps are more than columns, a column shows what the slot did in most of its steps.

    Args:
        trace: the run.
        width: columns of the terminal.
        color: ANSI colours; None: where stdout is a terminal and NO_COLOR is not set.
    """
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ if color is None else color
    signs = BLOCKS if _can_encode("".join(BLOCKS.values())) else ASCII
    order = order_of_arrival([trace])
    names = letters(order)
    slots, end = min(num_slots(trace), MAX_SLOTS), end_step(trace)
    large, lines = panel_numbers(trace, True, "step")
    margin = len(f"slot {slots - 1} ")
    columns = max(10, width - margin)
    each = max(1, -(-end // columns))
    text = [panel_heading(trace)]
    rows: dict[int, list[Span]] = {slot: [] for slot in range(slots)}
    for span in spans(trace):
        rows.get(span.slot, []).append(span)
    drawn: set[str] = set()
    for slot, found in rows.items():
        row, chars = _row(found, end, each, signs, names, order, color)
        text.append(f"{f'slot {slot}':<{margin}}{row}")
        drawn.update(chars)
    text.append(" " * margin + _ruler(end, each))
    unit = "a column is one step" if each == 1 else f"a column is {each} steps"
    text.append(f"{large} {', '.join(lines)}; {unit}")
    text.append(_key(drawn, signs, color))
    if slots < num_slots(trace):
        text.append(f"{num_slots(trace) - slots} more slots not drawn; the numbers count all")
    return "\n".join(text)


def _can_encode(signs: str) -> bool:
    try:
        signs.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _row(
    found: list[Span],
    end: int,
    each: int,
    signs: dict[str, str],
    names: dict[str, str],
    order: dict[str, int],
    color: bool,
) -> tuple[str, list[str]]:
    """The line of one slot, and its characters without colour."""
    columns = -(-end // each)
    most: list[tuple[int, Span | None]] = [(0, None)] * columns
    for span in found:
        for column in range(span.first // each, span.last // each + 1):
            steps = min(span.last, (column + 1) * each - 1) - max(span.first, column * each) + 1
            if steps > most[column][0]:
                most[column] = steps, span
    cells = [(signs[span.kind if span else ""], span) for _, span in most]
    running = [span if span and span.kind in ("prefill", "decode") else None for _, span in cells]
    letters_at: dict[int, str] = {}
    for _, run in groupby(enumerate(running), key=lambda pair: pair[1] and pair[1].seq_id):
        bar = list(run)
        name = names[bar[0][1].request_id] if bar[0][1] else ""
        letters_at |= {column: char for (column, _), char in zip(bar, name, strict=False)}
    painted = [_paint(order[span.request_id], span.kind) if color and span else "" for span in running]
    chars = [
        letters_at.get(i, " " if paint else sign)
        for i, ((sign, _), paint) in enumerate(zip(cells, painted, strict=True))
    ]
    out = []
    for paint, group in groupby(zip(painted, chars, strict=True), key=lambda pair: pair[0]):
        text = "".join(char for _, char in group)
        out.append(f"{paint}{text}\x1b[0m" if paint else text)
    return "".join(out), chars


def _paint(index: int, kind: str) -> str:
    """The ANSI code for the look of request `index`."""
    red, green, blue = (int(COLOURS[index % len(COLOURS)][i : i + 2], 16) for i in (1, 3, 5))
    if kind == "prefill":
        return f"\x1b[1;97;48;2;{red // 2};{green // 2};{blue // 2}m"
    return f"\x1b[{'97' if INKS[index % len(INKS)] == '#ffffff' else '30'};48;2;{red};{green};{blue}m"


def _key(drawn: set[str], signs: dict[str, str], color: bool) -> str:
    """What the signs mean that were drawn: a letter may stand on a whole prefill."""
    words = {
        "decode": "decode",
        "prefill": "prefill",
        "padding": "computed and thrown away",
        "held": "waits in its slot",
        "": "empty",
    }
    if color:
        words = {kind: word for kind, word in words.items() if kind not in ("decode", "prefill")}
    first = "dark: prefill, bright: decode" if color else "a letter begins a request"
    return ", ".join([first, *(f"{signs[kind]} {word}" for kind, word in words.items() if signs[kind] in drawn)])


def _ruler(end: int, each: int) -> str:
    """Step numbers under their columns, every ten columns."""
    columns = -(-end // each)
    line = ""
    for column in range(0, columns + 1, 10):
        mark = f"{column * each}"
        if column >= len(line) and column + len(mark) <= columns + 6:
            line = line.ljust(column) + mark + " "
    return line.rstrip()
