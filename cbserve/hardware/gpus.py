"""What public GPUs compute, hold and move, each value with its source.

Three traps lie in every datasheet, and each is a factor of two: headline FLOPs of H100, H200, L4 and B200 count 2:4
sparsity, so the dense rate is half; NVLink and PCIe are advertised for both directions, and a copy uses one; memory is
in decimal GB here (GB = 1e9), while tools often show GiB.

Memory is what CUDA reports (`totalGlobalMem`; torch: `total_memory`, and "total capacity" of its errors), for every GPU
here, because engines take their share of that. It is neither the name's (an H100 of 80 GB has 85.0e9 bytes, an L4 of 24
GB 23.6e9) nor what nvidia-smi lists, which has what the driver keeps for itself too: 81,559 MiB on that H100, of which
CUDA sees 81,106. ECC is on, except on the RTX 4090. Between drivers it differs by 0.1 %, on a T4 by 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbserve.core.errors import InvalidRequestError
from cbserve.core.given import short
from cbserve.hardware.names import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One GPU. All rates are peaks that no kernel reaches.

    Args:
        flops: multiplications and additions a second, dense, in bf16 (fp16 where there is no bf16).
        memory_bytes: as CUDA reports it.
        memory_bytes_s: bandwidth of its own memory.
        host_link_bytes_s: to the host's memory (PCIe x16, or NVLink-C2C), in one direction.
        nvlink_bytes_s: to its neighbours, in one direction; 0 where there is none.
        source: where the rates are from; "reported" stands before those that are quoted second-hand.
        memory_source: who read `memory_bytes` from such a card, and how; "" for one of your own.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bytes_s: float
    host_link_bytes_s: float
    nvlink_bytes_s: float
    source: str
    memory_source: str = ""


_DATASHEET = "NVIDIA datasheet, dense; NVIDIA aiconfigurator, systems"
_REPORTED = "reported: NVIDIA datasheet"
_ADA = "reported: NVIDIA Ada architecture whitepaper, dense"
_GEN3, _GEN4, _GEN5 = "; PCIe Gen3 x16", "; PCIe Gen4 x16", "; PCIe Gen5 x16"
_MIB, _GIB = 2**20, 2**30

GPUS = {
    gpu.name: gpu
    for gpu in (
        # fp16: Turing has no bf16. 300 GB/s by the datasheet, 320 by clock times width.
        Gpu("T4", 65e12, 15_095 * _MIB, 300e9, 16e9, 0, _REPORTED + "; hmc-tech.com 65.13 TFLOP/s" + _GEN3,
            "deviceQuery, github.com/sylvia-ymlin/cuda-kernels-from-scratch"),
        Gpu("L4", 121e12, 23_612_293_120, 300e9, 32e9, 0, _REPORTED + " (242 TFLOP/s is with sparsity)" + _GEN4,
            "deviceQuery, github.com/kamelth/COE506_Project"),
        # AWS's variant: tables also give 62.5, and 125, which is the A10.
        Gpu("A10G", 70e12, 22_587 * _MIB, 600e9, 32e9, 0, _REPORTED + " (other tables: 62.5 TFLOP/s)" + _GEN4,
            "torch, the TorchCodec documentation on decoding with CUDA"),
        Gpu("A100-40 SXM", 312e12, 42_298_834_944, 1555e9, 32e9, 300e9, _DATASHEET + _GEN4,
            "deviceQuery, github.com/bottlerocket-os/bottlerocket/pull/3873"),
        # NVLink needs the bridge, which joins two cards.
        Gpu("A100-80 PCIe", 312e12, 84_974_239_744, 1935e9, 32e9, 300e9, _DATASHEET + "; NVLink bridge" + _GEN4,
            "deviceQuery, documentation of Wake Forest University's DEAC cluster"),
        Gpu("A100-80 SXM", 312e12, 85_198_045_184, 2039e9, 32e9, 300e9, _DATASHEET + _GEN4, "reported: deviceQuery"),
        Gpu("L40S", 362e12, round(44.53 * _GIB), 864e9, 32e9, 0, _DATASHEET + _GEN4,
            "torch, github.com/vllm-project/vllm/issues/15598"),
        Gpu("H100 PCIe", 756e12, 81_008 * _MIB, 2000e9, 64e9, 300e9, _REPORTED + "; NVLink bridge" + _GEN5,
            "reported: torch 2.0"),
        Gpu("H100 SXM", 989.4e12, 85_045_477_376, 3350e9, 64e9, 450e9, _DATASHEET + _GEN5,
            "deviceQuery, github.com/thamada/nvidia-smi"),
        Gpu("H200 SXM", 989.4e12, 143_156 * _MIB, 4800e9, 64e9, 450e9, _DATASHEET + _GEN5,
            "torch, github.com/ai-bot-pro/achatbot"),
        # 192 GB are mounted; 7.7 to 8.0 TB/s by board. Gen6 hosts double the link.
        Gpu("B200", 2250e12, round(178.35 * _GIB), 8000e9, 64e9, 900e9,
            _DATASHEET + "; docs.vultr.com 8.0 TB/s" + _GEN5, "CUDA, github.com/pytorch/ao/pull/4002"),
        # NVLink-C2C: 900 GB/s in both directions between one Grace and its two GPUs, so a quarter for one each way.
        Gpu("GB200", 2500e12, round(184.31 * _GIB), 8000e9, 225e9, 900e9,
            _DATASHEET + "; reported: NVLink-C2C 900 GB/s for two GPUs",
            "torch, github.com/vllm-project/vllm/issues/43951"),
        # With fp32 accumulation, as inference kernels use it; 330 TFLOP/s is with sparsity, or with fp16 accumulation.
        Gpu("RTX 4090", 165.2e12, 25_250_627_584, 1008e9, 32e9, 0, _ADA + _GEN4,
            "torch, meta.json of a run of vLLM 0.19 by LLMServingSim"),
    )
}  # fmt: skip

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
            f"gpu={short(name)} is not in the table{did_you_mean(str(name), _SHORT)}; take one of "
            f"{', '.join(_SHORT)}, or describe yours as a Gpu"
        )
    return found
