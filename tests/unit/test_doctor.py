"""The doctor names each fault and gives the cure that fits the host."""

from dataclasses import replace
from pathlib import Path

import pytest

from cbserve.course.doctor import GPU, Finding, Report, diagnose, doctor
from cbserve.course.probing import Probe, detect_host
from cbserve.models.config import gpu_dtype
from cbserve.models.fetch import SOURCES, fetch_model, model_path

HEALTHY = Probe(
    host="jupyterlab",
    system="Linux",
    python=(3, 12, 1),
    versions={
        **{"numpy": "2.4.6", "torch": "2.13.0+cpu", "triton": "3.7.1", "gguf": "0.19.0", "safetensors": "0.8.0"},
        **{"tokenizers": "0.23.3", "jinja2": "3.1.6", "tqdm": "4.70.1", "ipywidgets": "8.1.9", "anywidget": "0.11.0"},
    },
    torch_threads=2,
    cores=2,
    c_compiler="cc",
    lab_widgets="3.0.17",
    home="/home/learner/.cache/cbserve",
    model_cached=True,
    disk_free_bytes=50_000_000_000,
    memory_available_bytes=8_000_000_000,
)
HOSTS = ("colab", "binder", "vscode", "jupyterlab", "notebook", "jupyter", "terminal")


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in HEALTHY.versions.items() if name not in names}


def with_versions(**versions: str) -> dict[str, str]:
    return {**HEALTHY.versions, **versions}


def found(probe: Probe, topic: str) -> Finding:
    return next(finding for finding in diagnose(probe) if finding.topic == topic)


@pytest.mark.parametrize("host", HOSTS)
def test_a_healthy_machine_has_no_fault_on_any_host(host: str) -> None:
    assert Report(tuple(diagnose(replace(HEALTHY, host=host)))).ok


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("change", "topic"),
    [
        ({"python": (3, 10, 4)}, "Python"),
        ({"python": (3, 14, 0)}, "Python"),
        ({"versions": without("gguf", "tqdm")}, "packages"),
        ({"versions": without("torch")}, "torch"),
        ({"torch_error": "OSError: libgomp.so.1: cannot open shared object file"}, "torch"),
        ({"versions": with_versions(triton="3.6.0")}, "Triton"),
        ({"home_error": "no permission to write in /home"}, "model"),
        ({"model_cached": False, "disk_free_bytes": 100_000_000}, "model"),
    ],
)
def test_a_fault_is_named_and_has_one_line_of_cure(host: str, change: dict[str, object], topic: str) -> None:
    probe = replace(HEALTHY, host=host, **change)
    finding = found(probe, topic)
    assert finding.level == "fault"
    assert finding.cure and "\n" not in finding.cure
    assert not Report(tuple(diagnose(probe))).ok


@pytest.mark.parametrize(
    ("change", "topic", "level", "words"),
    [
        ({"host": "colab"}, "GPU", "note", "T4 GPU"),
        ({"torch_threads": 8}, "threads", "note", "OMP_NUM_THREADS=2"),
        ({"nvidia_driver": True}, "GPU", "note", "TORCH_INDEX"),
        ({"c_compiler": ""}, "C compiler", "note", "apt-get install gcc"),
        ({"nvidia_driver": True, "torch_cuda": "13.0"}, "GPU", "note", "driver"),
        ({"versions": without("triton")}, "Triton", "note", "%pip install triton"),
        ({"versions": without("triton"), "host": "binder"}, "Triton", "ok", ""),
        ({"versions": without("triton"), "system": "Windows"}, "Triton", "ok", ""),
        ({"versions": with_versions(triton="3.6.0"), "host": "colab"}, "Triton", "fault", "numpy<2.4"),
        ({"versions": with_versions(triton="3.6.0", numpy="2.1.3")}, "Triton", "ok", ""),
        ({"versions": without("ipywidgets")}, "widgets", "fault", "%pip install ipywidgets"),
        ({"versions": without("anywidget")}, "charts", "note", "%pip install anywidget"),
        ({"lab_widgets": ""}, "widgets", "fault", "jupyterlab_widgets"),
        ({"lab_widgets": "1.1.7"}, "widgets", "fault", "jupyterlab_widgets==3.*"),
        ({"lab_widgets": "1.1.7", "versions": with_versions(ipywidgets="7.7.1")}, "widgets", "ok", ""),
        ({"lab_widgets": None}, "widgets", "ok", ""),
        ({"model_cached": False}, "model", "note", "!cbserve model fetch"),
        ({"model_cached": False, "host": "terminal"}, "model", "note", "cbserve model fetch"),
        ({"model_cached": None}, "model", "note", ""),
        ({"memory_available_bytes": 500_000_000}, "resources", "note", "kernels"),
        ({"memory_available_bytes": None}, "resources", "ok", ""),
    ],
)
def test_each_finding_fits_what_was_seen(change: dict[str, object], topic: str, level: str, words: str) -> None:
    finding = found(replace(HEALTHY, **change), topic)
    assert (finding.level, words in finding.cure, bool(finding.cure)) == (level, True, bool(words))


