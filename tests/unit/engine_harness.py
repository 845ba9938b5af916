"""A scheduler that is driven by hand: what the tests of the core share."""

from __future__ import annotations

from cbserve.clock import VirtualClock
from cbserve.core.batching import Batching, ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import Reason, StepPlan, StepResult
from cbserve.core.policies import Policy
from cbserve.core.request import Request, SamplingParams, Sequence
from cbserve.core.scheduler import Scheduler, StepUpdate
from cbserve.core.stopping import StopChecker
from cbserve.engine import Engine
from cbserve.executors.scripted import EOS, ScriptedExecutor


def make_scheduler(
    batching: Batching | None = None,
    *,
    policy: Policy | None = None,
    num_blocks: int = 1000,
    block_size: int = 16,
    max_model_len: int | None = None,
    cls: type[Scheduler] = Scheduler,
) -> Scheduler:
    checker = StopChecker([EOS], max_model_len)
    return cls(
        KVCacheManager(BlockPool(num_blocks, block_size)),
        batching or ContinuousBatching(),
        policy,
        checker,
        max_model_len,
    )


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, max_tokens: int | None = 20, **kwargs) -> Sequence:
    """Queue a request; `n=` goes to its params, the rest to the request."""
    params = SamplingParams(max_tokens=max_tokens, n=kwargs.pop("n", 1))
    added = scheduler.add(Request(name, range(1, 1 + num_prompt_tokens), params, **kwargs))
    assert not isinstance(added, Reason), str(added)
    return added


def step(scheduler: Scheduler, token: int = 1) -> tuple[StepPlan, StepUpdate]:
    """One iteration in which every row that samples gets `token`; conservation is checked twice."""
    plan = scheduler.schedule(0.0)
    scheduler.check()
    update = scheduler.update(plan, StepResult([[token] * row.num_samples for row in plan.rows]), 0.0)
    scheduler.check()
    return plan, update


def chunks(plan: StepPlan) -> dict[str, int]:
    """Tokens that each request computes in this step."""
    return {row.request_id: len(row.token_ids) for row in plan.rows if not row.is_padding}


def running(scheduler: Scheduler) -> list[str]:
    return [seq.request.request_id for seq in scheduler.running]


def waiting(scheduler: Scheduler) -> list[str]:
    return [seq.request.request_id for seq in scheduler.policy]


def make_engine(lengths: dict[str, int] | None = None, **kwargs) -> Engine:
    return Engine(make_scheduler(**kwargs), ScriptedExecutor(lengths), VirtualClock(), debug=True)
