"""Another engine's run: its settings as vLLM wrote them down, the same run simulated, and how well the two agree.

What is modelled of vLLM V1 (0.19): first come, first served; running sequences first, then the queue, within one token
budget; the last of the running yields when blocks run out and queues in front, its K and V lost, though the prefix
cache may still find them; a request is admitted when the blocks of its next chunk are free. Not modelled: admission by
the whole prompt (`scheduler_reserve_full_isl`), and that asynchronous scheduling plans a step before the last one has
ended, so that an arrival joins one step later.

Times count from the first arrival, and a request arrives by arrival_time, when the client sends it: from then on its
user waits, and the simulation itself makes it wait for the step that runs. By queued_ts that wait would count as none.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from cbserve.core import given
from cbserve.core.batching import ContinuousBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import short
from cbserve.core.metrics import percentile
from cbserve.core.trace import StepEvent
from cbserve.errors import CBServeError
from cbserve.executors.simulated import CostModel
from cbserve.files import read_object
from cbserve.hardware.gpus import GPUS, Gpu
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import MODELS, ModelShape, model_shape
from cbserve.outputs import RequestOutput
from cbserve.simulation import Simulation, simulate
from cbserve.workloads.measured import MeasuredRun

SERIES = ("running", "waiting", "kv_cache_pct")
_LARGEST = 1e10  # seconds, sequences or per cent
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "auto": 2}


class RunFileError(CBServeError):
    """A file beside a measured run cannot be used; names file, key or line, and cure."""


@dataclass(frozen=True)
class RunSettings:
    """What a run was served by, from its meta.json."""

    model: ModelShape
    gpu: Gpu
    engine: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    dtype_bytes: int


def read_settings(path: str | os.PathLike[str], model: str | None = None, gpu: str | None = None) -> RunSettings:
    """The meta.json that LLMServingSim's bench writes beside requests.jsonl.

    Args:
        model, gpu: names from the tables in place of those in the file.

    Raises:
        RunFileError: names the file and the key that is missing or of a wrong kind, or what the tables lack.
    """
    meta = read_object(path, RunFileError, "give the run's meta.json with --meta")

    def get(*keys: str, kind: type = int) -> Any:
        value: Any = meta
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
            raise RunFileError(f"{path}: {'.'.join(keys)}={value!r}: must be {_KINDS[kind]}")
        return value

    dtype = get("engine_kwargs", "dtype", kind=str).removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise RunFileError(f"{path}: engine_kwargs.dtype={dtype!r}: must be one of {', '.join(_DTYPE_BYTES)}")
    parallel = meta.get("engine_kwargs", {}).get("tensor_parallel_size", 1)
    if parallel != 1:
        raise RunFileError(f"{path}: engine_kwargs.tensor_parallel_size={parallel!r}: the cost model is of one device")
    try:
        shape = model_shape(_model_name(get("model", kind=str)) if model is None else model)
        name = get("hardware", "device_name", kind=str) if gpu is None else ""
        device = _gpu_of(name, meta["hardware"]) if gpu is None else find_gpu(gpu)
    except CBServeError as error:
        if isinstance(error, RunFileError):
            raise
        raise RunFileError(f"{path}: {error} (--model and --gpu name another)") from error
    return RunSettings(
        shape,
        device,
        f"vLLM {meta.get('vllm_version', 'of unknown version')}",
        get("engine_kwargs", "max_num_seqs"),
        get("engine_kwargs", "max_num_batched_tokens"),
        get("kv_cache", "num_gpu_blocks"),
        get("kv_cache", "block_size"),
        get("kv_cache", "enable_prefix_caching", kind=bool),
        _DTYPE_BYTES[dtype],
    )


_KINDS = {int: "a whole number of at least 1", str: "text", bool: "true or false"}


def _model_name(name: str) -> str:
    """The longest name of the table that a repository's name begins with: "meta-llama/Llama-3.1-8B-Instruct"."""
    short = name.split("/")[-1].lower().removeprefix("meta-")
    known = [known for known in [*map(str.lower, MODELS), "llama-3-8b", "llama-3-70b"] if short.startswith(known)]
    return max(known, key=len, default=name)


