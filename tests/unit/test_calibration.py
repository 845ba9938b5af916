"""A calibration is measured, kept whole or not at all, and found again; what is wrong with its file is said."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cbserve import CBServeError, Roofline
from cbserve.calibrating.advice import doubts
from cbserve.calibration import Calibration, CalibrationError, Point, calibration_path, load_calibration
from cbserve.cli import main
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import StepPlan
from cbserve.hardware.models import model_shape
from cbserve.simulation import simulate
from cbserve.workloads.workload import Job, Workload

ONE = Calibration(
    model=model_shape("smollm2-135m"),
    device="a processor, 2 of 2 cores",
    flops=80e9,
    memory_bytes_s=12e9,
    values={"eff_compute": 0.7, "eff_memory": 0.5, "overhead_s": 0.02, "overlap": 0.0},
    errors={"eff_compute": 0.03, "eff_memory": 0.1, "overhead_s": 0.004, "overlap": 0.0},
    created="2026-11-29T20:00:00+00:00",
    dtype_bytes=4,
    kv_passes=3.0,
    loop_s=1e-3,
    environment={"torch": "2.13.0", "threads": 2},
    points=(Point("decode", 8, 1, 64, 0.2, 0.19, 0.22, 7, 0.21),),
)


WITH_LINK = replace(
    ONE, values={**ONE.values, "host_link_bytes_s": 3.5e9}, errors={**ONE.errors, "host_link_bytes_s": 0.25e9}
)


# As one that was written before CPU time had a file of its own, but for its name.
CPU_TIME = replace(ONE, environment={"torch": "2.13.0", "threads": 1, "timer": "process_time"}, loop_s=2e-3)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A cache folder of its own, in which the models of the real one lie."""
    real = Path(os.environ.get("CBSERVE_HOME") or Path.home() / ".cache" / "cbserve").expanduser() / "models"
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))
    if real.is_dir():
        (tmp_path / "models").symlink_to(real, target_is_directory=True)
    return tmp_path


@pytest.fixture(scope="module")
def tiny():
    from cbserve import LLM

    return LLM("tiny", num_blocks=1400, backend="torch", verbose=False)


@pytest.mark.parametrize("calibration", [ONE, WITH_LINK], ids=["of before the link was measured", "as of today"])
def test_what_is_saved_is_loaded(home, calibration):
    path = calibration.save()
    assert path == calibration_path() == home / "calibration.json"
    assert load_calibration() == calibration == load_calibration(path)
    assert list(home.glob("*.tmp")) == []


def test_each_clock_has_a_file_of_its_own(home):
    ONE.save()
    CPU_TIME.save()
    assert load_calibration() == ONE and load_calibration(is_cpu_time=True) == CPU_TIME
    assert sorted(path.name for path in home.glob("*.json")) == ["calibration-cpu-time.json", "calibration.json"]


def test_without_one_of_cpu_time_its_own_cure_is_named(home):
    ONE.save()
    with pytest.raises(CalibrationError, match="calibration-cpu-time.json; .*cbserve calibrate --cpu-time"):
        load_calibration(is_cpu_time=True)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"timer": "perf_counter", "threads": 2}, "wall clock, 2 threads"),
        ({"timer": "process_time", "threads": 1}, "CPU time, 1 thread"),
        ({"timer": "perf_counter", "threads": 0}, "wall clock"),  # of a GPU
        ({}, "wall clock"),  # of another engine's run
    ],
)
def test_a_calibration_says_by_which_clock_it_was_measured(home, capsys, environment, words):
    """Wherever it is used, also where an older version wrote CPU time into the only file that there was."""
    from cbserve.course.doctor import doctor

    calibration = replace(ONE, environment=environment)
    assert calibration.clock == words
    calibration.save(calibration_path())
    assert f", 2026-11-29, {words}: eff_compute" in str(calibration)
    assert f", 2026-11-29, {words}; fit within 5% (median)" in repr(doctor())
    assert main(["sim", "--gpu", "this", "--requests", "5", "--num-blocks", "2000"]) == 0
    said = f"calibrated with SmolLM2-135M on 2026-11-29 ({words}), {calibration_path()}."
    assert said in capsys.readouterr().out


