"""Trace readers: what they keep, what they refuse and how they say it."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.errors import CBServeError
from cbserve.workloads.measured import STAMPS, read_requests
from cbserve.workloads.readers import read_azure, read_mooncake, read_trace
from cbserve.workloads.trace_files import TraceFileError
from cbserve.workloads.workload import Workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
AZURE = (
    HEADER
    + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:51.2224670,879,55"
)


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


MOONCAKE = mooncake((0, 1500, 7, [0, 1, 2]), (40, 1024, 3, [0, 1]), (277, 1300, 5, [0, 1, 9]))


def measured(*rows: tuple[float, ...]) -> str:
    names = ("input_toks", "output_toks", "arrival_time", *STAMPS)
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


# Unix time 1000 is 5 on the engine's clock; the first request took 0.5 s into the queue, the second none.
MEASURED = measured((10, 4, 1000.0, 5.5, 5.6, 6.0, 9.0), (20, 1, 1001.0, 6.0, 6.0, 7.5, 7.5))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(data: str | bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return write


Write = Callable[..., Path]


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_azure(write: Write) -> None:
    workload = read_azure(write(AZURE, "conv.csv"))
    assert [job.arrival_s for job in workload.jobs] == pytest.approx([0.0, 4.314579, 4.541877], abs=2e-6)
    assert [(len(job.prompt), job.num_output_tokens) for job in workload.jobs] == [(374, 44), (396, 109), (879, 55)]
    assert workload.jobs[0].prompt[-1] < workload.jobs[1].prompt[0]
    assert workload.name == "conv"
    assert "conv.csv" in workload.source and "CC-BY-4.0" in workload.source


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode())], ids=["plain", "gz"])
def test_an_azure_file_that_may_be_cut_within_its_last_number_is_noted(tmp_path: Path, cut: int, pack: Any) -> None:
    """The published files end without a line feed, so it can be no error."""
    text = HEADER + ROW + ROW.replace(ROW.split(",")[-1], "1234\n")
    file = tmp_path / "azure.csv"
    file.write_bytes(pack(text[: len(text) - cut]))
    workload = read_azure(file)
    assert workload.jobs[-1].num_output_tokens == int("1234"[: 5 - cut or 4][:4])
    assert ("no line feed" in workload.note) == (cut > 0 and pack is str.encode)
    assert read_azure(file, limit=1).note == "first 1 requests"


def test_azure_finds_columns_by_name_and_takes_time_zones(write: Write) -> None:
    text = (
        "GeneratedTokens,TIMESTAMP,More,ContextTokens\n"
        "44,2024-05-10 00:00:00.5+00:00,x,374\n\n"
        "7,2024-05-10 00:00:02+00:00,y,9\n"
    )
    jobs = read_azure(write("\ufeff" + text)).jobs
    assert [(job.arrival_s, len(job.prompt), job.num_output_tokens) for job in jobs] == [(0.0, 374, 44), (1.5, 9, 7)]


def test_mooncake_keeps_prefixes(write: Write) -> None:
    workload = read_mooncake(write(MOONCAKE, "m.jsonl"))
    first, second, third = (job.prompt for job in workload.jobs)
    assert [job.arrival_s for job in workload.jobs] == [0.0, 0.04, 0.277]
    assert (len(first), len(second), len(third)) == (1500, 1024, 1300)
    assert first[:1024] == second == third[:1024] == range(1024)
    assert first[1024:] == range(1024, 1500) and third[1024:] == range(9 * 512, 9 * 512 + 276)
    assert [job.num_output_tokens for job in workload.jobs] == [7, 3, 5]
    assert workload.note == "" and "Apache-2.0" in workload.source


def test_a_partial_block_takes_the_first_tokens_of_its_id(write: Write) -> None:
    (job,) = read_mooncake(write(mooncake((5, 513, 1, [7, 3])))).jobs
    assert list(job.prompt) == [*range(7 * 512, 8 * 512), 3 * 512]
    assert job.arrival_s == 0.0


BUCKETS = [(3000 * bucket, 100, 1, [10 * bucket + i]) for bucket in (0, 1, 2, 4) for i in range(10)]


def test_mooncake_rounded_arrivals_are_spread_within_their_buckets(write: Write) -> None:
    path = write(mooncake(*BUCKETS))
    workload = read_mooncake(path, seed=1)
    times = [job.arrival_s for job in workload.jobs]
    assert times == sorted(times) and len(set(times)) == 40
    assert [int(t // 3) for t in times] == [0] * 10 + [1] * 10 + [2] * 10 + [4] * 10
    assert [job.prompt[0] // 512 for job in workload.jobs] == [row[3][0] for row in BUCKETS]  # the order of the file
    assert "rounded to 3 s (4 distinct times for 40 requests)" in workload.note
    assert "uniform time of up to 3 s (seed 1)" in workload.note
    assert workload == read_mooncake(path, seed=1) != read_mooncake(path, seed=2)


def test_mooncake_jitter_is_the_callers_choice(write: Write) -> None:
    path = write(mooncake(*BUCKETS))
    left = read_mooncake(path, jitter_s=0)
    assert {job.arrival_s for job in left.jobs} == {0.0, 3.0, 6.0, 12.0} and "left so" in left.note
    assert all(job.arrival_s % 3 < 0.5 for job in read_mooncake(path, jitter_s=0.5).jobs)
    for jitter_s in (-1, float("nan"), "3"):
        with pytest.raises(InvalidRequestError, match="jitter_s="):
            read_mooncake(path, jitter_s=jitter_s)


@pytest.mark.parametrize(
    "stamps",
    [
        [0, 0, 40, 277, 471, 471, 639],  # some repeat, as independent arrivals in whole milliseconds do
        [0, 1000, 2000, 3000, 4000],  # a clock: nothing repeats
        [0, 0, 0, 0],  # all at once
        [0, 0, 0, 1, 1, 1, 2, 2, 2],  # a flood, not rounded beyond the millisecond
    ],
)
def test_mooncake_leaves_other_arrivals_alone(write: Write, stamps: list[int]) -> None:
    workload = read_mooncake(write(mooncake(*((t, 5, 1, [i]) for i, t in enumerate(stamps)))))
    assert [job.arrival_s for job in workload.jobs] == [t / 1000 for t in stamps]
    assert workload.note == ""


@pytest.mark.parametrize(
    ("read", "text"), [(read_azure, AZURE), (read_mooncake, MOONCAKE), (read_mooncake, mooncake(*BUCKETS))]
)
def test_limit_gives_the_first_requests(write: Write, read: Callable[..., Any], text: str) -> None:
    path = write(text)
    whole, part = read(path), read(path, limit=2)
    assert part.jobs == whole.jobs[:2] and "first 2 requests" in part.note
    assert read(path, limit=1000).jobs == whole.jobs
    for limit in (0, -1, 1.5, True):
        with pytest.raises(InvalidRequestError, match="limit="):
            read(path, limit=limit)


def test_azure_reads_no_further_than_its_limit(write: Write) -> None:
    assert len(read_azure(write(AZURE + "\r\nnonsense"), limit=3)) == 3


def workload_of(path: Path) -> Workload:
    return read_requests(path).workload


@pytest.mark.parametrize(("text", "read"), [(AZURE, read_azure), (MOONCAKE, read_mooncake), (MEASURED, workload_of)])
def test_read_trace_tells_formats_apart(write: Write, text: str, read: Callable[..., Any]) -> None:
    for path in (write(text, "a.txt"), write(gzip.compress(text.encode()), "b.txt.gz")):
        assert read_trace(path) == read(path)
        assert read_trace(str(path), limit=1).jobs == read(path).jobs[:1]


def test_measured_run(write: Write) -> None:
    run = read_requests(write(MEASURED))
    assert run.arrival_s == (0.0, 1.0) and run.lag_s == (0.5, 0.0)
    assert run.queue_s == pytest.approx((0.6, 0.0))
    assert run.ttft_s == pytest.approx((1.0, 1.5)) and run.e2e_s == pytest.approx((4.0, 1.5))
    assert run.tpot_s == pytest.approx((1.0,)) and run.num_output_tokens == (4, 1)
    assert run.makespan_s == pytest.approx(4.0)
    queued = read_requests(write(MEASURED), clock="queued_ts")
    assert queued.arrival_s == pytest.approx((0.0, 0.5))
    assert queued.ttft_s == pytest.approx((0.5, 1.5)) and queued.makespan_s == pytest.approx(3.5)
    assert [len(job.prompt) for job in run.workload.jobs] == [10, 20]
    with pytest.raises(InvalidRequestError, match="'arrival_time' and 'queued_ts'"):
        read_requests(write(MEASURED), clock="wall")


def test_measured_rows_need_not_be_in_order(write: Write) -> None:
    swapped = "".join(reversed(MEASURED.splitlines(keepends=True)))
    run = read_requests(write(swapped))
    assert run.arrival_s == (0.0, 1.0) and run.num_output_tokens == (4, 1)
    assert run.ttft_s == pytest.approx((1.0, 1.5)) and run.lag_s == (0.5, 0.0)


# ---- what is refused ------------------------------------------------------------------------------------------------

GOOD_MOON, GOOD_RUN = MOONCAKE.splitlines(keepends=True)[0], MEASURED.splitlines(keepends=True)[0]


def bad_moon(**fields: Any) -> str:
    return GOOD_MOON + json.dumps(json.loads(MOONCAKE.splitlines()[1]) | fields) + "\n"


def bad_run(**fields: Any) -> str:
    return GOOD_RUN + json.dumps(json.loads(GOOD_RUN) | fields) + "\n"


def without(line: str, name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(line).items() if key != name}) + "\n"


ROW = "2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize(
    ("read", "text", "line", "problem"),
    [
        (read_azure, "TIMESTAMP,Context,GeneratedTokens\n" + ROW, 1, "no column ContextTokens"),
        (read_azure, ROW, 1, "no column TIMESTAMP"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,abc,4\n", 3, "ContextTokens='abc': is no whole number"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,4.5,4\n", 3, "ContextTokens='4.5': is no whole number"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,-4,4\n", 3, "ContextTokens='-4': must be at least 1"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,4,-4\n", 3, "GeneratedTokens='-4': must be at least 1"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,4,0\n", 3, "GeneratedTokens='0': must be at least 1"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,99999999,4\n", 3, "ContextTokens='99999999': must be"),
        (read_azure, HEADER + ROW + "yesterday,4,4\n", 3, "TIMESTAMP='yesterday': is no time"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47+00:00,4,4\n", 3, "is no time"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:45,4,4\n", 3, "comes after .* not sorted"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,4\n" + ROW, 3, "has 2 of 3 columns$"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,4,4,4\n", 3, "has 4 of 3 columns"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15", 3, "has 1 of 3 columns .*the file is cut"),
        (read_azure, HEADER + ROW + "2023-11-16 18:15:47,4,", 3, "GeneratedTokens='': .*the file is cut"),
        (read_azure, HEADER, 1, "a header but no rows"),
        (read_azure, "<!DOCTYPE html>\n<html>", 1, "is a web page"),
        (read_azure, "\n\n  <html>", 3, "is a web page"),
        (read_mooncake, GOOD_MOON + GOOD_MOON[:60], 2, "is no JSON.*the file is cut"),
        (read_mooncake, GOOD_MOON + GOOD_MOON[:60] + "\n" + GOOD_MOON, 2, "is no JSON[^(]*$"),
        (read_mooncake, GOOD_MOON + "[1, 2]\n", 2, "must be a JSON object"),
        (read_mooncake, GOOD_MOON + "[" * 100_000 + "\n", 2, "is no JSON"),
        (read_mooncake, GOOD_MOON + without(GOOD_MOON, "hash_ids"), 2, 'has no "hash_ids"; it has timestamp, '),
        (read_mooncake, GOOD_MOON + without(GOOD_MOON, "timestamp"), 2, 'has no "timestamp"'),
        (read_mooncake, bad_moon(input_length=1025), 2, "hash_ids has 2 ids, but input_length=1025 are 3 blocks"),
        (read_mooncake, bad_moon(input_length=512), 2, "hash_ids has 2 ids, but input_length=512 are 1 blocks"),
        (read_mooncake, bad_moon(hash_ids=7), 2, "hash_ids has 7"),
        (read_mooncake, bad_moon(hash_ids=[0, -1]), 2, "hash_ids has -1"),
        (read_mooncake, bad_moon(hash_ids=[0, "1"]), 2, "hash_ids has '1'"),
        (read_mooncake, bad_moon(hash_ids=[0, 2**60]), 2, "below 2\\*\\*53"),
        (read_mooncake, bad_moon(input_length="12 tokens"), 2, "input_length='12 tokens': is no whole number"),
        (read_mooncake, bad_moon(input_length=True), 2, "input_length=True: is no whole number"),
        (read_mooncake, bad_moon(output_length=-3), 2, "output_length=-3: must be at least 1"),
        (read_mooncake, bad_moon(output_length=2.5), 2, "output_length=2.5: is no whole number"),
        (read_mooncake, bad_moon(timestamp=-1), 2, "timestamp=-1: must be a finite number"),
        (read_mooncake, bad_moon(timestamp=float("nan")), 2, "timestamp=nan: must be a finite number"),
        (read_mooncake, bad_moon(timestamp="0"), 2, "timestamp='0': is no number"),
        (read_mooncake, mooncake((9, 5, 1, [0]), (8, 5, 1, [1])), 2, "timestamp=8 comes after 9.*not sorted"),
        (read_mooncake, "<html>", 1, "is a web page"),
        (read_requests, GOOD_RUN + without(GOOD_RUN, "queued_ts"), 2, 'has no "queued_ts"'),
        (read_requests, bad_run(input_toks=0), 2, "input_toks=0: must be at least 1"),
        (read_requests, bad_run(first_token_ts=None), 2, "first_token_ts=None: is no number"),
        (read_requests, bad_run(first_token_ts=1.0), 2, "stamps are not in order"),
        (read_requests, GOOD_RUN + GOOD_RUN[:30], 2, "the file is cut"),
        (read_trace, "a,b,c\n1,2,3\n", 1, "is of no known format: 'a,b,c'"),
        (read_trace, "<html>", 1, "is a web page"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_file_and_line(
    write: Write, read: Callable[..., Any], text: str, line: int, problem: str
) -> None:
    path = write(text)
    with pytest.raises(TraceFileError, match=f"line {line}: .*{problem}") as caught:
        read(path)
    assert str(path) in str(caught.value) and isinstance(caught.value, CBServeError)


READERS = [read_azure, read_mooncake, read_requests, read_trace]


@pytest.mark.parametrize("read", READERS)
def test_files_that_cannot_be_read(write: Write, tmp_path: Path, read: Callable[..., Any]) -> None:
    for data in ("", "\n  \n"):
        with pytest.raises(TraceFileError, match="is empty"):
            read(write(data))
    with pytest.raises(TraceFileError, match="nowhere.csv: cannot be read .*No such file"):
        read(tmp_path / "nowhere.csv")
    with pytest.raises(TraceFileError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(TraceFileError, match="line 1: is no UTF-8 text"):
        read(write(b"\xff\xfe\x00\x01"))


SECONDS = [f"2023-11-16 18:{i // 60:02}:{i % 60:02},{i * i % 997 + 1},{i % 7 + 1}\n" for i in range(3000)]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_azure, HEADER + "".join(SECONDS)),
        (read_mooncake, mooncake(*((i, 5, i * i % 997 + 1, [i]) for i in range(3000)))),
    ],
)
def test_gzip(write: Write, read: Callable[..., Any], text: str) -> None:
    whole = gzip.compress(text.encode())
    assert read(write(whole, "trace.gz")).jobs == read(write(text, "trace.txt")).jobs
    for size in (len(whole) // 2, len(whole) - 4, 12):
        with pytest.raises(TraceFileError, match=r"after line \d+: the .gz file ends early"):
            read(write(whole[:size], "cut.gz"))
    with pytest.raises(TraceFileError, match="the .gz file is damaged"):
        read(write(whole[:10] + b"\xff" * 20 + whole[30:], "damaged.gz"))


# ---- URLs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[str]:
    bodies = {
        "/conv.csv": AZURE.encode(),
        "/raw?file=conv": gzip.compress(AZURE.encode()),
        "/page": b"<html>Sign in</html>",
        "/cut.csv": AZURE.encode(),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(self.path)
            if body is None:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + 100 * (self.path == "/cut.csv")))
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, *_: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(httpd.serve_forever, poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_urls(write: Write, server: str) -> None:
    path = write(AZURE, "conv.csv")
    jobs = read_azure(path).jobs
    assert read_azure(path.as_uri()).jobs == read_azure(f"{server}/conv.csv").jobs == jobs
    assert read_trace(f"{server}/raw?file=conv").jobs == jobs  # gzipped, whatever its name
    for url, problem in (
        (f"{server}/none.csv", "cannot be read .*404"),
        (f"{server}/page", "line 1: is a web page"),
        (f"{server}/cut.csv", "cannot be read .*IncompleteRead"),
        ("http://127.0.0.1:1/x.csv", "cannot be read"),
        ((path.parent / "none.csv").as_uri(), "cannot be read"),
    ):
        with pytest.raises(TraceFileError, match=problem):
            read_azure(url)
