"""The public face: what generate, chat and stream take and give, and what a bad argument does."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cbserve import LLM, ContinuousBatching, Request, SamplingParams, StaticBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.summary import summarize
from cbserve.core.trace import Trace
from cbserve.errors import CBServeError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def tiny() -> LLM:
    return LLM("tiny", debug=True, verbose=False)


def test_a_prompt_is_text_ids_or_messages_alone_or_in_a_list(tiny):
    text, ids, chat = "hi there", [104, 105], [{"role": "user", "content": "hi"}]
    outputs = tiny.generate([text, ids, chat], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [text, None, None]
    assert outputs[1].prompt_token_ids == ids
    for alone, batched in zip((text, ids, chat), outputs, strict=True):
        (single,) = tiny.generate(alone, GREEDY, use_tqdm=False)
        assert single.outputs[0].token_ids == batched.outputs[0].token_ids
    assert tiny.chat(chat, GREEDY, use_tqdm=False)[0].outputs[0].text == outputs[2].outputs[0].text
    for array in (torch.tensor(ids), np.array(ids), [torch.tensor(ids)], [np.array(ids)], torch.tensor([ids])):
        assert tiny.generate(array, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids
    asked = [Request(str(i), array, GREEDY) for i, array in enumerate((torch.tensor(ids), np.array(ids)))]
    assert [output.outputs[0].token_ids for output in tiny.engine.run(asked)] == [outputs[1].outputs[0].token_ids] * 2


def test_outputs_are_in_the_order_of_prompts_with_usage_and_times(tiny):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 2, 5)]
    outputs = tiny.generate(["a", "bb", "ccc"], params, use_tqdm=False)
    assert [(o.usage.prompt_tokens, o.usage.completion_tokens) for o in outputs] == [(1, 9), (2, 2), (3, 5)]
    for output in outputs:
        assert output.finished and output.outputs[0].finish_reason == "length"
        assert 0 <= output.times.admitted_s <= output.times.first_token_s <= output.times.finished_s
        assert output.outputs[0].text == tiny.tokenizer.decode(output.outputs[0].token_ids)


BAD_PROMPTS = {
    "none": (None, "NoneType"), "bytes": (b"x", "bytes"), "empty": ([], "no tokens"), "text empty": ("", "no tokens"),
    "id too large": ([1, 999_999], "999999"), "negative id": ([-1], "-1"), "float id": ([1, 1.5], "1.5"),
    "too long": ([5] * 5000, "5000"), "lone surrogate": ("a\ud800", "Unicode"),
    "bad message": ([{"role": "user"}], "content"), "float tensor": (torch.tensor([1.5]), "1.5"),
    "scalar tensor": (torch.tensor(3), "int"), "deep tensor": (torch.ones(1, 2, dtype=torch.int64), "[1, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_one_bad_prompt_fails_alone_and_says_why(tiny, case):
    prompt, why = BAD_PROMPTS[case]
    good, bad, also_good = tiny.generate(["first", prompt, "last"], GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and why in bad.error
    for output in (good, also_good):
        assert output.error is None and len(output.outputs[0].token_ids) == 12


BAD_ARGUMENTS = {
    "block_size": 0, "num_blocks": -1, "kv_cache_bytes": 10, "max_model_len": 10**9, "max_num_seqs": 0,
    "dtype": "float8",
    "device": "tpu", "max_num_batched_tokens": 0, "seed": -1, "batching": "static", "policy": "priority",
    "scheduler": None, "block_pool": 5, "attention": 5, "swap_space_bytes": 3,
}  # fmt: skip


@pytest.mark.parametrize("bad", [[99_999], [5] * 9000], ids=["unknown token", "too long"])
def test_a_refused_request_has_arrived_whatever_it_was_refused_for(tiny, bad):
    tiny.generate([[1, 2, 3], bad], SamplingParams(max_tokens=3), use_tqdm=False)
    summary = summarize(tiny.trace)
    assert (summary.num_requests, summary.num_refused) == (2, 1)


@pytest.mark.parametrize("size", [{"num_blocks": 10**13}, {"kv_cache_bytes": 10**18}, {"block_size": 10**9}])
def test_a_pool_beyond_all_memory_is_refused_with_its_size(size):
    with pytest.raises(InvalidRequestError, match=r"GB, which cannot be had here; lower num_blocks"):
        LLM("tiny", verbose=False, **({"num_blocks": 4096} | size if "block_size" in size else size))


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_fails_at_once_with_value_and_range(name):
    with pytest.raises(InvalidRequestError, match=name) as error:
        LLM("tiny", verbose=False, **{name: BAD_ARGUMENTS[name]})
    assert str(BAD_ARGUMENTS[name]) in str(error.value)


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(InvalidRequestError, match="give one of them"):
        LLM("tiny", num_blocks=4, kv_cache_bytes=10**6, verbose=False)
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        LLM("tiny", batching=StaticBatching(3), max_num_seqs=4, verbose=False)


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY, "fast"], "greedy", [GREEDY, None], 5])
def test_params_that_do_not_fit_the_prompts_start_nothing(tiny, params):
    with pytest.raises(InvalidRequestError):
        tiny.generate(["a", "b"], params, use_tqdm=False)
    assert not tiny.engine.has_unfinished


def test_streaming_grows_and_ends_with_the_text_of_generate(tiny):
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    texts = [output.outputs[0].text for output in tiny.stream("hello", params)]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert len(texts) == 30
    assert texts[-1] == tiny.generate("hello", params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("length", [1, 3])
def test_a_stop_string_cuts_the_text_and_ends_the_stream_there(tiny, length):
    whole = tiny.generate("hello", SamplingParams(max_tokens=30, temperature=0), use_tqdm=False)[0].outputs[0].text
    stop = whole[10 : 10 + length]
    params = SamplingParams(max_tokens=30, temperature=0, stop=stop)
    last = list(tiny.stream("hello", params))[-1].outputs[0]
    assert last.text == whole[: whole.index(stop)] and last.finish_reason == "stop" and last.stop_reason == stop


def test_a_call_during_a_stream_is_refused_and_leaving_the_stream_frees_all(tiny):
    stream = tiny.stream("hello", GREEDY)
    next(stream)
    with pytest.raises(CBServeError, match="serving another call"):
        tiny.generate("x", GREEDY, use_tqdm=False)
    stream.close()
    assert tiny.scheduler.kv.pool.num_used == 0
    assert len(tiny.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_ctrl_c_in_generate_leaves_the_pool_clean_and_the_engine_usable(tiny):
    import signal

    execute, calls = tiny.executor.execute, []

    def interrupted(plan):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    tiny.executor.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(["a", "b"], GREEDY, use_tqdm=False)
    tiny.scheduler.check()
    assert tiny.scheduler.kv.pool.num_used == 0
    assert len(tiny.generate(["a", "b"], GREEDY, use_tqdm=False)) == 2


def test_a_seed_belongs_to_the_request(tiny):
    """Alone, in a batch, beside rows with other parameters: the same tokens; another seed gives others."""
    mine = SamplingParams(max_tokens=20, temperature=1.0, top_k=40, seed=3, ignore_eos=True)
    others = [
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=2.0, min_p=0.1, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=1.0, top_k=40, seed=4, ignore_eos=True),
    ]
    alone = [tiny.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids for params in (mine, *others)]
    together = tiny.generate(["hello"] * 4, [mine, *others], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert len({tuple(ids) for ids in alone}) == 4


def test_logprobs_name_the_chosen_token_and_the_most_likely(tiny):
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, logprobs=3, ignore_eos=True)
    (output,) = tiny.generate("hello", params, use_tqdm=False)
    completion = output.outputs[0]
    assert len(completion.logprobs) == 5
    for token, choice in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token in choice and 3 <= len(choice) <= 4 and all(value <= 0 for value in choice.values())
    assert tiny.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].logprobs is None


def test_the_default_pool_on_a_cpu_is_stated(capsys):
    llm = LLM("tiny", max_num_seqs=2, max_model_len=64)
    assert "KV pool: 8 blocks of 16 tokens" in capsys.readouterr().out
    assert llm.scheduler.kv.pool.num_blocks == 8


def test_the_first_preemption_of_a_run_is_logged_once_with_its_cause(caplog):
    llm = LLM("tiny", num_blocks=6, verbose=False)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    llm.generate(["a" * 20] * 4, params, use_tqdm=False)
    (record,) = [record for record in caplog.records if "preempted" in record.message]
    assert "out of blocks" in record.message and "0 free" in record.message


def test_each_call_has_its_own_trace_that_can_be_saved(tiny, tmp_path):
    tiny.generate("a", GREEDY, use_tqdm=False)
    first = tiny.trace
    tiny.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert first is not tiny.trace and len(first.steps) == 12
    tiny.trace.save(tmp_path / "t.jsonl")
    assert Trace.load(tmp_path / "t.jsonl") == tiny.trace
    assert tiny.trace.meta["clock"] == "measured" and tiny.trace.meta["model"] == "tiny"


def test_a_learners_attention_and_pool_are_what_the_engine_runs(tiny):
    from cbserve.core.blocks import BlockPool
    from cbserve.kernels.paged_attention import paged_attention

    calls = []

    def attention(*args, **kwargs):
        calls.append("attention")
        return paged_attention(*args, **kwargs)

    class Pool(BlockPool):
        def allocate(self, count=1):
            calls.append("allocate")
            return super().allocate(count)

    llm = LLM("tiny", attention=attention, block_pool=Pool, verbose=False)
    expected = tiny.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert {"attention", "allocate"} <= set(calls)


@pytest.mark.model
@pytest.mark.parametrize("batching", [ContinuousBatching(max_num_batched_tokens=64), StaticBatching(24)], ids=str)
def test_the_24_references_through_the_engine(batching):
    """transformers' greedy ids and first log-probabilities, chunked and in a static batch."""
    cases = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["cases"]
    llm = LLM("smollm2-135m", batching=batching, debug=True, verbose=False)
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=5)
    outputs = llm.generate([case["prompt_token_ids"] for case in cases], params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids == case["output_token_ids"], case["prompt"]
        first = output.outputs[0].logprobs[0]
        for token, logprob in zip(case["first_top5_ids"], case["first_top5_logprobs"], strict=True):
            assert first[token] == pytest.approx(logprob, abs=1e-3)
