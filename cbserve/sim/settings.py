"""What a simulated run is made of: every option of `cbserve sim`, in one table that command line and sweep read."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

from cbserve.core.given import short
from cbserve.core.run_fold import LIMITS
from cbserve.errors import CBServeError
from cbserve.hardware.gpus import SHORT_NAMES
from cbserve.hardware.models import MODELS

BATCHINGS = {
    "static": "a batch of --batch-size runs until its longest answer is done",
    "continuous": "iteration-level: a whole prompt joins the decodes of one step (Orca)",
    "mixed": "iteration-level with chunked prefill: decodes first, then chunks of prompts, in one step (Sarathi, vLLM)",
    "prefill-first": "a step is either chunks of prompts or decodes, and decodes wait (vLLM before chunked prefill)",
}
WORKLOADS = ("azure-conv", "azure-code")

Objectives = tuple[tuple[str, float], ...]


def _number(text: str, kind: Callable[[str], float], fits: Callable[[Any], bool], rule: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{short(text)}: must be {rule}")
    return value


def whole(least: int, most: int, more: str = "") -> Callable[[str], int]:
    rule = f"{more}a whole number of at least {least} and at most {most:,}"
    return lambda text: int(_number(text, int, lambda value: least <= value <= most, rule))


count = whole(1, 10**12)
num_requests = whole(1, 10**7)  # some 10 GB of memory
seed = whole(0, 10**18)


def weight_bytes(text: str) -> float:
    """4 bits, or whole bytes."""
    return 0.5 if text in ("0.5", ".5") else whole(1, 8, "0.5 or ")(text)


def positive(text: str) -> float:
    return float(_number(text, float, lambda value: 0 < value < math.inf, "a number above 0"))


def seconds(text: str) -> float:
    return float(_number(text, float, lambda value: 0 <= value < math.inf, "a number of seconds of at least 0"))


def share(text: str) -> float:
    return float(_number(text, float, lambda value: 0 < value <= 1, "a share above 0 and at most 1"))


def switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be on or off")
    return text == "on"


def objectives(text: str) -> Objectives:
    """ "ttft=0.5,itl=0.1" -> (("ttft", 0.5), ("itl", 0.1)), in seconds."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in LIMITS or not equals:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r}: must be NAME=SECONDS with a name of {', '.join(LIMITS)}; for example "
                "--slo ttft=0.5,itl=0.1"
            )
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        try:
            found[name] = positive(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{name}={error} of seconds") from None
    return tuple(found.items())


def _option(
    parse: Callable[[str], Any], default: Any, help: str, choices: tuple[str, ...] = (), swept: bool = True
) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help, "choices": choices, "swept": swept})


