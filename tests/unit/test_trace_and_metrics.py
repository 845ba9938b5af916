"""The trace holds everything visible: files, Chrome export, equality, and the metrics that fold over it."""

import json
import math
import os
import re
from dataclasses import fields

import pytest
from engine_harness import make_engine

from cbserve.core.batching import ContinuousBatching, StaticBatching
from cbserve.core.metrics import occupancy, percentile, prefix_hit_rate, sequence_metrics, slot_utilisation
from cbserve.core.policies import Priority
from cbserve.core.request import Request, SamplingParams
from cbserve.core.run_fold import RunFold
from cbserve.core.summary import summarize
from cbserve.core.trace import EVENT_TYPES, Left, StepEvent, Trace, TraceError
from cbserve.serving import serve
from cbserve.sim.series import Series
from cbserve.simulation import Simulation
from cbserve.viz.timeline import timeline

TWELVE = [4, 9, 22, 6, 12, 3, 16, 5, 7, 10, 4, 8]


def busy_trace() -> Trace:
    """A run with every kind of event in it."""
    engine = make_engine(
        {"A": 40, "B": 30}, policy=Priority(displace=True), batching=ContinuousBatching(max_num_seqs=3), num_blocks=6
    )
    engine.run(
        [
            Request("A", range(20), SamplingParams(max_tokens=60), 0.0, priority=1),
            Request("B", range(20), SamplingParams(max_tokens=60), 0.0, priority=1),
            Request("never", range(1000), SamplingParams(max_tokens=60), 0.0),
            Request("C", range(20), SamplingParams(max_tokens=5, n=2), 3.0, priority=0),
        ]
    )
    return engine.trace


def test_the_table_of_events_is_complete():
    import cbserve.core.trace as module

    for name, cls in EVENT_TYPES.items():
        row = next(line for line in module.__doc__.splitlines() if line.startswith(f"| `{name}`"))
        named = {field.strip() for field in row.split("|")[2].split(",")}
        assert named == {field.name for field in fields(cls)}


def test_a_busy_run_has_every_event_and_survives_a_file(tmp_path):
    trace = busy_trace()
    assert {event.type for event in trace} == set(EVENT_TYPES)
    trace.save(tmp_path / "run.jsonl")
    again = Trace.load(tmp_path / "run.jsonl")
    assert again == trace and again.meta == trace.meta
    assert summarize(again) == summarize(trace)
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"], "a temporary file was left"


def test_the_same_inputs_give_the_same_trace():
    assert busy_trace() == busy_trace()


def test_the_first_difference_is_named():
    one, other = serve(TWELVE, ContinuousBatching(max_num_seqs=3)), serve(TWELVE, ContinuousBatching(max_num_seqs=4))
    assert "event" in one.difference(other)
    slower = serve(TWELVE, ContinuousBatching(max_num_seqs=3), step_time_s=1 + 1e-6)
    assert "end_s" in one.difference(slower) and one.difference(slower, rel_tol=1e-5) is None


@pytest.mark.parametrize("damage", ["cut", "garbage", "version", "unknown", "missing event"])
def test_a_damaged_file_is_refused_with_its_line(tmp_path, damage):
    path = tmp_path / "run.jsonl"
    serve([3, 2], StaticBatching(2)).save(path)
    lines = path.read_text().splitlines()
    lines = {
        "cut": lines[:-1],
        "garbage": [lines[0], "{not json", *lines[2:]],
        "version": [lines[0].replace('"version": 2', '"version": 99'), *lines[1:]],
        "unknown": [lines[0], '{"event": "party"}', *lines[2:]],
        "missing event": [*lines[:3], *lines[4:]],
    }[damage]
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError, match="run.jsonl"):
        Trace.load(path)


def test_chrome_export_is_valid_and_loses_no_token():
    trace = busy_trace()
    chrome = json.loads(json.dumps(trace.to_chrome()))
    slices = [event for event in chrome["traceEvents"] if event["ph"] == "X"]
    assert sum(s["args"]["tokens"] for s in slices) == sum(row.num_tokens for step in trace.steps for row in step.rows)
    for event in chrome["traceEvents"]:
        assert event["ph"] in "XMCi" and isinstance(event["name"], str) and {"pid", "tid"} <= set(event)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    by_slot = {}
    for s in slices:
        assert s["dur"] > 0
        by_slot.setdefault(s["tid"], []).append((s["ts"], s["ts"] + s["dur"]))
    for spans in by_slot.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(spans, spans[1:], strict=False)), "slices overlap in a slot"


