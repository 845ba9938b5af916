"""Workloads that an explorer's menu offers: what is shown -> jobs whose arrivals have a rate."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cbserve.errors import FigureError
from cbserve.twin import chat_workload
from cbserve.workloads.arrivals import poisson
from cbserve.workloads.readers import read_trace
from cbserve.workloads.synthetic import azure_twin
from cbserve.workloads.workload import Workload


def traffic(given: Any, num_requests: int) -> dict[str, Workload]:
    """What was given first: a name of `MADE`, the path of a trace, or a `Workload`; then all that can be made.

    Raises:
        FigureError: it is none of these.
        TraceFileError: the trace cannot be read.
    """
    made = {name: make(num_requests) for name, make in MADE.values()}
    if isinstance(given, str) and given in MADE:
        name = MADE[given][0]
        return {name: made[name], **made}
    if not isinstance(given, Workload):
        if not isinstance(given, str | os.PathLike) or not os.path.isfile(given):
            raise FigureError(
                f"workload={str(given)[:60]!r}: must be {', '.join(map(repr, MADE))}, the path of a trace (an Azure "
                "CSV, Mooncake JSONL or vLLM bench file that is there), or a Workload, such as read_trace(path) gives"
            )
        given = read_trace(given, num_requests)
    return {given.name: given, **made}


def _chats(num_requests: int) -> Workload:
    """Those of `cbserve twin`, as a Poisson process."""
    chats = chat_workload(num_requests)
    times = poisson(num_requests, 1.0)
    return replace(chats, jobs=[replace(job, arrival_s=at) for job, at in zip(chats.jobs, times, strict=True)])


MADE: Mapping[str, tuple[str, Callable[[int], Workload]]] = {
    "conv": ("Azure conv (twin)", partial(azure_twin, "conv")),
    "code": ("Azure code (twin)", partial(azure_twin, "code")),
    "chat": ("short chats", _chats),
}
