"""`calibrate`: time single steps of the real engine on this machine, and fit the constants of the cost model to them.

Prefill chunks of several lengths, decode batches over two contexts and swaps of two sizes, in rounds, so that what else
the machine does meets all of them alike. The ceilings are measured in the same rounds: a large matrix product and a
large copy, read and written bytes both counted. A ceiling is the best that was seen, a step its median.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import torch

from cbserve.calibrating.ceilings import Ceilings
from cbserve.calibrating.fit import Constant, least_squares
from cbserve.calibration import Calibration, Point
from cbserve.core.errors import InvalidRequestError
from cbserve.core.plan import StepPlan
from cbserve.core.request import Request, SamplingParams
from cbserve.core.trace import StepEvent
from cbserve.executors.swapping import spare_host_pool, swap_out_and_in
from cbserve.executors.timing import timing_row
from cbserve.hardware.host import memory_bytes
from cbserve.hardware.models import MODELS, ModelShape
from cbserve.hardware.roofline import Roofline

if TYPE_CHECKING:
    from cbserve.llm import LLM

PREFILLS = ((16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (128, 512))  # (tokens of the chunk, cached before it)
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (64, 512)
SWAPS = (128, 512)  # tokens that go out, and come in
_PROBES = (("prefill", 1, 64, 0), ("decode", 2, 1, 64), ("decode", 8, 1, 64))
_LEAST_ROUNDS = 3
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def calibrate(
    llm: LLM,
    budget_s: float = 40.0,
    progress: Callable[[float], object] | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure for about `budget_s` seconds, three rounds at least, and fit.

    On a CPU `overlap` is fitted too: how much of computing and loading runs at the same time. On a GPU it is 1. The
    error bars are a jackknife over the points: each kind of step is left out once. The host link is what the engine's
    own swaps reach, between its pool and one in the host's memory.

    Args:
        progress: called with the share that is done, in 0..1.
        timer: seconds; `time.process_time` counts what this process computes, whatever else the machine does. It fits a
            run on a `twin.CpuClock`, with one thread on a CPU.

    Raises:
        InvalidRequestError: `budget_s` is not above 0, or model and pool are too small for two different steps.
        CBServeError: requests are unfinished.
    """
    if not isinstance(budget_s, int | float) or not 0 < budget_s < float("inf"):
        raise InvalidRequestError(f"budget_s={budget_s!r}: must be a number of seconds above 0")
    llm.require_idle()
    steps, swaps = _plans(llm), _swaps(llm)
    if len(steps) < 5:
        raise InvalidRequestError(
            f"only {len(steps)} kinds of step fit the pool and max_model_len={llm.max_model_len}; enlarge num_blocks"
        )
    ceilings = Ceilings(llm.model.dtype, llm.device, timer)
    plans = steps + swaps
    # A swap before each step: so it finds the caches as steps leave them, as in a run.
    order = [index for i in range(len(steps)) for index in (len(steps) + i % len(swaps), i)]
    times: list[list[float]] = [[] for _ in plans]
    kept = llm.executor.kv_cache.clone() if llm.scheduler.kv.enable_prefix_caching else None
    began = time.perf_counter()
    try:
        with spare_host_pool(llm.executor, max(len(plan.swap_outs) for _, plan in plans)):
            done, rounds = 0.0, -1  # the first round warms up
            while done < 1 or rounds < _LEAST_ROUNDS:
                for at, index in enumerate(order):
                    start = timer()
                    llm.executor.execute(plans[index][1])
                    if rounds >= 0:
                        times[index].append(timer() - start)
                    if progress is not None:
                        share = min((time.perf_counter() - began) / budget_s, (rounds + 1 + at / len(order)) / 4)
                        progress(min(1.0, max(done, share)))
                ceilings.measure()
                rounds += 1
                done = (time.perf_counter() - began) / budget_s
    finally:
        if kept is not None:
            llm.executor.kv_cache.copy_(kept)
    timed = [(_point(point, seconds), plan) for (point, plan), seconds in zip(plans, times, strict=True)]
    base = Roofline(
        shape_of(llm),
        ceilings.flops,
        ceilings.bytes_s,
        dtype_bytes=llm.model.dtype.itemsize,
        block_size=llm.scheduler.kv.block_size,
        kv_passes=3.0 if llm.executor.backend.name == "torch" else 1.0,
    )
    is_cpu = llm.device.type == "cpu"
    about = _about(llm) | {"timer": timer.__name__}
    return _fit(base, timed, fits_overlap=is_cpu, loop_s=_loop_s(llm), about=about)


