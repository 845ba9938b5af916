"""What is kept across restarts survives damage, several writers and a folder that cannot be written."""

import contextlib
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from cbserve.course import store
from cbserve.course.store import Store, state_folder


def add_hundred(name: str) -> None:
    for number in range(100):
        Store("progress").update(lambda kept, number=number: kept.update({f"{name}{number}": {}}))


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CBSERVE_HOME": "/h"}, Path("/h/course")),
        ({"CBSERVE_HOME": "/h", "CBSERVE_STRICT": "1"}, None),
        ({"CBSERVE_HOME": "/h", "CBSERVE_STRICT": "0"}, Path("/h/course")),
        ({"CBSERVE_HOME": "/h", "PYTEST_CURRENT_TEST": "t"}, None),
        ({"CBSERVE_HOME": "/h", "CBSERVE_STRICT": "1", "CBSERVE_STATE": "/s"}, Path("/s")),
    ],
)
def test_where_it_is_kept(monkeypatch, environment, folder) -> None:
    for name in ("CBSERVE_HOME", "CBSERVE_STRICT", "CBSERVE_STATE", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert state_folder() == folder


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"lab1.ex1": 3}', "\x00\x01"])
def test_a_damaged_file_is_moved_aside_with_a_message(tmp_path, monkeypatch, capsys, damage) -> None:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    (tmp_path / "progress.json").write_text(damage)
    kept = Store("progress")
    kept.update(lambda kept: kept.update({"lab1.ex1": {"solved": True}}))
    assert "was damaged" in capsys.readouterr().out
    assert [path.read_text() for path in tmp_path.glob("progress.broken-*.json")] == [damage]
    assert kept.read() == {"lab1.ex1": {"solved": True}}


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path / "file" / "state"))
    kept = Store("progress")
    for _ in range(2):
        kept.update(lambda kept: kept.setdefault("lab1.ex1", {}).update(solved=True))
    assert kept.read() == {"lab1.ex1": {"solved": True}}
    said = capsys.readouterr().out
    assert said.count("cbserve:") == 1 and "Set CBSERVE_HOME" in said


def test_two_kernels_at_once_lose_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_hundred, args=(name,)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(json.loads((tmp_path / "progress.json").read_text())) == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress.json"]


def test_a_lock_left_by_a_dead_process_is_taken_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    monkeypatch.setattr(store, "_LOCK_WAIT_S", 0.02)
    (tmp_path / "progress.lock").touch()
    Store("progress").update(lambda kept: kept.update({"lab1.ex1": {}}))
    assert Store("progress").read() == {"lab1.ex1": {}}


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_no_half_file(monkeypatch, tmp_path, fault) -> None:
    def fail(*_args, **_kwargs):
        raise fault

    monkeypatch.setenv("CBSERVE_STATE", str(tmp_path))
    kept = Store("progress")
    kept.update(lambda entries: entries.update({"a": {}}))
    monkeypatch.setattr(os, "replace", fail)
    with contextlib.suppress(KeyboardInterrupt):
        kept.update(lambda entries: entries.update({"b": {}}))
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    assert kept.read() == {"a": {}}