def test_the_doctor_names_both(home):
    from cbserve.course.doctor import doctor

    ONE.save()
    CPU_TIME.save()
    texts = [finding.text for finding in doctor().findings if finding.topic == "calibration"]
    assert texts == [ONE.label, CPU_TIME.label] and max(map(len, texts)) < 120


def test_the_doctor_doubts_what_calibrate_doubted(home):
    from cbserve.course.doctor import doctor

    CPU_TIME.save()
    busy = replace(ONE, environment={**ONE.environment, "cores": 2, "load_average": 9.0})
    busy.save()
    assert doubts(busy) and not doubts(CPU_TIME)
    findings = [finding for finding in doctor().findings if finding.topic == "calibration"]
    assert [(f.level, f.text) for f in findings] == [
        ("note", f"{busy.label}; to be taken with care"), ("ok", CPU_TIME.label)
    ]  # fmt: skip
    assert findings[0].cure.startswith("cbserve calibrate when the machine is quiet")


def test_a_simulation_of_this_machine_takes_the_calibration_that_was_made_last(home, capsys):
    """On a busy machine the advice is to measure CPU time, and what it measured must be of use; so in an explorer."""
    from cbserve.explorers.machines import Machines

    later = {"created": "2026-11-30T08:00:00+02:00"}  # an hour is told by its zone
    for wall, cpu, clock in (
        (ONE, None, "wall clock, 2 threads"),
        (None, CPU_TIME, "CPU time, 1 thread"),
        (ONE, replace(CPU_TIME, **later), "CPU time, 1 thread"),
        (replace(ONE, **later), CPU_TIME, "wall clock, 2 threads"),
        (ONE, "damaged", "wall clock, 2 threads"),
    ):
        for is_cpu_time, calibration in ((False, wall), (True, cpu)):
            calibration_path(is_cpu_time).unlink(missing_ok=True)
            if calibration == "damaged":
                calibration_path(is_cpu_time).write_text("{")
            elif calibration is not None:
                calibration.save()
        assert main(["sim", "--gpu", "this", "--requests", "5", "--num-blocks", "2000"]) == 0
        said = f"({clock}), {calibration_path(clock.startswith('CPU'))}"
        assert f"{said}{', the newer of two' if wall and cpu else ''}." in capsys.readouterr().out
        made = (cpu if clock.startswith("CPU") else wall).created[:10]
        assert list(Machines("this", None).calibrated) == [f"this machine (calibrated {made})"]


@pytest.mark.parametrize("is_cpu_time", [False, True])
def test_a_damaged_one_alone_is_named_with_its_own_cure(home, capsys, is_cpu_time):
    calibration_path(is_cpu_time).write_text("{")
    assert main(["sim", "--gpu", "this", "--requests", "5"]) == 2
    error = capsys.readouterr().err
    assert f"{calibration_path(is_cpu_time)} cannot be read" in error
    assert error.rstrip().endswith("cbserve calibrate --cpu-time" if is_cpu_time else "cbserve calibrate")


def test_the_cost_model_has_the_constants_and_the_loop():
    cost = ONE.cost()
    assert (cost.eff_compute, cost.eff_memory, cost.overlap, cost.kv_passes) == (0.7, 0.5, 0.0, 3.0)
    assert cost.overhead_s == pytest.approx(0.021)
    assert cost(StepPlan(0)) == pytest.approx(0.021)  # nothing computed, nothing loaded


@pytest.mark.parametrize(
    ("errors", "words"),
    [({}, "0.700 (not fitted)"), ({"eff_compute": 0.03}, "0.700 ± 0.030"), ({"eff_compute": 0.0}, "at its bound")],
)
def test_error_bars_in_words(errors, words):
    assert words in str(replace(ONE, errors=errors))
    assert "20.000 ± 4.000 ms" in str(ONE)


def test_what_is_measured_beside_a_step_is_shown_with_the_sum_that_predictions_take(home, capsys):
    assert ("loop_s", "1.000 ms between two steps, which predictions add: 21.000 ms a step") in ONE.constants()
    assert "loop_s" not in dict(replace(ONE, loop_s=0.0).constants())
    ONE.save()
    assert main(["sim", "--gpu", "this", "--requests", "5", "--num-blocks", "2000"]) == 0
    assert "plus 21 ms." in capsys.readouterr().out


