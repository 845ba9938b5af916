"""Who is admitted, and how much of a prompt a step computes."""

import pytest
from engine_harness import add, chunks, make_engine, make_scheduler, running, step, waiting

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import Reason
from cbserve.core.policies import Priority
from cbserve.core.request import FinishReason, Request, SamplingParams


def test_prompts_that_fit_are_all_admitted_whole_in_arrival_order():
    scheduler = make_scheduler()
    for i in range(10):
        add(scheduler, str(i), 20)
    plan, _ = step(scheduler)
    assert chunks(plan) == {str(i): 20 for i in range(10)}
    assert [row.request_id for row in plan.rows] == running(scheduler) == [str(i) for i in range(10)]
    assert not waiting(scheduler)


def test_long_prompts_share_the_budget_in_chunks_below_the_threshold():
    scheduler = make_scheduler(ContinuousBatching(max_num_batched_tokens=1024, long_prefill_token_threshold=400))
    for name in "ABC":
        add(scheduler, name, 800)
    expected = [{"A": 400, "B": 400, "C": 224}, {"A": 400, "B": 400, "C": 224}, {"A": 1, "B": 1, "C": 352}]
    for want in expected:
        plan, update = step(scheduler)
        assert chunks(plan) == want
        gave_a_token = {seq.request.request_id for seq, _ in update.new_tokens}
        ends_prefill = {row.request_id for row in plan.rows if row.end >= 800}
        assert gave_a_token == ends_prefill  # a request in mid-chunk gives no token


@pytest.mark.parametrize(
    ("chunked", "first_step"), [(True, {"A": 800, "B": 224}), (False, {"A": 800})], ids=["chunked", "whole"]
)
def test_nobody_is_pulled_forward_past_the_head_of_the_queue(chunked, first_step):
    scheduler = make_scheduler(ContinuousBatching(chunked=chunked, max_num_batched_tokens=1024))
    for name, tokens in (("A", 800), ("B", 800), ("c", 10), ("d", 10)):
        add(scheduler, name, tokens)
    plan, _ = step(scheduler)
    assert chunks(plan) == first_step
    assert plan.blocked.request_id == ("c" if chunked else "B")
    assert plan.blocked.reason.code == "no_budget"


def test_admission_stops_at_max_num_seqs_over_all_residents():
    scheduler = make_scheduler(ContinuousBatching(max_num_seqs=3))
    for i in range(10):
        add(scheduler, str(i), 5)
    for _ in range(3):
        plan, _ = step(scheduler)
        assert (len(scheduler.running), len(scheduler.policy)) == (3, 7)
        assert plan.blocked.reason.code == "no_slots"


def test_a_running_sequence_without_budget_stays_healthy():
    scheduler = make_scheduler(ContinuousBatching(max_num_batched_tokens=50), policy=Priority())
    low = add(scheduler, "low", 5, max_tokens=4, priority=1)
    step(scheduler)
    add(scheduler, "urgent", 149, max_tokens=1, priority=0)
    assert chunks(step(scheduler)[0]) == {"low": 1, "urgent": 49}
    for _ in range(2):
        plan, _ = step(scheduler)
        assert chunks(plan) == {"urgent": 50} and "low" in running(scheduler)
    while scheduler.has_unfinished:
        step(scheduler)
    assert low.num_output_tokens == 4


REFUSED = {
    "pool": ({}, {"num_blocks": 4}, 60, 6, "too_long_for_pool"),
    "model": ({}, {"max_model_len": 50}, 50, 6, "too_long_for_model"),
    "step": ({"chunked": False, "max_num_batched_tokens": 64}, {}, 60, 6, "too_long_for_step"),
    "prompt, pool": ({}, {"num_blocks": 4}, 65, 6, "prompt_too_long_for_pool"),
    "prompt, pool, no max_tokens": ({}, {"num_blocks": 4}, 3810, None, "prompt_too_long_for_pool"),
    "prompt, step": ({"chunked": False, "max_num_batched_tokens": 64}, {}, 65, None, "prompt_too_long_for_step"),
    "empty": ({}, {}, 0, 6, "empty_prompt"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_fit_is_refused_when_added_and_only_that(case):
    limits, sizes, prompt, max_tokens, code = REFUSED[case]
    engine = make_engine(batching=ContinuousBatching(**limits), **sizes)
    engine.add_request(Request("ok", range(1, 10), SamplingParams(max_tokens=5)))
    engine.add_request(Request("never", range(prompt), SamplingParams(max_tokens=max_tokens)))
    outputs = {output.request_id: output for output in engine.run()}
    refused = outputs["never"]
    assert (
        engine.scheduler.limits.refuses(Request("again", range(prompt), SamplingParams(max_tokens=max_tokens))).code
        == code
    )
    assert refused.outputs[0].finish_reason == FinishReason.ERROR
    assert refused.outputs[0].token_ids == []
    if case != "empty":
        assert str(prompt) in refused.error, "the message names what was asked"
    assert ("max_tokens" in refused.error) == (code in ("too_long_for_pool", "too_long_for_step"))
    assert outputs["ok"].outputs[0].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(60, 5, True), (60, 6, False), (64, 1, True), (65, 1, False)]
)
def test_the_last_sampled_token_needs_no_block(prompt, max_tokens, fits):
    """4 blocks of 16: need = ceil((prompt + max_tokens - 1) / 16)."""
    engine = make_engine(num_blocks=4)
    (output,) = engine.run([Request("A", range(prompt), SamplingParams(max_tokens=max_tokens))])
    assert (output.error is None) == fits
    assert len(output.outputs[0].token_ids) == (max_tokens if fits else 0)
    if not fits:
        assert " 5 blocks" in output.error and "has 4" in output.error


