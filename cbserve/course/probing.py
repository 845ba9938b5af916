"""What the doctor looks at: one dataclass, and the function that fills it without ever raising."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cbserve.files import cache_folder, tilde
from cbserve.hardware.host import memory_limit_bytes

_PACKAGES = (
    *("numpy", "torch", "triton", "gguf", "safetensors", "tokenizers", "jinja2", "tqdm"),
    *("ipywidgets", "anywidget", "plotly", "jupyterlab"),
)


@dataclass(frozen=True)
class GPU:
    """A CUDA device: its name, compute capability (major, minor) and memory."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Probe:
    """What was seen. None where it could not be found out.

    `host` is one of colab, binder, vscode, jupyterlab, notebook, jupyter (cannot tell which), terminal. `versions`
    holds installed packages only. `lab_widgets` is the version of the page's widget extension, "" when it lacks one.
    `torch_cuda` is the CUDA version torch was built for, "" for a build without. `calibrations` is what was measured
    of this machine, with whether there is reason to doubt it, and `calibration_errors` what is wrong with its files,
    each by the command that writes it anew.
    """

    host: str
    system: str
    python: tuple[int, int, int]
    versions: Mapping[str, str]
    torch_error: str = ""
    torch_threads: int = 1
    torch_cuda: str = ""
    gpus: tuple[GPU, ...] = field(default=())
    nvidia_driver: bool = False
    c_compiler: str = ""
    cores: int = 1
    lab_widgets: str | None = None
    home: str = ""
    home_error: str = ""
    model_cached: bool | None = None
    disk_free_bytes: int = 0
    memory_available_bytes: int | None = None
    calibrations: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    calibration_errors: Mapping[str, str] = field(default_factory=dict)


def probe() -> Probe:
    """Look at this process, its packages and its machine."""
    host = detect_host(os.environ, sys.modules, _kernel_app(), _parent_command())
    home, cached = _model_cache()
    return Probe(
        host=host,
        system=platform.system(),
        python=sys.version_info[:3],
        versions=_versions(),
        **_torch(),
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        c_compiler=os.path.basename(shutil.which(os.environ.get("CC") or "cc") or ""),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        lab_widgets=_lab_widgets() if host in ("jupyterlab", "notebook") else None,
        home=tilde(home),
        home_error=_write_error(home),
        model_cached=cached,
        disk_free_bytes=shutil.disk_usage(_existing(home)).free,
        memory_available_bytes=_memory_available(),
        **_calibrations(),
    )


def detect_host(
    environment: Mapping[str, str], modules: Mapping[str, Any], in_kernel: bool, parent_command: Sequence[str]
) -> str:
    """Name the host from what it leaves behind; `parent_command` is the command line that started the kernel."""
    if "COLAB_RELEASE_TAG" in environment or "google.colab" in modules:
        return "colab"
    if any(name.startswith("BINDER_") for name in environment):
        return "binder"
    if not in_kernel:
        return "terminal"
    if "VSCODE_PID" in environment or "VSCODE_CWD" in environment:
        return "vscode"
    words = " ".join(parent_command).replace("\\", "/").lower()
    if "jupyter-lab" in words or "jupyterlab" in words or "jupyter lab" in words:
        return "jupyterlab"
    if "jupyter-notebook" in words or "jupyter notebook" in words or "-m notebook" in words:
        return "notebook"
    return "jupyter"


def _kernel_app() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def _parent_command() -> list[str]:
    try:
        import psutil

        return psutil.Process().parent().cmdline()
    except Exception:  # psutil is absent, or the system does not let us look
        return []


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken install raises anything: OSError for a missing library, for one
        return {"torch_error": f"{type(error).__name__}: {error}".splitlines()[0]}
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        gpus.append(GPU(device.name, (device.major, device.minor), device.total_memory))
    return {"torch_threads": torch.get_num_threads(), "torch_cuda": torch.version.cuda or "", "gpus": tuple(gpus)}


def _lab_widgets() -> str | None:
    """Version of jupyterlab_widgets on the paths of this environment; None when Jupyter may run from another one."""
    try:
        from jupyter_core.paths import jupyter_path

        for folder in jupyter_path("labextensions"):
            manifest = Path(folder) / "@jupyter-widgets" / "jupyterlab-manager" / "package.json"
            if manifest.is_file():
                # Its package.json counts differently (5.x for jupyterlab_widgets 3.x): ask the package itself.
                return metadata.version("jupyterlab_widgets")
        return "" if _server_is_here() else None
    except Exception:  # a foreign layout: better no finding than a wrong one
        return None


def _server_is_here() -> bool:
    """Whether the server that started this kernel runs from the kernel's own environment."""
    command = _parent_command()
    return bool(command) and Path(command[0]).parent == Path(sys.executable).parent


def _model_cache() -> tuple[Path, bool | None]:
    try:
        from cbserve.models.fetch import model_path, models_folder
    except ImportError:  # a package is missing, which has its own line in the report
        return cache_folder(), None
    return models_folder(), model_path("smollm2-135m") is not None


def _calibrations() -> dict[str, Any]:
    from cbserve.calibrating.advice import doubts
    from cbserve.calibration import COMMAND, CPU_TIME_COMMAND, CalibrationError, calibration_path, load_calibration

    found, errors = {}, {}
    for is_cpu_time, command in ((False, COMMAND), (True, CPU_TIME_COMMAND)):
        try:
            if calibration_path(is_cpu_time).exists():
                calibration = load_calibration(is_cpu_time=is_cpu_time)
                found[command] = calibration.label, bool(doubts(calibration))
        except CalibrationError as error:
            errors[command] = str(error)
        except OSError as error:  # the folder cannot even be looked at: the model's line says so
            errors[command] = f"cannot be looked for: {error}"
            break
    return {"calibrations": found, "calibration_errors": errors}


def _existing(folder: Path) -> Path:
    """The nearest folder that exists: `folder` itself or one above it."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _write_error(home: Path) -> str:
    """Why `home` cannot be made or written, or nothing. Makes no folder: looks at the nearest one that exists."""
    there = _existing(home)
    try:
        home.exists()
    except OSError as error:  # its name is too long, say
        return error.strerror or str(error)
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"no permission to write in {there}"


def _memory_available() -> int | None:
    try:
        import psutil

        available = int(psutil.virtual_memory().available)
    except Exception:
        return None
    limit = memory_limit_bytes()
    return available if limit is None else min(available, limit)
