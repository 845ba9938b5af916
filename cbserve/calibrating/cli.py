"""`cbserve calibrate` and `cbserve twin`: their arguments, and what they print. Imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from cbserve.errors import CBServeError
from cbserve.files import require_writable
from cbserve.sim.settings import count, positive, whole

if TYPE_CHECKING:
    from cbserve.calibrating.measured_run import Agreement
    from cbserve.calibration import Calibration
    from cbserve.llm import LLM
    from cbserve.viz.table import Table

BUDGET_S = 40.0
CALIBRATE = "measure what a step costs on this machine, or fit a run of another engine"
TWIN = "predict a run on this machine, run it, and compare"
_PREDICTED = ("", "measured", "predicted", "error", "target", "kept")
_FITTED = ("", "measured", "fitted", "error", "target", "within")  # to these very numbers: no prediction


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "cbserve calibrate [OPTION ...]; cbserve calibrate --help lists the options"
    _add_model(parser, " (with --from: the model in META.json)")
    _add_measuring(parser)
    parser.add_argument(
        "--from", dest="requests", metavar="REQUESTS.jsonl",
        help="fit this run of vLLM instead: what LLMServingSim's bench wrote of it, a JSON object a request with "
        "input_toks, output_toks, arrival_time, queued_ts, scheduled_ts, first_token_ts and last_token_ts (seconds)",
    )  # fmt: skip
    parser.add_argument("--meta", metavar="META.json", help="its settings; default: the file beside it")
    parser.add_argument("--timeseries", metavar="CSV", help="its state over time; default: the file beside it, if any")
    parser.add_argument("--gpu", help="with --from: a GPU of the table in place of the one in META.json")
    parser.add_argument(
        "--clock", choices=["arrival_time", "queued_ts"], default="arrival_time",
        help="with --from: when a request arrives: as the client sent it (the default), or as the engine queued it",
    )  # fmt: skip
    parser.add_argument(
        "--constants",
        metavar="FILE",
        help="with --from: compare with these constants, as --out wrote them; fit nothing",
    )
    parser.add_argument("--out", metavar="FILE", help="write the calibration here, not into the cache folder")
    parser.add_argument("--charts", metavar="FOLDER", help="with --from: write running, waiting and KV use as SVG")


def add_twin_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.usage = (
        "cbserve twin [OPTION ...]; cbserve twin --help lists the options"  # a bad value is one line below it
    )
    parser.add_argument("--requests", type=whole(2, 10**5), default=40, help="default 40")
    parser.add_argument("--seed", type=whole(0, 10**18), default=0)
    parser.add_argument(
        "--rate", type=positive, help="requests a second; default: 70 %% of what the machine could serve"
    )
    parser.add_argument("--slots", type=count, default=8, help="sequences that run at a time, default 8")
    parser.add_argument("--chunk", type=count, default=256, help="token budget of a step, default 256")
    parser.add_argument("--repeat", type=whole(1, 1000), default=1, help="run so often and compare with the median")
    parser.add_argument("--calibrate", action="store_true", help="measure the machine anew, whatever there is")
    _add_measuring(parser)
    parser.add_argument("--out", metavar="FILE.svg", help="write the picture")


def _add_model(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--model", help=f"default: smollm2-135m{more}")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=positive, metavar="SECONDS", help=f"time to measure, default {BUDGET_S:g}")
    parser.add_argument(
        "--cpu-time", action="store_true",
        help="one thread, and its CPU time in place of the clock on the wall: for a machine that others use; a "
        "calibration by it is kept beside the other one",
    )  # fmt: skip


def run_calibrate(options: argparse.Namespace) -> int:
    if options.requests is not None:
        return _calibrate_from(options)
    for name in ("meta", "timeseries", "gpu", "constants", "charts"):
        if getattr(options, name) is not None:
            raise CBServeError(f"--{name} belongs to --from REQUESTS.jsonl; give that too")
    from cbserve.calibration import place_for

    require_writable(place_for(options.out, options.cpu_time))  # before a minute is spent
    calibration = _measure(_llm(options), options)
    saved = _save(calibration, options.out)
    _print_calibration(calibration)
    print(saved)
    _print_doubts(calibration)
    return 0


def run_twin(options: argparse.Namespace) -> int:
    if options.out is not None:
        picture = Path(options.out)
        if picture.suffix.lower() != ".svg":
            raise CBServeError(f"--out {options.out}: the picture is an SVG; give a name that ends in .svg")
        require_writable(picture)
    from cbserve.calibrating.advice import verdict
    from cbserve.calibrating.machine import drift
    from cbserve.twin import LOAD, CpuClock, Twin, chat_workload, figures, paced, predict
    from cbserve.twin import run as run_for_real

    workload = chat_workload(options.requests, options.seed)
    llm = _llm(options, max_num_seqs=options.slots, max_num_batched_tokens=options.chunk)
    calibration = _calibration_for(llm, options)
    workload = paced(workload, llm, calibration, options.rate, options.seed)
    which = "as given" if options.rate is not None else f"{LOAD:.0%} of what this machine could serve; --rate sets it"
    settings = f"{options.slots} slots, {options.chunk} tokens a step"
    print(f"{len(workload)} requests; {workload.note} ({which}); {settings}", flush=True)
    predicted = predict(workload, llm, calibration)
    timer = _timer(options)
    print("predicted: " + ", ".join(f"{name} {seconds:.4g} s" for name, seconds in figures(predicted).items()))
    before = drift(llm, calibration, timer)
    print(f"a step takes {before:+.0%} compared with its calibration{_load()}")
    print("now for real ...", flush=True)
    clock = CpuClock() if options.cpu_time else None
    measured = tuple(run_for_real(workload, llm, clock) for _ in range(options.repeat))
    twin = Twin(workload, predicted, measured)
    if options.out is not None:  # before anything is printed: who reads that may go away
        twin.chart().save(options.out)
    print(_table(twin.agreement(), f"{_where(calibration)}{_load()}"))
    after = drift(llm, calibration, timer)
    print(f"after the run, a step takes {after:+.0%} compared with its calibration")
    print(verdict(twin.agreement(), before, after, options.cpu_time))
    if options.out is not None:
        print(f"picture: {options.out}")
    return 0


def _calibration_for(llm: LLM, options: argparse.Namespace) -> Calibration:
    from cbserve.calibration import CalibrationError, load_calibration
    from cbserve.twin import why_stale

    try:
        found = load_calibration(is_cpu_time=options.cpu_time)
        why = "asked for" if options.calibrate else why_stale(found, llm, _timer(options))
        if not why:
            print(f"calibration: {found}")
            _print_doubts(found)
            return found
        print(f"calibrating anew: {why}")
    except CalibrationError as error:
        print(f"calibrating first: {error}")
    calibration = _measure(llm, options)
    saved = _save(calibration)
    print(f"calibration: {calibration}\n{saved}")
    _print_doubts(calibration)
    return calibration


def _llm(
    options: argparse.Namespace, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
) -> LLM:
    try:
        from cbserve.llm import LLM
    except ImportError as error:
        raise CBServeError(f"the engine needs torch ({error}); python -m cbserve setup installs it") from error

    with redirect_stdout(sys.stderr):
        llm = LLM(
            "smollm2-135m" if options.model is None else options.model,
            device=options.device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
    if options.cpu_time:
        _one_thread(llm)
    return llm


def _one_thread(llm: LLM) -> None:
    import torch

    if llm.device.type != "cpu":
        raise CBServeError(f"--cpu-time on {llm.device}: CPU time says nothing of a GPU; leave it away")
    llm.executor.num_threads = 1
    torch.set_num_threads(1)  # what is measured beside the steps


def _timer(options: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if options.cpu_time else time.perf_counter


def _measure(llm: LLM, options: argparse.Namespace) -> Calibration:
    from cbserve.calibrating.machine import calibrate
    from cbserve.progress_bar import bar, told

    budget_s = BUDGET_S if options.budget is None else options.budget
    with told(f"calibrating, about {budget_s:.3g} s"), bar(
        total=100, desc="calibrating", bar_format="{l_bar}{bar}| {elapsed}"
    ) as done:  # fmt: skip
        return calibrate(llm, budget_s, lambda share: done.update(round(100 * share) - done.n), _timer(options))


def _save(calibration: Calibration, out: str | None = None) -> str:
    """Write it to `out` or its place in the cache folder. Returns where, what it replaced, and how to use it."""
    from cbserve.calibration import CalibrationError, load_calibration, place_for
    from cbserve.files import tilde

    try:
        old = load_calibration(place_for(out, calibration.is_cpu_time))
        replaced = (
            f", in place of one of {old.created[:16].replace('T', ' ')} (each step timed {_times(old)} times, now "
        )
        replaced += f"{_times(calibration)})"
    except CalibrationError:  # there was none that could be used
        replaced = ""
    path = calibration.save(out)
    use = "this" if out is None else quote(str(path))
    return f"saved to {tilde(path)}{replaced}; `cbserve sim --gpu {use}` takes it"


def _times(calibration: Calibration) -> int:
    return min((point.repeats for point in calibration.points), default=0)


def _print_calibration(calibration: Calibration) -> None:
    from cbserve.viz.table import table

    rows = [
        (
            p.kind, p.num_rows, p.num_tokens, p.context, f"{1e3 * p.seconds:.2f}",
            f"{1e3 * p.low_s:.2f} - {1e3 * p.high_s:.2f}", f"{1e3 * p.fitted_s:.2f}",
            f"{p.fitted_s / p.seconds - 1:+.0%}",
        )
        for p in calibration.points
    ]  # fmt: skip
    header = ("step", "rows", "tokens", "context", "ms", "quartiles", "fitted ms", "off")
    print(table(header, rows, _where(calibration)))
    print(_constants(calibration))


def _print_doubts(calibration: Calibration) -> None:
    from cbserve.calibrating.advice import doubts

    if said := doubts(calibration):
        print(said)


def _where(calibration: Calibration) -> str:
    return f"{calibration.model.name} on {calibration.device}; {calibration.clock}"


def _constants(calibration: Calibration) -> str:
    rows = [*calibration.constants(), ("ceilings", calibration.ceilings)]
    return "\n".join(f"{name:<18} {text}" for name, text in rows)


def _load() -> str:
    return f", load average {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""


def _table(rows: Sequence[Agreement], caption: str, header: Sequence[str] = _PREDICTED) -> Table:
    from cbserve.viz.table import table

    return table(header, [row.row() for row in rows], caption)


def _calibrate_from(options: argparse.Namespace) -> int:
    from cbserve.calibrating.measured_run import read_series, read_settings
    from cbserve.calibrating.run_fit import beside, compare, fit_run, series_charts
    from cbserve.calibration import load_calibration
    from cbserve.workloads.measured import read_requests

    for name in ("cpu_time", "budget", "device"):
        if getattr(options, name):
            raise CBServeError(
                f"--{name.replace('_', '-')} is of a measurement of this machine, and --from of another engine's run; "
                "leave one away"
            )
    run = read_requests(options.requests, options.clock)
    meta, csv = (
        beside(options.requests, what) if given is None else given
        for given, what in ((options.meta, "meta.json"), (options.timeseries, "timeseries.csv"))
    )
    settings = read_settings(meta, options.model, options.gpu)
    measured = read_series(csv) if options.timeseries is not None or os.path.isfile(csv) else None
    if options.charts is not None:  # before minutes are spent
        if measured is None:
            raise CBServeError(f"--charts draws the state over time, and there is no {csv}; give it with --timeseries")
        _make_folder(options.charts)
    if options.out is not None:
        require_writable(Path(options.out))
    name = os.path.basename(options.requests)
    if options.constants is not None:
        fit = compare(run, settings, load_calibration(options.constants))
    else:
        from cbserve.progress_bar import bar, told

        with told("fitting, by simulating the run again and again"), bar(desc="simulating", unit=" runs") as done:
            fit = fit_run(run, settings, name, lambda _: done.update())
        if options.out is not None:
            print(_save(fit.calibration, options.out))
    print(_constants(fit.calibration))
    header = _FITTED if fit.calibration.environment.get("fitted_to") == name else _PREDICTED
    print(_table(fit.agreement, f"{len(run.workload)} requests, {settings.engine}, {settings.gpu.name}, "
                 f"{settings.model.name}; times count from {run.clock}", header))  # fmt: skip
    for name, error in fit.median_errors.items():
        print(f"median |error| of {name}, request by request: {error:.1%}")
    if measured is not None:
        for name, (error, chart) in series_charts(measured, fit.answered, settings).items():
            print(f"{name}: mean |difference| {error:.3g} at {len(measured.times_s)} moments")
            if options.charts is not None:
                chart.save(Path(options.charts, f"{name}.svg"))
    return 0


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CBServeError(f"--charts: cannot make the folder {path!r} ({why}); give another") from None
