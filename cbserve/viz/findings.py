"""What a timeline says in words: its title, headings, caption, description and table, all computed from the traces."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from cbserve.core.metrics import occupancy, slot_utilisation
from cbserve.core.trace import Admitted, Arrived, Preempted, Refused, Trace
from cbserve.viz.spans import records
from cbserve.viz.style import percent

Rows = tuple[Sequence[str], Sequence[Sequence[object]]]


def batching_name(trace: Trace) -> str:
    """ "static batching", "continuous batching", or what the trace calls it."""
    name = str(trace.meta.get("batching", "batching")).partition("(")[0]
    return {"StaticBatching": "static batching", "ContinuousBatching": "continuous batching"}.get(name, name)


def num_slots(trace: Trace) -> int:
    """The trace's own number of slots, or as many as its rows use."""
    used = max((row.slot + 1 for step in trace.steps for row in step.rows), default=1)
    return int(trace.meta.get("num_slots", used))


def end_step(trace: Trace) -> int:
    """Steps that have ended by the last step of the trace."""
    steps = trace.steps
    return steps[-1].step + 1 if steps else 0


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def joined(words: Sequence[str], most: int = 8) -> str:
    """ "A", "A and B", "A, B and C"; beyond `most` the rest is counted."""
    if len(words) > most:
        return f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def has_padding(trace: Trace) -> bool:
    return any(row.kind == "padding" for step in trace.steps for row in step.rows)


def finding(traces: Sequence[Trace], is_whole: bool, labels: Sequence[str] | None = None) -> str:
    """The title: one sentence with the numbers of these traces."""
    requests = plural(sum(1 for _ in traces[0].of(Arrived)), "request")
    if not any(trace.steps for trace in traces):
        refused = sum(1 for _ in traces[0].of(Refused))
        return f"Nothing has run: {requests}" + (f", {refused} refused" if refused else "")
    shares = [percent(slot_utilisation(trace)) for trace in traces]
    window = "" if is_whole else _window(traces)
    if len(traces) > 1:
        verbs = ["uses ", *[""] * (len(traces) - 1)]
        panels = [batching_name(trace).removesuffix(" batching") for trace in traces]
        if labels and max(map(len, labels)) <= 30:
            panels, verbs = [f"{label}:" for label in labels], [""] * len(labels)
        parts = [
            f"{panel} {verb}{share}" + (f" in {plural(len(trace.steps), 'step')}" if is_whole else "")
            for trace, panel, share, verb in zip(traces, panels, shares, verbs, strict=True)
        ]
        same = len({frozenset(e.request_id for e in trace.of(Arrived)) for trace in traces}) == 1
        slots = {num_slots(trace) for trace in traces}
        what = f"The same {requests}" if same else "Different requests"
        where = f" on {plural(slots.pop(), 'slot')}" if len(slots) == 1 else ""
        return f"{what}{where}{',' if window else ''}{window}: {', '.join(parts)}"
    trace = traces[0]
    if has_padding(trace):
        return f"The hatched steps are computed and thrown away: {shares[0]} used{window}"
    returning: Counter[str] = Counter()
    for event in trace.of(Preempted):
        returning[event.way_back] += event.num_computed_tokens
    if returning.total():
        preemptions = plural(sum(1 for _ in trace.of(Preempted)), "preemption")
        ways = [f"{plural(count, 'token')} must be {way}" for way, count in returning.items() if count]
        return f"{preemptions}: {', '.join(ways)}"
    return f"{requests} on {plural(num_slots(trace), 'slot')}: {shares[0]} of the slot-steps gave a token{window}"


def _window(traces: Sequence[Trace]) -> str:
    first = min(trace.steps[0].step for trace in traces if trace.steps)
    last = max(map(end_step, traces)) - 1
    return f" in steps {first:,}–{last:,}" if last > first else f" in step {first:,}"