def drift(llm: LLM, calibration: Calibration, timer: Callable[[], float] = time.perf_counter) -> float:
    """How much longer a few of the steps that `calibration` timed take now: 0.1 is 10 % longer. About a second.

    A calibration cannot know what else the machine will do; this tells a wrong model from a machine that has changed.

    Raises:
        CBServeError: requests are unfinished.
        InvalidRequestError: the calibration has none of these steps.
    """
    llm.require_idle()
    ratios = []
    for point in calibration.points:
        if (point.kind, point.num_rows, point.num_tokens, point.context) in _PROBES:
            _, plan = _plan(llm, point.kind, point.num_rows, point.num_tokens, point.context)
            seconds = []
            for _ in range(4):
                start = timer()
                llm.executor.execute(plan)
                seconds.append(timer() - start)
            ratios.append(statistics.median(seconds[1:]) / point.seconds)
    if not ratios:
        raise InvalidRequestError(
            f"none of the {len(calibration.points)} points of the calibration is one of {_PROBES}"
        )
    return statistics.mean(ratios) - 1


def shape_of(llm: LLM) -> ModelShape:
    """The sizes of a loaded model, as the cost model counts them: those of the table where it has the same."""
    c = llm.config
    own = ModelShape(
        c.name, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size,
        c.vocab_size, "the loaded model", c.tie_word_embeddings,
    )  # fmt: skip
    named = {"name": own.name, "source": own.source, "published_params": None}
    return next((known for known in MODELS.values() if replace(known, **named) == own), own)


def device_name(llm: LLM) -> str:
    """In words: the processor, and what of it is used."""
    if llm.device.type == "cuda":
        return str(torch.cuda.get_device_name(llm.device))
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {llm.executor.num_threads} of {os.cpu_count()} cores"


def environment(llm: LLM) -> dict[str, str | int | float]:
    """What a calibration holds for: with another torch, dtype or number of threads the steps take another time."""
    return {
        "torch": torch.__version__,
        "threads": llm.executor.num_threads or 0,  # 0: a GPU
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "backend": llm.executor.backend.name,
    }


def _about(llm: LLM) -> dict[str, str | int | float]:
    about = environment(llm) | {"device": device_name(llm), "system": f"{platform.system()} {platform.machine()}"}
    about["max_model_len"] = llm.max_model_len
    about["cores"] = os.cpu_count() or 1  # all, as the load average counts
    is_cpu = llm.device.type == "cpu"
    memory = memory_bytes() if is_cpu else torch.cuda.get_device_properties(llm.device).total_memory
    if memory is not None:
        about["memory_bytes"] = memory
    if hasattr(os, "getloadavg"):
        about["load_average"] = round(os.getloadavg()[0], 2)
    return about


def _fit(
    base: Roofline,
    timed: Sequence[tuple[Point, StepPlan]],
    fits_overlap: bool,
    loop_s: float,
    about: Mapping[str, str | int | float],
) -> Calibration:
    steps = [(point, plan) for point, plan in timed if plan.rows]
    swaps = [(point, plan) for point, plan in timed if not plan.rows and point.seconds > 0]  # 0: a coarse timer
    measured = np.log([point.seconds for point, _ in steps])
    least = min(point.seconds for point, _ in steps)
    constants = {
        "eff_compute": Constant(0.5, 0.01, 1.0, 0.01),
        "eff_memory": Constant(0.5, 0.01, 1.0, 0.01),
        "overhead_s": Constant(0.2 * least, 0.0, 2 * least, 0.01 * least),
    }
    if fits_overlap:
        constants["overlap"] = Constant(0.5, 0.0, 1.0, 0.02)

    def residuals(values: Mapping[str, float]) -> np.ndarray:
        cost = replace(base, **values)
        return np.log([cost(plan) for _, plan in steps]) - measured

    fit = least_squares(residuals, constants, range(len(steps)))
    link, link_error = _host_link(base, swaps)
    cost, link_cost = replace(base, **fit.values), replace(base, **link)
    fixed = {} if fits_overlap else {"overlap": base.overlap}
    return Calibration(
        model=base.model,
        device=str(about.get("device", "")),
        flops=base.flops,
        memory_bytes_s=base.memory_bytes_s,
        values=fit.values | fixed | link,
        errors=fit.errors | link_error,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype_bytes=base.dtype_bytes,
        block_size=base.block_size,
        kv_passes=base.kv_passes,
        loop_s=loop_s,
        environment={name: value for name, value in about.items() if name != "device"},
        points=tuple(
            replace(point, fitted_s=cost_of(plan))
            for points, cost_of in ((steps, cost), (swaps if link else (), link_cost))
            for point, plan in points
        ),
    )


