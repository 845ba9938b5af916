"""What a real engine did: the times of every request, as a vLLM benchmark wrote them down."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cbserve.core.errors import InvalidRequestError
from cbserve.workloads.tokens import OWN_TOKENS, own_tokens
from cbserve.workloads.trace_files import Source, integer, json_object, number, read_lines, rows_of
from cbserve.workloads.workload import Job, Workload

CLOCKS = ("arrival_time", "queued_ts")
STAMPS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True)
class MeasuredRun:
    """Requests in order of arrival, and when a real engine answered them.

    All times are seconds; `arrival_s` counts from the first arrival, the others from each request's own arrival.
    `workload.jobs[i]` is what request i asked. `lag_s` is how much later than by `arrival_time` a request was queued.
    """

    workload: Workload
    clock: str
    arrival_s: tuple[float, ...]
    queue_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    lag_s: tuple[float, ...]

    @property
    def num_output_tokens(self) -> tuple[int, ...]:
        return tuple(job.num_output_tokens for job in self.workload.jobs)

    @property
    def tpot_s(self) -> tuple[float, ...]:
        """Mean time of each token after the first, of the requests that have two."""
        times = zip(self.e2e_s, self.ttft_s, self.num_output_tokens, strict=True)
        return tuple((e2e - ttft) / (n - 1) for e2e, ttft, n in times if n > 1)

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return max(at + e2e for at, e2e in zip(self.arrival_s, self.e2e_s, strict=True))


def read_requests(source: Source, clock: str = "arrival_time") -> MeasuredRun:
    """The requests.jsonl of a vLLM run as LLMServingSim's `bench` writes it; a path or URL, .gz too.

    `arrival_time` is Unix time, taken by the client; the other stamps are the engine's monotonic clock. Nothing says
    how the two are related, but no request is queued before it arrives: the request with the shortest way into the
    queue is taken to need no time for it. Prompts share nothing, because the file does not hold them.

    Args:
        clock: "arrival_time": a request arrives when the client sends it, so a busy engine that is slow to take it in
            counts; "queued_ts": when the engine has it in its queue.

    Raises:
        TraceFileError: names file and line: a field is missing, no number, negative, or stamps of a request are not in
            order.
        InvalidRequestError: another clock.
    """
    if clock not in CLOCKS:
        raise InvalidRequestError(f"clock={clock!r}: there are {' and '.join(map(repr, CLOCKS))}")

    def parse(text: str) -> tuple[int, int, float, list[float]]:
        row = json_object(text)
        stamps = [number(row, name) for name in STAMPS]
        if stamps != sorted(stamps):
            raise ValueError(f"its stamps are not in order: {', '.join(STAMPS)} = {stamps}")
        sizes = integer(row, "input_toks", 1, OWN_TOKENS), integer(row, "output_toks", 1, OWN_TOKENS)
        return *sizes, number(row, "arrival_time"), stamps

    rows = list(rows_of(source, read_lines(source), parse))
    epoch = rows[0][2]  # subtracted first: a Unix time has only 0.2 us of precision left
    offset = min(stamps[0] - (sent - epoch) for _, _, sent, stamps in rows)  # from there to the engine's clock
    rows = [(prompt, output, sent - epoch + offset, stamps) for prompt, output, sent, stamps in rows]
    arrivals = [sent if clock == "arrival_time" else stamps[0] for _, _, sent, stamps in rows]
    order = sorted(range(len(rows)), key=arrivals.__getitem__)
    start = arrivals[order[0]]

    def since_arrival(stamp: int) -> tuple[float, ...]:
        return tuple(rows[i][3][stamp] - arrivals[i] for i in order)

    jobs = [Job(arrivals[i] - start, own_tokens(i, rows[i][0]), rows[i][1]) for i in order]
    name = os.path.basename(os.fspath(source)).split(".jsonl")[0]
    return MeasuredRun(
        Workload(name, jobs, f"{name}, a measured run of vLLM (LLMServingSim's bench)", f"arrivals by {clock}"),
        clock,
        tuple(job.arrival_s for job in jobs),
        queue_s=since_arrival(1),
        ttft_s=since_arrival(2),
        e2e_s=since_arrival(3),
        lag_s=tuple(rows[i][3][0] - rows[i][2] for i in order),
    )
