"""`cbserve sim` from the command line: its table, its files, and what it refuses before it runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from cbserve import cli
from cbserve.calibration import Calibration
from cbserve.core.summary import summarize
from cbserve.core.trace import Preempted, Trace
from cbserve.hardware.gpus import gpu
from cbserve.hardware.models import model_shape
from cbserve.sim import device as sim_device
from cbserve.sim import point as points
from cbserve.sim.words import duration, rounded
from cbserve.simulation import simulate
from cbserve.viz.style import number, percent

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
    assert (
        f"{percent(found['slot_utilisation'])} of 256 slots x steps gave a token" in text and found["num_slots"] == 256
    )
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
    assert "312 TFLOP/s x 0.72" in text and "synthetic" in text and "kept TTFT <= 0.5 s, longest ITL <= 0.1 s" in text
    kept = found["kept_share"]
    assert f"TTFT is kept by {percent(kept['ttft'])}, longest ITL is kept by {percent(kept['itl'])}" in text
    assert max(0, sum(kept.values()) - 1) <= found["goodput_share"] <= min(kept.values())
    assert f"busy              {percent(found['busy_share'])} of the time" in text
    assert 0 < found["flop_utilisation"] < 0.72 and 0 < found["bandwidth_utilisation"] < 0.65
    assert f"{percent(found['bandwidth_utilisation'])} of memory bandwidth" in text
    assert found["prefix_hit_rate"] is None and "prefix cache" not in text


def test_the_limit_of_itl_is_for_the_longest_gap_of_a_request_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "--requests", "300", "--rate", "2", "--slo", "itl=0.1"]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["numbers"]
    assert found["latency_s"]["itl"]["p90"] < 0.1 and found["kept_share"]["itl"] < 0.6  # nine of ten gaps are short
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "its objective is for the longest gap of each request" in text


def test_all_settings_are_told_as_they_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"chunk": 512, "seed": 3}
    assert cli.main([*FEW, "--chunk", "512", "--seed", "3", "--prefix-caching", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    used = said["settings"]
    assert used | given == used
    assert used["model"] == "Llama-3.1-8B" and used["max_num_seqs"] == 256 and used["workload"] == "azure-conv"
    assert used["eff_memory"] == 0.65 and used["overhead"] == 0.0005 and used["utilization"] == 0.9
    assert used["max_model_len"] == 131072
    assert used["num_blocks"] == said["numbers"]["num_blocks"] and used["dtype_bytes"] == used["kv_dtype_bytes"] == 2
    without = {name for name, value in used.items() if value is None}
    assert without == {"trace", "limit", "max_tokens", "batch_size", "swap_space"}
    assert "batching mixed, chunk 512, max-num-seqs 256, policy fcfs, prefix-caching on" in " ".join(
        said["assumptions"]
    )
    assert 0 <= said["numbers"]["prefix_hit_rate"] < 1


@pytest.mark.parametrize("batching", ["static", "mixed"])
def test_priorities_that_no_request_has_are_noted(batching: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*FEW, "--policy", "priority", "--batching", batching]) == 0
    assert "have the same priority, so they are served as by fcfs" in capsys.readouterr().out


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
    assert "x 0.36)" in text and "x 0.325), plus 1 ms" in text and "overhead: as given" in text
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
        ([], "GB/s x 0.25), plus 1 of the shorter (overlap 0), plus 2 ms"),
        (["--requests", "60"], "at most 2,048 tokens of prompt and answer, that of the calibrated engine"),
        (["--overhead", "0.5"], "plus 500 ms"),
        ([], f"2026-01-02 (wall clock, 2 threads), {tmp_path / 'calibration.json'}."),
        (["--model", "llama-3.1-8b"], f"{tmp_path / 'calibration.json'}; for Llama-3.1-8B an assumption"),
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
        ({"threads": 2}, [], 512_000_000 // block_bytes, "256 requests x 32,768 tokens and 512 MB;"),
        (
            {"threads": 2, "max_model_len": 16}, ["--model", "llama-3.1-8b"],
            512_000_000 // model_shape("llama-3.1-8b").block_bytes(16, 2), "256 requests x 131,072 tokens and 512 MB;",
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


def test_weights_that_this_machine_cannot_hold_are_refused_with_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))
    values = {"eff_compute": 0.5, "eff_memory": 0.25, "overhead_s": 0.002, "overlap": 0.0}
    box = Calibration(
        model_shape("qwen2.5-0.5b"), "a small box", 100e9, 10e9, values, {}, "2026-01-02T03:04:05Z", dtype_bytes=4,
    )  # fmt: skip
    large = ["sim", "--requests", "10", "--model", "llama-3.1-8b", "--gpu"]
    why = "does not fit on a small box: 8.03e9 parameters x 4 bytes = 32.1 GB of weights, 24 GB of memory; "
    cure = "take a model of at most 6e9 parameters, or store the weights in 16 bits (--dtype-bytes 2)"
    monkeypatch.setattr(sim_device, "memory_bytes", lambda: 24_000_000_000)
    unknown = "its memory is not known, so the weights may not fit"
    for about, gpu_name in (
        ({"threads": 2, "memory_bytes": 24_000_000_000}, str(tmp_path / "theirs.json")),  # as it was measured
        ({"threads": 2}, "this"),  # of an older version
    ):
        saved = replace(box, environment=about)
        saved.save(None if gpu_name == "this" else gpu_name)
        assert cli.main([*large, gpu_name]) == 2
        assert why + cure in capsys.readouterr().err
        assert cli.main([*large, gpu_name, "--dtype-bytes", "2"]) == 0
        assert unknown not in capsys.readouterr().out
    out = str(tmp_path / "s.jsonl")
    assert cli.main([*large, str(tmp_path / "theirs.json"), "--sweep", "dtype_bytes=4,2", "--out", out]) == 0
    assert why in capsys.readouterr().err
    replace(box, environment={"threads": 2}).save(tmp_path / "theirs.json")
    assert cli.main([*large, str(tmp_path / "theirs.json")]) == 0
    assert unknown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said", "not_said"),
    [
        ([], "aiconfigurator 0.12).", "assumption"),
        (["--model", "llama-3-8b"], "aiconfigurator 0.12).", "assumption"),
        (["--gpu", "h100"], "an assumption for H100 SXM, which reaches 0.67 to 0.70", "time kernels"),
        (["--gpu", "l40s"], "; for L40S an assumption.", "time kernels"),
        (["--dtype-bytes", "1"], "; for weights of 8 bits an assumption.", "time kernels"),
        (
            ["--gpu", "h100", "--model", "qwen2.5-0.5b"],
            "; for H100 SXM, Qwen2.5-0.5B an assumption. A decode of one request takes 0.95 ms by that, too little",
            "as given",
        ),
        (
            ["--gpu", "h100", "--model", "qwen2.5-0.5b", "--overhead", "0.004"],
            "; for H100 SXM, Qwen2.5-0.5B an assumption; --overhead as given.", "time kernels",
        ),
    ],
)  # fmt: skip
def test_how_far_the_assumption_carries_is_said(
    more: list[str], said: str, not_said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sim", "--requests", "5", *more]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Efficiencies"))
    assert said in line and not_said not in line


def test_the_constants_of_another_run_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constants = {"eff_compute": 0.87, "eff_memory": 0.88, "overhead_s": 0.0024, "overlap": 1.0}
    fit = Calibration(
        model_shape("llama-3.1-8b"), "RTX 4090", 165.2e12, 1008e9, constants | {"host_link_bytes_s": 32e9}, {},
        "2026-01-02T03:04:05Z", environment={"fitted_to": "vllm.requests.jsonl"},
    ).save(tmp_path / "fit.json")  # fmt: skip
    usable, step = gpu("rtx4090").memory_bytes / 1e9, "on RTX 4090 takes the longer of FLOPs / (165.2 TFLOP/s x 0.87)"
    source = "fitted to Llama-3.1-8B on 2026-01-02, vllm.requests.jsonl"
    for more, said in (
        ([], [f"Llama-3.1-8B {step}", f"{source}.", f"from {0.9 * usable:.3g} GB usable"]),
        (["--model", "llama-3.1-8b"], [f"{source}."]),
        (["--model", "qwen2.5-0.5b"], [f"Qwen2.5-0.5B {step}", f"{source}; for Qwen2.5-0.5B an assumption."]),
        (["--utilization", "0.8"], [f"from {0.8 * usable:.3g} GB usable"]),
        (["--preemption", "swap"], ["Swaps move 32 GB/s."]),
    ):
        assert cli.main([*FEW, "--gpu", str(fit), *more]) == 0
        text = capsys.readouterr().out
        assert all(words in text for words in said), text
    sweep = ["--sweep", f"gpu=rtx4090,{fit}", "--jobs", "1", "--out", str(tmp_path / "s.jsonl"), "--json"]
    assert cli.main([*FEW, *sweep]) == 0
    table, fitted = (row["numbers"]["makespan_s"] for row in json.loads(capsys.readouterr().out))
    assert fitted < table
    assert cli.main([*FEW, "--gpu", str(tmp_path / "no.json")]) == 2
    assert "there is no calibration at" in capsys.readouterr().err


def test_bytes_of_weights_and_of_the_cache_are_two_options(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = {}
    for weight, value in (("2", None), ("2", "1"), ("1", None), ("0.5", None), ("0.5", "1")):
        more = [] if value is None else ["--kv-dtype-bytes", value]
        assert cli.main([*FEW, "--gpu", "l4", "--dtype-bytes", weight, *more, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        blocks[weight, value] = said["numbers"]["num_blocks"]
        assert "FLOP/s stay as above, those of 16 bits" in " ".join(said["assumptions"])
        used = said["settings"]["dtype_bytes"], said["settings"]["kv_dtype_bytes"]
        assert used == (float(weight), float(value or (weight if weight != "0.5" else 2)))
    assert blocks["2", "1"] == pytest.approx(2 * blocks["2", None], abs=1)
    assert blocks["0.5", "1"] == pytest.approx(2 * blocks["0.5", None], abs=1)
    freed = 1.5 * 8.03e9 / (16 * 131072)  # 4 bits instead of 16, in blocks of 16 tokens
    assert blocks["0.5", None] - blocks["2", None] == pytest.approx(freed, abs=1)


def test_requests_beyond_the_length_of_the_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = model_shape("qwen2.5-0.5b")
    config = {
        "model_type": "qwen2", "hidden_size": shape.hidden_size, "num_hidden_layers": 2, "vocab_size": 1000,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 1500,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for more, limit, said in (
        ([], 1500, "1,500 tokens of prompt and answer, by its config.json"),
        (["--max-model-len", "700"], 700, "700 tokens of prompt and answer, as given"),
    ):
        assert cli.main([*FEW, "--model", str(tmp_path), *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        num_longer = sum(len(job.prompt) >= limit for job in points._twin("conv", 40, 0).jobs)
        assert found["numbers"]["refused"] == num_longer > 0 and str(limit) in found["numbers"]["first_refusal"]
        assert said in " ".join(found["assumptions"]) and found["settings"]["max_model_len"] == limit
    assert cli.main(FEW) == 0
    said = "at most 131,072 tokens of prompt and answer, what Llama-3.1-8B was made for"
    assert said in capsys.readouterr().out
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main([*FEW, "--model", str(tmp_path)]) == 0
    assert "no limit (" in (said := capsys.readouterr().out) and "--max-model-len sets one" in said


def test_swapping_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["sim", "--requests", "60", "--rate", "20", "--num-blocks", "200", "--preemption", "swap", "--json"]
    assert cli.main(tight) == 0
    found = json.loads(capsys.readouterr().out)["numbers"]
    assert found["preemptions"] > 0 and found["kv_peak"] > 0.9
    assert found["refused"] > 0 and "200" in found["first_refusal"] and "--num-blocks" in found["first_refusal"]


@pytest.mark.parametrize("swap_space", ["0.02", "4"])
def test_the_table_says_how_many_preemptions_the_host_had_room_for(
    swap_space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.jsonl"
    tight = ["sim", "--requests", "60", "--rate", "20", "--num-blocks", "400"]
    assert cli.main([*tight, "--preemption", "swap", "--swap-space", swap_space, "--out", str(out)]) == 0
    ways = Counter(event.how for event in Trace.load(out).of(Preempted))
    told = f"{ways.total()} ({ways['swap']} swapped, {ways['recompute']} computed again)"
    assert re.search(rf"^preemptions +{re.escape(told)}$", capsys.readouterr().out, re.M)
    assert ways["swap"] and bool(ways["recompute"]) == (swap_space == "0.02")
    assert cli.main(tight) == 0
    assert re.search(r"^preemptions +[0-9]+$", capsys.readouterr().out, re.M)


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
    assert page.count("<figcaption") == 10 and page.count("means over 0.125 s each") == 4
    assert (
        re.search(r"Where most requests run, \d+ at .*: steps [\d,]+ to [\d,]+ of [\d,]+<", page)
        and "bands: up to the highest value in that time" in page
    )
    assert re.search("Shares of all [0-9,]+ gaps", page)
    ids = re.findall(r'<svg[^>]* id="(\w+)"', page)
    assert len(set(ids)) == len(ids)


def test_the_gaps_of_the_report_are_those_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bars are of a sample of the gaps."""
    report = tmp_path / "a.html"
    assert cli.main(["sim", "--requests", "300", "--rate", "2", "--report", str(report), "--json"]) == 0
    itl = json.loads(capsys.readouterr().out)["numbers"]["latency_s"]["itl"]
    page = report.read_text(encoding="utf-8")
    assert "drawn from 5,000 of them" in page
    assert f"99 of 100 gaps between tokens last at most {duration(itl['p99'])}<" in page
    for name, which in (("median", "p50"), ("p99", "p99")):
        assert f"{name}: {number(rounded(1e3 * itl[which]))}<" in page


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--batching", "static", "--batch-size", "1"], ["100 % of 1 slot x", "The only slot"]),
        (
            ["--max-tokens", "1"],
            ["of 256 slots x", "1 of 256 slots, the one in which anything happens", "The only step"],
        ),
    ],
)
def test_one_of_anything_is_said_in_the_singular(
    more: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "a.html"
    assert cli.main(["sim", "--requests", "1", "--report", str(report), *more]) == 0
    page = report.read_text(encoding="utf-8")
    text = unescape(re.sub(r"<[^>]*>", "\n", page)) + capsys.readouterr().out
    assert not re.findall(r"(?<![\d.,])1 (?:request|step|block|slot)s\b.*", text)
    for words in ["Up to 1 request runs at a time", *said]:
        assert words in text


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
    assert "refused           1: " in text and "1 block of 16" in text
    assert "<svg" not in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama-3.1-70b"], "= left for K and V"),
        (["--model", "llama-3.1-70b"], "(--dtype-bytes 1)"),
        (["--model", "gpt-9"], "model='gpt-9' is not in the table"),
        (["--model", ""], "model='' is not in the table"),
        (["--gpu", ""], "gpu='' is not in the table"),
        (["--gpu", "a100"], "did you mean a100-40, a100-80 or a100-80-pcie?"),
        (["--model", "llama3"], "did you mean llama-3.1-8b,"),
        (["--gpu", "abacus"], "rtx4090, `this`, or a file of `cbserve calibrate --out`"),
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--overhead", "1e308"], "look at --overhead, efficiencies and peaks"),
        (["--overhead", "1e20"], "a step of 1e+20 s brings the clock to"),
        (["--eff-compute", "1e-300"], "look at --overhead, efficiencies"),
        (["--rate", "1e-300"], "would take centuries"),
        (["--chunk", "1000000000"], "give a step fewer tokens (--chunk)"),
        *(
            (["--preemption", "swap", "--swap-space", space], "--swap-space " + said)
            for space, said in (
                ("1e-9", "1e-09: must be at least 0.00195 and at most"),
                ("1e308", "1e+308: must be at"),
            )
        ),
    ],
)
def test_numbers_beyond_what_can_be_simulated_are_refused_by_name(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*FEW, *arguments, "--out", str(tmp_path / "run.jsonl")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--gpu", "--model", "--trace", "--out", "--report"])
@pytest.mark.parametrize("name", [300 * "x", 300 * "x" + ".json", "a\0b", "/", "a/../" + 300 * "x"])
def test_a_name_that_no_file_can_have_is_refused_by_name(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    traffic = [] if option == "--trace" else ["--requests", "5"]
    assert cli.main(["sim", *traffic, option, name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and (name[:40] in error or repr(name)[1:-1] in error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [["--chunk", "0"], ["--slo", "ttft"], ["--batching", "magic"], ["--rate", "fast"]])
def test_bad_values_are_bad_usage(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["sim", *option])
    assert stop.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert "cbserve sim --help" in usage and option[0] in error


@pytest.mark.parametrize("content", ['{"key": "a", "numbers": {}}\n', "my notes\n"])
def test_a_run_replaces_a_trace_and_nothing_else(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.jsonl"
    assert cli.main([*FEW, "--out", str(out)]) == 0 == cli.main([*FEW, "--out", str(out)])
    out.write_text(content)
    (tmp_path / "run.html").write_text("before")
    assert cli.main([*FEW, "--out", str(out)]) == 2
    assert "give another --out, or delete the file" in capsys.readouterr().err
    assert out.read_text() == content and (tmp_path / "run.html").read_text() == "before"


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


def test_help_names_every_batching_gpu_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sim", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for said in ("static: a batch", "continuous: iteration-level", "mixed: iteration-level", "prefill-first: a step"):
        assert said in text
    assert "token budget of a step, decodes included" in text
    assert "a100-80, a100-80-pcie, l40s" in text and "llama-3.1-405b, mistral-7b" in text
    assert "A request keeps itl when its longest gap does" in text


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupted_run_leaves_no_file(tmp_path: Path) -> None:
    arguments = ["--requests", "20000", "--rate", "4", "--out", "run.jsonl", "--no-report"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "cbserve", "sim", *arguments], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )

    def has_written() -> bool:
        with suppress(FileNotFoundError):  # the probe of whether it can be written comes and goes
            return any(path.stat().st_size for path in tmp_path.glob(".run.jsonl.*"))
        return False

    deadline = time.monotonic() + 60
    while not has_written() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert list(tmp_path.iterdir()) == []
