"""`cbserve sim` from the command line: its table, its files, and what it refuses before it runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cbserve import cli
from cbserve.calibration import Calibration
from cbserve.core.summary import summarize
from cbserve.core.trace import Trace
from cbserve.hardware.models import model_shape
from cbserve.sim import point as points
from cbserve.simulation import simulate
from cbserve.viz.style import percent

FEW = ["sim", "--requests", "40", "--rate", "4"]
ROOT = Path(cli.__file__).parent.parent


def test_the_table_says_what_the_json_does(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FEW, "--chunk", "512", "--slo", "ttft=0.5,itl=0.1"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = said["numbers"]
    assert found["requests"] == 40 and found["refused"] == 0 and found["steps"] > 100
    assert f"{percent(found['slot_utilisation'])} of 256 slots" in text and found["num_slots"] == 256
    latency = found["latency_s"]
    for name in ("TTFT", "TPOT", "ITL", "E2E"):
        row = re.search(rf"^{name} +(.*)$", text, re.M).group(1).split()
        for value, which in zip(row[1:], ("p50", "p90", "p99"), strict=True):
            assert float(value.replace(",", "")) == pytest.approx(1e3 * latency[name.lower()][which], rel=1e-3, abs=0.5)
        assert latency[name.lower()]["p50"] <= latency[name.lower()]["p90"] <= latency[name.lower()]["p99"]
    assert found["goodput_per_s"] == pytest.approx(found["goodput_share"] * 40 / found["makespan_s"])
    assert 0 < found["kv_mean"] < found["kv_peak"] < 1
    for line in said["assumptions"]:
        assert line in text
    assert "312 TFLOP/s x 0.72" in text and "synthetic" in text and "kept TTFT <= 0.5 s, ITL <= 0.1 s" in text


@pytest.mark.parametrize("batching", ["static", "continuous", "mixed", "prefill-first"])
def test_every_batching_serves_everything(batching: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FEW, "--batching", batching, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["numbers"]
    assert found["refused"] == 0
    assert found["output_tokens"] == sum(job.num_output_tokens for job in points._twin("conv", 40, 0).jobs)
    assert found["goodput_per_s"] is None


def test_overrides_are_used_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--eff-compute", "0.36", "--eff-memory", "0.325", "--overhead", "0.001", "--num-blocks", "3000"]
    assert cli.main([*FEW, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert cli.main([*FEW, *slow, "--json"]) == 0
    slowed = json.loads(capsys.readouterr().out)
    tpot = [said["numbers"]["latency_s"]["tpot"]["p50"] for said in (usual, slowed)]
    assert 1.8 < tpot[1] / tpot[0] < 2.6
    text = " ".join(slowed["assumptions"])
    assert "x 0.36)" in text and "plus 1 ms" in text and "overhead: as given" in text
    assert slowed["numbers"]["num_blocks"] == 3000 and "3,000 blocks of 16 = 48,000 tokens, as given" in text


def test_this_machine_is_as_it_was_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))
    here = ["sim", "--requests", "10", "--gpu", "this", "--num-blocks", "4000"]
    assert cli.main(here) == 2
    assert "cbserve calibrate" in capsys.readouterr().err
    values = {"eff_compute": 0.5, "eff_memory": 0.25, "overhead_s": 0.002, "overlap": 0.0}
    model = model_shape("qwen2.5-0.5b")
    calibration = Calibration(
        model, "a small box", 100e9, 10e9, values, dict.fromkeys(values, 0.0), "2026-01-02T03:04:05Z",
        environment={"threads": 2, "max_model_len": 2048},
    )  # fmt: skip
    calibration.save()
    for more, said in (
        ([], "Qwen2.5-0.5B on a small box takes the longer of FLOPs / (0.1 TFLOP/s x 0.5)"),
        (["--overhead", "0.5"], "plus 500 ms"),
        (["--model", "llama-3.1-8b"], "2026-01-02 (wall clock, 2 threads); for Llama-3.1-8B an assumption"),
    ):
        assert cli.main([*here, *more]) == 0
        assert said in capsys.readouterr().out
    assert cli.main([*here, "--utilization", "0.5"]) == 2 and "--utilization" in capsys.readouterr().err
    assert cli.main([*here[:-2], "--utilization", "0.5"]) == 2 and "--num-blocks" in capsys.readouterr().err
    block_bytes = model.block_bytes(16, 2)
    for about, more, num_blocks, said in (
        ({"threads": 2, "max_model_len": 2048}, [], 512_000_000 // block_bytes, "256 requests x 2,048 tokens and 512"),
        ({"threads": 2, "max_model_len": 2040}, ["--max-num-seqs", "3"], 3 * 128, "3 requests x 2,040 tokens and 512"),
        ({"threads": 2, "max_model_len": 800}, ["--batching", "static"], 32 * 50, "32 requests x 800 tokens and 512"),
        ({"threads": 2}, [], 512_000_000 // block_bytes, "the engine's default on a CPU: 512 MB;"),
        (
            {"threads": 2, "max_model_len": 16}, ["--model", "llama-3.1-8b"],
            512_000_000 // model_shape("llama-3.1-8b").block_bytes(16, 2), "on a CPU: 512 MB;",
        ),
    ):  # fmt: skip
        replace(calibration, environment=about).save()
        assert cli.main([*here[:-2], *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["numbers"]["num_blocks"] == num_blocks and said in " ".join(found["assumptions"])
    for about in ({}, {"threads": 0, "max_model_len": 2048}):  # of a GPU, or another engine's
        replace(calibration, environment=about).save()
        assert cli.main(here[:-2]) == 2
        assert "give --num-blocks" in capsys.readouterr().err


def test_swapping_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["sim", "--requests", "60", "--rate", "20", "--num-blocks", "200", "--preemption", "swap", "--json"]
    assert cli.main(tight) == 0
    found = json.loads(capsys.readouterr().out)["numbers"]
    assert found["preemptions"] > 0 and found["kv_peak"] > 0.9
    assert found["refused"] > 0 and "200" in found["first_refusal"]


def test_a_trace_and_a_report_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl"
    assert cli.main([*FEW, "--slo", "ttft=0.5", "--out", str(out)]) == 0
    assert "run.jsonl" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    trace = Trace.load(out)
    assert summarize(trace).num_requests == 40
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<iframe|@import|src=|url\((?!#)", page)
    assert "prefers-color-scheme:dark" in page and "max-width:640px" in page
    figures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(figures) == 10  # five, each wide and narrow
    assert all(re.search(r"<title[^>]*>.+?</title><desc[^>]*>.+?</desc>", figure) for figure in figures)
    assert page.count("<figcaption") == 10 and page.count("parts of 0.125 s") == 6
    ids = re.findall(r'<svg[^>]* id="(\w+)"', page)
    assert len(set(ids)) == len(ids)


def test_a_report_alone_and_a_trace_alone(tmp_path: Path) -> None:
    assert cli.main([*FEW, "--report", str(tmp_path / "a.html")]) == 0
    assert cli.main([*FEW, "--out", str(tmp_path / "b.jsonl"), "--no-report"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.jsonl"]


def test_a_report_needs_no_trace_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(points, "simulate", lambda *args, **kwargs: runs.append(simulate(*args, **kwargs)) or runs[-1])
    assert cli.main([*FEW, "--report", str(tmp_path / "a.html")]) == 0
    assert [run.trace.events for run in runs] == [[]]


def test_a_run_in_which_everything_is_refused_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "a.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,500,20\n")
    report = ["--report", str(tmp_path / "a.html")]
    assert cli.main(["sim", "--trace", str(trace), "--num-blocks", "1", *report]) == 0
    text = capsys.readouterr().out
    assert "refused           1: " in text and "1 blocks of 16" in text
    assert "<svg" not in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama-3.1-70b"], "= left for K and V"),
        (["--model", "gpt-9"], "model='gpt-9' is not in the table"),
        (["--gpu", "abacus"], "a100-80"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--requests", "1", "--rate", "2"], "no rate that could be scaled"),
        (["--batch-size", "4"], "--batch-size has no effect"),
        (["--jobs", "2"], "--jobs needs --sweep"),
        (["--cluster", "auto"], "--cluster needs --sweep"),
        (["--report", "a.html", "--no-report"], "give one of the two"),
        (["--out", "run.html"], "would both be run.html"),
        (["--sweep", "rate=1"], "--sweep needs --out"),
        (["--sweep", "rate=1", "--out", "s.jsonl", "--cluster", "auto"], 'pip install "cbserve[cluster]"'),
        (["--sweep", "gpu=a100-80,abacus", "--out", "s.jsonl"], "abacus"),
    ],
)
def test_bad_input_is_one_message_and_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sim", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [["--chunk", "0"], ["--slo", "ttft"], ["--batching", "magic"], ["--rate", "fast"]])
def test_bad_values_are_bad_usage(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["sim", *option])
    assert stop.value.code == 2
    assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/run.jsonl", "folder.jsonl", "file.txt/run.jsonl"])
@pytest.mark.parametrize("more", [["--no-report"], ["--sweep", "rate=1,2"]])
def test_an_unwritable_path_is_known_before_the_run(
    name: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file.txt").touch()
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(points, "simulate", lambda *_, **__: pytest.fail("it ran"))
    assert cli.main([*FEW, "--out", str(tmp_path / name), *more]) == 2
    assert name.split("/")[0] in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_help_names_every_batching(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sim", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for said in ("static: a batch", "continuous: iteration-level", "mixed: iteration-level", "prefill-first: a step"):
        assert said in text
    assert "token budget of a step, decodes included" in text


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupted_run_leaves_no_file(tmp_path: Path) -> None:
    arguments = ["--requests", "20000", "--rate", "4", "--out", "run.jsonl", "--no-report"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "cbserve", "sim", *arguments], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".run.jsonl.*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert list(tmp_path.iterdir()) == []
