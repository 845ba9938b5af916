"""The executor, driven by hand-made plans on the tiny model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from cbserve.core.plan import Row, StepPlan
from cbserve.core.request import SamplingParams
from cbserve.executors import threads
from cbserve.executors.packing import PlanError
from cbserve.executors.threads import choose_num_threads
from cbserve.executors.torch_executor import TorchExecutor
from cbserve.kernels.paged_attention import paged_attention
from cbserve.models.weights import load_model

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"
BLOCK, NUM_BLOCKS = 8, 96
GREEDY = SamplingParams(temperature=0.0)
TEXTS = (b"The scheduler decides.", b"k", b"A block holds eight tokens, or sixteen, or more: ", b"12345678")
PROMPTS = [list(text) for text in TEXTS]


@pytest.fixture(scope="module")
def model():
    return load_model("tiny").model


@pytest.fixture
def executor(model):
    executor = TorchExecutor(model, NUM_BLOCKS, BLOCK)
    executor.kv_cache.fill_(torch.nan)  # what was never written must never matter
    return executor


class Driver:
    """A sequence that knows its tokens and how many of them are computed."""

    def __init__(self, prompt, blocks, params=GREEDY, name="a", sample_index=0):
        self.tokens, self.blocks, self.params, self.name = list(prompt), blocks, params, name
        self.num_prompt, self.computed, self.sample_index = len(prompt), 0, sample_index

    def row(self, count=None, num_samples=None):
        stop = len(self.tokens) if count is None else min(len(self.tokens), self.computed + count)
        samples = int(stop == len(self.tokens)) if num_samples is None else num_samples
        tokens = self.tokens[self.computed : stop]
        own = (self.blocks, self.params, self.num_prompt, self.sample_index, samples)
        row = Row(0, self.name, 0, self.computed, tokens, *own)
        self.computed = stop
        return row

    @property
    def answer(self):
        return self.tokens[self.num_prompt :]


def step(executor, drivers, chunk=None, extra=()):
    result = executor.execute(StepPlan(0, [driver.row(chunk) for driver in drivers] + list(extra)))
    for driver, sampled in zip(drivers, result.sampled[: len(drivers)], strict=True):
        driver.tokens += sampled
    return result


def generate(executor, prompt, blocks, num_tokens=24, chunk=None, params=GREEDY, name="a"):
    driver = Driver(prompt, blocks, params, name)
    while len(driver.answer) < num_tokens:
        step(executor, [driver], chunk if driver.computed < driver.num_prompt else None)
    return driver.answer


def own_blocks(index):
    return list(range(index * 20, index * 20 + 20))


@pytest.fixture(scope="module")
def expected(model):
    """Each prompt's greedy answer alone, nothing taken from a cache: all is computed again for every token."""
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(24):
            executor = TorchExecutor(model, 20, BLOCK)
            tokens += executor.execute(StepPlan(0, [Driver(tokens, own_blocks(0)).row()])).sampled[0]
        answers.append(tokens[len(prompt) :])
        assert len(set(answers[-1])) > 4  # a degenerate answer would hide every fault
    return answers


@pytest.mark.parametrize("chunk", [None, 1, 3, 8, 11])
def test_cached_and_chunked_prefill_give_what_recomputation_gives(executor, expected, chunk):
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert generate(executor, prompt, own_blocks(0), chunk=chunk) == answer


def test_scattered_blocks_do_not_matter(executor, expected):
    blocks = list(range(NUM_BLOCKS))
    random.Random(3).shuffle(blocks)
    for index, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
        assert generate(executor, prompt, blocks[index * 20 : index * 20 + 20]) == answer


@pytest.mark.parametrize("stagger", [0, 1, 5])
def test_a_batch_gives_what_each_gives_alone(executor, expected, stagger):
    """Sequences join one after the other, prefill in chunks while others decode, and leave at their own time."""
    drivers = [Driver(prompt, own_blocks(index), name=str(index)) for index, prompt in enumerate(PROMPTS)]
    for iteration in range(200):
        active = [d for i, d in enumerate(drivers) if iteration >= i * stagger and len(d.answer) < 24]
        if not active:
            break
        step(executor, active, chunk=7)
    assert [driver.answer for driver in drivers] == expected


def test_a_given_attention_takes_the_place_of_ours(model, expected):
    calls = []

    def attention(q, k_cache, v_cache, block_tables, query_start, context_lens, scale):
        calls.append((q.shape, block_tables.shape, query_start.tolist(), context_lens.tolist()))
        return paged_attention(q, k_cache, v_cache, block_tables, query_start, context_lens, scale)

    executor = TorchExecutor(model, NUM_BLOCKS, BLOCK, attention=attention)
    assert generate(executor, PROMPTS[0], own_blocks(1)) == expected[0]
    assert calls[0] == ((22, 4, 16), (1, 3), [0, 22], [22])
    assert len(calls) == 24 * model.config.num_layers


