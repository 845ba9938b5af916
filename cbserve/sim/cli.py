"""The command `cbserve sim`. Only the standard library is imported here before it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from shlex import join
from typing import Any

from cbserve.errors import CBServeError
from cbserve.sim.settings import OPTIONS, Settings, flag_of, in_options, switch

SUMMARY = "predict how a GPU serves a trace: the engine's own scheduler on a virtual clock, with a cost model"
EPILOG = """examples:
  cbserve sim --trace conv.csv.gz --rate 1.5 --slo ttft=0.5,itl=0.1 --out run.jsonl
  cbserve sim --requests 3000 --gpu h100 --sweep "rate=2,4,8;chunk=256,512,2048" --out sweep.jsonl
"""
_GROUPS = {
    "traffic": ("trace", "workload", "requests", "seed", "limit", "rate", "max_tokens"),
    "model and device": (
        "model", "max_model_len", "gpu", "dtype_bytes", "kv_dtype_bytes", "eff_compute", "eff_memory", "overhead",
    ),
    "scheduling": ("batching", "batch_size", "chunk", "max_num_seqs", "policy"),
    "memory": ("utilization", "num_blocks", "block_size", "prefix_caching", "preemption", "swap_space"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every field of `Settings`, and what becomes of the result."""
    parser.usage = "cbserve sim [OPTION ...]; cbserve sim --help lists the options"  # a bad value is one line below it
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name)
    result = parser.add_argument_group("result")
    _add(result, "slo")
    result.add_argument(
        "--out",
        type=Path,
        metavar="FILE.jsonl",
        help="the trace of the run, or the points of a sweep: JSON lines, whatever the name ends in",
    )
    result.add_argument("--report", type=Path, metavar="FILE.html", help="the report (beside --out)")
    result.add_argument("--no-report", action="store_true", help="write no report")
    result.add_argument("--json", action="store_true", help="print JSON, not a table")
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--sweep", metavar="GRID", help='"rate=0.5,1,2;chunk=256,512": all combinations; resumes')
    sweep.add_argument("--jobs", type=OPTIONS["requests"].metadata["parse"], help="processes (one a core)")
    sweep.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="an existing Ray cluster instead; its nodes need cbserve, and the trace by the same name",
    )


def _add(group: Any, name: str) -> None:
    option = OPTIONS[name]
    parse, help, choices = (option.metadata[key] for key in ("parse", "help", "choices"))
    more: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if parse is switch else {"type": parse}
    if choices:
        more |= {"choices": choices}
    elif parse is not switch:
        more |= {"metavar": name.upper()}
    default = option.default
    shown = f" ({default})" if default not in (None, (), False) else ""
    group.add_argument(flag_of(name), default=default, help=(help + shown).replace("%", "%%"), **more)


def run(options: argparse.Namespace) -> int:
    """Raises CBServeError: bad input, always before anything is simulated."""
    try:
        return _run(options)
    except CBServeError as error:
        from cbserve.calibration import CalibrationError

        if isinstance(error, CalibrationError):  # it speaks of the fields of a file, not of options
            raise
        raise CBServeError(in_options(str(error))) from error


def _run(options: argparse.Namespace) -> int:
    settings = Settings(**{name: getattr(options, name) for name in OPTIONS})
    if options.no_report and options.report:
        raise CBServeError("--report and --no-report: give one of the two")
    if options.sweep is None and (options.jobs or options.cluster):
        raise CBServeError(f"{'--jobs' if options.jobs else '--cluster'} needs --sweep: one run is one process")
    from cbserve.files import require_writable

    if options.out is not None:
        require_writable(options.out)
    report = options.report or (options.out.with_suffix(".html") if options.out and not options.no_report else None)
    if report is not None and report == options.out:
        raise CBServeError(f"--out and the report would both be {report}; name the one --out run.jsonl")
    if report is not None:
        require_writable(report)
    if options.sweep is not None:
        return _sweep(options, settings, report)
    return _single(options, settings, report)