def _host_link(base: Roofline, swaps: Sequence[tuple[Point, StepPlan]]) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes a second in one direction by the name of the constant, and one standard error: over the kinds of swap, of
    logarithms, so that relative errors count as in the fit. Nothing if the timer saw fewer than two take any time."""
    if len(swaps) < 2:
        return {}, {}
    rates = np.log([base.link_bytes(plan) / point.seconds for point, plan in swaps])
    rate = float(np.exp(rates.mean()))
    return {"host_link_bytes_s": rate}, {"host_link_bytes_s": rate * float(rates.std(ddof=1)) / len(rates) ** 0.5}


def _plans(llm: LLM) -> list[tuple[Point, StepPlan]]:
    """Steps that pool and model can take."""
    pool = llm.scheduler.kv.pool
    longest = min(llm.max_model_len, pool.num_blocks * pool.block_size)
    found = [
        _plan(llm, "prefill", 1, num_tokens, context)
        for num_tokens, context in PREFILLS
        if num_tokens + context <= longest
    ]
    found += [_plan(llm, "decode", batch, 1, context) for context in CONTEXTS for batch in BATCHES if context < longest]
    return found


def _swaps(llm: LLM) -> list[tuple[Point, StepPlan]]:
    """Out and in, of as many tokens as `SWAPS` says or the pool has."""
    pool = llm.scheduler.kv.pool
    counts = sorted({min(-(-num_tokens // pool.block_size), pool.num_blocks) for num_tokens in SWAPS})
    return [
        (Point(kind, 1, 0, count * pool.block_size, 0.0, 0.0, 0.0, 0), plan)
        for count in counts
        for kind, plan in zip(("swap out", "swap in"), swap_out_and_in(count), strict=True)
    ]


def _plan(llm: LLM, kind: str, num_rows: int, num_tokens: int, context: int) -> tuple[Point, StepPlan]:
    """Contexts of several rows are spread from half to one and a half of `context`, as in traffic: attention pads
    those of a group to the longest and masks the rest, which equal ones would not show."""
    pool, rows, first = llm.scheduler.kv.pool, [], 0
    for i in range(num_rows):
        start = round(context * (0.5 + i / (num_rows - 1))) if num_rows > 1 else context
        start = min(start, llm.max_model_len - num_tokens, pool.num_blocks * pool.block_size - num_tokens)
        count = -(-(start + num_tokens) // pool.block_size)
        rows.append(timing_row(start, num_tokens, [(first + b) % pool.num_blocks for b in range(count)]))
        first += count
    return Point(kind, num_rows, num_tokens, context, 0.0, 0.0, 0.0, 0), StepPlan(-1, rows)


def _point(point: Point, seconds: Iterable[float]) -> Point:
    values = sorted(seconds)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return replace(point, seconds=middle, low_s=low, high_s=high, repeats=len(values))


def _loop_s(llm: LLM) -> float:
    """Seconds between the end of a step and the beginning of the next: scheduling and the trace."""
    prompts = llm.random_prompts([8] * 4)
    params = replace(_GREEDY, max_tokens=8)
    trace = llm.serve([Request(f"loop-{i}", prompt, params, 0.0) for i, prompt in enumerate(prompts)])
    steps = [event for event in trace if isinstance(event, StepEvent)]
    return max(0.0, statistics.median(b.start_s - a.end_s for a, b in zip(steps, steps[1:], strict=False)))