def test_a_given_attention_of_the_wrong_shape_is_named(model):
    executor = TorchExecutor(model, NUM_BLOCKS, BLOCK, attention=lambda q, *_: q[0])
    with pytest.raises(PlanError, match=r"attention gave shape \[4, 16\]; it must give \[1, 4, 16\]"):
        step(executor, [Driver([65], [0])])


def test_padding_rows_change_nothing(executor, expected):
    """A finished row stays and recomputes its last token; nothing is sampled for it."""
    finished = Driver(PROMPTS[1], own_blocks(1))
    step(executor, [finished])
    last = finished.computed - 1
    padding = Row(1, "z", 1, last, [finished.tokens[last]], finished.blocks, GREEDY, 1, num_samples=0, is_padding=True)
    driver = Driver(PROMPTS[0], own_blocks(0))
    while len(driver.answer) < 24:
        assert step(executor, [driver], extra=[padding]).sampled[1] == []
    assert driver.answer == expected[0]


def test_copied_blocks_continue_as_the_original(executor, expected):
    driver = Driver(PROMPTS[2], own_blocks(0))
    while len(driver.answer) < 10:
        step(executor, [driver])
    before, used = driver.blocks, -(-driver.computed // BLOCK)
    driver.blocks = own_blocks(2)
    copies = list(zip(before[:used], driver.blocks[:used], strict=True))
    driver.tokens += executor.execute(StepPlan(0, [driver.row()], copies=copies)).sampled[0]
    executor.kv_cache[:, :, before] = torch.nan
    while len(driver.answer) < 24:
        step(executor, [driver])
    assert driver.answer == expected[2]


def test_a_plan_of_copies_alone(executor):
    executor.kv_cache[:, :, 3] = 1.5
    result = executor.execute(StepPlan(0, [], copies=[(3, 5)]))
    assert (result.sampled, result.logprobs) == ([], None)
    assert executor.kv_cache[:, :, 5].eq(1.5).all()


def test_samples_of_one_prefill_continue_each_in_its_own_stream(executor):
    """n samples at the end of a prefill are what n requests with these sample indices would draw."""
    params = SamplingParams(temperature=5.0, seed=11, n=4)
    row = Driver(PROMPTS[0], own_blocks(0), params).row(num_samples=4)
    together = executor.execute(StepPlan(0, [row])).sampled[0]
    alone = [
        executor.execute(StepPlan(0, [Driver(PROMPTS[0], own_blocks(1), params, sample_index=i).row()])).sampled[0][0]
        for i in range(4)
    ]
    assert together == alone
    assert len(set(together)) > 1


def test_a_seed_fixes_the_text_and_none_derives_one_from_the_id(executor, model):
    def text(params, name="a", default_seed=0):
        executor.default_seed = default_seed
        return generate(executor, PROMPTS[0], own_blocks(0), params=params, name=name)

    seeded, unseeded = SamplingParams(temperature=3.0, seed=7), SamplingParams(temperature=3.0)
    assert text(seeded, "a", 0) == text(seeded, "b", 1)
    assert text(unseeded, "a") == text(unseeded, "a")
    assert len({tuple(text(unseeded, name, seed)) for name, seed in (("a", 0), ("b", 0), ("a", 1))}) == 3


def test_a_derived_seed_is_the_same_in_every_process(model):
    assert TorchExecutor(model, 4, BLOCK)._derived_seed("request-1") == 3190941232672791606


def test_sampling_does_not_depend_on_the_batch(executor):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    alone = generate(executor, PROMPTS[0], own_blocks(0), params=params)
    driver, other = Driver(PROMPTS[0], own_blocks(0), params), Driver(PROMPTS[2], own_blocks(1), GREEDY, "b")
    while len(driver.answer) < 24:
        step(executor, [other, driver])
    assert driver.answer == alone


def test_logprobs_come_for_the_rows_that_asked(executor):
    asked = Driver(PROMPTS[0], own_blocks(0), SamplingParams(temperature=0.0, logprobs=2))
    result = step(executor, [Driver(PROMPTS[1], own_blocks(1)), asked])
    assert result.logprobs is not None and result.logprobs[0] is None
    (entry,) = result.logprobs[1]
    assert list(entry)[0] == asked.answer[0] and len(entry) == 2
    assert max(entry.values()) == entry[asked.answer[0]] < 0
    assert step(executor, [Driver(PROMPTS[1], own_blocks(1))]).logprobs is None


def test_a_chunk_in_mid_prefill_samples_nothing(executor):
    result = step(executor, [Driver(PROMPTS[0], own_blocks(0))], chunk=5)
    assert result.sampled == [[]] and result.duration_s > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"token_ids": [65, 320]}, "token id 320 is outside the vocabulary of 320"),
        ({"token_ids": [-1]}, "token id -1"),
        ({"token_ids": []}, "no tokens"),
        ({"token_ids": [65] * 17}, "the block table has 2 blocks of 8 tokens, 17 tokens need 3"),
        ({"start": 4096, "block_table": [0] * 600}, "the model has positions 0 to 4095"),
        ({"block_table": [NUM_BLOCKS, 0]}, "block 96 is outside the pool of 96"),
        ({"block_table": [-1]}, "block -1"),
    ],
)
def test_an_impossible_row_is_refused_before_anything_is_written(executor, row, message):
    fields = {"start": 0, "token_ids": [65], "block_table": [0, 1]} | row
    with pytest.raises(PlanError, match=message):
        executor.execute(StepPlan(0, [Row(0, "a", 0, params=GREEDY, num_prompt_tokens=1, **fields)], copies=[(0, 1)]))
    assert executor.kv_cache.isnan().all()


