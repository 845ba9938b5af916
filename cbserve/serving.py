"""`serve`: answers of given lengths through one scheduler, for the experiments of the course. Returns the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cbserve.clock import VirtualClock
from cbserve.core.batching import Batching, ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import InvalidRequestError
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import StepPlan
from cbserve.core.policies import Policy
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler
from cbserve.core.stopping import StopChecker
from cbserve.core.trace import Trace
from cbserve.engine import Engine
from cbserve.executors.scripted import EOS, ScriptedExecutor

if TYPE_CHECKING:
    from cbserve.llm import LLM


def request_name(index: int) -> str:
    """A, B, ..., Z, A1, B1, ...: the letters that the figures show."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


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
    num_blocks: int | None = None,
    block_size: int = 16,
    step_time_s: float | Callable[[StepPlan], float] = 1.0,
) -> Trace:
    """Serve answers of `lengths` tokens and return what happened.

    Args:
        lengths: output tokens of each request, at least 1.
        batching: continuous by default.
        llm: a real model: its engine serves the requests, and the trace is *measured*; its own batching, policy and
        pool
            are used, so the arguments that set those must stay away. Without it the same scheduler runs against a
            script
            and a virtual clock, and the trace is *simulated*: each step takes `step_time_s`.
        policy: FCFS by default.
        scheduler: a subclass that overrides duties.
        arrivals_s: when each request arrives; all at 0 by default.
        priorities: lower is more urgent; all 0 by default.
        prompt_tokens: length of the prompts, one number or one each.
        num_blocks: size of the KV pool; by default all requests fit.
        step_time_s: seconds a step, or a function of the plan (simulated runs only).

    Raises:
        InvalidRequestError: a length is not an integer of at least 1, or two arguments do not fit each other.
    """
    lengths = list(lengths)
    for index, length in enumerate(lengths):
        if not hasattr(length, "__index__") or isinstance(length, bool) or length < 1:
            raise InvalidRequestError(f"lengths[{index}]={length!r}: must be an integer of at least 1")
    prompts = [prompt_tokens] * len(lengths) if isinstance(prompt_tokens, int) else list(prompt_tokens)
    arrivals = [0.0] * len(lengths) if arrivals_s is None else list(arrivals_s)
    urgency = [0] * len(lengths) if priorities is None else list(priorities)
    for name, values in (("prompt_tokens", prompts), ("arrivals_s", arrivals), ("priorities", urgency)):
        if len(values) != len(lengths):
            raise InvalidRequestError(f"{name} has {len(values)} values for {len(lengths)} requests; give one each")
    names = [request_name(index) for index in range(len(lengths))]
    if llm is not None:
        if batching is not None or policy is not None or scheduler is not Scheduler or num_blocks is not None:
            raise InvalidRequestError(
                "llm= brings its own batching, policy, scheduler and pool: give them to LLM(...) instead"
            )
        return llm.serve(names, [int(n) for n in lengths], prompts, arrivals, urgency)
    blocks = sum(-(-(p + n) // block_size) for p, n in zip(prompts, lengths, strict=True)) or 1
    engine = Engine(
        scheduler(
            KVCacheManager(BlockPool(num_blocks or blocks, block_size)),
            batching or ContinuousBatching(),
            policy,
            StopChecker([EOS]),
        ),
        ScriptedExecutor(dict(zip(names, lengths, strict=True)), step_time_s),
        VirtualClock(),
        meta={"model": "scripted", "device": "none"},
    )
    params = [SamplingParams(max_tokens=n, temperature=0) for n in lengths]
    requests = [
        Request(name, range(1, 1 + prompt), param, arrival, priority)
        for name, prompt, param, arrival, priority in zip(names, prompts, params, arrivals, urgency, strict=True)
    ]
    engine.run(requests)
    return engine.trace