@pytest.mark.parametrize(("sizes", "expected"), [({"num_blocks": 4}, 64 - 10 + 1), ({"max_model_len": 40}, 30)])
def test_max_tokens_none_goes_to_the_models_length_capped_by_the_pool(sizes, expected):
    (output,) = make_engine(**sizes).run([Request("A", range(10), SamplingParams(max_tokens=None))])
    assert len(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == FinishReason.LENGTH


def test_a_long_prompt_leaves_running_requests_decoding_in_every_step_when_mixed():
    scheduler = make_scheduler(ContinuousBatching(max_num_batched_tokens=101, mixed=True))
    add(scheduler, "short", 5)
    step(scheduler)
    add(scheduler, "long", 500)
    for want in (100, 100, 100, 100, 100):
        plan, _ = step(scheduler)
        assert chunks(plan) == {"short": 1, "long": want}


def test_prefill_first_stalls_decodes_while_a_long_prompt_is_computed():
    scheduler = make_scheduler(ContinuousBatching(max_num_batched_tokens=100, mixed=False))
    add(scheduler, "short", 5)
    step(scheduler)
    add(scheduler, "long", 500)
    assert [chunks(step(scheduler)[0]) for _ in range(5)] == [{"long": 100}] * 5
    assert chunks(step(scheduler)[0]) == {"short": 1, "long": 1}


def test_prefill_first_cannot_starve_decodes_for_ever():
    scheduler = make_scheduler(ContinuousBatching(mixed=False, max_num_seqs=2, max_prefill_streak=5))
    victim = add(scheduler, "victim", 5, max_tokens=10)
    step(scheduler)
    for i in range(100):  # each ends with its prefill and frees its slot for the next
        add(scheduler, str(i), 5, max_tokens=1)
        step(scheduler)
    assert victim.num_output_tokens >= 10


def test_a_sequence_that_waits_outside_is_skipped_and_keeps_its_place():
    scheduler = make_scheduler(ContinuousBatching(max_num_seqs=1))
    params = SamplingParams(max_tokens=2)
    scheduler.add(Request("pulled", range(5), params, arrival_s=0.0), waiting_for="kv of pulled")
    scheduler.add(Request("B", range(5), params, arrival_s=1.0))
    scheduler.add(Request("C", range(5), params, arrival_s=2.0))
    assert chunks(step(scheduler)[0]) == {"B": 5}, "the one behind it is not starved"
    scheduler.complete("kv of pulled")
    assert waiting(scheduler) == ["pulled", "C"]
    step(scheduler)
    assert chunks(step(scheduler)[0]) == {"pulled": 5}


def test_a_completion_arrives_with_a_steps_result():
    from cbserve.core.plan import StepResult

    scheduler = make_scheduler()
    add(scheduler, "A", 5)
    scheduler.add(Request("B", range(5)), waiting_for="pull")
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, StepResult([[1]], completions=("pull",)), 0.0)
    assert set(chunks(step(scheduler)[0])) == {"A", "B"}


def test_an_id_in_use_is_refused_and_changes_nothing():
    scheduler = make_scheduler()
    add(scheduler, "A", 5)
    with pytest.raises(InvalidRequestError, match="'A' is in use"):
        add(scheduler, "A", 7)
    assert waiting(scheduler) == ["A"]