def test_an_impossible_copy_is_refused(executor):
    with pytest.raises(PlanError, match="copy of block 0 to 96"):
        executor.execute(StepPlan(0, [], copies=[(0, 96)]))


@pytest.mark.parametrize("size", [{"num_blocks": 0}, {"block_size": 0}, {"num_threads": 0}])
def test_an_impossible_size_is_refused(model, size):
    with pytest.raises(PlanError, match="must be at least 1"):
        TorchExecutor(model, **{"num_blocks": 4, "block_size": BLOCK} | size)


@pytest.mark.model
@pytest.mark.slow
def test_the_reference_texts_come_out_of_one_mixed_batch(smollm2):
    """24 prompts join two by two, prefill in chunks of 16 while others decode, on scattered blocks of a NaN cache."""
    cases = json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
    executor = TorchExecutor(smollm2.model, 512, 16)
    executor.kv_cache.fill_(torch.nan)
    blocks = list(range(512))
    random.Random(0).shuffle(blocks)
    drivers = []
    for index, case in enumerate(cases):
        count = -(-(len(case["prompt_token_ids"]) + len(case["output_token_ids"])) // 16)
        own, blocks = blocks[:count], blocks[count:]
        drivers.append(Driver(case["prompt_token_ids"], own, name=str(index)))
    wanted = [case["output_token_ids"] for case in cases]
    for iteration in range(200):
        joined = list(zip(drivers, wanted, strict=True))[: 2 * iteration + 2]
        active = [driver for driver, ids in joined if len(driver.answer) < len(ids)]
        if not active:
            break
        step(executor, active, chunk=16)
    assert [driver.answer for driver in drivers] == wanted


def test_an_interrupted_step_can_be_repeated(model, expected):
    interrupt = [False]

    def attention(*arguments):
        if interrupt[0]:
            raise KeyboardInterrupt
        return paged_attention(*arguments)

    executor = TorchExecutor(model, NUM_BLOCKS, BLOCK, attention=attention)
    driver = Driver(PROMPTS[0], own_blocks(0))
    step(executor, [driver])
    interrupt[0] = True
    with pytest.raises(KeyboardInterrupt):
        step(executor, [driver])
    interrupt[0], driver.computed = False, driver.computed - 1
    while len(driver.answer) < 24:
        step(executor, [driver])
    assert driver.answer == expected[0]


def test_threads_are_chosen_among_those_that_there_are():
    before = torch.get_num_threads()
    assert 1 <= choose_num_threads() <= max(before, threads._MOST)
    assert torch.get_num_threads() == before


def test_an_engine_keeps_its_threads_when_another_is_made(model, monkeypatch):
    """torch has one number for the process. A tiny model takes one thread, and a larger one beside it must not."""
    before = torch.get_num_threads()
    try:
        two = TorchExecutor(model, NUM_BLOCKS, BLOCK, num_threads=2)
        TorchExecutor(model, NUM_BLOCKS, BLOCK, num_threads=1)
        step(two, [Driver(PROMPTS[0], [0, 1, 2, 3])])
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        monkeypatch.setattr(threads, "_MOST", 4)
        tried = []
        monkeypatch.setattr(torch, "set_num_threads", tried.append)
        choose_num_threads.__wrapped__()
        assert {1, 2, 4} <= set(tried) and tried[-1] == 1
    finally:
        monkeypatch.undo()
        torch.set_num_threads(before)
