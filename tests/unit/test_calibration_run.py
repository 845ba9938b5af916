"""A run of vLLM, simulated with constants that are fitted to it: other runs too, and what is wrong with their files.

The measured run is 300 ShareGPT requests as vLLM 0.19 served them on an RTX 4090. It is looked for in the folder
`measured` beside the one that the environment variable CBSERVE_TRACES names, or in ../shared/data/measured beside the
repository. The constants are those that

    cbserve calibrate --from llmservingsim_RTX4090_Llama-3.1-8B.requests.jsonl --out tests/data/FILE

wrote.
"""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cbserve import CBServeError, Job, Roofline, Workload, read_requests
from cbserve.calibrating.measured_run import (
    RunFileError,
    RunSettings,
    agreement,
    mean_errors,
    median_errors,
    read_series,
    read_settings,
    series_of,
    serve_again,
)
from cbserve.calibrating.run_fit import compare, fit_run, series_charts
from cbserve.calibration import load_calibration
from cbserve.cli import main
from cbserve.hardware.gpus import GPUS
from cbserve.hardware.models import model_shape
from cbserve.simulation import simulate
from cbserve.workloads.measured import MeasuredRun

NAME = "llmservingsim_RTX4090_Llama-3.1-8B"
TRACES = os.environ.get("CBSERVE_TRACES") or Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
FOLDER = Path(TRACES).parent / "measured"
CONSTANTS = Path(__file__).resolve().parents[1] / "data" / "vllm_0.19_RTX4090_Llama-3.1-8B.json"

META = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "vllm_version": "0.20.1",
    "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "dtype": "bfloat16"},
    "kv_cache": {"num_gpu_blocks": 900, "block_size": 16, "enable_prefix_caching": False},
    "hardware": {"device_name": "NVIDIA A100-SXM4-80GB", "device_total_memory_bytes": 85_198_045_184},
}
TRUE = {"eff_compute": 0.6, "eff_memory": 0.8, "overhead_s": 0.004}


# ---- the proof ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm():
    if not (FOLDER / f"{NAME}.requests.jsonl").is_file():
        pytest.skip(f"{NAME}.requests.jsonl is not in {FOLDER}; CBSERVE_TRACES may name the folder traces beside it")
    run = read_requests(FOLDER / f"{NAME}.requests.jsonl")
    settings = read_settings(FOLDER / f"{NAME}.meta.json")
    return run, settings, compare(run, settings, load_calibration(CONSTANTS))


def test_the_settings_are_those_of_the_run(vllm):
    _, settings, _ = vllm
    assert (settings.max_num_seqs, settings.max_num_batched_tokens, settings.num_blocks) == (256, 2048, 2588)
    assert (settings.model.name, settings.gpu.name, settings.engine) == ("Llama-3.1-8B", "RTX 4090", "vLLM 0.19.0")
    assert settings.enable_prefix_caching and settings.dtype_bytes == 2


def test_three_constants_give_the_run_of_vllm(vllm):
    """Times count from the first arrival, by arrival_time: when the client sent a request, as its user waits."""
    run, _, fit = vllm
    assert {row.name: row.target for row in fit.agreement} == {
        "makespan": 0.05, "mean TTFT": 0.05, "p99 TTFT": 0.10, "mean TPOT": 0.05
    }  # fmt: skip
    for row in fit.agreement:
        assert abs(row.error) <= row.target, row
    assert fit.median_errors["TTFT"] <= 0.10 and fit.median_errors["E2E"] <= 0.10
    assert fit.calibration.values["overlap"] == 1.0 and fit.calibration.kv_passes == 1.0
    assert set(fit.calibration.errors) == {"eff_compute", "eff_memory", "overhead_s"}
    assert run.clock == "arrival_time"


def test_the_states_over_time_agree(vllm):
    run, settings, fit = vllm
    measured = read_series(FOLDER / f"{NAME}.timeseries.csv")
    charts = series_charts(measured, fit.answered, settings)
    assert set(charts) == {"running", "waiting", "kv_cache_pct"}
    errors = {name: error for name, (error, _) in charts.items()}
    for name, error in errors.items():
        assert error <= 0.10 * max(measured.values[name]), name
    for _, chart in charts.values():
        assert chart.svg.startswith("<svg") and "vLLM 0.19.0" in chart.svg and "simulated" in chart.svg


