"""What the scheduler decided in one step, and why, in sentences made from the trace."""

from __future__ import annotations

from collections.abc import Mapping

from cbserve.core.trace import Admitted, Arrived, BlockedEvent, Finished, Left, Preempted, Refused, StepEvent, Trace
from cbserve.viz.findings import joined, plural


def decision_steps(trace: Trace) -> list[int]:
    """The steps before which the scheduler admitted, preempted, or in which a request ended."""
    decided = {e.step for e in trace.of(Admitted, Preempted, Finished)}
    return sorted(decided)


def tell(trace: Trace, step: int, names: Mapping[str, str]) -> str:
    """What happened before, in and after `step`, and why. A step before the first one, or after the last, says so."""
    events = [e for e in trace.of(StepEvent) if e.step == step]
    if not events:
        return _nothing_runs(trace, step, names)
    now = events[0]
    said = [*_preempted(trace, step, names), *_admitted(trace, step, names)]
    waiting = _waiting(trace, now, names)
    computed = _computed(trace, now, names)
    ended = _ended(trace, step, names)
    if not said and not ended:
        said.append("Nothing to decide.")
    return " ".join([*said, *waiting, *computed, *ended])


def _nothing_runs(trace: Trace, step: int, names: Mapping[str, str]) -> str:
    if trace.steps and step > 0:
        return "All requests are done."
    refused = list(trace.of(Refused))
    waiting = sum(1 for _ in trace.of(Arrived)) - len(refused)
    said = [f"Nothing has run yet; {waiting} {'request waits' if waiting == 1 else 'requests wait'}."]
    said += [f"{names[e.request_id]} is refused: {e.reason}." for e in refused[:2]]
    if len(refused) > 2:
        said.append(f"{len(refused) - 2} more are refused.")
    return " ".join(said)


def _admitted(trace: Trace, step: int, names: Mapping[str, str]) -> list[str]:
    admitted = [e for e in trace.of(Admitted) if e.step == step]
    said = [
        f"{names[e.request_id]} resumes in slot {e.slot}: there is room for it again." for e in admitted if e.resumed
    ]
    new = [e for e in admitted if not e.resumed]
    if new:
        who = joined([names[e.request_id] for e in new])
        slots = joined([str(e.slot) for e in new])
        verb, noun = ("takes", "slot") if len(new) == 1 else ("take", "slots")
        is_static = str(trace.meta.get("batching", "")).startswith("Static")
        why = "the engine was idle, so a new batch starts" if is_static else "free slot and blocks enough"
        said.append(f"{who} {verb} {noun} {slots}: {why}.")
    return said


def _preempted(trace: Trace, step: int, names: Mapping[str, str]) -> list[str]:
    said = []
    for e in trace.of(Preempted):
        if e.step == step:
            verb = "is displaced" if e.cause == "displaced" else "is preempted"
            tokens = plural(e.num_computed_tokens, "token")
            said.append(f"{names[e.request_id]} {verb} from slot {e.slot}: {e.reason}; {tokens} will be {e.way_back}.")
    return said


def _waiting(trace: Trace, now: StepEvent, names: Mapping[str, str]) -> list[str]:
    if not now.num_waiting:
        return []
    last = None
    for event in trace:
        if isinstance(event, StepEvent) and event.step >= now.step:
            break
        if isinstance(event, BlockedEvent):
            last = event
    count = f"{now.num_waiting} {'waits' if now.num_waiting == 1 else 'wait'}"
    return [f"{count}, {names[last.request_id]} first: {last.reason}."] if last else [f"{count}."]


def _computed(trace: Trace, now: StepEvent, names: Mapping[str, str]) -> list[str]:
    owners = {e.seq_id: e.request_id for e in trace if hasattr(e, "seq_id") and hasattr(e, "request_id")}
    kinds: dict[str, list[str]] = {}
    for row in sorted(now.rows, key=lambda row: row.slot):
        kinds.setdefault(row.kind, []).append(names[owners[row.seq_id]])
    one = {
        "prefill": "computes its prompt",
        "decode": "gets one token",
        "padding": "is done but computed again, thrown away",
    }
    several = {
        "prefill": "compute their prompts",
        "decode": "get one token each",
        "padding": "are done but computed again, thrown away",
    }
    parts = [
        f"{joined(kinds[kind])} {(one if len(kinds[kind]) == 1 else several)[kind]}" for kind in one if kind in kinds
    ]
    return ["; ".join(parts) + "."] if parts else []


def _ended(trace: Trace, step: int, names: Mapping[str, str]) -> list[str]:
    said = []
    ended = [names[e.request_id] for e in trace.of(Finished) if e.step == step]
    left = sorted((e for e in trace.of(Left) if e.step == step), key=lambda e: e.slot)
    if ended:
        said.append(f"{joined(ended)} {'is' if len(ended) == 1 else 'are'} complete.")
    if left:
        noun = "Slot" if len(left) == 1 else "Slots"
        said.append(f"{noun} {joined([str(e.slot) for e in left])} {'is' if len(left) == 1 else 'are'} free.")
    elif ended:
        said.append(f"{'Its slot stays' if len(ended) == 1 else 'Their slots stay'} taken until the batch ends.")
    return said
