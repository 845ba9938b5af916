"""What is asked (`Request`, `SamplingParams`) and how far one sample of it got (`Sequence`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cbserve.core.errors import InvalidRequestError


class FinishReason(StrEnum):
    """Why a sequence ended. Every sequence ends exactly once, with one of these."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # it was refused: it can never be served


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{name}={value!r}: must be {limit}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN and infinity; an int may be too large for a float


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """None, one value or several -> a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names and meaning follow vLLM's.

    Args:
        max_tokens: at most so many new tokens; None means up to the model's length or the pool's.
        temperature: 0 is greedy, and so is what lies below 1e-5; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        seed: start of this request's random stream; None derives one from the engine's seed and the request's number.
        stop: strings that end the answer; the text is cut before the one that completes first.
        stop_token_ids: ids that end the answer; kept in `token_ids`, not in the text.
        ignore_eos: go on after the end-of-sequence token.
        n: samples of the same prompt.
        logprobs: None, or how many of the most likely tokens to report beside the chosen one.

    Raises:
        InvalidRequestError: a value is out of range; the message names value and range.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        if self.max_tokens is not None:
            _require(
                _is_int(self.max_tokens) and self.max_tokens >= 1,
                "max_tokens",
                self.max_tokens,
                "an int of at least 1, or None",
            )
        _require(
            _is_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0"
        )
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "0 or -1 (all), or at least 1")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        if self.seed is not None:
            _require(_is_int(self.seed) and self.seed >= 0, "seed", self.seed, "an integer >= 0, or None")
        _require(
            all(_is_text(s) and s for s in self.stop),
            "stop",
            self.stop,
            "strings of at least one character, no surrogates",
        )
        _require(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "ids >= 0"
        )
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        _require(_is_int(self.n) and self.n >= 1, "n", self.n, "an int of at least 1")
        if self.logprobs is not None:
            _require(
                _is_int(self.logprobs) and 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "in 0..20, or None"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks.

    Args:
        request_id: unique among unfinished requests.
        prompt_token_ids: any sequence of ints; it is only read. An array or a tensor becomes a list.
        params: sampling parameters.
        arrival_s: when it arrives, in seconds on the engine's clock; None: when it is added.
        priority: lower is more urgent.
        client_id: who asks; policies that share fairly read it.
        cache_salt: requests with different salts never share cached blocks.
        expected_output_tokens: a prediction of the answer's length, if someone makes one.
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float | None = None
    priority: int = 0
    client_id: str = ""
    cache_salt: str = ""
    expected_output_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.arrival_s is not None:
            _require(
                _is_number(self.arrival_s) and self.arrival_s >= 0, "arrival_s", self.arrival_s, "a finite time >= 0"
            )
        ids = self.prompt_token_ids
        _require(isinstance(self.request_id, str), "request_id", self.request_id, "a string")
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
            object.__setattr__(self, "prompt_token_ids", ids)
        _require(
            hasattr(ids, "__len__") and hasattr(ids, "__getitem__") and not isinstance(ids, str | bytes),
            "prompt_token_ids", ids, "a sequence of token ids; an LLM takes text",
        )  # fmt: skip
        _require(isinstance(self.params, SamplingParams), "params", self.params, "SamplingParams")
        _require(_is_text(self.cache_salt), "cache_salt", self.cache_salt, "a string")
        _require(_is_int(self.priority), "priority", self.priority, "an integer (lower is more urgent)")


class Sequence:
    """One sample of a request, with its three lengths (named once, because mixing them is the classic bug):

    ```
    | prompt ............ | sampled ...... |
    |<------------- num_tokens ----------->|   known
    |<-- num_computed_tokens -->|              K and V are in the cache
                                |<- sched ->|  num_scheduled_tokens: what this step computes
    ```

    A sampled token is known before its K and V are written. Prefill, chunked prefill, decode and resume after
    preemption are the same thing: `num_computed_tokens` chasing `num_tokens`.
    """

    __slots__ = (
        "admission_tokens", "arrival_s", "block_hashes", "finish_reason", "max_tokens", "num_computed_tokens",
        "num_preemptions", "num_prompt_tokens", "num_published_blocks", "num_scheduled_tokens", "output_bytes",
        "output_token_ids", "pending_samples", "request", "sample_index", "seq_id", "slot", "state", "stop_reason",
        "text_end", "waiting_for",
    )  # fmt: skip

    def __init__(self, request: Request, seq_id: int, max_tokens: int, sample_index: int = 0) -> None:
        self.request = request
        self.arrival_s = request.arrival_s or 0.0
        self.seq_id = seq_id
        self.sample_index = sample_index
        self.max_tokens = max_tokens  # resolved: params.max_tokens, capped by the model's length and the pool
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token id or stop string that ended it
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.pending_samples = request.params.n  # > 1 until the prefill is done and the samples fork
        self.admission_tokens = 0  # num_tokens when it was last admitted: up to there it prefills, then it decodes
        self.slot: int | None = None  # the batch slot it holds while it runs
        self.waiting_for: str | None = None  # something outside the step (a KV transfer): skipped, keeps its place
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []  # of its full blocks, each chained on the one before (prefix cache)
        self.num_published_blocks = 0  # blocks that the prefix index has been told of
        self.output_bytes = bytearray()  # UTF-8 bytes of the sampled tokens, if a tokenizer is known
        self.text_end: int | None = None  # the text is output_bytes[:text_end] once a stop string cut it

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_prefilling(self) -> bool:
        """True while tokens known at admission (the prompt; after a preemption also earlier output) lack K and V."""
        return self.num_computed_tokens < self.admission_tokens

    def tokens(self, start: int, stop: int) -> SequenceOf[int]:
        """Token ids at positions start..stop-1, of prompt and output together. A lazy prompt gives a lazy part."""
        prompt, n = self.request.prompt_token_ids, self.num_prompt_tokens
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        head = prompt[start : min(stop, n)]
        return [*head, *self.output_token_ids[: stop - n]] if stop > n else head

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, sample {self.sample_index}, {self.state}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )
