"""The twin: what is predicted is what the engine does but for time, and a stale calibration is not trusted."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from engine_harness import make_scheduler

from cbserve import LLM, CBServeError, Request, SamplingParams, StaticBatching, cli
from cbserve.calibrating import ceilings, machine
from cbserve.calibrating import cli as calibrating_cli
from cbserve.calibrating.machine import calibrate, drift
from cbserve.calibration import CalibrationError, calibration_path, load_calibration
from cbserve.cli import main
from cbserve.clock import RealClock, VirtualClock
from cbserve.core.policies import Policy
from cbserve.core.trace import Admitted, Finished, Preempted
from cbserve.engine import Engine
from cbserve.executors.simulated import SimulatedExecutor
from cbserve.twin import CpuClock, Twin, chat_workload, figures, paced, predict, run, why_stale


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", max_num_seqs=4, max_num_batched_tokens=128, verbose=False)


@pytest.fixture(scope="module")
def calibration(tiny):
    return calibrate(tiny, budget_s=0.2)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache folder of its own, and sweeps of a few kinds of step: here nobody looks at how well they fit."""
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "BATCHES", (2, 8))
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 128})
    return tmp_path


def test_the_workload_is_seeded_and_mixed():
    jobs = chat_workload(40, seed=3).jobs
    assert [(len(j.prompt), j.num_output_tokens) for j in jobs] == [
        (len(j.prompt), j.num_output_tokens) for j in chat_workload(40, seed=3).jobs
    ]
    assert chat_workload(40, seed=4).jobs != jobs
    assert all(16 <= len(job.prompt) <= 384 and 8 <= job.num_output_tokens <= 96 for job in jobs)
    assert len({len(job.prompt) for job in jobs}) > 20


def test_the_default_rate_queues_and_does_not_overload(tiny, calibration):
    workload = paced(chat_workload(40), tiny, calibration)
    at_once = figures(predict(chat_workload(40), tiny, calibration))
    spread = figures(predict(workload, tiny, calibration))
    assert workload.jobs[0].arrival_s == 0.0
    assert spread["mean TTFT"] < 0.25 * at_once["mean TTFT"]
    admitted = [event for event in predict(workload, tiny, calibration) if isinstance(event, Admitted)]
    assert any(event.time_s > workload.jobs[int(event.request_id)].arrival_s for event in admitted)
    assert paced(chat_workload(40), tiny, calibration, rate=2.0).rate == pytest.approx(2.0, rel=0.5)


class ByLength(Policy):
    """The shortest prompt first."""

    def key(self, seq):
        return seq.num_prompt_tokens


@pytest.mark.parametrize(
    "options",
    [
        {}, {"batching": StaticBatching(4)}, {"policy": ByLength()}, {"enable_prefix_caching": True},
        {"num_blocks": 60, "policy": ByLength()}, {"batching": StaticBatching(4), "num_blocks": 60},
        {"num_blocks": 40, "preemption": "swap"},
    ],
    ids=["as it is", "static", "a policy", "prefix caching", "a small pool", "static, a small pool", "swapping"],
)  # fmt: skip
def test_all_at_once_the_real_engine_decides_as_predicted(calibration, options):
    """Who is admitted in which step, and when in steps an answer ends, does not depend on time then."""
    batching = {} if "batching" in options else {"max_num_seqs": 4, "max_num_batched_tokens": 128}
    llm = LLM("tiny", verbose=False, **batching, **options)
    workload = chat_workload(12)
    decisions = [
        [(e.type, e.step, e.request_id) for e in trace if isinstance(e, Admitted | Preempted | Finished)]
        for trace in (predict(workload, llm, calibration), run(workload, llm))
    ]
    assert decisions[0] == decisions[1] and len(decisions[0]) >= 24
    if options.get("preemption") == "swap":
        assert any(decision[0] == "preempted" for decision in decisions[0])


def test_without_the_host_link_a_run_that_swaps_is_not_predicted(calibration):
    llm = LLM("tiny", num_blocks=40, preemption="swap", verbose=False)
    of_before = replace(calibration, values={n: v for n, v in calibration.values.items() if n != "host_link_bytes_s"})
    assert "host link" in why_stale(of_before, llm) and why_stale(calibration, llm) == ""
    with pytest.raises(CBServeError, match="host_link_bytes_s=None.*cbserve calibrate"):
        predict(chat_workload(2), llm, of_before)


