"""When an answer ends, what its text is, and that an aborted request leaves no trace."""

import sys
import threading
import time

import pytest
from engine_harness import add, chunks, make_engine, make_scheduler, step
from hypothesis import given
from hypothesis import strategies as st

from cbserve.clock import RealClock
from cbserve.core.batching import ContinuousBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import StepResult
from cbserve.core.request import FinishReason, Request, SamplingParams, Sequence
from cbserve.core.stopping import StopChecker, visible_text
from cbserve.core.trace import Finished
from cbserve.executors.scripted import EOS


def answer(tokens: list[bytes], **params) -> tuple[Sequence, list[str]]:
    """Feed tokens (given by their bytes) until the sequence ends; the sequence and the texts that were streamed."""
    checker = StopChecker([0], token_bytes=lambda i: b"" if i == 0 else tokens[i - 1])
    request = Request("A", range(3), SamplingParams(**({"max_tokens": len(tokens)} | params)))
    seq, sent, pieces = Sequence(request, 0, request.params.max_tokens), 0, []
    for i in range(1, len(tokens) + 1):
        seq.output_token_ids.append(i)
        checker.check(seq)
        piece, sent = visible_text(seq, sent)
        pieces.append(piece)
        if seq.is_finished:
            break
    return seq, pieces


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_stops_unless_ignored_and_stays_in_the_ids(ignore_eos):
    engine = make_engine({"A": 3})
    (output,) = engine.run([Request("A", range(5), SamplingParams(max_tokens=8, ignore_eos=ignore_eos))])
    completion = output.outputs[0]
    if ignore_eos:
        assert completion.finish_reason == FinishReason.LENGTH and len(completion.token_ids) == 8
    else:
        assert completion.finish_reason == FinishReason.STOP and completion.token_ids == [1, 2, EOS]
        assert completion.stop_reason is None


def test_a_stop_token_id_is_named_and_kept_out_of_the_text():
    seq, pieces = answer([b"a", b"b", b"c"], stop_token_ids=[2])
    assert (seq.finish_reason, seq.stop_reason, seq.output_token_ids) == (FinishReason.STOP, 2, [1, 2])
    assert "".join(pieces) == "a"


@pytest.mark.parametrize(("params", "limit", "tokens"), [({"max_tokens": 4}, None, 4), ({"max_tokens": 50}, 12, 7)])
def test_length_caps_give_length(params, limit, tokens):
    (output,) = make_engine(max_model_len=limit).run([Request("A", range(5), SamplingParams(**params))])
    assert output.outputs[0].finish_reason == FinishReason.LENGTH
    assert len(output.outputs[0].token_ids) == tokens
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (5, tokens)


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        ([b"one ", b"two ", b"three"], ["two"], "one ", "two"),
        ([b"abcXYdef", b"."], ["XY"], "abc", "XY"),  # inside a token
        ([b"ab", b"cd", b"ef"], ["bcde"], "a", "bcde"),  # over three tokens
        ([b"abcd"], ["cd", "b"], "a", "b"),  # b completes first
        ([b"abcd"], ["abcd", "bc"], "a", "bc"),  # bc completes first although abcd begins first
        ([b"abcd"], ["cd", "bcd"], "a", "bcd"),  # both complete at once: the longer
        ([b"\xe2\x82", b"\xac!", b"x"], ["\u20ac"], "", "\u20ac"),  # a character over two tokens
    ],
)
def test_the_stop_string_that_completes_first_wins_and_cuts_the_text(tokens, stop, text, reason):
    seq, pieces = answer(tokens, stop=stop)
    assert seq.finish_reason == FinishReason.STOP
    assert seq.stop_reason == reason
    assert "".join(pieces) == text


def test_while_streaming_what_may_yet_be_cut_is_held_back_and_flushed_at_the_end():
    seq, pieces = answer([b"ab", b"cd", b"ef", b"gh"], stop=["xyz"])
    assert pieces == ["", "ab", "cd", "efgh"]
    assert seq.finish_reason == FinishReason.LENGTH


