"""What is left when a step fails, or a request cannot be added: nothing, and the next call gives right answers."""

from __future__ import annotations

import pytest

from cbserve import LLM, Request, SamplingParams
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import CBServeError

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def make_llm(**kwargs) -> LLM:
    return LLM("tiny", num_blocks=6, block_size=4, max_num_seqs=3, debug=True, verbose=False, **kwargs)


def requests() -> list[Request]:
    """Two samples that copy on write, and a neighbour; on 6 blocks somebody is preempted."""
    two = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, n=2)
    return [Request("a", list(range(20, 26)), two), Request("b", list(range(30, 36)), PARAMS)]


def answers(llm: LLM) -> dict[str, list[list[int]]]:
    return {o.request_id: [sample.token_ids for sample in o.outputs] for o in llm.engine.run(requests())}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("failing", [1, 2, 4, 8])
def test_a_step_that_fails_aborts_all_and_leaves_no_wrong_k_and_v(failing, preemption):
    llm = make_llm(preemption=preemption)
    expected, execute, calls = answers(llm), llm.executor.execute, []

    def fail(plan):
        calls.append(plan)
        if len(calls) == failing:
            raise OSError("the device is gone")
        return execute(plan)

    llm.executor.execute = fail
    for request in requests():
        llm.engine.add_request(request)
    with pytest.raises(OSError, match="gone"):
        while llm.engine.has_unfinished:
            llm.engine.step()
    assert not llm.engine.has_unfinished and llm.scheduler.kv.pool.num_used == 0
    llm.scheduler.check()
    assert answers(llm) == expected


@pytest.mark.parametrize("second", [Request("a", [5, 6], PARAMS), "hello", None])
def test_a_request_that_cannot_be_added_leaves_none_of_its_company(second):
    llm = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.engine.run([Request("a", [5, 6], PARAMS), second])
    assert not llm.engine.has_unfinished
    assert llm.generate([5, 6], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_an_interrupt_while_requests_are_added_leaves_none_of_them():
    llm = make_llm()
    add, added = llm.engine.add_request, []

    def interrupted(request):
        if added:
            raise KeyboardInterrupt
        added.append(request)
        add(request)

    llm.engine.add_request = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], PARAMS, use_tqdm=False)
    llm.engine.add_request = add
    assert llm.generate("a", PARAMS, use_tqdm=False)[0].finished


BAD_REQUESTS = {
    "id": (None, [1], PARAMS, {}),
    "text": ("a", "hello", PARAMS, {}),
    "no prompt": ("a", None, PARAMS, {}),
    "params": ("a", [1], {"max_tokens": 3}, {}),
    "no params": ("a", [1], None, {}),
    "salt": ("a", [1], PARAMS, {"cache_salt": None}),
    "arrival": ("a", [1], PARAMS, {"arrival_s": 10**400}),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_request_of_wrong_kinds_is_refused_when_it_is_made(case):
    request_id, ids, params, more = BAD_REQUESTS[case]
    with pytest.raises(InvalidRequestError, match="must be"):
        Request(request_id, ids, params, **more)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-6])
def test_a_temperature_that_would_overflow_is_greedy(temperature):
    llm = make_llm()
    tokens = [
        llm.generate("abc", SamplingParams(max_tokens=4, temperature=t, ignore_eos=True), use_tqdm=False)[0].outputs[0]
        for t in (temperature, 0)
    ]
    assert tokens[0].token_ids == tokens[1].token_ids


@pytest.mark.parametrize("call", ["serve", "generate", "measure"])
def test_a_call_during_a_stream_is_refused_and_the_stream_goes_on(call):
    from cbserve import measure_step_times, serve

    llm = make_llm()
    stream = llm.stream("abc", PARAMS)
    next(stream)
    calls = {
        "serve": lambda: serve([3], llm=llm),
        "generate": lambda: llm.generate("b", PARAMS, use_tqdm=False),
        "measure": lambda: measure_step_times(llm, (1, 2), 1),
    }
    with pytest.raises(CBServeError, match="another call"):
        calls[call]()
    assert list(stream)[-1].outputs[0].finish_reason == "length"


def test_measuring_step_times_leaves_what_the_prefix_cache_finds():
    from cbserve import measure_step_times

    llm = LLM("tiny", num_blocks=64, block_size=4, enable_prefix_caching=True, verbose=False)
    before = llm.generate("abcdefghijklmnop", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    measure_step_times(llm, (1, 2, 64), 1)
    after = llm.generate("abcdefghijklmnop", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.trace.meta["prefix_caching"] and after == before
