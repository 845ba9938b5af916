"""What a run computed and moved, beside what its device could: folded over its events one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cbserve.core.plan import Ramp
from cbserve.core.trace import Admitted, Arrived, Event, Finished, Preempted, Refused, StepEvent
from cbserve.hardware.roofline import Roofline


@dataclass(slots=True)
class Work:
    """Takes events in order, spans as they are, of a run in which each request is one sequence.

    It counts as `cost` does: `flops` and `bytes` are the sums of `cost.of(plan)` over all steps.

    Attributes:
        busy_s: seconds in which a step ran; `compute_bound_s` of them in steps that compute for longer than they load.
        num_swapped: preemptions whose K and V went to the host; the others are computed again.
        num_cached_tokens, num_prompt_tokens: found in the prefix cache, and looked up, at first admissions.
    """

    cost: Roofline
    flops: float = 0.0
    bytes: float = 0.0
    busy_s: float = 0.0
    compute_bound_s: float = 0.0
    num_swapped: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    _prompts: dict[str, int] = field(default_factory=dict)  # tokens of the prompts in the queue
    # Sequences that got a token in the last step: their context, less the steps since the run began. So all of them
    # grow by one in a step without being touched.
    _going: dict[int, int] = field(default_factory=dict)
    _sum_going: int = 0
    _num_steps: int = 0

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, StepEvent):
            self._computed(event)
        elif isinstance(event, Preempted | Finished):
            self._sum_going -= self._going.pop(event.seq_id, 0)
            if isinstance(event, Finished):
                self._prompts.pop(event.request_id, None)  # aborted while it waited
            else:
                self.num_swapped += event.how == "swap"
        elif isinstance(event, Arrived):
            self._prompts[event.request_id] = event.num_prompt_tokens
        elif isinstance(event, Refused):
            self._prompts.pop(event.request_id, None)
        elif isinstance(event, Admitted) and not event.resumed:
            self.num_prompt_tokens += self._prompts.pop(event.request_id)
            self.num_cached_tokens += event.num_cached_tokens

    def _computed(self, step: StepEvent) -> None:
        count, going = step.count, self._going
        if not step.num_steady:
            going.clear()
            self._sum_going = 0
        # Of the first step; a decode attends to its whole context.
        num_tokens = num_growing = num_logits = num_steady = len(going)
        contexts = self._sum_going + num_steady * (self._num_steps + 1)
        double_pairs = 2 * contexts
        self._num_steps += count
        for seq_id, _, kind, tokens, num_sampled, context in step.rows:
            num_tokens += tokens
            contexts += context
            double_pairs += tokens * (2 * context - tokens + 1)
            if kind == "padding":
                num_logits += 1
                continue
            num_growing += 1
            if num_sampled:
                num_logits += 1
                going[seq_id] = base = context + count - 1 - self._num_steps
                self._sum_going += base
        flops, num_bytes = self.cost.work(num_tokens, double_pairs, contexts, num_logits, step.num_copies)
        more = num_growing * (count * (count - 1) // 2)  # tokens of context in the later steps
        more_flops, more_bytes = self.cost.work(0, 2 * more, more, 0)
        self.flops += count * flops + more_flops
        self.bytes += count * num_bytes + more_bytes
        seconds = step.end_s - step.start_s
        self.busy_s += seconds
        is_bound_by_compute = self.cost.is_bound_by_compute(flops, num_bytes)
        if len(step.ramp) == 2:  # within the span the other one becomes the longer
            first = Ramp(step.ramp[:1]).total(count)
            self.compute_bound_s += first if is_bound_by_compute else seconds - first
        elif is_bound_by_compute:
            self.compute_bound_s += seconds

    @property
    def flop_utilisation(self) -> float:
        """FLOPs / what the device's peak allows while a step runs; nan when none ran."""
        return self.flops / (self.cost.flops * self.busy_s) if self.busy_s else math.nan

    @property
    def bandwidth_utilisation(self) -> float:
        """Bytes / what the peak of its memory allows while a step runs; nan when none ran."""
        return self.bytes / (self.cost.memory_bytes_s * self.busy_s) if self.busy_s else math.nan

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens that were found in the prefix cache / prompt tokens; nan when nobody was admitted."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else math.nan
