"""What can never be served, known when a request is added: refused then, and only that one."""

from __future__ import annotations

from dataclasses import dataclass

from cbserve.core.batching import Batching
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import Reason
from cbserve.core.request import Request
from cbserve.core.stopping import StopChecker


@dataclass(frozen=True)
class Limits:
    """The limits of one engine: its pool, its steps, its model."""

    kv: KVCacheManager
    batching: Batching
    stop_checker: StopChecker
    max_model_len: int | None = None  # tokens of prompt and answer together

    def refuses(self, request: Request) -> Reason | None:
        """Why `request` can never be served here; None if it can."""
        if (message := self.stop_checker.refuses(request)) is not None:
            return Reason("invalid", {"message": message})
        prompt, params, pool = len(request.prompt_token_ids), request.params, self.kv.pool
        if not prompt:
            return Reason("empty_prompt")
        if self.max_model_len is not None and prompt >= self.max_model_len:
            return Reason("too_long_for_model", {"prompt": prompt, "limit": self.max_model_len})
        if params.n > self.batching.max_num_seqs:
            return Reason("too_many_samples", {"need": params.n, "slots": self.batching.max_num_seqs})
        samples = self._samples_at_once(request)
        budget = None if self.batching.chunked else self.batching.max_num_batched_tokens
        # The prompt alone: max_tokens has no part in it, and None would be capped below 1.
        if (need := self.kv.blocks_for(prompt)) > pool.num_blocks:
            room = {"need": need, "block_size": pool.block_size, "total": pool.num_blocks}
            return Reason("prompt_too_long_for_pool", {"prompt": prompt, **room})
        if budget is not None and prompt > budget:
            return Reason("prompt_too_long_for_step", {"prompt": prompt, "budget": budget})
        max_tokens = self.max_tokens(request)
        longest = prompt + max_tokens - 1  # the last sampled token needs no K and V
        if (need := self.kv.blocks_for(longest) * samples) > pool.num_blocks:
            room = {"need": need, "block_size": pool.block_size, "total": pool.num_blocks}
            code = "too_long_for_pool" if samples == 1 else "samples_too_long_for_pool"
            return Reason(code, {"prompt": prompt, "max_tokens": max_tokens, "samples": samples, **room})
        if budget is not None and longest > budget:
            numbers = {"prompt": prompt, "max_tokens": max_tokens, "need": longest, "budget": budget}
            return Reason("too_long_for_step", numbers)
        return None

    def _samples_at_once(self, request: Request) -> int:
        """How many samples must fit into the pool together: a static batch keeps room for all, else one may yield."""
        return request.params.n if self.batching.keeps_finished else 1

    def max_tokens(self, request: Request) -> int:
        """`params.max_tokens`, capped by the model's length; None also by the pool and the step."""
        prompt, asked = len(request.prompt_token_ids), request.params.max_tokens
        caps = [] if self.max_model_len is None else [self.max_model_len - prompt]
        if asked is None:
            share = self.kv.pool.num_blocks // self._samples_at_once(request)
            caps.append(max(1, share * self.kv.block_size - prompt + 1))  # 1: the least that can be asked, and refused
            if not self.batching.chunked and self.batching.max_num_batched_tokens is not None:
                caps.append(self.batching.max_num_batched_tokens - prompt + 1)
        else:
            caps.append(asked)
        return min(caps)