# ---- another run, without change ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Files of a run that is known through and through: simulated with `TRUE` on another GPU with another model."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "x.meta.json").write_text(json.dumps(META))
    settings = read_settings(folder / "x.meta.json")
    jobs = [Job(0.12 * i, range(1 + 5000 * i, 1 + 5000 * i + 100 + 61 * i % 900), 20 + 37 * i % 130) for i in range(60)]
    workload = Workload("x", jobs)
    empty = MeasuredRun(workload, "arrival_time", (), (), (), (), ())
    answered = serve_again(empty, settings, Roofline.on(settings.gpu, settings.model, **TRUE), keep_trace=True)
    with (folder / "x.requests.jsonl").open("w") as file:
        for i, (job, ttft, e2e) in enumerate(zip(jobs, answered.ttft_s, answered.e2e_s, strict=True)):
            at = 100.0 + job.arrival_s
            stamps = {"queued_ts": at, "scheduled_ts": at, "first_token_ts": at + ttft, "last_token_ts": at + e2e}
            sizes = {"input_toks": len(job.prompt), "output_toks": job.num_output_tokens}
            file.write(json.dumps({"request_id": f"r{i}", "arrival_time": 1e9 + job.arrival_s} | sizes | stamps) + "\n")
    seconds = [0.5 * i for i in range(1, 30)]
    series = series_of(answered, seconds, settings.num_blocks)
    with (folder / "x.timeseries.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["t", *series.values])
        writer.writerows(zip(seconds, *series.values.values(), strict=True))
    return folder


def test_a_known_run_gives_its_constants_back(other):
    run, settings = read_requests(other / "x.requests.jsonl"), read_settings(other / "x.meta.json")
    seen: list[int] = []
    fit = fit_run(run, settings, "x", seen.append)
    for row in fit.agreement:
        assert abs(row.error) <= 0.05, row
    assert fit.median_errors["TTFT"] < 0.10 and fit.median_errors["E2E"] < 0.02
    assert fit.calibration.values["eff_compute"] == pytest.approx(TRUE["eff_compute"], rel=0.1)
    assert seen == list(range(1, len(seen) + 1)) and len(seen) < 100
    assert (fit.calibration.model.name, fit.calibration.device) == ("Qwen2.5-7B", "A100-80 SXM")
    # The run says nothing of the host link: a run that swaps gets the table's peak, and is told so.
    assert ("host_link_bytes_s", "32.000 (not fitted) GB/s") in fit.calibration.constants()
    assert fit.calibration.cost().host_link_bytes_s == 32e9
    swapping = simulate(run.workload, fit.calibration.cost(), 300, preemption="swap", num_host_blocks=900)
    assert swapping.summary.num_preemptions


def test_the_command_fits_saves_and_compares(other, tmp_path, capsys):
    arguments = ["calibrate", "--from", str(other / "x.requests.jsonl")]
    out = tmp_path / "fit.json"
    assert main([*arguments, "--out", str(out), "--charts", str(tmp_path / "charts")]) == 0
    said = capsys.readouterr().out
    for words in ("eff_compute", "makespan", "p99 TTFT", "median |error| of TTFT", "running: mean |difference|"):
        assert words in said
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == [
        "kv_cache_pct.svg", "running.svg", "waiting.svg"
    ]  # fmt: skip
    assert main([*arguments, "--constants", str(out)]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if "TTFT" in line] == [
        line for line in said.splitlines() if "TTFT" in line
    ]
    another = tmp_path / "y.requests.jsonl"
    another.write_bytes((other / "x.requests.jsonl").read_bytes())
    settings = ["--meta", str(other / "x.meta.json"), "--constants", str(out)]
    assert main(["calibrate", "--from", str(another), *settings]) == 0
    foretold = capsys.readouterr().out
    for text, header in ((said, "fitted"), (again, "fitted"), (foretold, "predicted")):  # no run foretells itself
        last = {"fitted": "within", "predicted": "kept"}[header]
        assert re.search(f"measured +{header} +error +target +{last}", text)


def test_a_perfect_prediction_has_no_error(other):
    run, settings = read_requests(other / "x.requests.jsonl"), read_settings(other / "x.meta.json")
    answered = serve_again(run, settings, Roofline.on(settings.gpu, settings.model, **TRUE), keep_trace=True)
    assert [row.error for row in agreement(run, answered)] == pytest.approx([0] * 4, abs=1e-5)
    assert median_errors(run, answered) == pytest.approx({"TTFT": 0, "E2E": 0}, abs=1e-5)
    measured = read_series(other / "x.timeseries.csv")
    assert mean_errors(measured, series_of(answered, measured.times_s, 900)) == pytest.approx(
        {"running": 0, "waiting": 0, "kv_cache_pct": 0}, abs=1e-6
    )


def test_constants_of_another_device_are_refused(other):
    run, settings = read_requests(other / "x.requests.jsonl"), read_settings(other / "x.meta.json")
    with pytest.raises(CBServeError, match="constants are of model Llama-3.1-8B, the run of Qwen2.5-7B"):
        compare(run, settings, load_calibration(CONSTANTS))


# ---- what is wrong with the files -----------------------------------------------------------------------------------


def meta_file(tmp_path: Path, **changes: object) -> Path:
    """META with values replaced: kv_cache__block_size=0; None takes the key away."""
    meta = json.loads(json.dumps(META))
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = meta
        for key in parents:
            inner = inner[key]
        inner[last] = value
        if value is None:
            del inner[last]
    file = tmp_path / "meta.json"
    file.write_text(json.dumps(meta))
    return file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache__num_gpu_blocks": None}, "kv_cache.num_gpu_blocks=None: must be a whole number"),
        ({"kv_cache__block_size": 0}, "kv_cache.block_size=0"),
        ({"kv_cache": None}, "kv_cache.num_gpu_blocks=None"),
        ({"kv_cache__enable_prefix_caching": "yes"}, "must be true or false"),
        ({"engine_kwargs__max_num_seqs": True}, "engine_kwargs.max_num_seqs=True"),
        ({"engine_kwargs__dtype": "fp8"}, "engine_kwargs.dtype='fp8'"),
        ({"engine_kwargs__tensor_parallel_size": 2}, "tensor_parallel_size=2: the cost model is of one device"),
        ({"model": "acme/Nano-1B"}, "'acme/Nano-1B' is not in the table.*--model"),
        ({"hardware__device_name": "AMD Instinct MI300X"}, "MI300X' is not in the table"),
        ({"hardware": None}, "hardware.device_name=None"),
        (
            {"hardware__device_total_memory_bytes": "24 GB"},
            "hardware.device_total_memory_bytes='24 GB': must be a number",
        ),
        ({"hardware__device_total_memory_bytes": 10**400}, "must be a number of bytes"),
    ],
)
def test_a_key_that_is_wrong_is_named(tmp_path, change, words):
    with pytest.raises(RunFileError, match=words) as caught:
        read_settings(meta_file(tmp_path, **change))
    assert "meta.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_file_that_is_no_meta(tmp_path, text):
    file = tmp_path / "meta.json"
    file.write_text(text)
    with pytest.raises(RunFileError, match=r"meta\.json"):
        read_settings(file)