def test_the_host_link_is_a_constant_like_the_others():
    assert WITH_LINK.cost().host_link_bytes_s == 3.5e9
    assert "host_link_bytes_s 3.500 ± 0.250 GB/s" in str(WITH_LINK)
    assert "host_link_bytes_s not measured" in str(ONE)


def test_without_the_link_a_run_that_swaps_is_refused_before_it_begins(home, capsys):
    work = Workload("work", [Job(0.0, range(1, 20), 5)])  # nothing of it will ever be swapped
    with pytest.raises(InvalidRequestError, match="host_link_bytes_s=None.*cbserve calibrate"):
        simulate(work, ONE.cost(), 100, preemption="swap", num_host_blocks=10)
    for cost, preemption in ((ONE.cost(), "recompute"), (WITH_LINK.cost(), "swap")):
        assert simulate(work, cost, 100, preemption=preemption, num_host_blocks=10).summary.num_output_tokens == 5
    command = ["sim", "--gpu", "this", "--preemption", "swap", "--requests", "5", "--num-blocks", "2000"]
    ONE.save()
    assert main(command) == 2
    assert "cbserve calibrate" in capsys.readouterr().err
    WITH_LINK.save()
    assert main(command) == 0


def test_none_yet_names_place_and_cure(home):
    with pytest.raises(CalibrationError, match="there is no calibration at .*calibration.json; .*cbserve calibrate"):
        load_calibration()


@pytest.mark.parametrize("text", [None, "{}"], ids=["missing", "damaged"])
def test_the_cure_of_a_file_is_a_command_with_its_name(home, text):
    path = home / "not here.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CalibrationError, match=f"write it anew with: cbserve calibrate --out '{path}'"):
        load_calibration(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[" * 100_000, "cannot be read"),
        (lambda text: "[]", r"holds \[\], which is no JSON object"),
    ],
)
def test_a_file_that_is_no_calibration_is_named(home, change, words):
    path = ONE.save()
    path.write_text(change(path.read_text()))
    with pytest.raises(CalibrationError, match=words) as caught:
        load_calibration()
    assert str(path) in str(caught.value) and "cbserve calibrate" in str(caught.value)


def fields_of(found: object, path: tuple = ()) -> list[tuple]:
    """The way to every value in nested objects and lists."""
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [path, *(deeper for key, value in inner for deeper in fields_of(value, (*path, key)))]


