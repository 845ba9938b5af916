"""A scheduler that is driven by hand: what the tests of the core share."""

from __future__ import annotations

from cbserve.clock import VirtualClock
from cbserve.core.batching import Batching, ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.books import StepUpdate
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.plan import Reason, StepPlan, StepResult
from cbserve.core.policies import Policy
from cbserve.core.request import Request, SamplingParams, Sequence
from cbserve.core.scheduler import Scheduler
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
    prefix_caching: bool = False,
    num_host_blocks: int = 0,
    preemption: str = "recompute",
) -> Scheduler:
    checker = StopChecker([EOS])
    host_pool = BlockPool(num_host_blocks, block_size) if num_host_blocks else None
    kv = KVCacheManager(BlockPool(num_blocks, block_size), prefix_caching, host_pool)
    return cls(kv, batching or ContinuousBatching(), policy, checker, max_model_len, preemption)


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


class GhostCache:
    """A KV cache that holds, at each place, the tokens up to there: what K and V depend on. It carries out a plan's
    copies
    in the order that executors keep to, and finds any row whose context is not its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        kv = scheduler.kv
        self.scheduler, self.size = scheduler, kv.block_size
        self.device: list[list[object]] = [[None] * self.size for _ in range(kv.pool.num_blocks)]
        self.host: list[list[object]] = [
            [None] * self.size for _ in range(kv.host_pool.num_blocks if kv.host_pool else 0)
        ]

    def run(self, plan: StepPlan) -> None:
        for source, target in plan.swap_outs:
            self.host[target] = list(self.device[source])
        for target, content in [(target, list(self.device[source])) for source, target in plan.copies]:
            self.device[target] = content
        for source, target in plan.swap_ins:
            self.device[target] = list(self.host[source])
        tokens = {seq.seq_id: seq for seq in self.scheduler.running}
        tokens |= {padding.seq.seq_id: padding.seq for padding in self.scheduler.padding}
        for row in plan.rows:
            for position in range(row.start, row.end):
                block, offset = row.block_table[position // self.size], position % self.size
                self.device[block][offset] = tuple(tokens[row.seq_id].tokens(0, position + 1))
        for row in plan.rows:
            for position in range(row.end):
                block, offset = row.block_table[position // self.size], position % self.size
                own = tuple(tokens[row.seq_id].tokens(0, position + 1))
                assert self.device[block][offset] == own, f"{row.request_id} reads another's K and V at {position}"