@pytest.mark.parametrize("max_num_seqs", [1, 4, 300])
def test_a_simulation_of_this_machine_has_the_pool_that_the_engine_makes(home, calibration, capsys, max_num_seqs):
    calibration.save()
    assert main(["sim", "--gpu", "this", "--requests", "5", "--json", "--max-num-seqs", str(max_num_seqs)]) == 0
    num_blocks = json.loads(capsys.readouterr().out)["numbers"]["num_blocks"]
    assert num_blocks == LLM("tiny", max_num_seqs=max_num_seqs, verbose=False).scheduler.kv.pool.num_blocks


def test_a_run_on_cpu_time_does_not_wait(tiny, calibration):
    workload = paced(chat_workload(5), tiny, calibration, rate=0.1)
    began, own = time.perf_counter(), tiny.engine.clock
    trace = run(workload, tiny, CpuClock())
    assert time.perf_counter() - began < 0.5 * workload.duration_s
    assert figures(trace)["makespan"] >= workload.duration_s
    assert tiny.engine.clock is own


@pytest.mark.parametrize("clock", [CpuClock, RealClock, VirtualClock])
def test_any_clock_hears_of_many_steps_at_once(calibration, clock):
    engine = Engine(make_scheduler(), SimulatedExecutor(calibration.cost(), {}), clock(), fast_forward=True)
    outputs = list(engine.run([Request("a", [1, 2, 3], SamplingParams(max_tokens=50))]))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [50]


def test_the_table_takes_medians_and_has_targets(tiny, calibration):
    workload = chat_workload(6)
    predicted = predict(workload, tiny, calibration)
    slow = predict(workload, tiny, replace(calibration, loop_s=10.0))
    perfect = Twin(workload, predicted, (predicted,))
    assert [row.error for row in perfect.agreement()] == [0.0] * 4
    assert {row.name: row.target for row in perfect.agreement()} == {
        "makespan": 0.1, "mean TTFT": 0.2, "p99 TTFT": 0.2, "mean TPOT": 0.1
    }  # fmt: skip
    assert all(row.row()[-1] == "yes" for row in perfect.agreement())
    assert [row.error for row in Twin(workload, predicted, (slow, predicted, predicted)).agreement()] == [0.0] * 4
    assert all(row.row()[-1] == "NO" for row in Twin(workload, slow, (predicted,)).agreement())


def test_the_picture_shows_both_and_ends_at_all_tokens(tiny, calibration):
    workload = chat_workload(6)
    trace = predict(workload, tiny, calibration)
    total = sum(job.num_output_tokens for job in workload.jobs)
    chart = Twin(workload, trace, (trace, trace)).chart()
    assert "predicted" in chart.svg and "measured 2" in chart.svg
    assert {row[0] for row in chart.table[1]} == {"predicted", "measured 1", "measured 2"}
    assert chart.table[1][-1][2] == total


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"device": "another machine"}, "device was 'another machine'"),
        ({"block_size": 32}, "blocks have 32 tokens"),
        ({"environment": {}}, "timer was None"),
        ({"created": (datetime.now(UTC) - timedelta(days=9)).isoformat()}, "9 days old"),
    ],
)
def test_why_a_calibration_is_stale(tiny, calibration, change, words):
    why = why_stale(replace(calibration, **change), tiny)
    assert words in why and bool(why) == bool(words)


def test_a_calibration_counts_the_threads_of_its_own_engine(tiny, monkeypatch):
    """torch has one number for the process, which another engine may have set."""
    monkeypatch.setattr(tiny.executor, "num_threads", 7)
    assert machine.environment(tiny)["threads"] == 7 and ", 7 of " in machine.device_name(tiny)


def test_another_model_or_timer_is_stale(tiny, calibration):
    shape = replace(calibration.model, num_layers=99)
    assert "not of tiny" in why_stale(replace(calibration, model=shape), tiny)
    assert why_stale(calibration, tiny, time.process_time) == "timer was 'perf_counter' and is 'process_time'"


