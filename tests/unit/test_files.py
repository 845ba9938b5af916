"""Whoever writes a file writes it whole: what goes wrong on the way leaves the old one as it was, and nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from cbserve import Calibration, Trace, model_shape, serve, timeline
from cbserve.core.trace_file import TraceWriter
from cbserve.course import builder, lab
from cbserve.course.store import Store
from cbserve.errors import CBServeError
from cbserve.files import write_whole

TRACE = serve([3, 2])
VALUES = {"eff_compute": 0.5, "eff_memory": 0.25, "overhead_s": 0.002, "overlap": 0.0}
NOTEBOOK = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("a line\nand one with ü")])
STORED = "{}"  # what lay there must be JSON for a store


def streamed(path: Path) -> None:
    with TraceWriter(path, {}) as write:
        for event in TRACE.events:
            write(event)


def stored(path: Path) -> None:
    os.environ["CBSERVE_STATE"] = str(path.parent)
    Store(path.stem).update(lambda kept: kept.update({"lab1.ex1": {"solved": True}}))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "write_whole": lambda path: write_whole(path, "one\ntwo\r\n", CBServeError),
    "Trace.save": TRACE.save,
    "Trace.save_chrome": TRACE.save_chrome,
    "TraceWriter": streamed,
    "Figure.save": lambda path: timeline(TRACE).save(path),
    "Calibration.save": Calibration(
        model_shape("qwen2.5-0.5b"), "a box", 1e11, 1e10, VALUES, VALUES, "2026-01-02T03:04:05Z"
    ).save,
    "the builder of notebooks": lambda path: builder._write(path, NOTEBOOK),
    "the learner's lab": lambda path: lab._write(path, NOTEBOOK),
    "what the course remembers": stored,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))  # put back at the end, whatever `stored` sets
    (tmp_path / "file.json").write_text(STORED)
    return tmp_path / "file.json"


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced_whole_and_keeps_its_permissions(path: Path, name: str) -> None:
    path.chmod(0o640)
    WRITERS[name](path)
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() != STORED
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["^C", "full"])
def test_what_goes_wrong_leaves_the_old_file(
    path: Path, name: str, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(os, "replace", fail)
    if name == "what the course remembers" and isinstance(fault, OSError):
        WRITERS[name](path)  # goes on in memory, and says so
    else:
        with pytest.raises(KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else CBServeError) as caught:
            WRITERS[name](path)
        assert isinstance(fault, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert list(path.parent.iterdir()) == [path] and path.read_text() == STORED


def test_line_ends_are_as_given(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "one\ntwo\r\nü", CBServeError)
    assert (tmp_path / "file").read_bytes() == "one\ntwo\r\nü".encode()
    Trace().save(tmp_path / "trace")
    assert b"\r" not in (tmp_path / "trace").read_bytes()