@given(st.text(min_size=1, max_size=30), st.data())
def test_streamed_pieces_are_whole_characters_and_add_up(text, data):
    encoded, tokens = text.encode(), []
    while encoded:
        size = data.draw(st.integers(1, 5))
        tokens.append(encoded[:size])
        encoded = encoded[size:]
    stop = data.draw(st.lists(st.text(min_size=1, max_size=4), max_size=2))
    seq, pieces = answer(tokens, stop=stop)
    whole = "".join(pieces)
    assert "\ufffd" not in whole.replace("\ufffd", "", text.count("\ufffd"))
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        assert whole == text
    else:
        # token by token, the first completed stop string wins; the cut text ends where a stop string begins
        assert seq.finish_reason == FinishReason.STOP
        assert text.startswith(whole) and text[len(whole) :].startswith(seq.stop_reason)


def test_stop_strings_without_a_tokenizer_are_refused():
    (output,) = make_engine().run([Request("A", range(5), SamplingParams(stop=["x"]))])
    assert output.outputs[0].finish_reason == FinishReason.ERROR and "tokenizer" in output.error


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "in mid-chunk", "held"])
def test_abort_removes_every_trace(when):
    scheduler = make_scheduler(num_blocks=5)
    if when == "held":
        scheduler.add(Request("A", range(30), SamplingParams(max_tokens=20)), waiting_for="kv")
    else:
        add(scheduler, "A", 30, arrival_s=1.0)
    if when == "running":
        step(scheduler)
    elif when == "in mid-chunk":
        scheduler.schedule(0.0)  # planned, not computed
    elif when == "preempted":
        add(scheduler, "first", 32, arrival_s=0.0)
        step(scheduler)
        step(scheduler)
        scheduler.abort("first")
    update = scheduler.abort("A")
    assert [seq.finish_reason for seq in update.finished] == [FinishReason.ABORT]
    scheduler.check()
    assert scheduler.kv.pool.num_used == 0
    assert not scheduler.has_unfinished and not scheduler.running and not len(scheduler.policy) and not scheduler.held
    assert sorted(scheduler.free_slots) == list(range(scheduler.batching.max_num_seqs))


def test_aborting_an_unknown_or_finished_id_changes_nothing():
    engine = make_engine()
    engine.run([Request("A", range(5), SamplingParams(max_tokens=2))])
    before = len(engine.trace)
    assert engine.abort("A") is None and engine.abort("never seen") is None
    assert len(engine.trace) == before


def test_a_request_that_is_taken_back_before_it_arrives_ends_with_a_reason():
    engine = make_engine()
    for name in "AB":
        engine.add_request(Request(name, range(5), SamplingParams(max_tokens=2, n=2), arrival_s=9.0))
    output = engine.abort("A")
    assert [sample.finish_reason for sample in output.outputs] == [FinishReason.ABORT] * 2 and output.finished
    assert [output.request_id for output in engine.abort_all()] == ["B"]
    assert not engine.has_unfinished and not len(engine.trace)


def test_ctrl_c_while_a_request_is_taken_back_waits_until_the_books_are_in_order(monkeypatch):
    import signal

    engine = make_engine()
    engine.add_request(Request("A", range(20), SamplingParams(max_tokens=9)))
    engine.step()
    forget = engine.scheduler.kv.forget

    def struck(seq):
        signal.raise_signal(signal.SIGINT)
        return forget(seq)

    monkeypatch.setattr(engine.scheduler.kv, "forget", struck)
    with pytest.raises(KeyboardInterrupt):
        engine.abort("A")
    engine.scheduler.check()
    assert not engine.has_unfinished and engine.scheduler.kv.pool.num_used == 0
    assert [e.request_id for e in engine.trace.of(Finished)] == ["A"]


def test_a_step_in_flight_does_not_revive_an_aborted_request():
    scheduler = make_scheduler()
    add(scheduler, "A", 5)
    add(scheduler, "B", 5)
    plan = scheduler.schedule(0.0)
    scheduler.abort("A")
    again = add(scheduler, "A", 7)  # the id is free again at once
    update = scheduler.update(plan, StepResult([[1], [1]]), 0.0)
    assert [seq.request.request_id for seq, _ in update.new_tokens] == ["B"]
    assert again.output_token_ids == []
    assert chunks(step(scheduler)[0]) == {"B": 1, "A": 7}