FILE = json.loads(json.dumps({"format": 1} | asdict(replace(WITH_LINK, environment=ONE.environment | {"cores": 2}))))
ODD = (None, True, "5", "", [], {}, [1], {"a": 1}, 0, -1, -1e-9, 0.5, 10**400, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("path", fields_of(FILE)[1:], ids=lambda path: ".".join(map(str, path)))
def test_whatever_a_field_holds_the_file_is_used_or_refused_by_the_name_of_the_field(home, capsys, path):
    file, name = home / "odd.json", next(key for key in reversed(path) if isinstance(key, str))
    for odd in (*ODD, "gone", "nested"):
        found = copy.deepcopy(FILE)
        inside = functools.reduce(lambda inner, key: inner[key], path[:-1], found)
        before = inside[path[-1]]
        inside[path[-1]] = {**before, "more": 1} if isinstance(before, dict) else {"deeper": before}
        if odd == "gone":
            del inside[path[-1]]
        elif odd != "nested":
            inside[path[-1]] = odd
        file.write_text(json.dumps(found))
        code = main(["sim", "--gpu", str(file), "--requests", "2", "--num-blocks", "300"])
        error = capsys.readouterr().err
        if code == 0:
            doubts(load_calibration(file))
            is_no_bar = odd is math.nan and (name == "fitted_s" or path[0] == "errors")
            wrong = (-1, math.nan, math.inf, "5", [1], "nested") if type(before) in (int, float) else ("nested", 0)
            assert odd not in wrong or is_no_bar or path[0] == "environment", f"{odd} was taken"
        else:
            assert code == 2 and error.count("\n") == 1, error
            too_slow = name in ("flops", "memory_bytes_s") and "brings the clock to" in error
            assert too_slow or ("is damaged" in error and name in error), error


def test_a_save_that_is_interrupted_leaves_the_old_file(home, monkeypatch):
    path = ONE.save()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(ONE, device="another").save()
    assert load_calibration() == ONE
    assert [file.name for file in home.iterdir() if file.is_file()] == [path.name]


def test_loading_and_the_doctor_need_neither_torch_nor_numpy(home):
    ONE.save()
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from cbserve.calibration import load_calibration\n"
        "from cbserve.course.doctor import doctor\n"
        "load_calibration(); print(doctor())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = next(line for line in answer.stdout.splitlines() if "calibration" in line)
    assert line.startswith("ok") and "2026-11-29, wall clock, 2 threads; fit within 5% (median)" in line


def test_the_doctor_says_what_is_wrong_with_the_file(home):
    from cbserve.course.doctor import diagnose
    from cbserve.course.probing import probe

    def finding():
        return next(f for f in diagnose(probe()) if f.topic == "calibration")

    assert finding().level == "ok" and "none yet" in finding().text
    ONE.save().write_text("{")
    assert finding().level == "note" and "calibration.json cannot be read" in finding().text
    assert finding().cure == "cbserve calibrate"
    ONE.save()
    CPU_TIME.save().write_text("{")
    findings = [f for f in diagnose(probe()) if f.topic == "calibration"]
    assert [(f.level, f.cure) for f in findings] == [("ok", ""), ("note", "cbserve calibrate --cpu-time")]


def test_tiny_is_measured_and_fitted(tiny):
    from cbserve.calibrating.machine import calibrate

    shares: list[float] = []
    found = calibrate(tiny, budget_s=0.3, progress=shares.append)
    assert {(p.kind, p.num_rows, p.context) for p in found.points} >= {("decode", 32, 512), ("prefill", 1, 0)}
    assert all(p.repeats >= 3 and p.low_s <= p.seconds <= p.high_s for p in found.points)
    assert all(math.isfinite(p.fitted_s) and p.fitted_s > 0 for p in found.points)
    assert 0 < found.values["eff_compute"] <= 1 and 0 < found.values["eff_memory"] <= 1
    assert 0 <= found.values["overlap"] <= 1 and found.kv_passes == 3.0 and found.dtype_bytes == 4
    assert found.loop_s > 0 and found.model.name == "tiny" and set(found.errors) == set(found.values)
    swaps = {(p.kind, p.context) for p in found.points if p.kind.startswith("swap")}
    assert swaps == {(kind, tokens) for kind in ("swap out", "swap in") for tokens in (128, 512)}
    assert 1e6 < found.values["host_link_bytes_s"] < 1e13 and tiny.executor.host_cache.shape[2] == 0
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert tiny.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("link", [5e9, 1e30], ids=["a link", "a swap takes no time that the timer sees"])
def test_a_host_link_that_is_known_is_found(tiny, monkeypatch, link):
    """Each step takes the time that a cost model says, on a clock that shows nothing else."""
    from cbserve.calibrating import machine

    truth = Roofline(machine.shape_of(tiny), 80e9, 12e9, dtype_bytes=4, kv_passes=3.0, host_link_bytes_s=link)
    now_s = [0.0]

    class Known:
        flops, bytes_s, measure = 80e9, 12e9, staticmethod(lambda: None)

    def execute(plan):
        now_s[0] += truth(plan)

    def timer():
        return now_s[0]

    monkeypatch.setattr(machine, "Ceilings", lambda dtype, device, timer: Known)
    monkeypatch.setattr(machine, "_loop_s", lambda llm: 0.0)
    monkeypatch.setattr(tiny.executor, "execute", execute)
    found = machine.calibrate(tiny, budget_s=0.01, timer=timer)
    swaps = [p for p in found.points if p.kind.startswith("swap")]
    if link > 1e20:
        assert "host_link_bytes_s" not in found.values and not swaps
    else:
        assert found.values["host_link_bytes_s"] == pytest.approx(link, rel=1e-6)
        assert found.errors["host_link_bytes_s"] < 1e-6 * link
        assert len(swaps) == 4 and all(p.fitted_s == pytest.approx(p.seconds, rel=1e-6) for p in swaps)


def test_what_the_prefix_cache_knows_survives():
    from cbserve import LLM, SamplingParams
    from cbserve.calibrating.machine import calibrate

    llm = LLM("tiny", num_blocks=40, enable_prefix_caching=True, verbose=False)
    params = SamplingParams(max_tokens=8, temperature=0)
    before = llm.generate([list(range(5, 53))], params, use_tqdm=False)[0].outputs[0].token_ids
    calibrate(llm, budget_s=0.05)
    after = llm.generate([list(range(5, 53))], params, use_tqdm=False)[0].outputs[0].token_ids
    assert before == after


@pytest.mark.parametrize("budget", [0, -1.0, math.nan, math.inf, "long"])
def test_a_budget_out_of_range(tiny, budget):
    from cbserve.calibrating.machine import calibrate

    with pytest.raises(CBServeError, match="must be a number of seconds above 0"):
        calibrate(tiny, budget_s=budget)


def test_a_model_that_is_too_short_for_the_sweep():
    from cbserve import LLM
    from cbserve.calibrating.machine import calibrate

    with pytest.raises(CBServeError, match="enlarge num_blocks"):
        calibrate(LLM("tiny", num_blocks=2, verbose=False), budget_s=0.1)


@pytest.fixture
def small_ceilings(monkeypatch):
    from cbserve.calibrating import ceilings

    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 128})


