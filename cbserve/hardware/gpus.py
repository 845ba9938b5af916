"""What public GPUs compute, hold and move, each value with its source.

Three traps lie in every datasheet, and each is a factor of two: headline FLOPs of H100, H200, L4 and B200 count 2:4
sparsity, so the dense rate is half; NVLink and PCIe are advertised for both directions, and a copy uses one; memory is
in decimal GB here (GB = 1e9), while tools often show GiB. A card has a little more or less than its name says, an
A100-80 6 % more: where the count that CUDA reports is known it stands here, elsewhere the name's, decimal.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import short


@dataclass(frozen=True)
class Gpu:
    """One GPU. All rates are peaks that no kernel reaches.

    Args:
        flops: multiplications and additions a second, dense, in bf16 (fp16 where there is no bf16).
        memory_bytes: as CUDA reports it, or what the name says, decimal: see `memory_is_reported`.
        memory_bytes_s: bandwidth of its own memory.
        host_link_bytes_s: to the host's memory (PCIe x16, or NVLink-C2C), in one direction.
        nvlink_bytes_s: to its neighbours, in one direction; 0 where there is none.
        source: where the values are from; "reported" stands before those that are quoted second-hand.
        memory_is_reported: `memory_bytes` is CUDA's count on such a card; `source` says who read it.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_s: float
    host_link_bytes_s: float
    nvlink_bytes_s: float
    source: str
    memory_is_reported: bool = False


_DATASHEET = "NVIDIA datasheet, dense; NVIDIA aiconfigurator, systems"
_REPORTED = "reported: NVIDIA datasheet"
_ADA = "reported: NVIDIA Ada architecture whitepaper, dense"
_GEN3, _GEN4, _GEN5 = "; PCIe Gen3 x16", "; PCIe Gen4 x16", "; PCIe Gen5 x16"
_MEMORY_A100_40 = "; memory: deviceQuery in github.com/bottlerocket-os/bottlerocket/pull/3873"
_MEMORY_A100_80 = "; reported: memory, deviceQuery"
_MEMORY_4090 = "; memory: meta.json of a run of vLLM 0.19 by LLMServingSim"

GPUS = {
    gpu.name: gpu
    for gpu in (
        # fp16: Turing has no bf16. 300 GB/s by the datasheet, 320 by clock times width.
        Gpu("T4", 65e12, 16e9, 300e9, 16e9, 0, _REPORTED + "; hmc-tech.com 65.13 TFLOP/s" + _GEN3),
        Gpu("L4", 121e12, 24e9, 300e9, 32e9, 0, _REPORTED + " (242 TFLOP/s is with sparsity)" + _GEN4),
        # AWS's variant: tables also give 62.5, and 125, which is the A10.
        Gpu("A10G", 70e12, 24e9, 600e9, 32e9, 0, _REPORTED + " (other tables: 62.5 TFLOP/s)" + _GEN4),
        Gpu("A100-40 SXM", 312e12, 42_298_834_944, 1555e9, 32e9, 300e9, _DATASHEET + _GEN4 + _MEMORY_A100_40, True),
        # NVLink needs the bridge, which joins two cards.
        Gpu("A100-80 PCIe", 312e12, 80e9, 1935e9, 32e9, 300e9, _DATASHEET + "; NVLink bridge" + _GEN4),
        Gpu("A100-80 SXM", 312e12, 85_198_045_184, 2039e9, 32e9, 300e9, _DATASHEET + _GEN4 + _MEMORY_A100_80, True),
        Gpu("L40S", 362e12, 48e9, 864e9, 32e9, 0, _DATASHEET + _GEN4),
        Gpu("H100 PCIe", 756e12, 80e9, 2000e9, 64e9, 300e9, _REPORTED + "; NVLink bridge" + _GEN5),
        Gpu("H100 SXM", 989.4e12, 80e9, 3350e9, 64e9, 450e9, _DATASHEET + _GEN5),
        Gpu("H200 SXM", 989.4e12, 141e9, 4800e9, 64e9, 450e9, _DATASHEET + _GEN5),
        # 192 GB are mounted, 179 usable; 7.7 to 8.0 TB/s by board. Gen6 hosts double the link.
        Gpu("B200", 2250e12, 180e9, 8000e9, 64e9, 900e9, _DATASHEET + "; docs.vultr.com 8.0 TB/s" + _GEN5),
        # NVLink-C2C: 900 GB/s in both directions between one Grace and its two GPUs, so a quarter for one each way.
        Gpu("GB200", 2500e12, 186e9, 8000e9, 225e9, 900e9, _DATASHEET + "; reported: NVLink-C2C 900 GB/s for two GPUs"),
        # With fp32 accumulation, as inference kernels use it; 330 TFLOP/s is with sparsity, or with fp16 accumulation.
        Gpu("RTX 4090", 165.2e12, 25_250_627_584, 1008e9, 32e9, 0, _ADA + _GEN4 + _MEMORY_4090, True),
    )
}

_SHORT = {
    "t4": "T4",
    "l4": "L4",
    "a10g": "A10G",
    "a100-40": "A100-40 SXM",
    "a100-80": "A100-80 SXM",
    "a100-80-pcie": "A100-80 PCIe",
    "l40s": "L40S",
    "h100": "H100 SXM",
    "h100-pcie": "H100 PCIe",
    "h200": "H200 SXM",
    "b200": "B200",
    "gb200": "GB200",
    "rtx4090": "RTX 4090",
}
SHORT_NAMES = tuple(_SHORT)
_BY_NAME = {name.lower(): gpu for name, gpu in GPUS.items()} | {short: GPUS[name] for short, name in _SHORT.items()}


def gpu(name: str | Gpu) -> Gpu:
    """The GPU of that name, short ("a100-80") or full ("A100-80 SXM"), in any case; a `Gpu` is returned as it is.

    Raises:
        InvalidRequestError: there is none of that name; the message lists all short names.
    """
    if isinstance(name, Gpu):
        return name
    found = _BY_NAME.get(str(name).strip().lower())
    if found is None:
        raise InvalidRequestError(
            f"gpu={short(name)} is not in the table; take one of {', '.join(_SHORT)}, or describe yours as a Gpu"
        )
    return found
