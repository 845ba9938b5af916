"""The state of the pool that a trace tells is the state that the scheduler's own tables had."""

import random

import pytest
from engine_harness import make_engine, make_scheduler

from cbserve.clock import VirtualClock
from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.pages import PageFold, PageState, page_state, page_states, pool_size
from cbserve.core.policies import FCFS, Priority
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler
from cbserve.core.trace import PagesEvent, StepEvent, Trace
from cbserve.engine import Engine
from cbserve.executors.scripted import ScriptedExecutor
from cbserve.serving import serve


def truth(scheduler: Scheduler) -> dict[str, object]:
    """What the scheduler's own books say, read where they are kept."""
    kv, pool = scheduler.kv, scheduler.kv.pool
    tables = {seq_id: tuple(table) for seq_id, table in kv.tables.items()}
    tables |= {padding.seq.seq_id: padding.lease.block_ids for padding in scheduler.padding}
    return {
        "tables": tables,
        "ref_counts": list(pool.ref_counts),
        "cached": {block for block in pool._free if block in pool._hash_of},
        "free": {block for block in pool._free if block not in pool._hash_of},
        "findable": set(pool._hash_of),
        "swapped": {seq_id: tuple(blocks) for seq_id, blocks in kv.swapped.items()},
        "coming_in": {seq_id: tuple(blocks) for seq_id, blocks in kv.coming_in.items()},
    }


def told(state: PageState) -> dict[str, object]:
    """The same, from a state that was folded from the trace."""
    pages = state.pages()
    return {
        "tables": state.tables,
        "ref_counts": [page.ref_count for page in pages],
        "cached": {page.block for page in pages if page.state == "cached"},
        "free": {page.block for page in pages if page.state == "free"},
        "findable": set(state.findable),
        "swapped": state.swapped,
        "coming_in": state.coming_in,
    }


class Watching(ScriptedExecutor):
    """Notes what the scheduler's books say while each step computes."""

    def watch(self, scheduler: Scheduler) -> None:
        self.scheduler, self.seen = scheduler, []
        self.tokens: list[dict[int, int]] = []

    def execute(self, plan):
        self.seen.append(truth(self.scheduler))
        self.tokens.append({row.seq_id: row.end for row in plan.rows})
        return super().execute(plan)


def random_run(seed: int, batching=None, aborts: bool = True, **options) -> tuple[Trace, Watching]:
    """A run of random requests in families with common prefixes; the fold is compared after every step."""
    rng = random.Random(seed)
    lengths = {f"r{i}": rng.randint(1, 14) for i in range(40)}
    scheduler = make_scheduler(
        batching
        or ContinuousBatching(max_num_seqs=rng.randint(2, 7), max_num_batched_tokens=rng.choice([12, 40, 200])),
        **options,
    )
    executor = Watching(lengths)
    executor.watch(scheduler)
    engine, fold, at = Engine(scheduler, executor, VirtualClock(), debug=True), PageFold(), 0
    waiting = []
    for name in lengths:
        shared = [100 * rng.randint(0, 2) + min(i, 9) for i in range(rng.randint(1, 18))]
        params = SamplingParams(max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 1, 2]), temperature=0)
        waiting.append(Request(name, shared, params, priority=rng.randint(0, 2), cache_salt=rng.choice(["", "", "x"])))
    while waiting or engine.has_unfinished:
        while waiting and rng.random() < 0.5:
            engine.add_request(waiting.pop())
        if aborts and engine.scheduler.requests and rng.random() < 0.08:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        engine.step()
        for event in engine.trace.events[at:]:
            fold.apply(event)
            if isinstance(event, StepEvent):
                fold.end_step()
        at = len(engine.trace.events)
        assert told(fold.snapshot(0, *pool_size(engine.trace))) == truth(scheduler)
    return engine.trace, executor


