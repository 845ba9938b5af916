"""The whole engine on the Triton kernels, in the interpreter: text identical to the torch backend.

The only way to try launch code, strides and grids before a GPU is seen. Run by test_interpreter.py in its own process.
"""

import pytest

from cbserve import LLM, ContinuousBatching, SamplingParams
from cbserve.core.trace import Admitted, Preempted, StepEvent

PROMPT = [(7 * i) % 200 + 5 for i in range(20)]
REQUESTS = [
    (PROMPT, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)),
    ([*PROMPT[:16], 77, 78], SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True, n=2)),
    ([9, 8, 7], SamplingParams(max_tokens=6, temperature=0.7, top_k=20, seed=4, ignore_eos=True, logprobs=2)),
]


def answers(backend: str, num_blocks: int):
    batching = ContinuousBatching(max_num_batched_tokens=12, max_num_seqs=5)
    sizes = {"block_size": 8, "num_blocks": num_blocks, "preemption": "swap", "enable_prefix_caching": True}
    llm = LLM("tiny", backend=backend, batching=batching, debug=True, verbose=False, **sizes)
    prompts, params = zip(*REQUESTS, strict=True)
    first = llm.generate(list(prompts), list(params), use_tqdm=False)
    trace = llm.trace
    again = llm.generate([prompts[0]], [params[0]], use_tqdm=False)
    tokens = [[completion.token_ids for completion in output.outputs] for output in first + again]
    return tokens, first[2].outputs[0].logprobs, trace, llm.trace


@pytest.mark.parametrize("num_blocks", [8, 6], ids=["copied on write", "swapped out"])
def test_the_text_is_that_of_the_torch_backend(num_blocks):
    tokens, logprobs, trace, again = answers("triton", num_blocks)
    expected, expected_logprobs, _, _ = answers("torch", num_blocks)
    assert tokens == expected
    for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    rows = [row for step in trace.of(StepEvent) for row in step.rows]
    assert any(row.kind == "prefill" and not row.num_sampled for row in rows), "no prompt was cut into chunks"
    if num_blocks == 6:
        assert any(event.how == "swap" for event in trace.of(Preempted)), "nobody was swapped out"
    else:
        assert any(step.num_copies for step in trace.of(StepEvent)), "nothing was copied on write"
    assert any(event.num_cached_tokens for event in again.of(Admitted)), "no prefix was found"