def _single(options: argparse.Namespace, settings: Settings, report: Path | None) -> int:
    from tqdm import tqdm

    from cbserve.sim.assumptions import assumptions
    from cbserve.sim.paths import require_no_other_file
    from cbserve.sim.point import numbers, prepare
    from cbserve.sim.report import write_report
    from cbserve.sim.series import Series
    from cbserve.sim.telling import TellingPart
    from cbserve.sim.words import tables

    settings.check()
    if options.out is not None:
        require_no_other_file(options.out)
    point, seen, telling = prepare(settings), Series(), TellingPart()
    rests_on = assumptions(point)
    listeners = [] if report is None else [seen.add, telling.add]
    begun = time.perf_counter()
    with tqdm(total=len(point.workload), unit="request", delay=1, leave=False, disable=None) as bar:
        simulation, work = point.run(options.out, lambda output: bar.update() and None, listeners)
    took = time.perf_counter() - begun
    found = numbers(simulation, work, settings)
    if report is not None:  # before anything is printed: who reads that may go away
        title = f"{point.device.cost.model.name} on {point.device.name}: {point.workload.name}"
        part = telling.part(simulation.trace.meta)
        write_report(report, seen, part, found, settings.slo, title, rests_on, _command())
    if options.json:
        about = {"settings": point.resolved(), "assumptions": rests_on}
        print(json.dumps(about | {"numbers": found}, indent=2))
    else:
        for table in tables(found, settings.slo):
            print(f"{table}\n")
        print("\n".join(rests_on))
        print(f"{found['makespan_s']:,.1f} s of serving were simulated in {took:.2f} s.")
    _say_where(options, report)
    return 0


def _sweep(options: argparse.Namespace, settings: Settings, report: Path | None) -> int:
    from tqdm import tqdm

    from cbserve.sim.pool import Cluster, Processes, Runner, load_ray
    from cbserve.sim.sweep import Record, check, grid, key_of, read_axes, sweep
    from cbserve.sim.sweep_report import about, refusals, sweep_table, write_sweep_report

    if options.out is None:
        raise CBServeError("--sweep needs --out sweep.jsonl: what is done stands there, and the next time goes on")
    if options.cluster and options.jobs:
        raise CBServeError("--jobs has no effect with --cluster, whose size decides")
    axes = read_axes(options.sweep)
    points = grid(settings, axes)
    if options.cluster and any(point.gpu == "this" for point in points):
        raise CBServeError("--gpu this is this machine, not those of the cluster; take --jobs")
    check(points)
    if options.cluster:
        load_ray()
    record = Record(options.out)
    if record.dropped:
        print(f"cbserve: the last line of {options.out} was cut; its point runs again", file=sys.stderr)
    if record.changed:
        lines = ", ".join(map(str, record.changed))
        print(
            f"cbserve: {options.out}, line {lines}: edited since it was written; its point runs again", file=sys.stderr
        )
    runner: Runner = Cluster(options.cluster) if options.cluster else Processes(options.jobs or _cores())
    try:
        with tqdm(total=len(points), unit="point", disable=None) as bar:
            rows, lost = sweep(points, record, runner, lambda num_done: bar.update(num_done) and None)
    except KeyboardInterrupt:
        kept = sum(key_of(point) in record.found for point in points)
        said = f"{kept:,} of {len(points):,} points are kept in {options.out}; the same command goes on"
        print(f"cbserve: {said}", file=sys.stderr)
        raise
    slo = dict(settings.slo)
    if report is not None and rows:
        write_sweep_report(report, rows, axes, slo, [*about(points, rows, axes), f"Made by: {_command()}"])
    print(json.dumps(rows, indent=2) if options.json else sweep_table(rows, axes, slo))
    for at, why in refusals(rows, axes):
        print(f"cbserve: refused: {at}: {why}", file=sys.stderr)
    for point, reason in lost:
        where = ", ".join(f"{name.replace('_', '-')}={getattr(point, name)}" for name in axes)
        print(f"cbserve: {where}: {reason}; run the command again to try it once more", file=sys.stderr)
    _say_where(options, report if rows else None)
    return 1 if lost else 0


def _say_where(options: argparse.Namespace, report: Path | None) -> None:
    files = [str(path) for path in (options.out, report) if path is not None]
    if files and not options.json:
        print(f"Written: {', '.join(files)}")


def _command() -> str:
    return join(["cbserve", *sys.argv[1:]])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