def test_the_command_calibrates_predicts_runs_and_compares(home, capsys):
    arguments = ["twin", "--model", "tiny", "--requests", "8", "--budget", "0.2", "--out", str(home / "twin.svg")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    said = ("calibrating first: there is no calibration", "predicted: ", "now for real", "kept", "after the run")
    order = [out.index(words) for words in said]
    assert order == sorted(order)
    assert out.splitlines()[-2].startswith(("Missed: ", "Every target is kept"))  # the last one names the picture
    assert (home / "twin.svg").read_text().startswith("<svg") and load_calibration().model.name == "tiny"
    assert main([*arguments, "--repeat", "2"]) == 0
    assert "calibrating" not in capsys.readouterr().out  # the one that it has is fresh
    wall = calibration_path().read_bytes()
    for words in ("there is no calibration", "calibrating anew: asked for"):
        assert main([*arguments, "--cpu-time", *["--calibrate"] * ("anew" in words)]) == 0
        out = capsys.readouterr().out
        assert words in out and "CPU time, 1 thread" in out
    assert calibration_path().read_bytes() == wall and "wall clock" in str(load_calibration())
    assert load_calibration(is_cpu_time=True).clock == "CPU time, 1 thread"


def test_the_picture_is_written_although_nobody_reads_on(home, monkeypatch):
    """`cbserve twin --out x.svg | head`: whatever is printed after the run may be the first that cannot be."""

    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(calibrating_cli, "_table", gone)
    monkeypatch.setattr(cli, "_drop_output", lambda: None)
    arguments = ["twin", "--model", "tiny", "--requests", "4", "--budget", "0.1", "--out", str(home / "x.svg")]
    assert main(arguments) == 0 and (home / "x.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("given", "which"),
    [([], "(70% of what this machine could serve; --rate sets it)"), (["--rate", "9"], "9 requests")],
)
def test_the_rate_is_said_before_the_run(home, capsys, given, which):
    assert main(["twin", "--model", "tiny", "--requests", "4", "--budget", "0.1", *given]) == 0
    before, _, _ = capsys.readouterr().out.partition("now for real")
    assert "a second (" in before and which in before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeat", "0"], "argument --repeat: '0': must be a whole number of at least 1 and at most 1,000"),
        (["--requests", "1"], "argument --requests: '1': must be a whole number of at least 2"),
        (["--requests", 30 * "9"], "and at most 100,000"),
        (["--rate", "0"], "argument --rate: '0': must be a number above 0"),
        (["--rate", "nan"], "argument --rate: 'nan': must be a number above 0"),
        (["--slots", "0"], "argument --slots: '0'"),
        (["--budget", "1e400"], "argument --budget: '1e400': must be a number above 0"),
        (["--out", "/no/such/folder/x.svg"], "/no/such/folder"),
        (["--out", "x.png"], "--out x.png: the picture is an SVG; give a name that ends in .svg"),
        (["--out", "x"], "--out x: the picture is an SVG"),
        (["--model", 300 * "x"], "is neither a model's name"),
        (["--model", "~nobody/x"], "is neither a model's name"),
    ],
)
def test_bad_arguments_are_one_line(home, capsys, arguments, words):
    try:
        code = main(["twin", "--model", "tiny", "--requests", "4", "--budget", "0.1", *arguments])
    except SystemExit as bad_usage:
        code = bad_usage.code
    *usage, error = capsys.readouterr().err.splitlines()
    assert code == 2 and words in error and len(usage) <= 1


def test_an_engine_in_use_is_not_calibrated(tiny):
    tiny.engine.add_request(Request("x", [5, 6, 7]))
    try:
        with pytest.raises(CBServeError, match="is serving another call"):
            calibrate(tiny, 0.1)
    finally:
        tiny.engine.abort_all()


def test_drift_is_seen(tiny, calibration):
    faster = [replace(point, seconds=point.seconds / 3) for point in calibration.points]
    assert drift(tiny, replace(calibration, points=tuple(faster))) > drift(tiny, calibration) + 0.5
    with pytest.raises(CBServeError, match="none of the 0 points"):
        drift(tiny, replace(calibration, points=()))


def test_calibration_errors_are_of_one_kind():
    assert issubclass(CalibrationError, CBServeError)
