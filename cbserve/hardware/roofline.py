"""What a step costs on a device by the roofline (Williams, Waterman & Patterson, CACM 52(4), 2009): it computes, it
moves bytes, and the slower of the two sets the pace.

A step is one mixed batch, prefill chunks and decodes together: FLOPs and bytes are summed over its rows, the weights
are read once, and there is one maximum over the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cbserve.core import given
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import Ramp, StepPlan
from cbserve.hardware.gpus import Gpu
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import ModelShape, model_shape

_ABOVE_0 = (lambda v: 0 < v < math.inf, "a number above 0")
_SHARE = (lambda v: 0 < v <= 1, "a share of the peak, in (0, 1]")
LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("flops", "memory_bytes_s", "dtype_bytes", "block_size"), _ABOVE_0),
    **dict.fromkeys(("kv_dtype_bytes", "host_link_bytes_s"), _ABOVE_0),
    **dict.fromkeys(("eff_compute", "eff_memory"), _SHARE),
    "overlap": (lambda v: 0 <= v <= 1, "in [0, 1]: 1 is the plain roofline"),
    "kv_passes": (lambda v: 1 <= v < math.inf, "a number of at least 1: attention reads every context once"),
    "overhead_s": (lambda v: 0 <= v < math.inf, "a number of seconds of at least 0"),
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step: what it computes and moves, and the seconds of each. `seconds` is all of it."""

    flops: float
    bytes: float  # in the device's memory
    link_bytes: float  # over the host link, for swaps
    compute_s: float
    memory_s: float
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step: `cost(plan)`; its parts: `cost.of(plan)`; many steps that differ in lengths: `cost.ramp`.

        seconds = max(compute_s, memory_s) + (1 - overlap) x min(compute_s, memory_s) + overhead_s + swaps
        compute_s = FLOPs / (flops x eff_compute),  memory_s = bytes / (memory_bytes_s x eff_memory)

    FLOPs of a row that computes C tokens after x cached ones: 2 for each weight in the layers and token,
    4 x layers x heads x head_dim x (C x + C (C + 1) / 2) for attention, and the output head once if the row samples.
    Bytes: the weights that are multiplied with, K and V of every row's context (what attention reads) `kv_passes`
    times, K and V of the new tokens (what is written), and twice each block that is copied. A padding row is a decode.
    Not counted: activations, norms, the look-up of embeddings.

    Args:
        flops: peak of the device, a second.
        memory_bytes_s: peak of its memory.
        eff_compute: share of `flops` that is reached, in (0, 1]. Kernels of small chunks reach less; one number for
            all sizes is the simplification of this model.
        eff_memory: share of `memory_bytes_s` that is reached, in (0, 1].
        overhead_s: added to every step: launches, scheduling, sampling.
        overlap: 1: computing and loading overlap perfectly (the plain roofline); 0: they take turns.
        dtype_bytes: of a weight.
        kv_dtype_bytes: of a value in the KV cache; None: as the weights.
        block_size: tokens of a block, for copies and swaps.
        kv_passes: how often K and V of a context cross memory in a step. 1: a kernel reads them in place, in their
            blocks. 3: they are gathered first, so they are read, written and read again, as the torch attention of this
            engine does it (`kernels.paged_attention`).
        host_link_bytes_s: one direction; None: not known. Swaps are carried out before the step, one after the other.

    Raises:
        InvalidRequestError: a value is out of range; or, when called, a plan swaps and the link is not known.
    """

    model: ModelShape
    flops: float
    memory_bytes_s: float
    eff_compute: float = 1.0
    eff_memory: float = 1.0
    overhead_s: float = 0.0
    overlap: float = 1.0
    dtype_bytes: int = 2
    kv_dtype_bytes: int | None = None
    block_size: int = 16
    kv_passes: float = 1.0
    host_link_bytes_s: float | None = None

    takes_steady: ClassVar[bool] = True  # see executors.simulated.CostModel

    # What a step is multiplied with.
    _flops_s: float = field(init=False, repr=False, compare=False)  # that are reached
    _bytes_s: float = field(init=False, repr=False, compare=False)
    _token_flops: float = field(init=False, repr=False, compare=False)
    # half of the FLOPs of one query with one key: 4 x layers x heads x head_dim for both products
    _pair_flops: float = field(init=False, repr=False, compare=False)
    _logit_flops: float = field(init=False, repr=False, compare=False)
    _weights_bytes: float = field(init=False, repr=False, compare=False)
    _kv_bytes: float = field(init=False, repr=False, compare=False)  # of a token

    def __post_init__(self) -> None:
        for name, rule in LIMITS.items():
            if (value := getattr(self, name)) is not None or name not in ("host_link_bytes_s", "kv_dtype_bytes"):
                given.number(name, value, *rule)
        model = self.model
        for name, value in {
            "_flops_s": self.flops * self.eff_compute,
            "_bytes_s": self.memory_bytes_s * self.eff_memory,
            "_token_flops": 2.0 * model.num_layers * model.layer_params,
            "_pair_flops": 2.0 * model.num_layers * model.num_heads * model.head_dim,
            "_logit_flops": 2.0 * model.vocab_size * model.hidden_size,
            "_weights_bytes": float(self.dtype_bytes * model.matmul_params),
            "_kv_bytes": float(model.kv_bytes_per_token(self.kv_dtype_bytes or self.dtype_bytes)),
        }.items():
            object.__setattr__(self, name, value)

    @classmethod
    def on(cls, gpu: str | Gpu, model: str | ModelShape, **overrides: Any) -> Roofline:
        """`model` on `gpu`, by their names in the tables. `overrides` are fields of `Roofline`.

        Efficiencies and overhead (0.72, 0.65, 0.5 ms) are fitted to step times of Llama-3.1-8B in bf16 on an A100-80
        SXM (NVIDIA aiconfigurator 0.12, measured kernels, vLLM 0.14): prefills of 1,024 tokens and more reach 0.72 to
        0.76 of the peak, decodes 0.61 to 0.65. H100 and H200 reach 0.67 to 0.70 and 0.62 to 0.75 in the same tables.
        For every other GPU, model and dtype they are an assumption; calibrate to know.
        """
        device = find_gpu(gpu)
        settings: dict[str, Any] = {
            "flops": device.flops,
            "memory_bytes_s": device.memory_bytes_s,
            "host_link_bytes_s": device.host_link_bytes_s,
            "eff_compute": 0.72,
            "eff_memory": 0.65,
            "overhead_s": 0.5e-3,
        }
        return cls(model_shape(model), **(settings | overrides))

    def __call__(self, plan: StepPlan) -> float:
        """Seconds of the step."""
        flops, num_bytes, _ = self._work(plan)
        seconds = self._seconds(flops / self._flops_s, num_bytes / self._bytes_s)
        if plan.swap_outs or plan.swap_ins:
            seconds += self.link_bytes(plan) / self.require_link()
        return seconds

    def of(self, plan: StepPlan) -> StepCost:
        """What the step computes, moves and takes."""
        flops, num_bytes, _ = self._work(plan)
        return StepCost(
            flops=flops,
            bytes=num_bytes,
            link_bytes=self.link_bytes(plan),
            compute_s=flops / self._flops_s,
            memory_s=num_bytes / self._bytes_s,
            seconds=self(plan),
        )

    def ramp(self, plan: StepPlan, count: int) -> Ramp:
        """Seconds of `count` steps in a row, the first being `plan`: all have its rows, each one token further.

        FLOPs and bytes grow by the same amount in every step, so the durations are an arithmetic progression, or two
        where the larger of the two times changes sides. Padding rows recompute their last token and do not grow.

        Raises:
            InvalidRequestError: `count` below 1, or `plan` is not decodes and padding alone.
        """
        if not isinstance(count, int) or count < 1:
            raise InvalidRequestError(f"count={count!r}: must be a whole number of steps of at least 1")
        num_rows = len(plan.rows) + (plan.steady.num_rows if plan.steady is not None else 0)
        flops, num_bytes, num_tokens = self._work(plan)
        if not num_rows or num_tokens != num_rows or plan.copies or plan.swap_outs or plan.swap_ins:
            raise InvalidRequestError(
                f"a ramp is of decode rows, one token each, without copies and swaps; this plan has rows: "
                f"{num_rows}, tokens: {num_tokens}, copies: {len(plan.copies)}, swaps: "
                f"{len(plan.swap_outs) + len(plan.swap_ins)}"
            )
        growing = num_rows - sum([row.is_padding for row in plan.rows]) if plan.rows else num_rows
        compute, memory = flops / self._flops_s, num_bytes / self._bytes_s
        more_compute = growing * 2 * self._pair_flops / self._flops_s  # a token more is a pair more, counted doubly
        more_memory = growing * self.kv_passes * self._kv_bytes / self._bytes_s
        hidden = 1 - self.overlap  # the part of the shorter one that shows
        gap, trend = compute - memory, more_compute - more_memory
        turn = count  # the first step in which the other one is longer
        if gap * trend < 0:
            turn = int(min(count, -gap / trend // 1 + 1))
        if gap > 0 or (gap == 0 and trend > 0):
            slopes = (more_compute + hidden * more_memory, more_memory + hidden * more_compute)
        else:
            slopes = (more_memory + hidden * more_compute, more_compute + hidden * more_memory)
        first = (turn, self._seconds(compute, memory), slopes[0])
        if turn == count:
            return Ramp((first,))
        there = self._seconds(compute + turn * more_compute, memory + turn * more_memory)
        return Ramp((first, (count - turn, there, slopes[1])))

    def link_bytes(self, plan: StepPlan) -> float:
        """Bytes that the step's swaps move over the host link, both directions together."""
        return (len(plan.swap_outs) + len(plan.swap_ins)) * self.block_size * self._kv_bytes

    def require_link(self) -> float:
        """`host_link_bytes_s`; a run that swaps asks for it before it begins.

        Raises:
            InvalidRequestError: it is not known.
        """
        if self.host_link_bytes_s is None:
            raise InvalidRequestError(
                "host_link_bytes_s=None, but blocks are swapped to the host: measure the link with `cbserve calibrate` "
                "(older calibrations lack it), give its bytes a second in one direction (PCIe Gen4 x16: 32e9), or "
                "preempt by recomputing"
            )
        return self.host_link_bytes_s

    def critical_batch(self) -> float:
        """Tokens of a step at which its matrices take as long to compute as their weights to load: F / BW for 16 bits.

        Below it a token more is free, above it is not. Attention is left out: with long contexts a decode stays bound
        by memory at any batch.
        """
        return self.dtype_bytes * self._flops_s / (2 * self._bytes_s)

    def work(
        self, num_tokens: int, double_pairs: int, num_read: int, num_logits: int, num_copies: int = 0
    ) -> tuple[float, float]:
        """FLOPs and bytes of a step by its counts; with `num_tokens` = 0, what the other counts add to those of a step.

        Args:
            double_pairs: 2 for each query and key that meet.
            num_read: tokens of all contexts, which attention reads.
            num_logits: rows that need the output head.
            num_copies: blocks that are copied.
        """
        flops = self._token_flops * num_tokens + self._pair_flops * double_pairs + self._logit_flops * num_logits
        num_bytes = self._kv_bytes * (self.kv_passes * num_read + num_tokens)  # contexts read, new tokens written
        if num_tokens:
            num_bytes += self._weights_bytes
        if num_copies:
            num_bytes += 2 * num_copies * self.block_size * self._kv_bytes
        return flops, num_bytes

    def is_bound_by_compute(self, flops: float, num_bytes: float) -> bool:
        """Whether a step of so many FLOPs and bytes computes for longer than it loads."""
        return flops / self._flops_s > num_bytes / self._bytes_s

    def _work(self, plan: StepPlan) -> tuple[float, float, int]:
        """(FLOPs, bytes, tokens). It runs for every step of a simulation: most rows are decodes and cost few look-ups.

        Token i of C after x attends to x + i, itself among them: C x + C (C + 1) / 2 pairs, doubled here to stay whole.
        A decode has 2 (x + 1) of these doubled pairs, and a chunk (C - 1) (2 x + C + 2) more.
        """
        rows = plan.rows
        starts = more_tokens = more_pairs = silent = 0
        for row in rows:
            start = row.start
            starts += start
            count = len(row.token_ids)
            if count != 1:
                more_tokens += count - 1
                more_pairs += (count - 1) * (2 * start + count + 2)
            if not row.num_samples and not row.is_padding:
                silent += 1
        num_rows = len(rows)
        if (steady := plan.steady) is not None:
            num_rows += steady.num_rows
            starts += steady.context_len - steady.num_rows
        tokens = num_rows + more_tokens
        double_pairs = 2 * (starts + num_rows) + more_pairs
        flops, num_bytes = self.work(tokens, double_pairs, starts + tokens, num_rows - silent, len(plan.copies))
        return flops, num_bytes, tokens

    def _seconds(self, compute_s: float, memory_s: float) -> float:
        longer, shorter = (compute_s, memory_s) if compute_s > memory_s else (memory_s, compute_s)
        return longer + (1 - self.overlap) * shorter + self.overhead_s
