"""A sweep: written down point by point, resumed, and not stopped by a point that is refused or a worker that dies."""

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import viz_checks

from cbserve import cli
from cbserve.errors import CBServeError
from cbserve.sim import pool, sweep
from cbserve.sim.pool import Cluster, Lost, Processes
from cbserve.sim.settings import Settings
from cbserve.sim.sweep import Record, grid, read_axes, run_point
from cbserve.sim.sweep_charts import charts, frontier
from cbserve.sim.sweep_report import about, refusals, sweep_table, write_sweep_report
from cbserve.sim.words import duration
from cbserve.viz.figure import Figure

BASE = Settings(requests=30)
AXES = read_axes("rate=2,8;chunk=256,2048")
POINTS = grid(BASE, AXES)


def one_by_one(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for item in items:
        yield item, function(item)


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    path, ran = tmp_path / "s.jsonl", []

    def run(settings: Settings) -> dict[str, Any]:
        ran.append(settings)
        return run_point(settings)

    rows, lost = sweep.sweep(POINTS[:3], Record(path), one_by_one, run=run)
    assert ran == POINTS[:3] and not lost and len(path.read_text().splitlines()) == 3
    done: list[int] = []
    again, _ = sweep.sweep(POINTS, Record(path), one_by_one, done.append, run)
    assert ran == POINTS and again[:3] == rows and done == [3, 1]
    assert [row["settings"]["rate"] for row in again] == [2, 2, 8, 8]
    sweep.sweep(grid(Settings(requests=31), AXES), Record(path), one_by_one, run=run)
    assert len(ran) == 8  # another setting: other points
    assert all(json.loads(line)["numbers"]["requests"] in (30, 31) for line in path.read_text().splitlines())


def test_a_cut_last_line_is_dropped_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    rows, _ = sweep.sweep(POINTS[:2], Record(path), one_by_one)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    record = Record(path)
    assert record.dropped and len(record.found) == 1
    again, _ = sweep.sweep(POINTS[:2], record, one_by_one)
    assert again == rows and path.read_bytes() == whole


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "words\n", "words", '{"event": "header"}\n', '{"key": "a"}\n'])
def test_a_file_that_is_no_sweep_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(CBServeError, match="line( 1:)? is no point of a sweep"):
        Record(path)
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["numbers", "settings", "sum", "latency_s", "ttft", "p99", "tokens_per_s", "rate"])
@pytest.mark.parametrize("odd", ["7", [7], {"a": 7}, 7.5, -1, None, "gone"])
def test_a_line_that_was_edited_is_left_out_and_its_point_runs_again(
    name: str, odd: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even a value that could be one would be a wrong table."""
    monkeypatch.setattr(pool, "Processes", lambda jobs: one_by_one)
    path = tmp_path / "s.jsonl"
    command = ["sim", "--requests", "5", "--sweep", "rate=2,8", "--out", str(path), "--no-report"]
    assert cli.main(command) == 0
    sound, whole = capsys.readouterr(), path.read_text().splitlines()

    def edited(found: dict[str, Any]) -> dict[str, Any]:
        found = {key: edited(value) if isinstance(value, dict) else value for key, value in found.items()}
        return {key: odd if key == name else value for key, value in found.items() if (key, odd) != (name, "gone")}

    path.write_text(f"{json.dumps(edited(json.loads(whole[0])))}\n{whole[1]}\n")
    code, said = cli.main(command), capsys.readouterr()
    if "is no point of a sweep" in said.err:
        assert (code, said.out, name, odd) == (2, "", "numbers", "gone")
    else:
        assert code == 0 and said.out == sound.out and "line 1: edited since it was written" in said.err
        assert path.read_text().splitlines()[1:] == [whole[1], whole[0]]


def test_processes_give_the_same_as_one_by_one(tmp_path: Path) -> None:
    here, _ = sweep.sweep(POINTS, Record(tmp_path / "a.jsonl"), one_by_one)
    there, lost = sweep.sweep(POINTS, Record(tmp_path / "b.jsonl"), Processes(2))
    assert here == there and not lost


def fragile(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    if number == 2:
        raise ZeroDivisionError("two is too many")
    return 10 * number


def test_a_worker_that_dies_takes_only_its_point_along() -> None:
    outcomes = dict(Processes(2)(fragile, list(range(6))))
    assert {number: outcomes[number] for number in (0, 3, 4, 5)} == {0: 0, 3: 30, 4: 40, 5: 50}
    assert isinstance(outcomes[1], Lost) and "died (exit code" in outcomes[1].reason
    assert isinstance(outcomes[2], Lost) and "ZeroDivisionError: two is too many" in outcomes[2].reason


def test_a_trace_out_of_reach_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(CBServeError, match="gone.csv"):
        run_point(Settings(trace=str(tmp_path / "gone.csv")))
    assert "left for K and V" in run_point(Settings(model="llama-3.1-70b", requests=2))["error"]


def test_a_lost_point_is_reported_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"

    def unlucky(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        for item in items:
            yield item, Lost("its worker died") if item == POINTS[1] else function(item)

    rows, lost = sweep.sweep(POINTS, Record(path), unlucky)
    assert lost == [(POINTS[1], "its worker died")] and len(rows) == 3
    rows, lost = sweep.sweep(POINTS, Record(path), one_by_one)
    assert not lost and [row["settings"]["chunk"] for row in rows] == [256, 2048, 256, 2048]


def test_the_command_records_refusals_resumes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.jsonl"
    grid_text = "rate=2,8;model=llama-3.1-8b,llama-3.1-70b"
    command = ["sim", "--requests", "30", "--slo", "ttft=1", "--sweep", grid_text, "--jobs", "1", "--out", str(out)]
    assert cli.main(command) == 0
    first = capsys.readouterr()
    assert "model=llama-3.1-70b and 1 more: Llama-3.1-70B does not fit" in first.err
    assert "= left for K and V" in first.err and "goodput/s" in first.out
    lines = out.read_text().splitlines()
    assert len(lines) == 4 and sum("error" in json.loads(line) for line in lines) == 2
    page = (tmp_path / "s.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 6 and "does not fit" in page and "<script" not in page  # three, each wide and narrow
    for said in ("chunk 2,048", "max-num-seqs 256", "requests 30", "eff-memory 0.65", "num-blocks ", "Azure"):
        assert said in page
    assert cli.main(command) == 0
    assert out.read_text().splitlines() == lines
    assert capsys.readouterr().out == first.out
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == sorted(
        map(json.loads, lines), key=lambda row: (row["settings"]["rate"], "error" in row)
    )


class FakeRay(SimpleNamespace):
    """As much of Ray as is used. Tasks run when they are waited for; one dies."""

    def init(self, address: str) -> None:
        if address == "nowhere":
            raise ConnectionError("no head node")
        self.log.append(("init", address))

    def shutdown(self) -> None:
        self.log.append(("shutdown",))

    def remote(self, **options: int) -> Callable[..., Any]:
        self.log.append(("options", options))
        return lambda function: SimpleNamespace(remote=lambda *args: SimpleNamespace(call=(function, args)).call)

    def wait(self, refs: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return refs[-1:], refs[:-1]

    def get(self, ref: Any) -> Any:
        function, args = ref
        if args[1] == 1:
            raise RuntimeError("The worker died unexpectedly")
        return function(*args)


def test_a_cluster_gets_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(log=[])
    monkeypatch.setattr(pool, "load_ray", lambda: ray)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        outcomes = dict(Cluster(address)(fragile, [0, 1, 2, 3]))
    assert outcomes[0] == 0 and outcomes[3] == 30
    assert "The worker died unexpectedly" in outcomes[1].reason and "ZeroDivisionError" in outcomes[2].reason
    assert ray.log == [("init", address), ("options", {"max_retries": 0}), ("shutdown",)]
    with pytest.raises(CBServeError, match="cluster='nowhere' cannot be reached"):
        list(Cluster("nowhere")(fragile, [0]))
    for gone in (address, f"ray://{address}"):  # Ray itself would wait for minutes
        with pytest.raises(CBServeError, match="cannot be reached.*refused"):
            list(Cluster(gone)(fragile, [0]))
    assert len(ray.log) == 3


def row(rate: float, chunk: int, tokens: float, ttft: float, gpu: str = "a100-80") -> dict[str, Any]:
    """A run whose goodput is the higher, the sooner its first tokens come."""
    latency = {name: {"p50": ttft / 2, "p99": ttft} for name in ("ttft", "itl")}
    shares = dict.fromkeys(("busy_share", "flop_utilisation", "bandwidth_utilisation", "goodput_share", "kv_peak"), 0.5)
    goodput = {"goodput_per_s": rate / (1 + ttft), "kept_share": {"ttft": 0.75, "itl": 0.25}, "prefix_hit_rate": None}
    found = {"tokens_per_s": tokens, "latency_s": latency, **shares, **goodput, "preemptions": 0, "refused": 0}
    return {"settings": Settings(rate=rate, chunk=chunk, gpu=gpu).as_dict(), "numbers": found}


def hovers(figure: Figure) -> list[str]:
    """What the marks say."""
    return [text for text in re.findall(r"<title>(.*?)</title>", figure.svg) if "rate" in text]


def test_a_curve_for_each_setting_along_the_rate() -> None:
    rows = [row(1, 256, 100.4, 0.1), row(1, 512, 90, 0.05), row(4, 256, 1004.6, 2), row(4, 512, 200, 1)]
    axes = {"rate": [1.0, 4.0], "chunk": [256, 512]}
    goodput, *latencies = charts(rows, axes, {"ttft": 0.5})
    for figure in [draw(width) for draw in latencies for width in (880, 400)]:
        viz_checks.check(figure.svg)
        assert {">chunk 256<", ">chunk 512<"} <= set(re.findall(">chunk.*?<", figure.svg))
        assert "1,005 tokens/s (rate 4, chunk 256)" in figure.title  # as its mark and the table have it
        assert sorted(tuple(values[:3]) for values in figure.table[1]) == [
            (1, 256, 100.4), (1, 512, 90), (4, 256, 1004.6), (4, 512, 200),
        ]  # fmt: skip
        assert len(hovers(figure)) == 4 and "rate 1, chunk 512: 90 tokens/s, p99" in figure.svg
    assert "highest goodput is 2 requests/s (rate 4, chunk 512)" in goodput(880).title
    assert [values[:2] for values in goodput(880).table[1]] == [[1, 256], [4, 256], [1, 512], [4, 512]]
    text = str(sweep_table([*rows, {"settings": rows[0]["settings"], "error": "no room"}], axes, {"itl": 0.5}))
    assert text.count("\n") == 7 and "longest ITL <= 0.5 s" in text and "ITL kept %" in text


@pytest.mark.parametrize("slo", [{}, {"ttft": 0.5}])
def test_of_many_settings_the_best_of_each_gpu_is_a_curve_and_the_rest_are_grey(slo: dict[str, float]) -> None:
    speed = {"t4": 1, "l4": 2, "h100": 8}
    rows = [
        row(rate, chunk, rate * chunk * speed[gpu], chunk / speed[gpu] / 100, gpu)
        for rate in (1, 2, 3) for gpu in speed for chunk in (256, 512, 1024, 2048)
    ]  # fmt: skip
    axes = {"rate": [1, 2, 3], "chunk": [256, 512, 1024, 2048], "gpu": list(speed)}
    drawn = [draw(width) for draw in charts(rows, axes, slo) for width in (880, 400)]
    assert len(drawn) == (6 if slo else 4)
    best = 256 if slo else 2048
    for figure in drawn:
        viz_checks.check(figure.svg)
        names = {text.text for text in viz_checks.texts(figure.svg)}
        assert {f"chunk {best:,}, {gpu}" for gpu in speed} | {"other settings"} <= names
        assert len(hovers(figure)) == len(figure.table[1]) == 36
        assert "Grey: the other 9 settings." in figure.caption
    assert any(text.text.startswith("frontier") for text in viz_checks.texts(drawn[-1].svg))


def test_more_settings_than_one_axis_can_tell_apart_are_points_under_the_frontier() -> None:
    rows = [row(1, chunk, chunk, chunk / 100 if chunk != 20 else 900) for chunk in range(10, 30)]
    (first, _) = charts(rows, {"rate": [1.0], "chunk": list(range(10, 30)), "seed": [0]}, {})
    assert len(hovers(first(880))) == 20 and "frontier" in first(880).svg
    assert frontier([(1, 5), (2, 4), (3, 6), (4, 7), (4, 8), (2, 9)]) == [(2, 4), (3, 6), (4, 7)]


def test_a_frontier_of_one_point_is_neither_drawn_nor_named() -> None:
    rows = [row(1, 256, 100 * k, 1 / k, gpu) for k, gpu in enumerate(("t4", "l4", "h100"), start=1)]
    for draw in charts(rows, {"gpu": ["t4", "l4", "h100"]}, {}):
        viz_checks.check(draw(400).svg)
        assert not any(text.text.startswith("frontier") for text in viz_checks.texts(draw(400).svg))


def test_one_run_has_a_chart_without_a_frontier() -> None:
    (first, _) = charts([row(1, 256, 1004.6, 0.1)], {"rate": [1.0]}, {"ttft": 1.0})
    assert "1,005 tokens/s, with a p99 TTFT of 100 ms" in first(880).title and "frontier" not in first(880).svg


def test_a_wide_table_uses_the_window_and_says_that_it_scrolls(tmp_path: Path) -> None:
    path = tmp_path / "s.html"
    write_sweep_report(path, [row(1, 256, 100, 0.1), row(2, 256, 200, 0.1)], {"rate": [1, 2]}, {}, [])
    page = path.read_text(encoding="utf-8")
    assert 'class="scroll grid many"' in page and "12 columns: scroll the table sideways" in page


def test_what_all_points_share_is_said_with_its_defaults() -> None:
    rows = [{"settings": point.as_dict(), **run_point(point)} for point in POINTS]
    same, efficiencies, room, workload = about(POINTS, rows, AXES)[1:]
    assert "model Llama-3.1-8B" in same and "max-num-seqs 256" in same and "overhead 0.0005" in same
    assert "chunk" not in same and "rate" not in same and "slo" not in same
    assert "fitted to Llama-3.1-8B" in efficiencies and "Azure conv 2023 (synthetic twin)" in workload
    blocks = sorted(row["settings"]["num_blocks"] for row in rows)
    assert f"{blocks[0]:,} to {blocks[-1]:,} blocks" in room


def test_an_interrupted_sweep_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(jobs: int) -> Callable[[Any, Any], Iterator[tuple[Any, Any]]]:
        def run(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
            yield items[0], function(items[0])
            raise KeyboardInterrupt

        return run

    monkeypatch.setattr(pool, "Processes", interrupted)
    out = tmp_path / "s.jsonl"
    assert cli.main(["sim", "--requests", "30", "--sweep", "rate=1,2,4", "--out", str(out)]) == 130
    assert f"1 of 3 points are kept in {out}; the same command goes on" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 1


def test_nothing_is_drawn_when_every_point_is_refused() -> None:
    refused = [{"settings": point.as_dict(), "error": f"no room\n{point.rate}"} for point in POINTS]
    assert charts(refused, AXES, {}) == []
    assert refusals(refused, AXES) == [("rate=2, chunk=256 and 3 more", "no room\n2.0")]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.09284, "92.8 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (65.0, "65 s"), (12345.0, "12,300 s")],
)
def test_seconds_are_said_in_the_unit_that_suits(seconds: float, said: str) -> None:
    assert duration(seconds) == said
