"""The command line: exit codes, the set-up of the environment, and what each target does before it hands over."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from cbserve import __version__, bootstrap, cli, demo, targets
from cbserve.errors import CBServeError
from cbserve.models.weights import export_model


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone's files, and a `.venv` that is already there; pip is recorded and not run."""
    for name in ("pyproject.toml", "constraints.txt", "requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    monkeypatch.delenv("CBSERVE_VENV", raising=False)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(bootstrap, "_works", lambda python: True)
    return tmp_path


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(bootstrap, "_install", lambda python, profile: done.append(profile))
    return done


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"], ["generate"], ["model"], ["generate", "Hi", "--nonsense"]])
def test_bad_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: cbserve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (CBServeError("disk is full: free 1 GB"), 2, "disk is full: free 1 GB"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_a_line_on_stderr_and_an_exit_code(raised, code, said, monkeypatch, capsys) -> None:
    def fail(options: object) -> int:
        raise raised

    monkeypatch.setattr(cli, "_setup", fail)
    assert cli.main(["setup"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"cbserve: {said}\n" and captured.out == ""


def test_it_runs_before_anything_is_installed() -> None:
    # -I -S: no site-packages, so that only the standard library can be imported
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from cbserve.cli import main; sys.exit(main(['clean', '-h']))"
    )
    root = Path(cli.__file__).parent.parent
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script, str(root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_setup_installs_once_and_again_when_a_pin_changes(checkout: Path, installs: list[str]) -> None:
    assert cli.main(["setup"]) == cli.main(["setup"]) == 0
    assert installs == ["learn"]
    (checkout / "constraints.txt").write_text("numpy==9")
    assert cli.main(["setup"]) == 0
    assert installs == ["learn", "learn"]


def test_the_test_profile_serves_learners_too_but_not_the_other_way_round(checkout: Path, installs: list[str]) -> None:
    bootstrap.ensure("learn")
    bootstrap.ensure("test")
    bootstrap.ensure("learn")
    assert installs == ["learn", "test"]


def test_a_failed_install_leaves_no_stamp(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    for _ in range(2):
        with pytest.raises(CBServeError, match="pip could not install requirements.txt"):
            bootstrap.ensure("learn")
    assert not list((checkout / ".venv").glob("*.stamp"))


def test_torch_index_is_an_extra_index(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    monkeypatch.setattr(bootstrap, "_why_silent", lambda index: "")
    bootstrap.ensure("learn")
    monkeypatch.setenv("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    bootstrap.ensure("learn")
    plain, cpu = commands
    assert "--extra-index-url" not in plain
    assert cpu[cpu.index("--extra-index-url") + 1] == "https://download.pytorch.org/whl/cpu"


def test_an_index_that_does_not_answer_is_named_before_pip_begins(checkout, monkeypatch, capfd) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{taken.getsockname()[1]}/whl/cpu"
        monkeypatch.setenv("TORCH_INDEX", index)
        said: list[str] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            said.append(capfd.readouterr().out)
            assert command[command.index("--retries") + 1] == "1"
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(bootstrap.subprocess, "run", run)
        bootstrap.ensure("learn")
    assert f"TORCH_INDEX={index} does not answer" in said[0] and "gigabytes" in said[0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch from PyPI is small")
@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cpu"])
def test_the_small_torch_is_offered_before_anything_is_made(checkout, installs, index, monkeypatch, capsys) -> None:
    made: list[str] = []
    monkeypatch.setenv("TORCH_INDEX", index)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    monkeypatch.setattr(bootstrap, "_works", lambda python: False)
    monkeypatch.setattr(bootstrap, "_create", lambda venv: made.append(capsys.readouterr().out))
    bootstrap.ensure("learn")
    assert ("TORCH_INDEX=https://download" in made[0]) is not bool(index)


def test_current_environment_is_used_as_it_is(checkout, installs, monkeypatch) -> None:
    monkeypatch.setenv("CBSERVE_VENV", "current")
    python = bootstrap.ensure("test")
    assert installs == [] and bootstrap.is_running(python)


def test_outside_a_clone_the_cure_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    assert cli.main(["lab"]) == 2
    assert "needs a clone" in capsys.readouterr().err


def test_a_target_goes_on_inside_the_environment(checkout, installs, monkeypatch) -> None:
    handed: list[list[str]] = []

    def hand_over(python: Path, arguments: list[str]) -> None:
        handed.append([str(python), *arguments])
        raise SystemExit(0)

    monkeypatch.setattr(bootstrap, "hand_over", hand_over)
    with pytest.raises(SystemExit):
        cli.main(["test-fast", "-k", "scheduler"])
    python = str(bootstrap.venv_python(checkout / ".venv"))
    assert handed == [[python, "-m", "cbserve", "test-fast", "-k", "scheduler"]]
    assert installs == ["test"]


def test_lab_reset_brings_an_exercise_back_and_says_where_the_backup_is(checkout, monkeypatch, capsys) -> None:
    def notebook(source: str) -> Any:
        answer = nbformat.v4.new_code_cell(source, metadata={"tags": ["exercise", "exercise:lab1.ex1"]}, id="answer")
        return nbformat.v4.new_notebook(cells=[answer])

    for folder, source in (("labs", "# exercise: lab1.ex1\n..."), ("work", "# exercise: lab1.ex1\nmine = 1")):
        (checkout / folder).mkdir()
        nbformat.write(notebook(source), checkout / folder / "lab1.ipynb")
    monkeypatch.setenv("CBSERVE_VENV", "current")
    copy = checkout / "work" / "lab1.ipynb"
    before = copy.read_text()
    assert cli.main(["lab", "reset", "lab1.ex1"]) == 0
    assert nbformat.read(copy, as_version=4).cells[0].source.endswith("...")
    backup = Path(capsys.readouterr().out.split(": ")[-1].strip())
    assert backup.read_text() == before
    for wrong in (["lab1.ex9"], []):
        assert cli.main(["lab", "reset", *wrong]) == 2
        assert "lab1.ex1" in capsys.readouterr().err


def test_clean_keeps_the_learners_work(checkout: Path) -> None:
    for folder in ("work", ".mypy_cache", "cbserve/__pycache__"):
        (checkout / folder).mkdir(parents=True)
    assert cli.main(["clean"]) == 0
    assert sorted(path.name for path in checkout.iterdir() if path.is_dir()) == ["cbserve", "work"]
    assert not (checkout / "cbserve" / "__pycache__").exists()


@pytest.mark.parametrize(("root", "platform"), [(False, "linux"), (False, "darwin"), (True, "linux")])
def test_a_missing_chromium_never_fails_the_tests(root, platform, monkeypatch, capsys) -> None:
    tried: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        tried.append(command)
        return subprocess.CompletedProcess(command, 100)  # no network, say

    monkeypatch.setattr(targets.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(targets.os, "geteuid", lambda: 0 if root else 1000, raising=False)
    monkeypatch.setattr(targets.sys, "platform", platform)
    monkeypatch.setattr(targets.subprocess, "run", run)
    targets.install_chromium()
    assert bool(tried) == root
    assert "browser tests will be skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-tokens", "4"], 0, ""),
        (["--max-tokens", "4", "--chat"], 0, ""),
        (["--max-tokens", "0"], 2, "max_tokens=0"),
        (["--model", "no-such-model"], 2, "no-such-model"),
    ],
)
def test_generate_prints_a_text_or_the_reason(arguments: list[str], code: int, said: str, capsys) -> None:
    assert cli.main(["generate", "Hello", "--model", "tiny", "--device", "cpu", *arguments]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert bool(captured.out.strip()) == (code == 0)


def test_generate_streams_the_text_that_llm_generates(capsys) -> None:
    from cbserve import LLM, SamplingParams

    texts = {}
    for seed in (1, 1, 2):
        common = ["generate", "Hello", "--model", "tiny", "--device", "cpu", "--max-tokens", "12", "--temperature", "1"]
        assert cli.main([*common, "--seed", str(seed)]) == 0
        texts.setdefault(seed, set()).add(capsys.readouterr().out)
    params = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in texts]
    outputs = LLM("tiny", device="cpu").generate(["Hello"] * len(params), params)
    assert texts == {seed: {output.outputs[0].text + "\n"} for seed, output in zip(texts, outputs, strict=True)}
    assert texts[1] != texts[2]


def test_an_unknown_notebook_is_refused_by_name(monkeypatch, capsys) -> None:
    monkeypatch.setenv("CBSERVE_VENV", "current")
    assert cli.main(["notebooks", "build", "99_nothing"]) == 2
    assert "99_nothing" in capsys.readouterr().err


def test_model_list_says_what_is_there(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))
    assert cli.main(["model", "list"]) == 0
    assert "smollm2-135m  not fetched" in capsys.readouterr().out


def test_the_lab_opens_without_the_model(monkeypatch, capsys) -> None:
    from cbserve.models import fetch

    def offline(*_: object) -> Path:
        raise CBServeError("no network; copy the cache folder")

    monkeypatch.setattr(fetch, "fetch_model", offline)
    targets.fetch_or_warn()
    assert "going on without the model: no network" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", [["model", "list"], ["demo", "--model", "tiny", "--requests", "2", "--slots", "2"]])
def test_a_reader_that_leaves_is_no_fault(command):
    environment = os.environ | {"CBSERVE_VENV": "current"}
    child = subprocess.Popen(
        [sys.executable, "-m", "cbserve", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    child.stdout.close()  # as `| head` does
    faults = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait() == 0 and "Traceback" not in faults and "BrokenPipe" not in faults


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("| true", 0, ""),
        (">/dev/full", 2, "cbserve: cannot write the output (No space left on device); send it elsewhere\n"),
    ],
)
@pytest.mark.parametrize("more", ["--json", "--sweep rate=2"])
def test_output_that_goes_nowhere_costs_no_file(where: str, code: int, said: str, more: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m cbserve sim --requests 20 {more} --out run.jsonl"
    if where == ">/dev/full" and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    answer = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} {where}"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(bootstrap.ROOT)},
    )  # fmt: skip
    assert (answer.returncode, answer.stderr.rpartition("\r")[2].rpartition("]")[2].lstrip("\n")) == (code, said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.jsonl"]
    assert "</html>" in (tmp_path / "run.html").read_text() and (tmp_path / "run.jsonl").read_text().endswith("}\n")


@pytest.mark.parametrize("value", ["0", "-3", "abc", "1.5", ""])
def test_demo_wants_whole_numbers(value, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--slots", value])
    assert "give a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["model", "export", 300 * "x", "--model", "tiny"],
        ["model", "export", "~nobody/x", "--model", 300 * "x"],
        ["generate", "Hi", "--model", 300 * "x"],
    ],
)
def test_a_name_that_is_too_long_is_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and 300 * "x" in error and not list(tmp_path.iterdir())


def test_the_doctor_says_that_the_name_of_the_cache_folder_is_too_long(monkeypatch, capsys):
    monkeypatch.setenv("CBSERVE_HOME", 300 * "x")
    assert cli.main(["doctor"]) == 1
    assert "cannot be written: File name too long" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("variable", "command"),
    [
        ("", ["model", "export", "~nobody-at-all/x", "--model", "tiny"]),
        ("CBSERVE_HOME", ["doctor"]),
        ("CBSERVE_HOME", ["sim", "--gpu", "this", "--requests", "2"]),
    ],
)
def test_the_home_of_nobody_is_no_folder_here(variable, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, "~nobody-at-all/x")
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "'~nobody-at-all/x': there is no home directory of that name" in error
    assert not list(tmp_path.iterdir())


def test_exporting_below_a_file_names_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CBServeError, match="export to another folder"):
        export_model("tiny", tmp_path / "file" / "model")


def test_outside_the_environment_a_missing_package_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(name: str) -> Callable[[object], int]:
        def run(options: object) -> int:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return run

    monkeypatch.setattr(cli, "_generate", lacks("torch"))
    assert cli.main(["generate", "x"]) == 2
    said = capsys.readouterr().err
    assert "has no package torch" in said and ".venv/bin/activate" in said
    monkeypatch.setattr(cli, "_generate", lacks("cbserve.nowhere"))  # a fault of ours is not the learner's
    with pytest.raises(ModuleNotFoundError):
        cli.main(["generate", "x"])