def test_the_command_saves_and_prints(home, capsys, small_ceilings):
    assert main(["calibrate", "--model", "tiny", "--budget", "0.2"]) == 0
    out = capsys.readouterr().out
    assert "eff_compute" in out and "overlap" in out and str(home / "calibration.json") in out
    assert load_calibration().model.name == "tiny"
    wall = (home / "calibration.json").read_bytes()
    assert main(["calibrate", "--model", "tiny", "--budget", "0.2", "--cpu-time"]) == 0
    out = capsys.readouterr().out
    assert "CPU time, 1 thread" in out and str(home / "calibration-cpu-time.json") in out
    assert (home / "calibration.json").read_bytes() == wall


def test_the_command_says_what_speaks_against_its_constants(home, capsys, monkeypatch, small_ceilings):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    assert main(["calibrate", "--model", "tiny", "--budget", "0.2"]) == 0
    assert "load average 99.0 on" in capsys.readouterr().out.splitlines()[-1]


def test_an_interrupted_command_leaves_no_file(home, monkeypatch, capsys):
    from cbserve.executors.torch_executor import TorchExecutor

    calls, execute = [], TorchExecutor.execute

    def interrupted(self, plan):
        calls.append(plan)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return execute(self, plan)

    monkeypatch.setattr(TorchExecutor, "execute", interrupted)
    assert main(["calibrate", "--model", "tiny", "--budget", "1"]) == 130
    assert [file.name for file in home.iterdir() if file.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--meta", "x.json"], "--meta belongs to --from"),
        (["--charts", "."], "--charts belongs to --from"),
        (["--cpu-time", "--from", "x.jsonl"], "--cpu-time is of a measurement of this machine"),
        (["--budget", "40", "--from", "x.jsonl"], "--budget is of a measurement of this machine"),
        (["--device", "cpu", "--from", "x.jsonl"], "--device is of a measurement of this machine"),
        (["--model", ""], "config.json"),  # given, and no name: not the default
        (["--from", ""], "cannot be read"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--from", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_arguments_are_one_line(home, capsys, arguments, words):
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_calibration_says_what_it_replaces_and_who_takes_it(home, capsys):
    command = ["calibrate", "--model", "tiny", "--budget", "0.1"]
    assert main(command) == 0
    out, log = capsys.readouterr()
    assert f"saved to {home / 'calibration.json'}; `cbserve sim --gpu this` takes it" in out
    assert log.splitlines()[-2:] == [  # no bar, which a log would hold hundreds of times
        "cbserve: calibrating, about 0.1 s ...", log.splitlines()[-1]
    ] and "done in" in log.splitlines()[-1] and "\r" not in log  # fmt: skip
    first = load_calibration()
    replace(first, created="2026-01-02T03:04:05+00:00", points=ONE.points).save()
    assert main(command) == 0
    assert ", in place of one of 2026-01-02 03:04 (each step timed 7 times, now " in capsys.readouterr().out
    assert main([*command, "--out", str(home / "a b.json")]) == 0
    assert f"`cbserve sim --gpu '{home / 'a b.json'}'` takes it" in capsys.readouterr().out


def test_without_torch_the_cure_is_named(home, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cbserve.llm", None)
    assert main(["calibrate", "--model", "tiny"]) == 2
    assert "needs torch" in capsys.readouterr().err
