"""The central proof: the same request gives the same tokens however it is scheduled (float32, CPU)."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from cbserve import LLM, ContinuousBatching, Priority, Request, SamplingParams, Scheduler, StaticBatching
from cbserve.core.trace import Admitted, Preempted, StepEvent

PROMPTS = [[(7 * i + 13 * j) % 200 + 5 for j in range(length)] for i, length in enumerate((3, 40, 16, 33, 70, 1))]
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=60, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)


def tokens_of(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@cache
def alone(params: SamplingParams) -> list[list[int]]:
    llm = LLM("tiny", verbose=False)
    return [tokens_of(llm, [prompt], params)[0] for prompt in PROMPTS]


WAYS = {
    "batched": {},
    "batched, one slot": {"max_num_seqs": 1},
    "chunked": {"batching": ContinuousBatching(max_num_batched_tokens=7)},
    "chunked by threshold": {"batching": ContinuousBatching(long_prefill_token_threshold=5)},
    "prefill first": {"batching": ContinuousBatching(mixed=False, max_num_batched_tokens=24)},
    "whole prompts": {"batching": ContinuousBatching(chunked=False, max_num_batched_tokens=140)},
    "static": {"batching": StaticBatching(4)},
    "preempted": {"num_blocks": 18},
    "preempted and chunked": {"num_blocks": 18, "batching": ContinuousBatching(max_num_batched_tokens=7)},
    "swapped": {"num_blocks": 18, "preemption": "swap"},
    "swapped and chunked": {
        "num_blocks": 18,
        "preemption": "swap",
        "batching": ContinuousBatching(max_num_batched_tokens=7),
    },
    "swap or recompute": {"num_blocks": 18, "preemption": "auto"},
    "little swap space": {"num_blocks": 18, "preemption": "swap", "swap_space_bytes": 60_000},
    "prefix cache": {"enable_prefix_caching": True, "batching": ContinuousBatching(max_num_batched_tokens=33)},
    "prefix cache, preempted": {"enable_prefix_caching": True, "num_blocks": 18},
    "prefix cache, swapped": {"enable_prefix_caching": True, "num_blocks": 18, "preemption": "swap"},
    "blocks of 1": {"block_size": 1},
    "blocks of 32": {"block_size": 32},
}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_request_gives_the_same_tokens(way, params):
    llm = LLM("tiny", debug=True, verbose=False, **WAYS[way])
    lengths = [60, 45, 60, 8, 60, 30]
    each = [replace(params, max_tokens=length) for length in lengths]
    expected = [tokens[:length] for tokens, length in zip(alone(params), lengths, strict=True)]
    assert tokens_of(llm, PROMPTS, each) == expected
    assert llm.scheduler.kv.pool.num_used == 0
    if "prefix cache" in way:  # everything once more, now that the prompts are known
        assert tokens_of(llm, PROMPTS, each) == expected
        assert any(e.num_cached_tokens for e in llm.trace.of(Admitted) if not e.resumed)
    if "swapped" in way:
        assert any(e.how == "swap" for e in llm.trace.of(Preempted))
        assert llm.scheduler.kv.host_pool.num_used == 0
    if way == "little swap space":
        assert {e.how for e in llm.trace.of(Preempted)} == {"swap", "recompute"}
    if "preempted" in way:
        assert sum(1 for _ in llm.trace.of(Preempted)) >= 2, "nobody was preempted: the pool is too large for this test"
    if "chunked" in way:
        assert any(row.kind == "prefill" and not row.num_sampled for s in llm.trace.steps for row in s.rows)
    if way == "static":
        assert any(row.kind == "padding" for step in llm.trace.of(StepEvent) for row in step.rows)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_torchs_default_dtype_does_not_matter(dtype, backend):
    expected = alone(GREEDY) + alone(SEEDED)
    torch.set_default_dtype(dtype)
    try:
        llm = LLM("tiny", backend=backend, num_blocks=18, preemption="swap", verbose=False)
        found = [tokens for params in (GREEDY, SEEDED) for tokens in tokens_of(llm, PROMPTS, params)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_displaced_by_a_premium_request_it_still_says_the_same():
    llm = LLM("tiny", policy=Priority(displace=True), max_num_seqs=3, debug=True, verbose=False)
    llm.engine.new_trace()
    for i, prompt in enumerate(PROMPTS[:-1]):
        llm.engine.add_request(Request(f"standard {i}", prompt, GREEDY, 0.0, priority=1))
    outputs = {}
    for n in range(10_000):
        if n == 20:
            llm.engine.add_request(Request("premium", PROMPTS[-1], GREEDY, priority=0))
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
        if not llm.engine.has_unfinished:
            break
    assert [e.cause for e in llm.trace.of(Preempted)] == ["displaced"]
    names = [*(f"standard {i}" for i in range(5)), "premium"]
    assert [outputs[name].outputs[0].token_ids for name in names] == alone(GREEDY)


@pytest.mark.parametrize(
    ("num_blocks", "preemption"),
    [(None, "recompute"), (20, "recompute"), (20, "swap")],
    ids=["roomy", "preempted", "swapped"],
)
def test_samples_of_one_prompt_equal_the_same_samples_in_other_company(num_blocks, preemption):
    """n = 3 forks after the prefill and copies on write; each sample's stream depends on seed, sample and position
    only."""
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=5, ignore_eos=True, n=3)
    roomy = LLM("tiny", verbose=False).generate([PROMPTS[1]], params, use_tqdm=False)[0]
    samples = [completion.token_ids for completion in roomy.outputs]
    assert len({tuple(sample) for sample in samples}) == 3, "the samples are copies of each other"
    single = LLM("tiny", verbose=False).generate([PROMPTS[1]], SamplingParams(max_tokens=50, seed=5, ignore_eos=True))
    assert single[0].outputs[0].token_ids == samples[0]
    llm = LLM(
        "tiny",
        verbose=False,
        debug=True,
        num_blocks=num_blocks,
        preemption=preemption,
        batching=ContinuousBatching(max_num_batched_tokens=16),
    )
    others = [params, params, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)]
    outputs = llm.generate([PROMPTS[1], PROMPTS[4], PROMPTS[3]], others, use_tqdm=False)
    assert [completion.token_ids for completion in outputs[0].outputs] == samples
    if num_blocks:
        assert any(llm.trace.of(Preempted))


class YieldsOnce(Scheduler):
    """A learner's rule: the only running sequence gives its place up, although there is room."""

    def grow(self, seq, num_tokens, step):
        if seq.num_output_tokens == 5 and not seq.num_preemptions:
            return seq
        return super().grow(seq, num_tokens, step)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_step_that_only_swaps_out_is_carried_out(preemption):
    llm = LLM("tiny", num_blocks=6, preemption=preemption, scheduler=YieldsOnce, debug=True, verbose=False)
    assert tokens_of(llm, PROMPTS[1:2], replace(GREEDY, max_tokens=12)) == [alone(GREEDY)[1][:12]]
    assert [e.how for e in llm.trace.of(Preempted)] == [preemption]


def test_the_model_under_the_proof_is_not_degenerate():
    """A model that repeats one token would hide every fault of the KV cache."""
    llm = LLM("tiny", verbose=False)
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, logprobs=2)
    for output in llm.generate(PROMPTS, long, use_tqdm=False):
        assert len(set(output.outputs[0].token_ids)) >= 50
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        for choice in output.outputs[0].logprobs:
            first, second = sorted(choice.values(), reverse=True)[:2]
            assert first - second > 1e-3


def test_the_kv_cache_matters_to_this_model():
    """Change one early prompt token: the answers differ, so a wrong block would show."""
    llm = LLM("tiny", verbose=False)
    changed = [[*prompt[:1], (prompt[1] + 1) % 200 + 5, *prompt[2:]] for prompt in PROMPTS if len(prompt) > 1]
    same = [prompt for prompt in PROMPTS if len(prompt) > 1]
    assert all(a != b for a, b in zip(tokens_of(llm, changed, GREEDY), tokens_of(llm, same, GREEDY), strict=True))
