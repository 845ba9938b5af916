"""The timeline: slots as rows, steps or seconds from left to right, one panel for each trace on a common scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbserve.core.trace import StepEvent, Trace
from cbserve.errors import FigureError
from cbserve.viz import given, style
from cbserve.viz.axes import heading
from cbserve.viz.figure import Canvas, Figure
from cbserve.viz.findings import caption, description, end_step, finding, panel_heading, panel_numbers, table_twin
from cbserve.viz.marks import key_entries, sample
from cbserve.viz.panel import RIGHT, Panel
from cbserve.viz.spans import cut, letters, order_of_arrival

LEFT = 66  # pixels for the names of the slots


def timeline(
    *traces: Trace | Sequence[Trace],
    title: str | None = None,
    labels: Sequence[str] | None = None,
    names: Mapping[str, str] | None = None,
    first_step: int = 0,
    last_step: int | None = None,
    width: int = 880,
    axis: str = "step",
    queue: bool = False,
    cursor: int | None = None,
    slots: Sequence[int] | None = None,
) -> Figure:
    """Draw what each slot did in each step.

    Args:
        traces: one panel each, from top to bottom, on a common scale; a list of them is taken too.
        title: the finding; computed from the traces by default.
        labels: heading of each panel; by default how it was batched.
        names: request_id -> what stands on its bar; letters in order of arrival by default.
        first_step, last_step: the part to draw, both included; the numbers beside a panel are those of this part.
        width: pixels, at least 480.
        axis: "step", or "time" in seconds on the engine's clock.
        queue: draw how many requests wait above each panel.
        cursor: draw only what has happened when this step ends, on the scale of the whole part; -1: nothing yet.
        slots: draw these alone; the first 64 by default. The numbers beside a panel are those of all.

    Raises:
        FigureError: no trace, an unknown axis, no steps in the part, labels that are not one a trace, a wrong type.
    """
    runs = given.only_traces(traces)
    if axis not in ("step", "time"):
        raise FigureError(f"axis={axis!r}: must be 'step' or 'time'")
    given.pixels("width", width, 480)
    labels = None if labels is None else given.texts("labels", labels)
    if labels is not None and len(labels) != len(runs):
        raise FigureError(f"{len(labels)} labels for {len(runs)} traces; give one each")
    if title is not None:
        given.text("title", title)
    if names is not None:
        given.mapping("names", names, "request id -> what stands on its bar")
    for name, step in (("first_step", first_step), ("last_step", last_step), ("cursor", cursor)):
        if step is not None:
            given.integer(name, step)
    for slot in slots or ():
        given.integer("slots", slot, least=0)
    end = max(end_step(trace) for trace in runs) or 1
    first, last = max(0, first_step), min(end - 1 if last_step is None else last_step, end - 1)
    if last < first:
        raise FigureError(
            f"first_step={first_step}, last_step={last_step}: the part is empty; choose steps from 0 to {end - 1}"
        )
    now = last if cursor is None else max(first - 1, min(cursor, last))
    order = order_of_arrival(runs)
    names = letters(order, names)
    canvas = Canvas(width)
    wholes = [first == 0 and now >= end_step(trace) - 1 for trace in runs]
    parts = [trace if whole else cut(trace, first, now) for trace, whole in zip(runs, wholes, strict=True)]
    title = title or finding(parts, all(wholes), labels)
    y = heading(canvas, title)
    low, high = (first, last + 1) if axis == "step" else _times([cut(trace, first, last) for trace in runs])
    per_unit = (width - LEFT - RIGHT) / (high - low)
    top, grid_at, panels = y + 22, len(canvas.parts), []
    for index, (trace, part) in enumerate(zip(runs, parts, strict=True)):
        panel = Panel(canvas, trace, part, names, order, axis, (LEFT, low, per_unit), (first, now), slots)
        y = panel.draw(y + 30, labels[index] if labels else panel_heading(trace), queue)
        panel.numbers(width - RIGHT + 14, *panel_numbers(part, wholes[index], axis))
        if cursor is not None:
            canvas.line(
                panel.right(now), panel.top - 5, panel.right(now), panel.bottom + 5, "e", stroke_dasharray="4 3"
            )
        panels.append(panel)
    if cursor is None and len(panels) > 1:
        panels[-1].saved_against(panels[0], axis)
    y = _axis(canvas, grid_at, top, y + 4, (low, high, per_unit), axis)
    y = _key(canvas, y + 24, key_entries(set().union(*(panel.seen for panel in panels))))
    text = description(parts, labels)
    until = [trace if now >= end_step(trace) - 1 else cut(trace, 0, now) for trace in runs]
    return Figure(
        canvas.svg(y + 16, title, text), title, text, caption(title, runs), table_twin(until, labels, names, slots)
    )


def _times(parts: Sequence[Trace]) -> tuple[float, float]:
    """From the first start to the last end, in seconds."""
    steps: list[StepEvent] = [step for part in parts for step in part.steps]
    low, high = min((s.start_s for s in steps), default=0.0), max((s.end_s for s in steps), default=0.0)
    return (low, high) if high > low else (low, low + 1.0)


def _axis(
    canvas: Canvas, grid_at: int, top: float, bottom: float, scale: tuple[float, float, float], axis: str
) -> float:
    """Grid lines go behind what is drawn already. Returns the baseline of the axis' name."""
    low, high, per_unit = scale
    grid = Canvas(canvas.width)
    values = style.ticks(low, high, int((high - low) * per_unit / 85))
    if axis == "step":
        values = [value for value in values if value == int(value)]
    for value, text in zip(values, style.tick_names(values), strict=True):
        x = LEFT + (value - low) * per_unit
        grid.line(x, top + 16, x, bottom, "g")
        canvas.text(x, bottom + 15, text, "a", "middle")
    canvas.parts[grid_at:grid_at] = grid.parts
    name = "step: one token for every running request" if axis == "step" else "time in seconds"
    canvas.text(LEFT, bottom + 33, f"{name} →", "a")
    return bottom + 33


def _key(canvas: Canvas, y: float, entries: Sequence[tuple[str, str]]) -> float:
    """One line (or more) that names the marks that occur. Returns its last baseline."""
    x = float(LEFT)
    for kind, text in entries:
        needed = 26 + style.text_width(text, 12) + 14
        if x > LEFT and x + needed > canvas.width - 16:
            x, y = LEFT, y + 20
        sample(canvas, kind, x, y)
        canvas.text(x + 24, y, text, "a")
        x += needed
    return y
