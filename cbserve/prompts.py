"""What an `LLM` can be asked: text, token ids or chat messages; one, or a list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import is_integer
from cbserve.core.request import SamplingParams
from cbserve.models.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages


def as_batch(prompts: Any) -> list[Prompt]:
    """One prompt or a list of them -> a list. Raises InvalidRequestError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError(
            f"prompts of type {type(prompts).__name__}: must be text, token ids, chat messages, or a list of them"
        )
    first = prompts[0] if len(prompts) else None
    is_id = isinstance(first, float) or (is_integer(first) and not getattr(first, "ndim", 0))
    is_one = isinstance(first, Mapping) or is_id
    return [prompts] if is_one else list(prompts)


def params_for(params: Any, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt, of one for all, one each, or None. Raises InvalidRequestError for anything else."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    params = list(params) if isinstance(params, Iterable) else [params]
    for wrong in (p for p in params if not isinstance(p, SamplingParams)):
        raise InvalidRequestError(f"params: {wrong!r} is no SamplingParams")
    if len(params) != num_prompts:
        raise InvalidRequestError(f"{len(params)} params for {num_prompts} prompts; give one for all, or one each")
    return params


def encode(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids. Raises InvalidRequestError for what is no prompt, and for an id that the model does not know."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequestError(f"a prompt of type {type(prompt).__name__}: must be text, token ids or chat messages")
    if len(prompt) and isinstance(prompt[0], Mapping):
        return tokenizer.apply_chat_template(prompt)
    for token in prompt:
        if not is_integer(token) or not 0 <= int(token) < vocab_size:
            raise InvalidRequestError(f"token id {token!r}: must be an integer in 0..{vocab_size - 1}")
    return [int(token) for token in prompt]
