"""The real model: one step, prefill chunks and decodes together, is one forward pass over packed tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cbserve.core.plan import Row, StepPlan, StepResult
from cbserve.executors.packing import PackedStep, PlanError, RowBounds, pack, padded_tables
from cbserve.executors.threads import choose_num_threads
from cbserve.kernels.backends import choose_backend
from cbserve.models.llama import Attend, LlamaModel
from cbserve.models.sampling import SamplingRow, sample

# The signature of kernels.paged_attention.paged_attention, where shapes and units stand.
PagedAttentionOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]

# Below so many weights a step is over before a second thread has woken up.
_FEW_WEIGHTS = 10_000_000


class TorchExecutor:
    """Carries out `StepPlan`s with a model, on its device and in its dtype.

    Args:
        model: its weights decide device and dtype.
        num_blocks, block_size: size of the KV cache, in blocks and in tokens a block; those of the scheduler's pool.
        backend: what computes between the matrix products: "triton", "c" (in C, for a CPU), "torch",
            or "auto" (Triton on CUDA; on a CPU C where a compiler is found; else torch).
        attention: takes the place of `kernels.paged_attention.paged_attention`; called once a layer with all rows.
        default_seed: requests without a seed get one that is derived from this number and their id.
        num_host_blocks: size of the host pool that sequences are swapped out to; 0: no swapping.
        num_threads: on a CPU, torch's threads in this executor's steps; None measures how many are fastest.

    Attributes:
        num_threads: of its steps; None on a GPU. It may be set.
        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], K before V. Memory that no token was
            ever written to is not yet taken from the operating system (on a CPU).

    Raises:
        PlanError: a size is not positive.
    """

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: int,
        block_size: int,
        attention: PagedAttentionOp | None = None,
        default_seed: int = 0,
        num_threads: int | None = None,
        num_host_blocks: int = 0,
        backend: str = "auto",
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size), ("num_threads", num_threads)):
            if value is not None and value < 1:
                raise PlanError(f"{name}={value}: must be at least 1")
        config = model.config
        sizes = config.head_dim, config.hidden_size, config.intermediate_size
        self.backend = choose_backend(backend, model.device, model.dtype, sizes)
        self._fused = None if self.backend.name == "torch" else self.backend  # torch has its own fast forms
        self.model, self.attention, self.default_seed = model, attention, default_seed
        self.bounds = RowBounds(config.vocab_size, config.max_position, num_blocks, block_size)
        # Not filled: attention never looks at what no token was written to.
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv_cache = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.host_cache = self.new_host_cache(num_host_blocks)
        self._layers = [(k_cache, v_cache) for k_cache, v_cache in self.kv_cache]
        self._scale = config.head_dim**-0.5
        self.num_threads: int | None = None
        if model.device.type == "cpu":
            few = sum(map(_num_elements, config.tensor_shapes().values())) < _FEW_WEIGHTS
            self.num_threads = num_threads or (1 if few else choose_num_threads())
            torch.set_num_threads(self.num_threads)

    def new_host_cache(self, num_blocks: int) -> Tensor:
        """What `num_blocks` are swapped out to: shaped as `kv_cache`, in the host's memory, pinned for a GPU."""
        num_layers, two, _, *block_shape = self.kv_cache.shape
        pinned = self.model.device.type == "cuda" and num_blocks > 0
        shape = (num_layers, two, num_blocks, *block_shape)
        return torch.empty(shape, dtype=self.model.dtype, device="cpu", pin_memory=pinned)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, compute the rows, sample. Raises PlanError for an impossible row; then nothing was written."""
        began = time.perf_counter()
        if self.num_threads not in (None, torch.get_num_threads()):  # torch has one number, and engines may be several
            torch.set_num_threads(self.num_threads)
        # Decodes of equal length side by side: attention takes them as a slice.
        order = sorted(range(len(plan.rows)), key=lambda i: (len(plan.rows[i].token_ids), -plan.rows[i].end))
        rows = [plan.rows[i] for i in order]
        packed = pack(rows, self.bounds, self.model.device)
        self._check_copies(plan)
        copy_blocks = self.backend.copy_blocks
        copy_blocks(self.kv_cache, self.host_cache, plan.swap_outs)
        copy_blocks(self.kv_cache, self.kv_cache, plan.copies)
        copy_blocks(self.host_cache, self.kv_cache, plan.swap_ins)
        result = StepResult([[] for _ in rows])
        if rows:
            last = [stop - 1 for row, stop in zip(rows, packed.query_start[1:], strict=True) if row.num_samples]
            logit_rows = torch.tensor(last, dtype=torch.int64, device=self.model.device)
            attend = self._attend(packed)
            logits = self.model.forward(packed.token_ids, packed.positions, attend, logit_rows, self._fused)
            sampled, logprobs = self._sample(logits, rows)
            back = sorted(range(len(rows)), key=order.__getitem__)
            result.sampled = [sampled[r] for r in back]
            if any(row.params.logprobs is not None for row in rows):
                result.logprobs = [logprobs[r] for r in back]
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        result.duration_s = time.perf_counter() - began
        return result

    def _attend(self, packed: PackedStep) -> Attend:
        """What the model calls in each layer: K and V into the cache, then attention over it."""
        device, scale, layers, slots = self.model.device, self._scale, self._layers, packed.slots
        store_kv = self.backend.store_kv
        if self.attention is None:
            lens = packed.query_lens, packed.context_lens
            plan = packed.block_tables, *lens, self.bounds.block_size, self.model.dtype, device
            step = self.backend.paged_attention(*plan)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                store_kv(k, v, *layers[layer], slots)
                return step.run(q, *layers[layer], scale)

            return attend
        attention, tables = self.attention, padded_tables(packed.block_tables, device)
        query_start = torch.tensor(packed.query_start, dtype=torch.int32, device=device)
        context_lens = torch.tensor(packed.context_lens, dtype=torch.int32, device=device)

        def attend_with_given(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(k, v, *layers[layer], slots)
            out = attention(q.contiguous(), *layers[layer], tables, query_start, context_lens, scale)
            if out.shape != q.shape:
                raise PlanError(f"attention gave shape {list(out.shape)}; it must give {list(q.shape)}, the shape of q")
            return out

        return attend_with_given

    def _sample(
        self, logits: Tensor, rows: Sequence[Row]
    ) -> tuple[list[list[int]], list[list[dict[int, float]] | None]]:
        """`num_samples` tokens for each row; logits: [rows that sample, vocab]."""
        if any(row.num_samples > 1 for row in rows):
            sampling = [row for row in rows if row.num_samples]
            logits = logits[[r for r, row in enumerate(sampling) for _ in range(row.num_samples)]]
        choices = [self._choice(row, row.sample_index + i) for row in rows for i in range(row.num_samples)]
        ids, logprobs = sample(logits, choices, self.backend.sample_tokens)
        sampled, reported, at = [], [], 0
        for row in rows:
            own = slice(at, at := at + row.num_samples)
            sampled.append(ids[own])
            asked = row.num_samples and row.params.logprobs is not None
            reported.append([p for p in logprobs[own] if p is not None] if asked else None)
        return sampled, reported

    def _choice(self, row: Row, sample_index: int) -> SamplingRow:
        p = row.params
        seed = self._derived_seed(row.request_id) if p.seed is None and p.temperature > 0 else p.seed or 0
        return SamplingRow(p.temperature, p.top_k, p.top_p, p.min_p, seed, sample_index, row.end, p.logprobs)

    def _derived_seed(self, request_id: str) -> int:
        """The same in every process, which Python's hash() is not."""
        digest = hashlib.blake2b(f"{self.default_seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _check_copies(self, plan: StepPlan) -> None:
        device, host = self.bounds.num_blocks, self.host_cache.shape[2]
        for pairs, num_sources, num_targets in (
            (plan.copies, device, device), (plan.swap_outs, device, host), (plan.swap_ins, host, device),
        ):  # fmt: skip
            for source, target in pairs:
                if not (0 <= source < num_sources and 0 <= target < num_targets):
                    raise PlanError(
                        f"copy of block {source} to {target}: the pool has blocks 0 to {device - 1}, the host "
                        f"{'none' if not host else f'0 to {host - 1}'}"
                    )


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