def _gpu_of(name: str, hardware: Mapping[str, Any]) -> Gpu:
    """A driver's name ("NVIDIA A100-SXM4-80GB") among those of the table: same chip, nearest memory and form."""
    words = re.findall(r"[a-z]+[0-9]+[a-z]*|[a-z]+|[0-9]+", name.lower())
    chips = [gpu for gpu in GPUS.values() if set(re.findall(r"[a-z0-9]+", gpu.name.lower().split("-")[0])) & set(words)]
    chips = [gpu for gpu in chips if not gpu.name.startswith("RTX") or gpu.name.split()[1] in words]
    memory = hardware.get("device_total_memory_bytes") or 0
    given.number(
        "hardware.device_total_memory_bytes", memory, lambda v: 0 <= v < 1e15, "a number of bytes of at least 0"
    )
    is_pcie = "pcie" in words
    if not chips:
        raise InvalidRequestError(f"device_name={name!r} is not in the table of GPUs")
    return min(chips, key=lambda gpu: (abs(gpu.memory_bytes - memory) // 8e9, is_pcie is not ("PCIe" in gpu.name)))


@dataclass(frozen=True)
class Answered:
    """A simulated run: seconds of each job from its arrival, in order of the jobs."""

    simulation: Simulation
    ttft_s: tuple[float, ...]
    e2e_s: tuple[float, ...]


def require_times(run: MeasuredRun) -> None:
    """Raises RunFileError: a time that predictions are compared with is 0, or no answer tells what a decode takes."""
    for index, ttft in enumerate(run.ttft_s):
        if ttft <= 0:
            raise RunFileError(f"request {index} (by arrival) has its first token at its arrival: no step takes 0 s")
    if not any(run.tpot_s):
        raise RunFileError(
            "no answer of the run takes time after its first token, so nothing tells what a decode step takes; give a "
            "run with answers of two tokens or more"
        )


def serve_again(run: MeasuredRun, settings: RunSettings, cost: CostModel, keep_trace: bool = False) -> Answered:
    """The same requests through this package's scheduler with the same settings, in simulated time."""
    outputs: dict[str, RequestOutput] = {}
    simulation = simulate(
        run.workload,
        cost,
        settings.num_blocks,
        settings.block_size,
        ContinuousBatching(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens),
        enable_prefix_caching=settings.enable_prefix_caching,
        keep_trace=keep_trace,
        progress=lambda output: outputs.__setitem__(output.request_id, output),
    )
    if simulation.refused:
        request_id, why = simulation.refused[0]
        raise RunFileError(f"request {request_id} cannot be served with the settings of the run: {why}")
    times = [(job.arrival_s, outputs[str(index)].times) for index, job in enumerate(run.workload.jobs)]
    return Answered(
        simulation,
        tuple((t.first_token_s or math.nan) - at for at, t in times),
        tuple((t.finished_s or math.nan) - at for at, t in times),
    )


@dataclass(frozen=True)
class Agreement:
    """One number of a run: as measured and as predicted. `target` is the relative error that is hoped for."""

    name: str
    measured: float
    predicted: float
    target: float
    unit: str = "s"

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1

    @property
    def is_kept(self) -> bool:
        return abs(self.error) <= self.target

    def row(self) -> list[str]:
        digits = f"{self.measured:.4g} {self.unit}", f"{self.predicted:.4g} {self.unit}"
        kept = "yes" if self.is_kept else "NO"
        return [self.name, *digits, f"{self.error:+.1%}", f"{self.target:.0%}", kept]


def agreement(run: MeasuredRun, answered: Answered) -> list[Agreement]:
    """The four figures of a run; `median_errors` looks at every request."""
    lengths = run.num_output_tokens
    tpot = [(e - t) / (n - 1) for e, t, n in zip(answered.e2e_s, answered.ttft_s, lengths, strict=True) if n > 1]
    end = max(at + e2e for at, e2e in zip(run.arrival_s, answered.e2e_s, strict=True))
    return [
        Agreement("makespan", run.makespan_s, end, 0.05),
        Agreement("mean TTFT", mean(run.ttft_s), mean(answered.ttft_s), 0.05),
        Agreement("p99 TTFT", percentile(run.ttft_s, 99), percentile(answered.ttft_s, 99), 0.10),
        Agreement("mean TPOT", 1e3 * mean(run.tpot_s), 1e3 * mean(tpot), 0.05, "ms"),
    ]


def median_errors(run: MeasuredRun, answered: Answered) -> dict[str, float]:
    """Median over the requests of |predicted / measured - 1|, of TTFT and of E2E."""
    pairs = {"TTFT": (run.ttft_s, answered.ttft_s), "E2E": (run.e2e_s, answered.e2e_s)}
    return {name: median(abs(b / a - 1) for a, b in zip(*pair, strict=True)) for name, pair in pairs.items()}


@dataclass(frozen=True)
class Series:
    """State of an engine over time: `values` by name of `SERIES`, one value for each of `times_s`."""

    times_s: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]


def read_series(path: str | os.PathLike[str]) -> Series:
    """The timeseries.csv of a run; its `t` is taken to count from the first arrival.

    Raises:
        RunFileError: names file and line: a column is missing, a value is no number or out of range, or `t` runs
            backwards.
    """
    columns: dict[str, list[float]] = {name: [] for name in ("t", *SERIES)}
    least = dict.fromkeys(SERIES, 0.0)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise RunFileError(f"{path}, line 1: no column {', '.join(missing)}; there are {reader.fieldnames}")
            for row in reader:
                for name, values in columns.items():
                    try:
                        value = float(row[name])
                    except (TypeError, ValueError):
                        value = math.nan
                    low = least.get(name, values[-1] if values else -_LARGEST)  # t must not run backwards
                    if not low <= value <= _LARGEST:
                        why = f"must be a number from {low:g} to {_LARGEST:g}"
                        raise RunFileError(f"{path}, line {reader.line_num}: {name}={short(row[name])}: {why}")
                    values.append(value)
    except (OSError, ValueError, csv.Error) as error:  # ValueError: no UTF-8, or a null in the name
        why = getattr(error, "strerror", None) or error
        raise RunFileError(f"{path} cannot be read ({why}); give the run's timeseries.csv") from error
    if not columns["t"]:
        raise RunFileError(f"{path} has no rows")
    return Series(tuple(columns.pop("t")), {name: tuple(values) for name, values in columns.items()})


def series_of(answered: Answered, times_s: Sequence[float], num_blocks: int) -> Series:
    """The simulated run at the same moments; it must have kept its trace."""
    steps = [event for event in answered.simulation.trace if isinstance(event, StepEvent)]
    found: list[tuple[float, float, float]] = []
    at = 0
    for time_s in times_s:
        while at + 1 < len(steps) and steps[at + 1].start_s <= time_s:
            at += 1
        step = steps[at]
        over = time_s >= steps[-1].end_s
        used = 100 * step.num_used_blocks / num_blocks
        found.append((0, 0, 0) if over else (step.num_running, step.num_waiting, used))
    columns: list[tuple[float, ...]] = list(zip(*found, strict=True))
    return Series(tuple(times_s), dict(zip(SERIES, columns, strict=True)))


def mean_errors(measured: Series, predicted: Series) -> dict[str, float]:
    """Mean absolute difference of each series, in its own unit."""
    return {
        name: mean(abs(a - b) for a, b in zip(measured.values[name], predicted.values[name], strict=True))
        for name in SERIES
    }
