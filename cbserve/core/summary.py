"""A run in one line of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cbserve.core.metrics import mean, percentile, slots_of
from cbserve.core.run_fold import RunFold
from cbserve.core.trace import Trace


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in one line of numbers. Times in seconds, rates per second, shares in 0..1."""

    num_requests: int
    num_refused: int
    num_steps: int
    makespan_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_s: float
    num_slots: int
    slot_utilisation: float
    occupancy: float
    padding_share: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    itl_p99_s: float
    e2e_mean_s: float
    queue_mean_s: float
    num_preemptions: int
    peak_used_blocks: int

    def rows(self) -> list[tuple[str, str]]:
        """(name, value with unit) pairs for a table."""
        return [
            ("requests", f"{self.num_requests}" + (f" ({self.num_refused} refused)" if self.num_refused else "")),
            ("steps", f"{self.num_steps}"),
            ("time", f"{self.makespan_s:.3f} s"),
            ("output tokens", f"{self.num_output_tokens}"),
            ("throughput", f"{self.tokens_per_s:.1f} tokens/s"),
            ("slot utilisation", f"{self.slot_utilisation:.1%} of {self.num_slots:,} slots"),
            ("occupancy", f"{self.occupancy:.1%}"),
            ("TTFT mean / p99", f"{ms(self.ttft_mean_s)} / {ms(self.ttft_p99_s)}"),
            ("TPOT mean", ms(self.tpot_mean_s)),
            ("ITL p99", ms(self.itl_p99_s)),
            ("E2E mean", ms(self.e2e_mean_s)),
            ("queue mean", ms(self.queue_mean_s)),
            ("preemptions", f"{self.num_preemptions}"),
        ]


def summarize(trace: Trace, num_slots: int | None = None) -> Summary:
    """Fold a trace into a `Summary`. Means and percentiles without a value are nan.

    Args:
        num_slots: slots to divide by; the trace's own number by default.

    Raises:
        InvalidRequestError: num_slots is below 1, or neither it nor the trace says how many.
        TraceError: a request was under way when the trace began.
    """
    fold = RunFold()
    for event in trace.events:
        fold.add(event)
    return summary_of(fold, slots_of(trace, num_slots) if fold.num_steps or num_slots is not None else 1)


def summary_of(fold: RunFold, num_slots: int) -> Summary:
    """The numbers of a run that ran on `num_slots` slots."""
    ttft, e2e, tpot, queue = (_known(v) for v in (fold.ttft_s, fold.e2e_s, fold.tpot_s, fold.queue_s))
    places, makespan = num_slots * fold.num_steps, fold.makespan_s
    return Summary(
        num_requests=fold.num_requests,
        num_refused=fold.num_refused,
        num_steps=fold.num_steps,
        makespan_s=makespan,
        num_prompt_tokens=fold.num_prompt_tokens,
        num_output_tokens=fold.num_output_tokens,
        tokens_per_s=fold.num_output_tokens / makespan if makespan > 0 else math.nan,
        num_slots=num_slots,
        slot_utilisation=fold.num_output_tokens / places if places else math.nan,
        occupancy=fold.num_occupied / places if places else math.nan,
        padding_share=fold.num_padding / fold.num_rows if fold.num_rows else math.nan,
        ttft_mean_s=mean(ttft),
        ttft_p99_s=percentile(ttft, 99),
        tpot_mean_s=mean(tpot),
        itl_p99_s=fold.itl(99),
        e2e_mean_s=mean(e2e),
        queue_mean_s=mean(queue),
        num_preemptions=fold.num_preemptions,
        peak_used_blocks=fold.peak_used_blocks,
    )


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.2f} s"
