"""Readers of public traces: the Azure LLM inference traces (CSV) and Mooncake's (JSON lines, with prefix hashes)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby, islice, pairwise
from statistics import median
from typing import Any

from cbserve.workloads import given
from cbserve.workloads.measured import read_requests
from cbserve.workloads.tokens import OWN_TOKENS, Ranges, joined, own_tokens
from cbserve.workloads.trace_files import (
    Source,
    TraceFileError,
    field,
    integer,
    json_object,
    number,
    read_lines,
    rows_of,
)
from cbserve.workloads.workload import Job, Workload

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 512  # of Mooncake's hashes


def read_trace(source: Source, limit: int | None = None) -> Workload:
    """A trace in any of the formats that are known here; its first line says which.

    Raises:
        TraceFileError: it is none of them, or cannot be read.
    """
    lines = read_lines(source)
    _, first, _ = next(lines)
    lines.close()  # type: ignore[attr-defined]
    if "TIMESTAMP" in first:
        return read_azure(source, limit)
    if "hash_ids" in first:
        return read_mooncake(source, limit)
    if "input_toks" in first:
        workload = read_requests(source).workload
        return workload if limit is None else workload.first(limit)
    raise TraceFileError(
        f"{source}, line 1: is of no known format: {first[:60]!r}; there are Azure's CSV ({','.join(AZURE_COLUMNS)}), "
        'Mooncake\'s JSON lines ("hash_ids") and the requests of a vLLM benchmark ("input_toks")'
    )


def read_azure(source: Source, limit: int | None = None) -> Workload:
    """An Azure LLM inference trace (2023 or 2024): a path or URL of a .csv or .csv.gz. Prompts share nothing.

    Times count from the first arrival, to the microsecond. A plain file that is cut within its last number cannot be
    told from a whole one, because the published files end without a line feed too: it is read, and `note` says so. A
    .gz and a URL tell by themselves whether they are whole.

    Args:
        limit: read only so many requests.

    Raises:
        TraceFileError: names file and line: a column is missing, a value is no number, negative or not in order, a line
            is cut, there is a web page instead, or nothing.
    """
    if limit is not None:
        given.integer("limit", limit, 1, ", or None")
    ends_whole = True

    def seen() -> Iterator[tuple[int, str, bool]]:
        nonlocal ends_whole
        for line in read_lines(source):
            ends_whole = line[2]
            yield line

    lines = seen()
    header = next(rows_of(source, lines, _azure_header))
    first: datetime | None = None
    before = 0.0, ""

    def parse(text: str) -> tuple[float, int, int]:
        nonlocal first, before
        values = text.split(",")
        if len(values) != len(header):
            raise ValueError(f"has {len(values)} of {len(header)} columns")
        row = dict(zip(header, values, strict=True))
        stamp = row["TIMESTAMP"]
        try:
            at = datetime.fromisoformat(stamp)
            first = first or at
            arrival_s = (at - first).total_seconds()
        except (ValueError, TypeError):  # TypeError: with a time zone after one without
            raise ValueError(f"TIMESTAMP={stamp!r}: is no time such as 2023-11-16 18:15:46.6805900") from None
        if arrival_s < before[0]:
            raise ValueError(f"TIMESTAMP={stamp} comes after {before[1]}: the rows are not sorted")
        before = arrival_s, stamp
        prompt = integer(row, "ContextTokens", 1, OWN_TOKENS)
        return arrival_s, prompt, integer(row, "GeneratedTokens", 1, OWN_TOKENS)

    rows = islice(rows_of(source, lines, parse), limit)
    jobs = [Job(arrival_s, own_tokens(i, prompt), output) for i, (arrival_s, prompt, output) in enumerate(rows)]
    if not jobs:
        raise TraceFileError(f"{source}, after line 1: has a header but no rows")
    origin = "in the format of the Azure LLM inference traces, https://github.com/Azure/AzurePublicDataset, CC-BY-4.0"
    open_end = "" if ends_whole else "the last line has no line feed, so its answer may be longer if the file was cut"
    note = "; ".join(filter(None, (_limited(jobs, limit), open_end)))
    return Workload(_stem(source), jobs, f"{_name(source)}, {origin}", note)


def _azure_header(text: str) -> list[str]:
    header = [name.strip().strip('"') for name in text.split(",")]
    for name in AZURE_COLUMNS:
        if name not in header:
            raise ValueError(f"has no column {name}; it has {text[:100]!r}, and needs {','.join(AZURE_COLUMNS)}")
    return header


def read_mooncake(source: Source, limit: int | None = None, jitter_s: float = 3.0, seed: int = 0) -> Workload:
    """A Mooncake trace (Qin et al. 2025, FAST): a path or URL of a .jsonl or .jsonl.gz. Prefix hashes are kept.

    `hash_ids[i]` names a prompt's first i + 1 blocks of 512 tokens, the last one perhaps partial: equal ids mean equal
    prefixes. Block i becomes the first tokens of range(512 * id, 512 * id + 512), so that prompts are equal exactly as
    far as their ids are.

    Arrivals of some of these files are rounded to 3 s. They count as rounded where timestamps repeat, at least two
    requests to each on the mean, and lie at least 0.1 s apart on the median. Then each request moves by a uniform time
    between its timestamp and the next one, at most `jitter_s`; the order of the file stays. `note` says so. Other files
    are left alone.

    Args:
        limit: only so many requests; the file is read to its end all the same, to see whether its times are rounded.
        jitter_s: how far a rounded arrival may move; 0 leaves them as they are.
        seed: of the jitter.

    Raises:
        TraceFileError: names file and line: a field is missing, no number, negative or not in order, `hash_ids` has not
            one id for each block of `input_length`, a line is cut, there is a web page instead, or nothing.
    """
    if limit is not None:
        given.integer("limit", limit, 1, ", or None")
    given.number("jitter_s", jitter_s, lambda v: 0 <= v < 1e9, "a number of seconds of at least 0")
    given.seed(seed)
    before = 0.0

    def parse(text: str) -> tuple[float, range | Ranges, int]:
        nonlocal before
        row = json_object(text)
        stamp = number(row, "timestamp")
        if stamp < before:
            raise ValueError(f"timestamp={stamp:g} comes after {before:g}: the rows are not sorted")
        before = stamp
        return stamp / 1000, _mooncake_prompt(row), integer(row, "output_length", 1)

    rows = list(rows_of(source, read_lines(source), parse))
    arrivals, note = _spread([row[0] - rows[0][0] for row in rows], jitter_s, seed)
    jobs = [Job(at, prompt, output) for at, (_, prompt, output) in zip(arrivals[:limit], rows[:limit], strict=True)]
    origin = "in the format of the Mooncake traces, https://github.com/kvcache-ai/Mooncake, Apache-2.0"
    note = "; ".join(part for part in (note, _limited(jobs, limit)) if part)
    return Workload(_stem(source), jobs, f"{_name(source)}, {origin}", note)


def _mooncake_prompt(row: dict[str, Any]) -> range | Ranges:
    num_tokens, ids = integer(row, "input_length", 1, OWN_TOKENS), field(row, "hash_ids")
    blocks = -(-num_tokens // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != blocks:
        held = f"{len(ids)} ids" if isinstance(ids, list) else repr(ids)[:40]
        raise ValueError(f"hash_ids has {held}, but input_length={num_tokens} are {blocks} blocks of {BLOCK_TOKENS}")
    for block_id in ids:
        if type(block_id) is not int or not 0 <= block_id < 2**53:
            raise ValueError(f"hash_ids has {block_id!r}: ids must be whole numbers of at least 0 and below 2**53")
    starts = [block_id * BLOCK_TOKENS for block_id in ids]
    pieces = [range(start, start + BLOCK_TOKENS) for start in starts]
    pieces[-1] = pieces[-1][: num_tokens - BLOCK_TOKENS * (blocks - 1)]
    return joined(pieces)


def _spread(times: Sequence[float], jitter_s: float, seed: int) -> tuple[list[float], str]:
    """Arrivals with the rounding taken back, and a note about it; see `read_mooncake`."""
    buckets = [(at, len(list(group))) for at, group in groupby(times)]
    apart = [b[0] - a[0] for a, b in pairwise(buckets)]
    if not apart or len(times) < 2 * len(buckets) or median(apart) < 0.1:
        return list(times), ""
    step = median(apart)
    about = f"arrivals are rounded to {step:g} s ({len(buckets)} distinct times for {len(times)} requests)"
    if not jitter_s:
        return list(times), f"{about} and left so"
    rng = given.generator(seed)
    spread: list[float] = []
    for (at, count), width in zip(buckets, [*apart, step], strict=True):
        spread += sorted(at + rng.random() * min(width, jitter_s) for _ in range(count))
    return spread, f"{about}; each was moved by a uniform time of up to {min(step, jitter_s):g} s (seed {seed})"


def _limited(jobs: Sequence[Job], limit: int | None) -> str:
    return f"first {limit} requests" if limit == len(jobs) else ""


def _name(source: Source) -> str:
    return os.path.basename(os.fspath(source)) or str(source)


def _stem(source: Source) -> str:
    return _name(source).split(".")[0]