@pytest.mark.parametrize(
    ("threads", "cores", "words"),
    [
        (2, 2, "1 to 2 threads on 2 CPU cores, as many as a short measurement finds fastest"),
        (1, 2, "1 thread on 2 CPU cores"),
        (1, 1, "1 thread on 1 CPU core"),
    ],
)
def test_the_threads_are_those_that_the_engine_may_take(threads: int, cores: int, words: str) -> None:
    assert found(replace(HEALTHY, torch_threads=threads, cores=cores), "torch").text.endswith(f"takes {words}")


def test_an_incompatible_cure_depends_on_the_host() -> None:
    cures = {host: found(replace(HEALTHY, host=host, versions=without("torch")), "torch").cure for host in HOSTS}
    assert "Runtime > Restart session" in cures["colab"]
    assert "Binder session" in cures["binder"]
    assert ".venv" in cures["vscode"]
    assert "make lab" in cures["terminal"]


@pytest.mark.parametrize(
    ("name", "capability", "dtype"),
    [("Tesla T4", (7, 5), "float16"), ("A100", (8, 0), "bfloat16"), ("H100", (9, 0), "bfloat16")],
)
def test_dtype_follows_compute_capability(name: str, capability: tuple[int, int], dtype: str) -> None:
    assert gpu_dtype(capability) == dtype
    text = found(replace(HEALTHY, gpus=(GPU(name, capability, 16 * 2**30),)), "GPU").text
    assert name in text and text.endswith(dtype) and "16 GiB" in text
    notes = [f.text for f in diagnose(replace(HEALTHY, gpus=(GPU(name, capability, 16 * 2**30),))) if f.level == "note"]
    assert any("goes through torch" in note for note in notes) == (capability < (8, 0))


@pytest.mark.parametrize(
    ("environment", "modules", "in_kernel", "parent", "host"),
    [
        ({"COLAB_RELEASE_TAG": "release"}, {}, True, [], "colab"),
        ({}, {"google.colab": None}, True, [], "colab"),
        ({"BINDER_REPO_URL": "x"}, {}, True, ["jupyter-lab"], "binder"),
        ({"VSCODE_PID": "1"}, {}, True, [], "vscode"),
        ({"VSCODE_PID": "1"}, {}, False, [], "terminal"),  # a terminal inside VS Code has no notebook
        ({}, {}, True, ["/v/bin/python", "/v/bin/jupyter-lab", "--no-browser"], "jupyterlab"),
        ({}, {}, True, ["python", "-m", "jupyterlab"], "jupyterlab"),
        ({}, {}, True, ["C:\\v\\Scripts\\jupyter-lab.exe"], "jupyterlab"),
        ({}, {}, True, ["/v/bin/python", "/v/bin/jupyter-notebook"], "notebook"),
        ({}, {}, True, ["python", "-m", "pytest", "--nbval-lax"], "jupyter"),
        ({}, {}, False, ["bash"], "terminal"),
    ],
)
def test_the_host_is_recognised(environment, modules, in_kernel, parent, host) -> None:
    assert detect_host(environment, modules, in_kernel, parent) == host


def test_the_report_shows_every_finding_as_text_and_as_a_plain_table() -> None:
    report = Report((Finding("disk", "fault", "1 < 2 & full", "free some"), Finding("GPU", "ok", "none")))
    assert "fault  disk  1 < 2 & full\n             -> free some" in repr(report)
    table = report._repr_html_()
    assert "1 &lt; 2 &amp; full" in table and table.count("<tr>") == 3
    # An untrusted notebook drops scripts and style sheets; a fixed colour is unreadable in one of the two themes.
    assert not any(word in table for word in ("<script", "<style", "color", "class="))


def test_doctor_reports_on_this_machine_without_raising(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path / "not" / "there"))
    report = doctor()
    assert [finding.topic for finding in report.findings][:2] == ["host", "Python"]
    assert report.findings[1].level == "ok"
    assert not (tmp_path / "not").exists()


def test_the_size_of_the_model_is_the_same_wherever_it_is_said() -> None:
    costs = SOURCES["smollm2-135m"].costs
    assert costs == "93 MB down, 540 MB on disk"
    assert found(replace(HEALTHY, model_cached=False), "model").text.endswith(costs)
    root = Path(__file__).parents[2]
    assert costs in (root / "README.md").read_text() and costs in str(fetch_model.__doc__)
    chapter = (root / "chapters" / "source" / "00_start_here.py").read_text().replace("\n# ", " ")
    assert all(size in chapter for size in ("93 MB to fetch", "540 MB on disk"))


@pytest.mark.model
def test_the_model_takes_on_disk_what_is_said() -> None:
    folder = model_path("smollm2-135m")
    if folder is None:
        pytest.skip("SmolLM2-135M is not in the cache")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size == pytest.approx(SOURCES["smollm2-135m"].folder_bytes, rel=1e-3)


def test_a_missing_torch_is_a_line_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)  # makes `import torch` raise ImportError
    torch = next(finding for finding in doctor().findings if finding.topic == "torch")
    assert torch.level == "fault"