def panel_heading(trace: Trace) -> str:
    """How it was batched, and what that did here."""
    name = batching_name(trace)
    heading = name[:1].upper() + name[1:]
    if has_padding(trace):
        return f"{heading}: a slot waits for the slowest of its batch"
    causes = {event.cause for event in trace.of(Preempted)}
    if causes:
        what = (
            "a more urgent request takes a running one's place"
            if "displaced" in causes
            else "blocks run out, the last yields"
        )
        return f"{heading}: {what}"
    if name == "continuous batching" and any(event.step > 0 and not event.resumed for event in trace.of(Admitted)):
        return f"{heading}: a free slot takes the next request at once"
    return heading


def panel_numbers(trace: Trace, is_whole: bool, axis: str) -> tuple[str, list[str]]:
    """The number printed large, and the lines beneath it."""
    steps = trace.steps
    if not steps:
        return "-", ["no step yet"]
    used, occupied = slot_utilisation(trace), occupancy(trace)
    is_start = steps[0].step == 0
    lines = ["used" if is_whole else "used so far" if is_start else "used in this part"]
    if percent(used) != percent(occupied):
        lines.append(f"{percent(occupied)} occupied")
    if not is_whole:
        lines.append(f"after {plural(end_step(trace), 'step')}" if is_start else f"to step {end_step(trace) - 1:,}")
    elif axis == "time":
        lines.append(f"done at {steps[-1].end_s:.3g} s")
    else:
        lines.append(f"done at step {end_step(trace):,}")
    return percent(used), lines


def description(traces: Sequence[Trace], labels: Sequence[str] | None) -> str:
    """What is drawn, for who cannot see it."""
    sentences = []
    for index, trace in enumerate(traces):
        name = labels[index] if labels else batching_name(trace)
        used = slot_utilisation(trace)
        share = "no step has run" if math.isnan(used) else f"{percent(used)} of the slot-steps gave a token"
        sentence = f"{name}: {plural(num_slots(trace), 'slot')}, {plural(len(trace.steps), 'step')}, {share}"
        wasted = sum(row.kind == "padding" for step in trace.steps for row in step.rows)
        if wasted:
            sentence += f", {plural(wasted, 'slot-step')} computed and thrown away"
        preemptions = sum(1 for _ in trace.of(Preempted))
        if preemptions:
            sentence += f", {plural(preemptions, 'preemption')}"
        sentences.append(sentence + ".")
    return " ".join(sentences)


def caption(title: str, traces: Sequence[Trace]) -> str:
    """The finding, and whether it was measured or simulated."""
    clocks = {str(trace.meta.get("clock", "")) for trace in traces}
    scripted = all(trace.meta.get("model") == "scripted" for trace in traces)
    model = "a scripted model" if scripted else "a cost model"
    where = {"measured": " Measured here.", "simulated": f" Simulated: the real scheduler with {model}."}
    return f"{title}." + (where.get(clocks.pop(), "") if len(clocks) == 1 else "")


def table_twin(
    traces: Sequence[Trace], labels: Sequence[str] | None, names: Mapping[str, str], slots: Sequence[int] | None
) -> Rows:
    """The data: a row for each sequence, in `slots` alone where they are given. Steps are numbered from 0; "finished"
    and "left" name the last step."""
    header = ["request", "slot", "admitted", "first token", "finished", "left", "tokens", "preemptions"]
    rows: list[list[object]] = []
    for index, trace in enumerate(traces):
        panel = [labels[index] if labels else batching_name(trace)] if len(traces) > 1 else []
        for r in records(trace):
            if slots is not None and not {*slots} & {*r.slots}:
                continue
            name = names[r.request_id]
            request = name if name == r.request_id else f"{name} ({r.request_id})"
            held = r.slots[0] if len(r.slots) == 1 else ", ".join(map(str, r.slots))
            steps = [r.admitted, r.first_token, r.finished, r.left]
            rows.append([*panel, request, held, *steps, r.num_tokens, r.num_preemptions])
    return (["panel", *header] if len(traces) > 1 else header), rows
