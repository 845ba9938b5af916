"""One panel of a timeline: the slots of one trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from cbserve.core.trace import Admitted, Preempted, Trace
from cbserve.viz import style
from cbserve.viz.figure import Canvas
from cbserve.viz.findings import end_step, num_slots, plural
from cbserve.viz.marks import badge, chevrons
from cbserve.viz.spans import Span, spans

MAX_SLOTS = 64
RIGHT = 150  # pixels for the large number
COMPUTE = {"prefill", "decode"}
TINY = 1.5  # pixels: narrower bars of different requests that touch are drawn as one


class Panel:
    """Draws the slots of one trace.

    Args:
        canvas: where to.
        trace: the whole run; `part`: what has happened of it so far.
        names, order: by request_id, what stands on a bar and the index of its look.
        axis: "step" or "time".
        scale: (x of the low end, low end, pixels per step or second).
        window: first and last step drawn.
        slots: draw these alone; by default the first `MAX_SLOTS` of those that are used.
    """

    def __init__(
        self, canvas: Canvas, trace: Trace, part: Trace, names: Mapping[str, str], order: Mapping[str, int], axis: str,
        scale: tuple[float, float, float], window: tuple[int, int], slots: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.canvas, self.trace, self.part, self.names, self.order = canvas, trace, part, names, order
        self.axis, self.window = axis, window
        self.x0, self.low, self.per_unit = scale
        self.times = {step.step: (step.start_s, step.end_s) for step in trace.steps} if axis == "time" else {}
        total = num_slots(trace)
        used = max((row.slot + 1 for step in trace.steps for row in step.rows), default=1)
        self.empty = total - used if total > 8 and total - used >= 4 else 0  # the last ones, never used: not drawn
        drawn = range(min(total - self.empty, MAX_SLOTS)) if slots is None else sorted(set(slots))
        self.rows = {slot: row for row, slot in enumerate(drawn)}
        count = len(self.rows)
        self.hidden = total - self.empty - count
        self.pitch = 38 if count <= 4 else 30 if count <= 8 else 22 if count <= 16 else 17
        self.height = self.pitch - (8 if count <= 4 else 6 if count <= 8 else 4 if count <= 16 else 2)
        self.seen: set[str] = set()  # kinds of marks drawn, for the key
        self.top = self.bottom = 0.0

    # ---- places -------------------------------------------------------------------------------------------------

    def left(self, step: int) -> float:
        """x where `step` begins."""
        at = self.times[step][0] if step in self.times else float(step)
        return self.x0 + (at - self.low) * self.per_unit

    def right(self, step: int) -> float:
        """x where `step` ends."""
        at = self.times[step][1] if step in self.times else step + 1.0
        return self.x0 + (at - self.low) * self.per_unit

    def y(self, slot: int) -> float:
        return self.top + self.rows[slot] * self.pitch

    # ---- drawing ------------------------------------------------------------------------------------------------

    def draw(self, y: float, heading: str, queue: bool) -> float:
        """Draw from the heading's baseline `y` downwards. Returns the bottom."""
        for line in style.wrap(heading, self.canvas.width - self.x0 - 16, 14, bold=True):
            self.canvas.text(self.x0, y, line, "h halo")
            y += 18
        y -= 18
        if queue:
            y = self._queue(y + 8)
        self.top = y + 12
        self.bottom = self.top + len(self.rows) * self.pitch - (self.pitch - self.height)
        end = end_step(self.trace) - 1
        found = [s for s in spans(self.part) if s.slot in self.rows]
        for slot in self.rows:
            middle = self.y(slot) + self.height / 2 + 4.3
            self.canvas.text(self.x0 - 10, middle, f"slot {slot}", "a", "end")
            if self.trace.steps:
                x = max(self.x0, self.left(max(self.window[0], self.trace.steps[0].step)))
                edge = self.right(max(min(end, self.window[1]), self.window[0]))
                self.canvas.rect(x, self.y(slot), edge - x, self.height, "track", f"slot {slot}: empty", rx=3)
        for _, group in groupby(sorted(found, key=lambda s: (s.slot, s.first)), key=lambda s: s.slot):
            self._slot(list(group))
        self._largest_waste(found)
        self._marks()
        notes = ((self.hidden, "not drawn; the numbers count all"), (self.empty, "stay empty; the numbers count them"))
        for count, what in notes:
            if count:
                self.bottom += 18
                self.canvas.text(self.x0, self.bottom, f"{plural(count, 'more slot')} {what}", "a halo")
        return self.bottom

    def numbers(self, x: float, large: str, lines: Sequence[str]) -> None:
        y = self.top + 24
        self.canvas.text(x, y, large, "n")
        for line in lines:
            y += 17
            self.canvas.text(x, y, line, "b" if line == lines[0] else "a")
        self.bottom = max(self.bottom, y)

    def saved_against(self, other: Panel, axis: str) -> None:
        """Point at the steps (or seconds) between this panel's end and that of `other`, where there is room."""
        mine, theirs = end_step(self.part) - 1, end_step(other.part) - 1
        if min(mine, theirs) < 0:
            return
        a, b = self.right(mine), other.right(theirs)
        units = theirs - mine if axis == "step" else (b - a) / self.per_unit
        text = f"{plural(int(units), 'step')} sooner" if axis == "step" else f"{units:.3g} s sooner"
        if b - a < style.text_width(text, 14, bold=True) + 36:
            return
        y = (self.top + self.bottom) / 2
        self.canvas.add("path", "e", d=f"M{b:.1f} {y:.1f}H{a + 6:.1f}m6 -5l-6 5l6 5M{b:.1f} {y - 7:.1f}v14")
        self.canvas.text((a + b) / 2, y - 8, text, "h halo", "middle")

    def _queue(self, y: float) -> float:
        """How many wait, as steps of a small curve. Returns its base line."""
        steps = self.part.steps
        most, height, base = max((s.num_waiting for s in self.trace.steps), default=0), 26.0, y + 28
        self.canvas.text(self.x0 - 10, base - 2, "waiting", "a", "end")
        runs = [list(group) for _, group in groupby(steps, key=lambda s: s.num_waiting)]
        edges = [(self.left(run[0].step), self.right(run[-1].step), run[0].num_waiting / max(most, 1)) for run in runs]
        outline = "".join(f"V{base - height * share:.1f}H{edge:.1f}" for _, edge, share in edges)
        if edges:
            d = f"M{edges[0][0]:.1f} {base:.1f}{outline}V{base:.1f}Z"
            self.canvas.add("path", "m", f"at most {plural(most, 'request')} waiting at a time", d=d)
        for (x, edge, _), run in zip(edges, runs, strict=True):
            if edge - x >= 4:
                where = f"step {run[0].step}" if len(run) == 1 else f"steps {run[0].step} to {run[-1].step}"
                hover = f"{where}: {plural(run[0].num_waiting, 'request')} waiting"
                self.canvas.rect(x, base - height, edge - x, height, "", hover, fill="none", pointer_events="all")
        self.canvas.text(self.canvas.width - RIGHT + 14, base - 2, f"at most {most:,}", "a")
        return base

    def _slot(self, row: list[Span]) -> None:
        for stay in self._stays(row):
            first, last = stay[0], stay[-1]
            x, edge = self.left(first.first), self.right(last.last)
            if len({s.request_id for s in stay}) > 1:
                self.seen.add("crowd")
                ids = list(dict.fromkeys(self.names[s.request_id] for s in stay))
                hover = f"{len(ids)} requests, {ids[0]} to {ids[-1]}, steps {first.first} to {last.last}"
                self.canvas.rect(x, self.y(first.slot), edge - x, self.height, "m", hover)
            elif first.kind == "padding":
                self.seen.add("padding")
                hover = (
                    f"{self.names[first.request_id]} is done: {plural(first.num_steps, 'step')} computed, thrown away"
                )
                self._bar(first.slot, x, edge, "w", f"{hover} ({_steps(first, last)})")
            elif first.kind == "held":
                self.seen.add("held")
                hover = f"{self.names[first.request_id]} holds the slot and computes nothing, {_steps(first, last)}"
                middle = self.y(first.slot) + self.height / 2
                self.canvas.rect(x, middle - 2, edge - x, 4, "", hover, fill=style.colour(self.order[first.request_id]))
            else:
                self._request(stay, x, edge)

    def _stays(self, row: list[Span]) -> list[list[Span]]:
        """Group spans into what is drawn as one bar: prefill and decode of one request, or a crowd of tiny bars."""
        stays: list[list[Span]] = []
        for span in row:
            last = stays[-1][-1] if stays else None
            if (
                last
                and last.seq_id == span.seq_id
                and last.last + 1 == span.first
                and {last.kind, span.kind} <= COMPUTE
            ):
                stays[-1].append(span)
            else:
                stays.append([span])
        bars: list[list[Span]] = []
        was_tiny = False
        for stay in stays:
            is_tiny = self.right(stay[-1].last) - self.left(stay[0].first) < TINY and stay[0].kind in COMPUTE
            if is_tiny and was_tiny and bars[-1][-1].last + 1 == stay[0].first:
                bars[-1] += stay
            else:
                bars.append(stay)
            was_tiny = is_tiny
        return bars

    def _request(self, stay: list[Span], x: float, edge: float) -> None:
        first, last, slot = stay[0], stay[-1], stay[0].slot
        index, name = self.order[first.request_id], self.names[first.request_id]
        request = name if name == first.request_id else f"{name} ({first.request_id})"
        tokens = sum(s.num_sampled for s in stay)
        hover = f"{request}: {plural(tokens, 'token')}, {_steps(first, last)}"
        self._bar(slot, x, edge, "", hover, fill=self.canvas.look(index))
        self.seen.add("decode")
        size = min(13, self.height - 1)
        needed = style.text_width(name, size, bold=True) + 3
        start = self.right(first.last) if first.kind == "prefill" else x
        on_prefill = edge - start < needed <= edge - x  # all prefill, or nearly: the letter stands on it
        start = x if on_prefill else start
        for span in stay:
            if span.kind == "prefill":
                a, b = self.left(span.first), self.right(span.last)
                b = max(b, min(a + 3, a + 0.4 * (edge - x)))  # wide enough to be seen
                self._prefill(span, a, b, request, has_mark=not on_prefill)
        if edge - start >= needed and size >= 12:
            ink = "#fff" if on_prefill else style.ink(index)
            edge_of_text = "stroke:#222" if on_prefill else f"stroke:{style.colour(index)}"
            self.canvas.text(
                (start + edge) / 2, self.y(slot) + self.height / 2 + size * 0.36, name, "l",
                style=f"fill:{ink};{edge_of_text}" + (f";font-size:{size}px" if size != 13 else ""),
            )  # fmt: skip

    def _prefill(self, span: Span, a: float, b: float, request: str, has_mark: bool) -> None:
        self.seen.add("recompute" if span.recomputes else "prefill")
        what = "computes again" if span.recomputes else "prefill of"
        cls = "pre" if b - a >= 5 else "cap"
        self._bar(span.slot, a, b, cls, f"{request}: {what} {plural(span.num_tokens, 'token')}, {_steps(span, span)}")
        tall = min(4.0, self.height / 2 - 4)
        if has_mark and b - a >= 8:
            chevrons(
                self.canvas, (a + b) / 2, self.y(span.slot) + self.height / 2, tall, span.recomputes and b - a >= 16
            )

    def _bar(self, slot: int, x: float, edge: float, cls: str, hover: str, **more: str) -> None:
        wide = edge - x
        gap = 1.5 if wide > 6 else 0.3 if wide > 1 else 0.0
        self.canvas.rect(x, self.y(slot), wide - gap, self.height, cls, hover, rx=3 if wide > 8 else 1, **more)

    def _largest_waste(self, found: Iterable[Span]) -> None:
        """Say on the widest hatched bar what the hatch means."""
        padding = [s for s in found if s.kind == "padding"]
        text = "computed, thrown away"
        if padding:
            span = max(padding, key=lambda s: self.right(s.last) - self.left(s.first))
            x, edge = self.left(span.first), self.right(span.last)
            if edge - x > style.text_width(text, 12) + 16 and self.height >= 14:
                self.canvas.text((x + edge) / 2, self.y(span.slot) + self.height / 2 + 4.3, text, "b halo", "middle")

    def _marks(self) -> None:
        """Preemptions and resumptions, as badges on the edge of a bar; where they would touch, as a cut alone."""
        last_badge: dict[int, float] = {}
        first, now = self.window
        for event in self.part.of(Preempted, Admitted):
            is_cut = isinstance(event, Preempted)
            if not (first <= event.step <= now) or event.slot not in self.rows or not (is_cut or event.resumed):
                continue
            x, y, name = self.left(event.step), self.y(event.slot), self.names[event.request_id]
            kind = event.cause if is_cut else "resumed"
            if is_cut:
                what = "displaced" if kind == "displaced" else "preempted"
                hover = (
                    f"step {event.step}: {name} is {what}: {event.reason}. It gives back "
                    f"{plural(event.num_blocks, 'block')}; {plural(event.num_computed_tokens, 'token')} "
                    f"will be {event.way_back}"
                )
                zigzag = "".join(f"l{2.5 if i % 2 else -2.5} {self.height / 4:.2f}" for i in range(4))
                for cls in ("cut", "e"):
                    self.canvas.add("path", cls, hover if cls == "e" else "", d=f"M{x:.1f} {y:.1f}{zigzag}")
            else:
                hover = f"step {event.step}: {name} resumes in slot {event.slot}"
            if x - last_badge.get(event.slot, -99.0) >= 15:
                last_badge[event.slot] = x
                self.seen.add(kind)
                badge(self.canvas, kind, x, y + 1, hover)


def _steps(first: Span, last: Span) -> str:
    return f"step {first.first}" if first.first == last.last else f"steps {first.first} to {last.last}"
