"""`LLM`: model, tokenizer and engine behind `generate`, `chat` and `stream`. Names follow vLLM's."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from tqdm import tqdm

from cbserve.core.batching import Batching, ContinuousBatching, require_batching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.policies import Policy, require_policy
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler, require_scheduler_class
from cbserve.core.stopping import StopChecker
from cbserve.core.trace import Trace
from cbserve.engine import Engine
from cbserve.errors import CBServeError
from cbserve.executors.swapping import faster_preemption
from cbserve.executors.torch_executor import TorchExecutor
from cbserve.hardware.capacity import CPU_KV_CACHE_BYTES, default_num_blocks
from cbserve.models.weights import load_model
from cbserve.outputs import RequestOutput
from cbserve.prompts import Prompt, as_batch, encode, params_for

CUDA_MEMORY_SHARE = 0.9  # of what is free when the weights are loaded


class LLM:
    """A model that serves many requests at a time.

    Args:
        model: "smollm2-135m" (fetched when absent), "tiny" (random, instant), or a Hugging Face folder of a Llama
            model.
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        dtype: a torch dtype or its name; None: float32 on CPU, by compute capability on CUDA.
        batching: `ContinuousBatching(...)` or `StaticBatching(...)`; continuous by default.
        policy: who goes first; FCFS by default.
        scheduler: a subclass of `Scheduler` that overrides duties.
        block_pool: a class or function (num_blocks, block_size) -> pool with the methods of `BlockPool`.
        backend: "auto" takes the Triton kernels on CUDA, and on a CPU torch, with attention in C where there is a
            compiler; or "triton", "c", "torch".
        attention: a replacement for the paged attention of a step (see `cbserve.kernels.paged_attention`).
        block_size: tokens in a block.
        num_blocks, kv_cache_bytes: size of the KV pool, in one unit or the other. By default on a CPU
            min(max_num_seqs x max_model_len tokens, 512 MB), on CUDA 90 % of the free memory.
        enable_prefix_caching: find the K and V of known prefixes instead of computing them again.
        preemption: what becomes of a victim's K and V: "recompute"; "swap", copied to host memory while there is room;
            or "auto", whichever this machine does faster, measured once.
        swap_space_bytes: host memory for swapping; as much as the KV pool by default.
        max_num_seqs, max_num_batched_tokens: shorthand for the same arguments of `ContinuousBatching`.
        max_model_len: most tokens of prompt and answer together; the model's own limit by default.
        seed: of the random streams of requests without a seed, and of the weights of "tiny".
        debug: check conservation of blocks and slots after every step.
        verbose: say what size of KV pool was chosen.

    Raises:
        InvalidRequestError: an argument is out of range; the message names value and range.
        ModelError: the model cannot be had or read.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        batching: Batching | None = None,
        policy: Policy | None = None,
        scheduler: type[Scheduler] = Scheduler,
        block_pool: Callable[[int, int], BlockPool] = BlockPool,
        backend: str = "auto",
        attention: Callable[..., torch.Tensor] | None = None,
        preemption: str = "recompute",
        enable_prefix_caching: bool = False,
        swap_space_bytes: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
        debug: bool = False,
        verbose: bool = True,
    ) -> None:
        for name, value in (
            ("block_size", block_size), ("num_blocks", num_blocks), ("kv_cache_bytes", kv_cache_bytes),
            ("max_model_len", max_model_len), ("swap_space_bytes", swap_space_bytes),
        ):  # fmt: skip
            if value is not None and integer(name, value, 1) > 2**60:
                raise InvalidRequestError(f"{name}={value}: must be at most 2**60, and what the memory holds")
        if num_blocks is not None and kv_cache_bytes is not None:
            raise InvalidRequestError(f"num_blocks={num_blocks} and kv_cache_bytes={kv_cache_bytes}: give one of them")
        if preemption not in ("recompute", "swap", "auto"):
            raise InvalidRequestError(f"preemption={preemption!r}: must be 'recompute', 'swap' or 'auto'")
        if swap_space_bytes is not None and preemption == "recompute":
            raise InvalidRequestError(
                f"swap_space_bytes={swap_space_bytes} beside preemption='recompute', which swaps nothing; "
                "choose 'swap' or 'auto'"
            )
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise InvalidRequestError(f"seed={seed!r}: must be an integer from 0 to 2**63 - 1")
        batching = _batching(batching, max_num_seqs, max_num_batched_tokens)
        require_policy(policy)
        require_scheduler_class(scheduler)
        for name, function in (("block_pool", block_pool), ("attention", attention)):
            if function is not None and not callable(function):
                raise InvalidRequestError(f"{name}={function!r}: must be a class or a function")
        self.device = _device(device)
        self.config, self.model, self.tokenizer = load_model(model, self.device, _dtype(dtype), seed)
        limit = self.config.max_position
        if max_model_len is not None and max_model_len > limit:
            raise InvalidRequestError(f"max_model_len={max_model_len}: {self.config.name} was made for at most {limit}")
        self.max_model_len = max_model_len or limit
        self.seed = seed
        num_blocks = self._num_blocks(num_blocks, kv_cache_bytes, block_size, batching.max_num_seqs, verbose)
        checker = StopChecker(self.config.eos_token_ids, self.tokenizer.token_bytes)
        num_host_blocks = self._num_host_blocks(preemption, swap_space_bytes, num_blocks, block_size)
        try:
            self.executor = TorchExecutor(
                self.model, num_blocks, block_size, attention, seed, num_host_blocks=num_host_blocks, backend=backend
            )
        except (RuntimeError, MemoryError) as error:  # torch's words for too little memory differ by device
            gigabytes = (num_blocks + num_host_blocks) * block_size * self.kv_bytes_per_token / 1e9
            raise InvalidRequestError(
                f"num_blocks={num_blocks} of {block_size} tokens, with {num_host_blocks} for swapping, need "
                f"{gigabytes:.1f} GB, which cannot be had here; lower num_blocks, kv_cache_bytes or swap_space_bytes"
            ) from error
        host_pool = BlockPool(num_host_blocks, block_size) if num_host_blocks else None
        kv = KVCacheManager(block_pool(num_blocks, block_size), enable_prefix_caching, host_pool)
        how = faster_preemption(self.executor, block_size) if preemption == "auto" else preemption
        self.scheduler = scheduler(kv, batching, policy, checker, self.max_model_len, how)
        meta = {
            "model": self.config.name,
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }
        self.engine = Engine(self.scheduler, self.executor, meta=meta, debug=debug)
        self._ids = count()

    @property
    def trace(self) -> Trace:
        """What happened in the latest `generate`, `chat`, `stream` or `serve`."""
        return self.engine.trace

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_bytes_per_token(self.model.dtype.itemsize)

    def __repr__(self) -> str:
        pool = self.scheduler.kv.pool
        return (
            f"LLM({self.config.name!r} on {self.device}, {type(self.scheduler.batching).__name__} of "
            f"{self.scheduler.batching.max_num_seqs} slots, KV pool of {pool.num_blocks} blocks "
            f"of {pool.block_size} tokens)"
        )

    # ---- what a client calls ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, many at a time.

        Args:
            prompts: a string, token ids, chat messages, or a list of such.
            params: for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Returns:
            One output for each prompt, in their order. A prompt that can never be served has finish_reason "error"
            and says why in `error`; the others are served.

        Raises:
            InvalidRequestError: `params` do not fit; nothing was started.

        Ctrl-C aborts what runs and leaves the engine ready for the next call.
        """
        batch = as_batch(prompts)
        by_id: dict[str, RequestOutput] = {}
        requests, texts = self._requests(batch, params_for(params, len(batch)))
        bar = tqdm(
            total=len(batch), unit="request", disable=not use_tqdm, file=_bar_file(), leave=False, dynamic_ncols=True
        )
        with bar:
            num_tokens = 0
            for output in self._stream(requests, partial=False):
                by_id[output.request_id] = output
                num_tokens += output.usage.completion_tokens
                bar.set_postfix_str(f"{num_tokens / max(self.engine.clock.now(), 1e-9):.0f} tokens/s", refresh=False)
                bar.update()
        outputs = [by_id[request_id] for request_id in texts]
        for output, text in zip(outputs, texts.values(), strict=True):
            output.prompt = text
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them. A message is {"role": "user", "content": "..."}."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError(
                f"messages={messages!r}: must be a list of {{'role': ..., 'content': ...}}; use generate for text"
            )
        return self.generate(messages, params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt and yield its output as it grows; text never ends within a character or a stop string."""
        requests, texts = self._requests([prompt], params_for(params, 1))
        for output in self._stream(requests):
            output.prompt = texts[output.request_id]
            yield output

    def serve(self, requests: Iterable[Request]) -> Trace:
        """Serve requests in a new trace and return it; see `cbserve.serving.serve`.

        Raises:
            InvalidRequestError: one of them can never be served.
        """
        self.require_idle()
        self.engine.new_trace()
        for output in self.engine.run(requests):
            if output.error:
                raise InvalidRequestError(f"request {output.request_id!r}: {output.error}")
        return self.trace

    def random_prompts(self, num_tokens: Iterable[int]) -> list[list[int]]:
        """Prompts of these lengths, of random tokens; the same in each call."""
        rng = random.Random(self.seed)
        low, high = (5, 256) if self.config.vocab_size <= 512 else (100, self.config.vocab_size - 1)
        return [[rng.randrange(low, high) for _ in range(n)] for n in num_tokens]

    # ---- beneath ------------------------------------------------------------------------------------------------

    def _stream(self, requests: list[Request | tuple[Request, str]], partial: bool = True) -> Iterator[RequestOutput]:
        self.require_idle()
        self.engine.new_trace()
        try:
            for entry in requests:
                if isinstance(entry, Request):
                    self.engine.add_request(entry)
                else:
                    self.engine.refuse(*entry)
            yield from self.engine.stream(partial=partial)
        finally:
            self.engine.abort_all()

    def require_idle(self) -> None:
        """Raise CBServeError while requests are unfinished: a second call would mix with them, or end them."""
        if self.engine.has_unfinished:
            raise CBServeError(
                "this LLM is serving another call; finish or close that stream first, or use its engine directly"
            )

    def _requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> tuple[list[Request | tuple[Request, str]], dict[str, str | None]]:
        """Requests, or (request, why it is refused), and the text of each prompt by request id."""
        requests: list[Request | tuple[Request, str]] = []
        texts: dict[str, str | None] = {}
        for prompt, param in zip(prompts, params, strict=True):
            request_id = str(next(self._ids))
            texts[request_id] = prompt if isinstance(prompt, str) else None
            try:
                ids = encode(prompt, self.tokenizer, self.config.vocab_size)
                requests.append(Request(request_id, ids, param, arrival_s=0.0))
            except (CBServeError, TypeError, ValueError) as error:
                requests.append((Request(request_id, (), param, arrival_s=0.0), str(error)))
        return requests, texts

    def _num_host_blocks(self, preemption: str, swap_space_bytes: int | None, num_blocks: int, block_size: int) -> int:
        if preemption == "recompute":
            return 0
        block_bytes = self.kv_bytes_per_token * block_size
        if swap_space_bytes is None:
            return num_blocks
        if swap_space_bytes < block_bytes:
            raise InvalidRequestError(
                f"swap_space_bytes={swap_space_bytes}: one block takes {block_bytes}; give at least that"
            )
        return swap_space_bytes // block_bytes

    def _num_blocks(
        self, num_blocks: int | None, kv_cache_bytes: int | None, block_size: int, max_num_seqs: int, verbose: bool
    ) -> int:
        block_bytes = self.kv_bytes_per_token * block_size
        if num_blocks is not None:
            return num_blocks
        if kv_cache_bytes is not None:
            if kv_cache_bytes < block_bytes:
                raise InvalidRequestError(
                    f"kv_cache_bytes={kv_cache_bytes}: one block takes {block_bytes}; give at least that"
                )
            return kv_cache_bytes // block_bytes
        room = CPU_KV_CACHE_BYTES
        if self.device.type == "cuda":
            room = int(torch.cuda.mem_get_info(self.device)[0] * CUDA_MEMORY_SHARE)
        chosen = default_num_blocks(room, block_bytes, block_size, max_num_seqs, self.max_model_len)
        if verbose:
            print(
                f"KV pool: {chosen} blocks of {block_size} tokens, {chosen * block_bytes / 1e6:.0f} MB "
                f"(the default on {self.device.type}; num_blocks= or kv_cache_bytes= sets another size)"
            )
        return chosen


def _batching(batching: Batching | None, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> Batching:
    limits: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    limits = {name: value for name, value in limits.items() if value is not None}
    if batching is not None and limits:
        raise InvalidRequestError(f"{', '.join(limits)} beside batching={batching}: give them to the batching instead")
    require_batching(batching)
    return batching or ContinuousBatching(**limits)


def _device(device: str | torch.device | None) -> torch.device:
    device = None if device is None else str(device)
    kind, _, index = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or not index):
        raise InvalidRequestError(f"device={device!r}: must be 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidRequestError(
            f"device={device!r}: torch sees {torch.cuda.device_count()} CUDA devices here; use device='cpu'"
        )
    return torch.device(device or kind)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    value = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and value not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidRequestError(f"dtype={dtype!r}: must be one of float32, float16, bfloat16, or None")
    return value


def _bar_file() -> Any:
    """In a notebook stderr is shown as a fault: the bar goes to stdout there."""
    return sys.stdout if "ipykernel" in sys.modules else sys.stderr