def test_the_tables_can_be_asked_for_another_model_and_device(tmp_path):
    settings = read_settings(meta_file(tmp_path), model="llama-2-13b", gpu="h100")
    assert isinstance(settings, RunSettings)
    assert (settings.model, settings.gpu) == (model_shape("llama-2-13b"), GPUS["H100 SXM"])


@pytest.mark.parametrize(
    ("name", "gigabytes", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 85.2, "A100-80 SXM"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "A100-40 SXM"),
        ("NVIDIA A100 80GB PCIe", 85.0, "A100-80 PCIe"),
        ("NVIDIA H100 80GB HBM3", 85.0, "H100 SXM"),
        ("NVIDIA H100 PCIe", 85.0, "H100 PCIe"),
        ("NVIDIA H200", 150.1, "H200 SXM"),
        ("NVIDIA L4", 23.6, "L4"),
        ("NVIDIA L40S", 47.7, "L40S"),
        ("Tesla T4", 15.8, "T4"),
        ("NVIDIA A10G", 23.9, "A10G"),
        ("NVIDIA GeForce RTX 4090", 25.3, "RTX 4090"),
    ],
)
def test_a_driver_s_name_is_found_in_the_table(tmp_path, name, gigabytes, expected):
    hardware = {"device_name": name, "device_total_memory_bytes": int(gigabytes * 1e9)}
    assert read_settings(meta_file(tmp_path, hardware=hardware)).gpu.name == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t,running,waiting\n1,2,3\n", "line 1: no column kv_cache_pct"),
        ("t,running,waiting,kv_cache_pct\n1,2,3,4\n2,x,3,4\n", "line 3: running='x': must be a number from 0 to"),
        ("t,running,waiting,kv_cache_pct\n1,2\n", "line 2: waiting=None"),
        ("t,running,waiting,kv_cache_pct\n1,2,3,-4\n", "line 2: kv_cache_pct='-4': must be a number from 0"),
        ("t,running,waiting,kv_cache_pct\n1,2,3,1e300\n", "line 2: kv_cache_pct='1e300': must be .* to 1e\\+10"),
        ("t,running,waiting,kv_cache_pct\n5,2,3,4\n3,2,3,4\n", "line 3: t='3': must be a number from 5"),
        ("t,running,waiting,kv_cache_pct\n", "has no rows"),
        ("", "line 1: no column t"),
    ],
)
def test_a_series_that_is_wrong_names_its_line(tmp_path, text, words):
    file = tmp_path / "series.csv"
    file.write_text(text)
    with pytest.raises(RunFileError, match=words):
        read_series(file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--meta", "missing.json"], "missing.json cannot be read"),
        (["--timeseries", "missing.csv"], "missing.csv cannot be read"),
        (["--gpu", "gtx-1080"], "gtx-1080"),
        (["--model", "gpt-9"], "gpt-9"),
        (["--constants", "missing.json"], "there is no calibration at missing.json"),
        (["--constants", ""], "cannot be read"),  # given, and no name: not the default
        (["--model", ""], "model='' is not in the table"),
        (["--gpu", ""], "gpu='' is not in the table"),
        (["--meta", ""], "cannot be read"),
        (["--timeseries", "a\0b"], "cannot be read (embedded null"),
        (["--out", "missing/x.json"], "there is no folder missing"),
        (["--charts", "a\0b"], "cannot make the folder"),
    ],
)
def test_bad_arguments_are_one_line(other, capsys, arguments, words):
    assert main(["calibrate", "--from", str(other / "x.requests.jsonl"), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_toks": 1}, "no answer of the run takes time after its first token"),
        ({"last_token_ts": 101.0}, "no answer of the run takes time after its first token"),
        (dict.fromkeys(("scheduled_ts", "first_token_ts"), 100.0), "has its first token at its arrival"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--constants", "c.json"]])
def test_a_run_that_tells_nothing_of_a_step_is_refused_before_it_is_fitted(
    other, change, words, more, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    stamps = {"queued_ts": 100.0, "scheduled_ts": 100.5, "first_token_ts": 101.0, "last_token_ts": 102.0}
    row = {"input_toks": 100, "output_toks": 20, "arrival_time": 1.7e9} | stamps | change
    Path("r.jsonl").write_text(4 * f"{json.dumps(row)}\n")
    if more:
        settings = read_settings(other / "x.meta.json")
        fitted = replace(load_calibration(CONSTANTS), model=settings.model, device=settings.gpu.name)
        fitted.save("c.json")
    out = [] if more else ["--out", "out.json"]
    assert main(["calibrate", "--from", "r.jsonl", "--meta", str(other / "x.meta.json"), *out, *more]) == 2
    assert words in capsys.readouterr().err and not Path("out.json").exists()


def test_a_request_that_the_run_could_not_serve(other, tmp_path):
    meta = meta_file(tmp_path, kv_cache__num_gpu_blocks=10)
    run = read_requests(other / "x.requests.jsonl")
    with pytest.raises(RunFileError, match="cannot be served with the settings of the run"):
        fit_run(run, read_settings(meta))


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("calibrate", "no folder/x.json", "there is no folder"),
        ("twin", "no folder/x.svg", "there is no folder"),
        ("twin", "x.png", "give a name that ends in .svg"),
    ],
)
def test_where_the_result_goes_is_looked_at_before_anything_is_measured(
    command, name, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("cbserve.calibrating.cli._llm", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main([command, "--model", "tiny", "--out", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err
