"""`serve`: what its arguments for memory do, on the script and on the model."""

import logging

import pytest

from cbserve.core.batching import ContinuousBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.metrics import prefix_hit_rate
from cbserve.core.policies import Priority
from cbserve.core.scheduler import Scheduler
from cbserve.core.trace import Admitted, Forked, Preempted
from cbserve.llm import LLM
from cbserve.recorder import quiet
from cbserve.serving import serve

SYSTEM = list(range(100, 132))  # two blocks of 16
PROMPTS = [[*SYSTEM, *range(1000 * i, 1000 * i + 8)] for i in (1, 2)]


def cached_tokens(trace):
    return [event.num_cached_tokens for event in trace.of(Admitted)]


def test_a_shared_prefix_is_found_unless_the_salts_differ():
    late = {"arrivals_s": [0, 5], "prompts": PROMPTS}
    shared = serve([4, 4], enable_prefix_caching=True, **late)
    assert cached_tokens(shared) == [0, 32]
    assert prefix_hit_rate(shared) == 32 / 80
    assert cached_tokens(serve([4, 4], enable_prefix_caching=True, cache_salts=["a", "b"], **late)) == [0, 0]
    assert cached_tokens(serve([4, 4], **late)) == [0, 0]


def test_swapping_keeps_what_recomputing_loses():
    small = {"prompt_tokens": 8, "num_blocks": 5, "block_size": 8}
    lost, kept = (serve([20, 20], preemption=how, **small) for how in ("recompute", "swap"))
    assert {event.how for event in lost.of(Preempted)} == {"recompute"}
    assert {event.how for event in kept.of(Preempted)} == {"swap"}
    assert sum(event.num_swapped_blocks for event in kept.of(Admitted)) > 0
    without_room = serve([20, 20], preemption="swap", num_host_blocks=1, **small)
    assert {event.how for event in without_room.of(Preempted)} == {"recompute"}


@pytest.mark.parametrize("how, way", [("recompute", "computed again"), ("swap", "copied back from the host")])
def test_the_warning_of_a_preemption_says_how_the_tokens_come_back(caplog, how, way):
    serve([20, 20], preemption=how, prompt_tokens=8, num_blocks=5, block_size=8)
    (record,) = caplog.records
    assert f"tokens will be {way}. " in record.message


def test_the_warning_of_a_preemption_names_the_cure_of_its_cause_and_promises_no_more_of_them(caplog):
    urgent = {"priorities": [1, 0], "arrivals_s": [0, 3], "policy": Priority(displace=True)}
    one = serve([20, 4], ContinuousBatching(max_num_seqs=1), **urgent)
    assert len(list(one.of(Preempted))) == 1
    (record,) = caplog.records
    assert "(displaced)" in record.message and "The policy asked for it." in record.message
    assert "larger pool" not in record.message and "More preemptions" not in record.message


def test_each_cause_of_preemption_is_warned_of_once(caplog):
    many = {"priorities": [1, 1, 0, 0], "arrivals_s": [0, 0, 3, 6], "policy": Priority(displace=True)}
    trace = serve(
        [30, 30, 20, 20], ContinuousBatching(max_num_seqs=2), prompt_tokens=8, num_blocks=6, block_size=8, **many
    )
    assert len(list(trace.of(Preempted))) > 2
    said = [record.message for record in caplog.records]
    assert sorted("A larger pool or fewer slots avoid it." in message for message in said) == [False, True]


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.CRITICAL])
def test_quiet_hides_the_warning_and_leaves_the_level_that_was_set(caplog, level):
    logger = logging.getLogger("cbserve")
    caplog.set_level(level, "cbserve")
    with quiet():
        assert logger.getEffectiveLevel() == max(level, logging.ERROR)
        serve([20, 20], prompt_tokens=8, num_blocks=5, block_size=8)
    assert logger.level == level and not caplog.records


def test_samples_share_their_prompt():
    trace = serve([6], num_samples=3, prompt_tokens=40)
    assert len(list(trace.of(Forked))) == 2
    assert max(step.num_used_blocks for step in trace.steps) == 2 + 3  # two full blocks once, a last one each


def test_a_model_gets_the_prompts_that_are_given():
    llm = LLM("tiny", num_blocks=32, enable_prefix_caching=True, verbose=False)
    prompts = [[token % 200 + 5 for token in prompt] for prompt in PROMPTS]
    serve([2], llm=llm, prompts=prompts[:1])
    assert cached_tokens(serve([2], llm=llm, prompts=prompts[1:])) == [32]


@pytest.mark.parametrize(
    "arguments",
    [{"prompts": PROMPTS[:1]}, {"cache_salts": ["a"]}, {"prompt_tokens": [1, 2, 3]}],
    ids=lambda a: next(iter(a)),
)
def test_one_value_a_request(arguments):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(arguments))} has"):
        serve([3, 3], **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batching": ContinuousBatching()}, {"policy": Priority()}, {"scheduler": type("Mine", (Scheduler,), {})},
        {"num_blocks": 9}, {"block_size": 4}, {"enable_prefix_caching": True}, {"preemption": "swap"},
        {"num_host_blocks": 3}, {"step_time_s": 0.0},
    ],
    ids=lambda a: next(iter(a)),
)  # fmt: skip
def test_a_model_brings_its_own_engine(arguments):
    with pytest.raises(InvalidRequestError, match=f"^{next(iter(arguments))} beside llm=.* give them to LLM"):
        serve([3], llm=LLM("tiny", num_blocks=8, verbose=False), **arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"num_blocks": 1},
            "request 'A': prompt 8 .* max_tokens 100 need 7 blocks .* the pool has 1; lower max_tokens",
        ),
        ({"num_blocks": 1, "prompt_tokens": 40}, "request 'A': the prompt has 40 tokens and needs 3 blocks"),
        ({"num_samples": 33}, "request 'A': n=33 samples need as many slots, there are 32"),
    ],
)
def test_what_can_never_be_served_is_said_with_and_without_a_model(options, said):
    with pytest.raises(InvalidRequestError, match=said):
        serve([100], **options)
    sizes = {"num_blocks": options["num_blocks"]} if "num_blocks" in options else {}
    with pytest.raises(InvalidRequestError, match=said):
        serve([100], llm=LLM("tiny", verbose=False, **sizes), **{k: v for k, v in options.items() if k not in sizes})
