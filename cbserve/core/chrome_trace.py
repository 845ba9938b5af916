"""A trace in the Chrome trace event format, for Perfetto or chrome://tracing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cbserve.core.trace import Admitted, Forked, Preempted, StepEvent, Trace


def events_of(trace: Trace) -> dict[str, Any]:
    """Chrome trace events: one thread a slot, one slice for each run of steps of the same kind, counters for the
    queue and the pool. Times in microseconds."""
    events: list[dict[str, Any]] = [_chrome_name(0, "slots", "process_name")]
    names = {e.seq_id: e.request_id for e in trace.of(Admitted, Forked)}
    open_slices: dict[int, dict[str, Any]] = {}
    for step in trace.of(StepEvent):
        begin, end = step.start_s * 1e6, step.end_s * 1e6
        for row in step.rows:
            last = open_slices.get(row.slot)
            name = f"{names.get(row.seq_id, row.seq_id)} {row.kind}"
            if last and last["name"] == name and last["args"]["last_step"] == step.step - 1:
                last["dur"] = end - last["ts"]
                last["args"]["last_step"] = step.step
                last["args"]["tokens"] += row.num_tokens
            else:
                if row.slot not in open_slices:
                    events.append(_chrome_name(row.slot, f"slot {row.slot}", "thread_name"))
                args = {"first_step": step.step, "last_step": step.step, "tokens": row.num_tokens}
                slice_ = {"name": name, "cat": row.kind, "ph": "X", "pid": 0, "tid": row.slot}
                open_slices[row.slot] = slice_ | {"ts": begin, "dur": end - begin, "args": args}
                events.append(open_slices[row.slot])
        for name, value in (("waiting", step.num_waiting), ("used blocks", step.num_used_blocks)):
            events.append({"name": name, "ph": "C", "pid": 0, "tid": 0, "ts": begin, "args": {name: value}})
    for event in trace.of(Preempted):
        name = f"preempted {event.request_id}: {event.cause}"
        slot, ts = event.slot, event.time_s * 1e6
        events.append({"name": name, "ph": "i", "s": "t", "pid": 0, "tid": slot, "ts": ts, "args": asdict(event)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {k: str(v) for k, v in trace.meta.items()}}


def _chrome_name(tid: int, name: str, what: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