def test_after_the_last_request_everything_is_empty():
    engine = make_engine({name: 5 + i for i, name in enumerate("ABCDE")}, num_blocks=6)
    engine.run(Request(name, range(20), SamplingParams(max_tokens=30)) for name in "ABCDE")
    scheduler = engine.scheduler
    assert not (scheduler.requests or scheduler.running or scheduler.padding or scheduler.held or scheduler.kv.tables)
    assert scheduler.kv.pool.num_free == 6 and not scheduler.kv.pool.leases
    assert not engine.has_unfinished and engine.step() == []


def test_leaving_a_stream_early_aborts_what_runs_and_the_engine_goes_on():
    engine = make_engine()
    requests = [Request(name, range(20), SamplingParams(max_tokens=50)) for name in "ABC"]
    for output in engine.stream(requests):
        if output.usage.completion_tokens >= 3:
            break
    assert not engine.has_unfinished and engine.scheduler.kv.pool.num_used == 0
    (output,) = engine.run([Request("A", range(20), SamplingParams(max_tokens=4))])
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("where", ["execute", "schedule", "update"])
def test_ctrl_c_loses_no_block_wherever_it_strikes(where):
    import signal

    engine = make_engine(num_blocks=40)
    target = engine.executor if where == "execute" else engine.scheduler
    original, calls = getattr(target, where), []

    def strike(*args):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    setattr(target, where, strike)
    requests = [Request(name, range(20), SamplingParams(max_tokens=50)) for name in "ABC"]
    with pytest.raises(KeyboardInterrupt):
        engine.run(requests)
    engine.scheduler.check()
    assert not engine.has_unfinished and engine.scheduler.kv.pool.num_used == 0
    assert len(engine.run(requests)) == 3


def test_another_thread_may_add_and_abort_while_the_engine_runs():
    engine = make_engine(num_blocks=60, batching=ContinuousBatching(max_num_seqs=4))
    engine.debug = False  # its check is made between two steps, where another thread may have the books open
    first = [Request(f"A{i}", range(20), SamplingParams(max_tokens=40)) for i in range(120)]
    aborted, switch = [], sys.getswitchinterval()

    def meddle() -> None:
        for i in range(120):
            engine.add_request(Request(f"B{i}", range(20), SamplingParams(max_tokens=40)))
            for name in (f"A{i}", f"B{i - 5}"):
                aborted.append(engine.abort(name))

    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=meddle)
        for request in first:
            engine.add_request(request)
        thread.start()
        outputs = engine.run()
        thread.join()
        outputs += engine.run()
    finally:
        sys.setswitchinterval(switch)
    ended = [output.request_id for output in [*outputs, *aborted] if output is not None]
    assert len(ended) == len(set(ended)) == 240
    assert not engine.has_unfinished and engine.scheduler.kv.pool.num_used == 0
    engine.scheduler.check()
    finished = [event.request_id for event in engine.trace.events if isinstance(event, Finished)]
    assert sorted(finished) == sorted(ended)


def test_what_another_thread_adds_or_aborts_is_seen_while_the_engine_waits_for_an_arrival():
    engine = make_engine()
    engine.clock = RealClock()
    params = SamplingParams(max_tokens=3)

    def meddle() -> None:
        time.sleep(0.1)
        engine.add_request(Request("now", range(5), params))
        time.sleep(0.2)
        engine.abort("late")

    thread = threading.Thread(target=meddle)
    thread.start()
    outputs = engine.run([Request("late", range(5), params, arrival_s=60.0)])
    thread.join()
    assert [output.request_id for output in outputs] == ["now"] and engine.clock.now() < 30
    assert not engine.has_unfinished


BAD_PARAMS = [
    {"max_tokens": 0}, {"max_tokens": 2.5}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -2},
    {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2}, {"seed": -1}, {"stop": [""]}, {"stop": [3]},
    {"stop_token_ids": [-1]}, {"n": 0}, {"logprobs": -1}, {"logprobs": 21}, {"ignore_eos": "no"}, {"max_tokens": True},
    {"stop": 5}, {"stop": ["\ud800"]}, {"stop_token_ids": "7"}, {"temperature": 10**400},
]  # fmt: skip


@pytest.mark.parametrize("params", BAD_PARAMS, ids=str)
def test_bad_sampling_parameters_name_value_and_range(params):
    ((name, value),) = params.items()
    with pytest.raises(InvalidRequestError, match=name) as error:
        SamplingParams(**params)
    assert "must be" in str(error.value)