RUNS = {
    "plain": {"num_blocks": 40},
    "prefix cache": {"num_blocks": 24, "block_size": 4, "prefix_caching": True},
    "preemptions": {"num_blocks": 12, "block_size": 4},
    "prefix cache and preemptions": {"num_blocks": 12, "block_size": 2, "prefix_caching": True},
    "swap": {"num_blocks": 12, "block_size": 4, "num_host_blocks": 40, "preemption": "swap"},
    "little swap space, prefix cache": {
        "num_blocks": 12, "block_size": 2, "num_host_blocks": 9, "preemption": "swap", "prefix_caching": True,
    },
    "displacing": {
        "num_blocks": 13, "block_size": 2, "num_host_blocks": 9, "preemption": "swap", "prefix_caching": True,
        "policy": lambda: Priority(displace=True),
    },
    "static": {"num_blocks": 40, "block_size": 4, "batching": StaticBatching(4)},
    "static, prefix cache": {"num_blocks": 40, "block_size": 4, "batching": StaticBatching(4), "prefix_caching": True},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RUNS)
def test_the_fold_is_what_the_scheduler_had_in_and_after_every_step(name: str, seed: int) -> None:
    options = dict(RUNS[name])
    options["policy"] = options.pop("policy", FCFS)()
    trace, executor = random_run(seed, **options)
    states = list(page_states(trace))
    assert len(states) == len(executor.seen) + 1
    for state, seen, tokens in zip(states, executor.seen, executor.tokens, strict=False):
        assert told(state) == seen
        assert {seq_id: state.num_tokens[seq_id] for seq_id in tokens} == tokens
    for step, state in zip(trace.steps, states, strict=False):
        assert len([page for page in state.pages() if page.state == "used"]) == step.num_used_blocks
        assert sum(change.kind == "evicted" for change in state.changes) >= step.num_evictions
    end = states[-1]
    assert not end.tables and not end.swapped and not end.num_tokens


def test_the_random_runs_have_everything_in_them() -> None:
    trace, _ = random_run(0, **RUNS["little swap space, prefix cache"])
    kinds = {change.kind for state in page_states(trace) for change in state.changes}
    assert kinds == {"allocated", "hit", "shared", "copied", "freed", "swapped_out", "swapped_in", "evicted"}


@pytest.mark.parametrize("seed", range(3))
def test_changes_lead_from_each_state_to_the_next(seed: int) -> None:
    """Blocks that `changes` say were taken and given back are the difference of two states."""
    trace, _ = random_run(seed, num_blocks=14, block_size=2, prefix_caching=True, num_host_blocks=9, preemption="swap")
    before = {}
    for state in page_states(trace):
        after = {(seq_id, block) for seq_id, table in state.tables.items() for block in table}
        held = set(before)
        for change in state.changes:
            pairs = {(change.seq_id, block) for block in change.blocks}
            if change.kind in ("allocated", "hit", "shared", "swapped_in", "copied"):
                held |= pairs
            if change.kind == "copied":
                held -= {(change.seq_id, block) for block in change.sources}
            elif change.kind == "freed":
                held -= pairs
        assert held == after
        before = after


def test_a_state_survives_a_file(tmp_path) -> None:
    trace, _ = random_run(3, **RUNS["little swap space, prefix cache"])
    trace.save(tmp_path / "run.jsonl")
    again = Trace.load(tmp_path / "run.jsonl")
    assert again == trace and list(page_states(again)) == list(page_states(trace))


def test_tables_are_told_once_only_what_is_new() -> None:
    trace = serve([60], block_size=4, prompt_tokens=10)
    grown = [entry for event in trace.of(PagesEvent) for entry in event.grown]
    assert [first for _, first, _ in grown] == [0, *range(3, 18)]
    assert len(list(trace.of(PagesEvent))) == 16 < len(trace.steps)


def test_a_second_run_finds_what_the_first_left_in_the_cache() -> None:
    engine = make_engine({"A": 4, "B": 4}, num_blocks=20, block_size=4, prefix_caching=True)
    engine.run([Request("A", range(17), SamplingParams(max_tokens=4))])
    engine.new_trace()
    engine.run([Request("B", range(17), SamplingParams(max_tokens=4))])
    state = page_state(engine.trace, 0)
    hits = [change for change in state.changes if change.kind == "hit"]
    assert [len(change.blocks) for change in hits] == [4]
    assert told(list(page_states(engine.trace))[-1]) == truth(engine.scheduler)


def test_a_step_that_is_not_there_and_a_trace_without_a_pool_are_named() -> None:
    trace = serve([3])
    assert page_state(trace, 3).tables == {} and page_state(trace).step in (0, 1, 2)
    with pytest.raises(ValueError, match="step=4: must be from 0 to 3"):
        page_state(trace, 4)
    with pytest.raises(ValueError, match="num_blocks"):
        page_state(Trace())