def test_the_lectures_example_is_40_7_percent_on_500_steps():
    trace = serve([10, 100, 500], StaticBatching(3))
    assert len(trace.steps) == 500
    assert slot_utilisation(trace) == pytest.approx(610 / 1500)
    assert summarize(trace).padding_share == pytest.approx(890 / 1500)


def test_twelve_requests_on_three_slots():
    static, continuous = serve(TWELVE, StaticBatching(3)), serve(TWELVE, ContinuousBatching(max_num_seqs=3))
    assert (len(static.steps), len(continuous.steps)) == (60, 37)
    assert slot_utilisation(static) == pytest.approx(106 / 180)
    assert slot_utilisation(continuous) == pytest.approx(106 / 111)


def test_utilisation_is_pooled_over_batches_and_counts_slots_that_no_request_took():
    trace = serve([4, 2, 3], StaticBatching(2))
    assert slot_utilisation(trace) == pytest.approx((4 + 2 + 3) / (2 * (4 + 3)))


def test_a_slot_in_mid_prefill_is_occupied_but_gives_no_token():
    trace = serve([2], ContinuousBatching(max_num_seqs=1, max_num_batched_tokens=10), prompt_tokens=40)
    assert len(trace.steps) == 5
    assert slot_utilisation(trace) == pytest.approx(2 / 5) and occupancy(trace) == 1.0


def test_a_slot_whose_decode_waits_for_a_prefill_is_occupied():
    batching = ContinuousBatching(mixed=False, max_num_seqs=4, max_num_batched_tokens=10)
    trace = serve([9, 2, 2], batching, prompt_tokens=40, arrivals_s=[0.0, 6.0, 6.5])
    assert any(step.num_running > len(step.rows) for step in trace.steps)  # a decode that waits has no row
    held = sum(step.num_running for step in trace.steps) / (4 * len(trace.steps))
    assert occupancy(trace) == pytest.approx(held) and summarize(trace).occupancy == pytest.approx(held)


def test_times_follow_the_definitions():
    """One slot, one second a step: B waits for A."""
    trace = serve([3, 4], ContinuousBatching(max_num_seqs=1), arrivals_s=[0.0, 0.5])
    a, b = sequence_metrics(trace)
    assert (a.queue_s, a.ttft_s, a.itl_s, a.tpot_s, a.e2e_s) == (0.0, 1.0, [1.0, 1.0], 1.0, 3.0)
    assert (b.queue_s, b.ttft_s, b.tpot_s, b.e2e_s) == (2.5, 3.5, 1.0, 6.5)


def test_one_stall_is_one_large_gap_but_a_small_change_of_tpot():
    times = iter([1.0] * 5 + [50.0] + [1.0] * 95)
    trace = serve([101], ContinuousBatching(max_num_seqs=1), step_time_s=lambda plan: next(times))
    (record,) = sequence_metrics(trace)
    assert max(record.itl_s) == 50.0 and record.tpot_s == pytest.approx(1.49)


def test_an_answer_of_one_token_has_no_tpot_and_an_empty_trace_no_numbers():
    (record,) = sequence_metrics(serve([1], StaticBatching(1)))
    assert record.tpot_s is None and record.itl_s == []
    empty = summarize(Trace({"num_slots": 3}))
    assert empty.num_steps == 0 and math.isnan(empty.slot_utilisation) and math.isnan(empty.ttft_mean_s)


def test_every_sequence_leaves_once_and_static_ones_after_they_finish():
    trace = serve(TWELVE, StaticBatching(3))
    left = [event.request_id for event in trace.of(Left)]
    assert sorted(left) == sorted(set(left)) and len(left) == 12


def test_samples_of_one_request_each_give_their_tokens():
    engine = make_engine(batching=ContinuousBatching(max_num_seqs=4))
    (output,) = engine.run([Request("A", range(20), SamplingParams(max_tokens=5, n=3))])
    assert [len(c.token_ids) for c in output.outputs] == [5, 5, 5]
    records = sequence_metrics(engine.trace)
    assert [r.sample_index for r in records] == [0, 1, 2] and all(r.num_output_tokens == 5 for r in records)
    assert slot_utilisation(engine.trace) == pytest.approx(15 / (4 * 5))


