"""`serve`: answers of given lengths through one scheduler, for the experiments of the course. Returns the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cbserve.clock import VirtualClock
from cbserve.core.batching import Batching, ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import integer, is_integer
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import StepPlan
from cbserve.core.policies import Policy
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler, require_scheduler_class
from cbserve.core.stopping import StopChecker
from cbserve.core.trace import Trace
from cbserve.engine import Engine
from cbserve.executors.scripted import EOS, ScriptedExecutor
from cbserve.viz.style import letter as request_name  # a request keeps its letter in every figure

if TYPE_CHECKING:
    from cbserve.llm import LLM


def _listed(name: str, values: Any) -> list[Any]:
    """A list of plain Python values, of a list, an array or a tensor."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name}={values!r}: must be a list, one value a request")
    return list(values)


def serve(
    lengths: Sequence[int],
    batching: Batching | None = None,
    *,
    llm: LLM | None = None,
    policy: Policy | None = None,
    scheduler: type[Scheduler] = Scheduler,
    arrivals_s: Sequence[float] | None = None,
    priorities: Sequence[int] | None = None,
    prompt_tokens: int | Sequence[int] = 8,
    prompts: Sequence[Sequence[int]] | None = None,
    cache_salts: Sequence[str] | None = None,
    num_samples: int = 1,
    num_blocks: int | None = None,
    block_size: int | None = None,
    enable_prefix_caching: bool = False,
    preemption: str = "recompute",
    num_host_blocks: int | None = None,
    step_time_s: float | Callable[[StepPlan], float] | None = None,
) -> Trace:
    """Serve answers of `lengths` tokens and return what happened.

    Args:
        lengths: output tokens of each request, at least 1.
        batching: continuous by default.
        llm: a real model: its engine serves the requests, and the trace is *measured*; its own batching, policy and
            pool are used, so the arguments that set those must stay away. Without it the same scheduler runs against a
            script and a virtual clock, and the trace is *simulated*: each step takes `step_time_s`.
        policy: FCFS by default.
        scheduler: a subclass that overrides duties.
        arrivals_s: when each request arrives; all at 0 by default.
        priorities: lower is more urgent; all 0 by default.
        prompt_tokens: length of the prompts, one number or one each.
        prompts: the prompts themselves, as token ids, in place of `prompt_tokens`: equal beginnings are known prefixes.
        cache_salts: one a request: different salts never share cached blocks.
        num_samples: answers to each prompt, forked when it is computed; scripted ones are all alike.
        num_blocks, block_size: the KV pool; by default all requests fit, in blocks of 16 tokens.
        enable_prefix_caching: find the blocks of known prefixes instead of computing them.
        preemption: "recompute" or "swap", to a host pool of `num_host_blocks` (by default as many as the pool has).
        step_time_s: seconds a step, 1 by default, or a function of the plan.

    Raises:
        InvalidRequestError: a length is not an integer of at least 1, two arguments do not fit each other, or a request
            can never be served (in a pool that is too small for it, say).
    """
    lengths = [integer(f"lengths[{i}]", length, 1) for i, length in enumerate(_listed("lengths", lengths))]
    given = prompts is not None
    for name, size in (("block_size", block_size), ("num_blocks", num_blocks), ("num_host_blocks", num_host_blocks)):
        if size is not None:
            integer(name, size, 1)
    require_scheduler_class(scheduler)
    sizes = _listed("prompt_tokens", [prompt_tokens] * len(lengths) if is_integer(prompt_tokens) else prompt_tokens)
    sizes = [integer("prompt_tokens", size, 1) for size in sizes]
    texts: list[Sequence[int]] = list(prompts) if prompts is not None else [range(1, 1 + size) for size in sizes]
    arrivals = [0.0] * len(lengths) if arrivals_s is None else _listed("arrivals_s", arrivals_s)
    urgency = [0] * len(lengths) if priorities is None else _listed("priorities", priorities)
    salts = [""] * len(lengths) if cache_salts is None else _listed("cache_salts", cache_salts)
    per_request = {"prompts" if given else "prompt_tokens": texts, "arrivals_s": arrivals, "priorities": urgency}
    for name, values in (per_request | {"cache_salts": salts}).items():
        if len(values) != len(lengths):
            raise InvalidRequestError(f"{name} has {len(values)} values for {len(lengths)} requests; give one each")
    if llm is not None and not given:
        texts = llm.random_prompts(sizes)
    requests = [
        Request(
            request_name(index),
            texts[index],
            SamplingParams(max_tokens=int(n), temperature=0, ignore_eos=llm is not None, n=num_samples),
            arrivals[index],
            urgency[index],
            cache_salt=salts[index],
        )
        for index, n in enumerate(lengths)
    ]
    if llm is not None:
        own = {
            "batching": batching, "policy": policy, "scheduler": scheduler is not Scheduler, "num_blocks": num_blocks,
            "block_size": block_size, "enable_prefix_caching": enable_prefix_caching,
            "preemption": preemption != "recompute", "num_host_blocks": num_host_blocks, "step_time_s": step_time_s,
        }  # fmt: skip
        if names := [name for name, value in own.items() if value is not None and value is not False]:
            raise InvalidRequestError(
                f"{', '.join(names)} beside llm=, which brings an engine of its own: give them to LLM(...), or leave "
                "llm= out and simulate"
            )
        return llm.serve(requests)
    block_size, step_time_s = block_size or 16, 1.0 if step_time_s is None else step_time_s
    blocks = sum(num_samples * -(-(len(p) + n) // block_size) for p, n in zip(texts, lengths, strict=True)) or 1
    num_blocks = num_blocks or blocks
    host_pool = BlockPool(num_host_blocks or num_blocks, block_size) if preemption == "swap" else None
    engine = Engine(
        scheduler(
            KVCacheManager(BlockPool(num_blocks, block_size), enable_prefix_caching, host_pool),
            batching or ContinuousBatching(),
            policy,
            StopChecker([EOS]),
            preemption=preemption,
        ),
        ScriptedExecutor({r.request_id: n for r, n in zip(requests, lengths, strict=True)}, step_time_s),
        VirtualClock(),
        meta={"model": "scripted", "device": "none"},
    )
    for output in engine.run(requests):
        if output.error:
            raise InvalidRequestError(f"request {output.request_id!r}: {output.error}")
    return engine.trace