@dataclass(frozen=True)
class Settings:
    """One point. None: the default that `help` names, or that an option without effect was not given."""

    trace: str | None = _option(str, None, "Azure CSV, Mooncake JSONL or vLLM bench file, .gz too; or a URL", (), False)
    workload: str | None = _option(str, None, "without a trace: a synthetic twin (azure-conv)", WORKLOADS)
    requests: int | None = _option(num_requests, None, "requests of the twin (1000)")
    seed: int | None = _option(seed, None, "of the twin (0)")
    limit: int | None = _option(count, None, "only the first LIMIT requests")
    rate: float | None = _option(positive, None, "requests a second: arrival times are scaled to it")
    max_tokens: int | None = _option(count, None, "most tokens of an answer")
    model: str | None = _option(
        str,
        None,
        f"{', '.join(map(str.lower, MODELS))}, or the folder of a Hugging Face config.json (llama-3.1-8b; with a "
        "calibration, its model)",
    )
    max_model_len: int | None = _option(
        count,
        None,
        "most tokens of prompt and answer together (what the model was made for)",
    )
    gpu: str = _option(
        str,
        "a100-80",
        f"{', '.join(SHORT_NAMES)}; or `this`: as `cbserve calibrate` measured this machine; or the file that "
        "`cbserve calibrate --out` wrote",
    )
    dtype_bytes: float | None = _option(
        weight_bytes, None, "bytes of a weight: 0.5, 1, 2 or 4; FLOP/s stay those of 16 bits (2)"
    )
    kv_dtype_bytes: int | None = _option(
        whole(1, 8), None, "bytes of a value in the KV cache (those of a weight; 2 where that has less than 1)"
    )
    batching: str = _option(
        str, "mixed", "; ".join(f"{name}: {what}" for name, what in BATCHINGS.items()), tuple(BATCHINGS)
    )
    batch_size: int | None = _option(count, None, "requests of a static batch (32)")
    chunk: int | None = _option(count, None, "token budget of a step, decodes included (2048; continuous: 16384)")
    max_num_seqs: int | None = _option(count, None, "requests that run at a time, except static (256)")
    policy: str = _option(str, "fcfs", "who goes first: by arrival, or by priority", ("fcfs", "priority"))
    prefix_caching: bool = _option(switch, False, "share blocks of equal prefixes")
    preemption: str = _option(
        str, "recompute", "what becomes of a victim's K and V when blocks run out", ("recompute", "swap")
    )
    swap_space: float | None = _option(positive, None, "GiB of host memory for swapped blocks (4)")
    utilization: float | None = _option(share, None, "share of the GPU's memory that may be used (0.9)")
    num_blocks: int | None = _option(
        count,
        None,
        "blocks of the KV cache (what the GPU has room for; --gpu this on a CPU: "
        "the engine's default, --max-num-seqs requests of the model's length or 512 MB, whichever is less)",
    )
    block_size: int = _option(count, 16, "tokens of a block")
    eff_compute: float | None = _option(share, None, "share of the GPU's FLOPs that is reached (0.72)")
    eff_memory: float | None = _option(share, None, "share of its memory bandwidth that is reached (0.65)")
    overhead: float | None = _option(seconds, None, "seconds added to every step (0.0005)")
    slo: Objectives = _option(
        objectives,
        (),
        "objectives for goodput in seconds: ttft=0.5,itl=0.1; also tpot, e2e. A request keeps itl when its longest gap "
        "does, while the ITL of the table is over all gaps together",
        (),
        False,
    )

    def without_effect(self) -> list[str]:
        """Options that were given but change nothing beside the others."""
        with_trace, static = self.trace is not None, self.batching == "static"
        mute = {
            "workload": with_trace, "requests": with_trace, "seed": with_trace, "batch_size": not static,
            "chunk": static, "max_num_seqs": static, "swap_space": self.preemption != "swap",
            "utilization": self.num_blocks is not None or self.gpu == "this",
        }  # fmt: skip
        return [name for name, is_mute in mute.items() if is_mute and getattr(self, name) is not None]

    def check(self) -> None:
        """Raises CBServeError naming an option that would be ignored, and the one that it does not go with."""
        for name in self.without_effect():
            self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Say that option `name` has no effect."""
        partners = {
            "workload": "--trace; give one of the two", "requests": "--trace; take --limit", "seed": "--trace",
            "batch_size": f"--batching {self.batching}, only with static; take --max-num-seqs",
            "chunk": "--batching static, which packs whole prompts",
            "utilization": f"--gpu {self.gpu}; take --num-blocks" if self.num_blocks is None else "--num-blocks",
            "max_num_seqs": "--batching static; take --batch-size", "swap_space": "--preemption recompute",
        }  # fmt: skip
        raise CBServeError(f"{flag_of(name)} has no effect with {partners[name]}")

    def normal(self) -> Settings:
        """Without the options that change nothing: two grid points that mean the same are one."""
        mute: dict[str, Any] = dict.fromkeys(self.without_effect())
        return replace(self, **mute)

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"slo": dict(self.slo)}


OPTIONS: dict[str, Field[Any]] = {option.name: option for option in fields(Settings)}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


# What messages of the library call what an option sets. An engine that asks for max_tokens shows its value.
_LIBRARY_NAMES = {
    "max_num_batched_tokens": "chunk", "kv_cache_bytes": "utilization", "overhead_s": "overhead",
    **{name: name for name in OPTIONS if "_" in name},
}  # fmt: skip
_IN_MESSAGE = re.compile(rf"(?<![-\w])(?<!\+ )({'|'.join(_LIBRARY_NAMES)})\b(=(?=\S))?")


def in_options(message: str) -> str:
    """A message of the library with the options' names: "dtype_bytes=1" is "--dtype-bytes 1" here."""
    return _IN_MESSAGE.sub(lambda found: flag_of(_LIBRARY_NAMES[found[1]]) + (" " if found[2] else ""), message)


def parse(name: str, text: str) -> Any:
    """The value of option `name`, as the command line reads it.

    Raises:
        CBServeError: it is none.
    """
    option = OPTIONS[name].metadata
    choices = option["choices"]
    if choices and text not in choices:
        raise CBServeError(f"{name.replace('_', '-')}={text!r}: there are {', '.join(choices)}")
    try:
        return option["parse"](text)
    except argparse.ArgumentTypeError as error:
        raise CBServeError(f"{name.replace('_', '-')}={error}") from None
