"""`calibrate --from`: three constants of the cost model, such that a simulated run answers as a real one did."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from cbserve.calibrating.fit import Constant, least_squares
from cbserve.calibrating.measured_run import (
    SERIES,
    Agreement,
    Answered,
    RunSettings,
    Series,
    agreement,
    mean_errors,
    median_errors,
    require_times,
    series_of,
    serve_again,
)
from cbserve.calibration import Calibration, CalibrationError
from cbserve.hardware.roofline import Roofline
from cbserve.viz import lines
from cbserve.viz.figure import Figure
from cbserve.workloads.measured import MeasuredRun

_POLISH = 30  # simulations: a run is a staircase in its constants, on which derivatives say little
_GROUPS = 10  # of requests that arrived one after the other: neighbours are not independent
_NAMES = {"running": "sequences running", "waiting": "requests waiting", "kv_cache_pct": "KV blocks in use, %"}


@dataclass(frozen=True)
class RunFit:
    """A calibration and the run that it was fitted to, side by side."""

    calibration: Calibration
    agreement: tuple[Agreement, ...]
    median_errors: Mapping[str, float]
    answered: Answered


def fit_run(
    run: MeasuredRun,
    settings: RunSettings,
    source: str = "",
    progress: Callable[[int], object] | None = None,
    max_rounds: int = 6,
) -> RunFit:
    """Fit eff_compute, eff_memory and overhead_s to TTFT and E2E of every request; `overlap` stays 1, and the host link
    at the table's peak: such a run does not use it.

    Residuals are log(predicted / measured) of both times of each request. Each evaluation simulates the whole run. The
    search begins at `Roofline.on`'s assumption for all GPUs. Error bars are a jackknife over tenths of the requests, of
    the linearised problem. eff_memory and overhead_s can nearly take each other's place where all decode steps load
    about as much; wide bars say so, and then only their joint effect is known.

    Args:
        source: what to call the run in the calibration.
        progress: called with the number of simulations so far.

    Raises:
        RunFileError: a request cannot be served with these settings, or took no time.
    """
    require_times(run)
    base = Roofline.on(settings.gpu, settings.model, dtype_bytes=settings.dtype_bytes, block_size=settings.block_size)
    measured = np.log([*run.ttft_s, *run.e2e_s])
    count = 0

    def residuals(constants: Mapping[str, float]) -> np.ndarray:
        nonlocal count
        answered = serve_again(run, settings, replace(base, **constants))
        count += 1
        if progress is not None:
            progress(count)
        return np.log([*answered.ttft_s, *answered.e2e_s]) - measured

    overhead_step = 0.12 * float(np.mean(run.tpot_s))
    constants = {
        "eff_compute": Constant(base.eff_compute, 0.05, 1.0, 0.12),
        "eff_memory": Constant(base.eff_memory, 0.05, 1.0, 0.12),
        "overhead_s": Constant(base.overhead_s, 0.0, 0.1, overhead_step),
    }
    n = len(run.ttft_s)
    groups = [i * _GROUPS // n for i in range(n)] * 2
    fit = least_squares(residuals, constants, groups, max_rounds, tolerance=0.02, polish=_POLISH)
    calibration = Calibration(
        model=settings.model,
        device=settings.gpu.name,
        flops=settings.gpu.flops,
        memory_bytes_s=settings.gpu.memory_bytes_s,
        values=fit.values | {"overlap": 1.0, "host_link_bytes_s": settings.gpu.host_link_bytes_s},
        errors=fit.errors,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype_bytes=settings.dtype_bytes,
        block_size=settings.block_size,
        environment={"engine": settings.engine, "fitted_to": source, "clock": run.clock, "num_requests": n},
    )
    return compare(run, settings, calibration)


def compare(run: MeasuredRun, settings: RunSettings, calibration: Calibration) -> RunFit:
    """The run simulated with the constants of `calibration`, beside what was measured.

    Raises:
        RunFileError: a request cannot be served with these settings, or took no time.
        CalibrationError: the constants are of another model or device.
    """
    for name, theirs, ours in (
        ("model", calibration.model.name, settings.model.name),
        ("device", calibration.device, settings.gpu.name),
    ):
        if theirs != ours:
            raise CalibrationError(f"the constants are of {name} {theirs}, the run of {ours}; fit them to this run")
    require_times(run)
    answered = serve_again(run, settings, calibration.cost(), keep_trace=True)
    return RunFit(calibration, tuple(agreement(run, answered)), median_errors(run, answered), answered)


def series_charts(measured: Series, answered: Answered, settings: RunSettings) -> dict[str, tuple[float, Figure]]:
    """For each series its mean absolute difference, and a chart of it, measured and simulated."""
    predicted = series_of(answered, measured.times_s, settings.num_blocks)
    errors = mean_errors(measured, predicted)
    return {
        name: (
            errors[name],
            lines(
                {
                    settings.engine: (measured.times_s, measured.values[name]),
                    "simulated": (predicted.times_s, predicted.values[name]),
                },
                title=f"{_NAMES[name].capitalize()}: the simulation is {errors[name]:.3g} off on average",
                x_name="seconds since the first arrival",
                y_name=_NAMES[name],
                caption=f"{settings.model.name} on {settings.gpu.name}. Mean absolute difference at "
                f"{len(measured.times_s)} moments.",
            ),
        )
        for name in SERIES
    }


def beside(requests: str | os.PathLike[str], what: str) -> str:
    """The file that lies beside NAME.requests.jsonl: NAME.meta.json, NAME.timeseries.csv."""
    return str(requests).removesuffix(".gz").removesuffix("requests.jsonl") + what
