"""A trace that is written while the run goes on stands whole under its name, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbserve.core.trace import Trace, TraceError
from cbserve.errors import CBServeError
from cbserve.hardware.roofline import Roofline
from cbserve.simulation import simulate
from cbserve.workloads.workload import Job, Workload

COST = Roofline.on("a100-80", "llama-3.1-8b")
WORK = Workload("work", [Job(0.1 * i, range(40), 5) for i in range(200)])


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond 10 kB."""
    resource = pytest.importorskip("resource", reason="limits of a process are of Unix")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, full_disk: None) -> None:
    with pytest.raises(TraceError, match="run.jsonl.*room"):
        simulate(WORK, COST, 1000, trace_path=tmp_path / "run.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_full_at_the_last_line(tmp_path: Path, full_disk: None) -> None:
    """What waits in the file's buffer is only written when the file is closed."""
    with pytest.raises(TraceError, match=r"run\.jsonl"):
        simulate(WORK.first(30), COST, 1000, trace_path=tmp_path / "run.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken_by", [KeyboardInterrupt, ZeroDivisionError])
def test_a_run_that_is_broken_off_leaves_the_old_file(tmp_path: Path, broken_by: type[BaseException]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old")

    def stop(output: Any) -> None:
        raise broken_by

    with pytest.raises(broken_by):
        simulate(WORK, COST, 1000, trace_path=path, progress=stop)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", [5, 1.5, [3], "a\0b", "no folder/run.jsonl"])
def test_a_path_that_cannot_be_written_is_named(path: Any) -> None:
    with pytest.raises(TraceError, match="cannot write to"):
        simulate(WORK, COST, 1000, trace_path=path)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    job = Job(np.float64(0.5), range(40), 5, client_id=np.int64(7))  # type: ignore[arg-type]
    path = tmp_path / "run.jsonl"
    run = simulate(Workload("one", [job]), COST, np.int64(1000), trace_path=path, meta={"seed": np.int32(3)})
    assert Trace.load(path) == run.trace and Trace.load(path).meta["seed"] == 3
    run.trace.save(path)
    assert Trace.load(path) == run.trace


@pytest.mark.parametrize("meta", [{"x": object()}, {"x": {1, 2}}])
def test_what_json_cannot_hold_is_named(tmp_path: Path, meta: dict[str, Any]) -> None:
    with pytest.raises(CBServeError, match="cannot be written"):
        simulate(WORK, COST, 1000, trace_path=tmp_path / "run.jsonl", meta=meta)
    assert list(tmp_path.iterdir()) == []
