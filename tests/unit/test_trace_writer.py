"""A trace that is written while the run goes on stands whole under its name, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.core.trace import Trace, TraceError
from cbserve.errors import CBServeError
from cbserve.files import require_writable
from cbserve.hardware.roofline import Roofline
from cbserve.simulation import simulate, simulating
from cbserve.viz import page_map
from cbserve.workloads.workload import Job, Workload

COST = Roofline.on("a100-80", "llama-3.1-8b")
WORK = Workload("work", [Job(0.1 * i, range(40), 5) for i in range(200)])


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside, no file of this process grows beyond 10 kB: nor does the one that pytest's own report goes to."""
    resource = pytest.importorskip("resource", reason="limits of a process are of Unix")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="run.jsonl.*room"), full_disk():
        simulate(WORK, COST, 1000, trace_path=tmp_path / "run.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_full_at_the_last_line(tmp_path: Path) -> None:
    """What waits in the file's buffer is only written when the file is closed."""
    with pytest.raises(TraceError, match=r"run\.jsonl"), full_disk():
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


def test_a_run_that_is_left_in_a_pause_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old")
    run = simulating(WORK, COST, 1000, trace_path=path)
    next(run)
    assert len(list(tmp_path.iterdir())) == 2
    run.close()
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


def _damage(**fields: Any) -> Any:
    def change(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["event"] == "step" and line["count"] > 1).update(fields)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        *[_damage(count=value) for value in ("5", None, -5, 0, 1000)],
        *[_damage(ramp=value) for value in ([], "abc", [[1]])],
        *[_damage(start_s=value, end_s=value) for value in (None, "x")],
        _damage(rows=["abcdef"]), _damage(rows=5), _damage(num_steady="1"),
        *[lambda lines, size=size: lines[0]["meta"].update(block_size=size) for size in (None, 0, "x")],
    ],
)  # fmt: skip
def test_a_damaged_span_is_named_by_its_line(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "run.jsonl"
    simulate(Workload("two", [Job(0.0, range(40), 60), Job(0.0, range(40), 90)]), COST, 1000, trace_path=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    damage(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=r"run\.jsonl, line \d+: "):
        Trace.load(path)


def test_a_trace_without_block_tables_draws_no_page_map() -> None:
    run = simulate(WORK.first(3), COST, 100)
    with pytest.raises(InvalidRequestError, match="fast_forward=False"):
        page_map(run.trace, 1)
    assert "free" not in page_map(simulate(WORK.first(3), COST, 100, fast_forward=False).trace, 1).title


WRITES = """
import sys, time
from cbserve.core.trace_file import TraceWriter
TraceWriter(sys.argv[1], {})
print("begun", flush=True)
time.sleep(60)
"""


@contextmanager
def writer_of(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has begun to write `path`."""
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        try:
            yield process
        finally:
            process.kill()


WAYS = {
    "a run": lambda path: simulate(WORK.first(3), COST, 1000, trace_path=path),
    "save": lambda path: Trace().save(path),
    "require_writable": require_writable,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["run.jsonl", "run[1]*.jsonl"])
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(
    tmp_path: Path, way: str, name: str
) -> None:
    path = tmp_path / name
    with writer_of(path) as killed:
        killed.kill()
        killed.wait()
        (left,) = tmp_path.iterdir()
        with writer_of(path) as living:
            other = tmp_path / left.name.replace(name, f"other-{name}")
            other.write_text("of another target")
            WAYS[way](path)
            here = {file.name for file in tmp_path.iterdir()} - {name}
            assert here == {left.name.replace(str(killed.pid), str(living.pid)), other.name}