@pytest.mark.parametrize(("q", "expected"), [(0, 1), (50, 2.5), (100, 4), (99, 3.97)])
def test_percentile_interpolates(q, expected):
    assert percentile([4, 1, 3, 2], q) == pytest.approx(expected)


def test_steps_of_a_new_trace_count_from_zero_and_its_clock_too():
    engine = make_engine()
    for _ in range(2):
        engine.new_trace()
        engine.run([Request("A", range(5), SamplingParams(max_tokens=3))])
        steps = [(s.step, s.start_s) for s in engine.trace.of(StepEvent)]
        assert steps == [(0, 0.0), (1, 1.0), (2, 2.0)]


BAD_PATHS = {
    "no such folder": lambda folder: folder / "none" / "run.jsonl", "a folder": lambda folder: folder,
    "a device": lambda folder: os.devnull, "a number": lambda folder: 5, "nothing": lambda folder: None,
    "a zero byte": lambda folder: f"{folder}/a\0b",
}  # fmt: skip


@pytest.mark.parametrize("use", [Trace().save, Trace().save_chrome, Trace.load], ids=["save", "save_chrome", "load"])
@pytest.mark.parametrize("bad", BAD_PATHS)
def test_a_path_that_is_no_file_is_refused_by_name(tmp_path, bad, use):
    path = BAD_PATHS[bad](tmp_path)
    with pytest.raises(TraceError) as caught:
        use(path)
    assert str(path).replace("\0", "\\x00") in str(caught.value) and "give the path" in str(caught.value)
    assert not list(tmp_path.iterdir()) and os.path.exists(os.devnull) and not os.path.isfile(os.devnull)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\xff", b"\x00\x01", b"[]", b"{}"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, content):
    (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match="run.jsonl"):
        Trace.load(tmp_path / "run.jsonl")


@pytest.mark.parametrize("other", [5, None, "run.jsonl", []])
def test_a_trace_is_compared_with_traces_only(other):
    with pytest.raises(TraceError, match=re.escape(repr(other))):
        Trace().difference(other)
    assert Trace() != other


def without_a_beginning() -> list[Trace]:
    """Traces that began while requests waited, were in mid-prefill, decoded, were swapped out or padding; some end
    there too."""
    whole = busy_trace()
    traces = [
        Trace(whole.meta | {"prefix_caching": True}, whole.events[cut:]) for cut in range(1, len(whole.events), 2)
    ]
    for batching in (StaticBatching(2), ContinuousBatching(max_num_seqs=2, max_num_batched_tokens=8)):
        for num_steps in range(1, 9):
            for num_more in (1, 100):
                engine = make_engine({"A": 3, "B": 9, "C": 2}, batching=batching)
                for name in "ABC":
                    engine.add_request(Request(name, range(20), SamplingParams(max_tokens=20, n=1 + (name == "B"))))
                for _ in range(num_steps):
                    engine.step()
                traces.append(engine.new_trace())
                for _ in range(num_more):
                    engine.step()
    return traces


def folded(fold, trace: Trace):
    for event in trace.events:
        fold.add(event)
    return fold


FOLDS = {
    "summarize": summarize,
    "goodput": lambda trace: folded(RunFold(), trace).goodput({"ttft": 1.0}),
    "itl_mean_s": lambda trace: folded(RunFold(), trace).itl_mean_s,
    "sequence_metrics": sequence_metrics,
    "prefix_hit_rate": prefix_hit_rate,
    "series": lambda trace: folded(Series(), trace),
    "timeline": timeline,
    "a simulation's listener": lambda trace: Simulation(trace, folded(RunFold(), trace), ()).summary,
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_request_that_began_before_the_trace_is_named_where_its_times_are_wanted(name):
    refused = 0
    for trace in without_a_beginning():
        try:
            FOLDS[name](trace)
        except TraceError as error:
            refused += 1
            assert re.search(r"(request '\w+'|sequence \d+) was under way|no request arrived", str(error))
        assert 0 <= slot_utilisation(trace) <= occupancy(trace) or not trace.steps
    assert refused
    FOLDS[name](busy_trace())


@pytest.mark.parametrize("num_slots", [None, 5, 1000])
def test_a_utilisation_names_the_slots_that_it_counts(num_slots):
    trace = serve([4, 9, 22], ContinuousBatching(max_num_seqs=3))
    shown = dict(summarize(trace, num_slots).rows())["slot utilisation"]
    assert shown == f"{35 / (22 * (num_slots or 3)):.1%} of {num_slots or 3:,} slots"