class TestStaticBatching:
    def test_a_batch_takes_what_waits_and_admits_nobody_until_it_ends(self):
        scheduler = make_scheduler(StaticBatching(3))
        lengths = {"A": 1, "B": 2, "C": 4, "D": 2}
        for name, length in lengths.items():
            add(scheduler, name, 5, max_tokens=length)
        seen = []
        while scheduler.has_unfinished:
            plan, _ = step(scheduler)
            seen.append([("/" if row.is_padding else "") + row.request_id for row in plan.rows])
        assert seen == [
            ["A", "B", "C"], ["B", "C", "/A"], ["C", "/A", "/B"], ["C", "/A", "/B"], ["D"], ["D"],
        ]  # fmt: skip

    def test_a_finished_answer_is_given_at_its_own_end_and_its_blocks_stay_until_the_batch_ends(self):
        scheduler = make_scheduler(StaticBatching(2), num_blocks=4)
        add(scheduler, "short", 16, max_tokens=1)
        add(scheduler, "long", 16, max_tokens=3)
        _, update = step(scheduler)
        assert [seq.request.request_id for seq in update.finished] == ["short"]
        assert update.left == []
        assert scheduler.kv.pool.num_used == 2
        step(scheduler)
        _, update = step(scheduler)
        assert sorted(seq.request.request_id for seq, _ in update.left) == ["long", "short"]
        assert scheduler.kv.pool.num_used == 0

    def test_a_padding_row_recomputes_its_last_computed_token(self):
        scheduler = make_scheduler(StaticBatching(2))
        add(scheduler, "short", 5, max_tokens=3)
        add(scheduler, "long", 5, max_tokens=9)
        for token in (7, 8, 9):
            step(scheduler, token)
        plan, _ = step(scheduler)
        (padding,) = [row for row in plan.rows if row.is_padding]
        assert (padding.start, list(padding.token_ids), padding.num_samples) == (6, [8], 0)

    def test_a_small_pool_makes_small_batches_because_the_longest_answer_is_reserved(self):
        scheduler = make_scheduler(StaticBatching(8), num_blocks=10)
        for i in range(6):
            add(scheduler, str(i), 16, max_tokens=33)  # 48 tokens: 3 blocks each
        plan, _ = step(scheduler)
        assert len(plan.rows) == 3
        assert plan.blocked.reason == Reason("no_blocks", {"need": 3, "free": 1})

    def test_an_aborted_member_pads_until_the_batch_ends(self):
        scheduler = make_scheduler(StaticBatching(2))
        add(scheduler, "A", 5, max_tokens=9)
        add(scheduler, "B", 5, max_tokens=3)
        step(scheduler)
        scheduler.abort("A")
        scheduler.check()
        plan, _ = step(scheduler)
        assert [row.is_padding for row in plan.rows] == [False, True]
        scheduler.abort("B")
        scheduler.check()
        assert scheduler.kv.pool.num_used == 0 and not scheduler.has_unfinished


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ContinuousBatching(0), "mixed=0.*did you mean max_num_seqs=0"),
        (lambda: ContinuousBatching(32), "mixed=32.*did you mean max_num_seqs=32"),
        (lambda: ContinuousBatching(True, 8), "chunked=8"),
        (lambda: ContinuousBatching(mixed=None), "mixed=None"),
        (lambda: ContinuousBatching(max_num_seqs=0), "max_num_seqs=0"),
        (lambda: ContinuousBatching(max_num_seqs=65_537), "max_num_seqs=65537: must be at most 65,536"),
        (lambda: ContinuousBatching(max_num_seqs=10**12), "at most 65,536"),
        (lambda: StaticBatching(65_537), "batch_size=65537: must be at most 65,536"),
    ],
)
def test_a_batching_that_makes_no_sense_is_refused(make, said):
    with pytest.raises(InvalidRequestError, match=said):
        make()


def test_the_most_slots_are_taken():
    assert ContinuousBatching(max_num_seqs=65_536).max_num_seqs == StaticBatching(65_536).max_num_seqs


@pytest.mark.parametrize(
    "batching", [StaticBatching(4), ContinuousBatching(max_num_seqs=4)], ids=["static", "continuous"]
)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 40])
def test_without_max_tokens_an_answer_may_be_as_long_as_the_longest_that_can_be_asked_for(
    batching, n, num_blocks, num_prompt_tokens
):
    def served(max_tokens):
        engine = make_engine(batching=batching, num_blocks=num_blocks)
        return engine.run([Request("A", range(num_prompt_tokens), SamplingParams(max_tokens=max_tokens, n=n))])[0]

    least, unlimited = served(1), served(None)
    assert (unlimited.error is None) == (least.error is None)
    if least.error is not None:
        assert f"n={n}" in unlimited.error if num_prompt_tokens <= 16 * num_blocks else "prompt" in unlimited.error
        return
    (length,) = {len(sample.token_ids) for sample in unlimited.outputs}
    assert served(length).error is None
    assert served(length + 1).error is not None
