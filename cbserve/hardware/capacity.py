"""How many tokens fit: what a GPU's memory leaves for the KV cache, with the arithmetic shown."""

from __future__ import annotations

from dataclasses import dataclass

from cbserve.core.errors import InvalidRequestError
from cbserve.hardware.gpus import GPUS, Gpu
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import ModelShape, model_shape

GB = 1e9
# CUDA's context, the allocator's slack, CUDA graphs: vLLM 0.19 with Llama-3.1-8B on an RTX 4090 kept 1.24 GB from K and
# V, of which the shapes of its step explain 0.34.
RUNTIME_BYTES = 0.9e9
CPU_KV_CACHE_BYTES = 512_000_000  # most that the engine's default pool takes on a CPU


def default_num_blocks(
    room_bytes: float, block_bytes: int, block_size: int, max_num_seqs: int, max_model_len: int | None
) -> int:
    """Blocks of the pool that an engine makes when nobody says how many: enough for `max_num_seqs` requests of
    `max_model_len` tokens (None: not known, so no limit), and never more than `room_bytes` hold; at least 1."""
    room = int(room_bytes // block_bytes)
    return max(1, room if max_model_len is None else min(max_num_seqs * -(-max_model_len // block_size), room))


@dataclass(frozen=True)
class KVCapacity:
    """KV cache that fits beside a model: utilization x memory - weights - activations, in whole blocks.

    `print` it to see the arithmetic.
    """

    model: ModelShape
    gpu: Gpu
    utilization: float
    weights_bytes: float
    activation_bytes: float
    dtype_bytes: int
    kv_dtype_bytes: int
    block_size: int

    @property
    def kv_bytes(self) -> float:
        """What is left for the cache; below 0 when the rest does not fit."""
        return self.utilization * self.gpu.memory_bytes - self.weights_bytes - self.activation_bytes

    @property
    def block_bytes(self) -> int:
        return self.model.block_bytes(self.block_size, self.kv_dtype_bytes)

    @property
    def num_blocks(self) -> int:
        return max(0, int(self.kv_bytes // self.block_bytes))

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        rows = (
            ("  memory", self.gpu.memory_bytes, "as CUDA reports it" if self.gpu.memory_source else "as described"),
            (f"  usable, x {self.utilization:g}", self.utilization * self.gpu.memory_bytes, ""),
            (
                "- weights",
                self.weights_bytes,
                f"{self.model.num_params / 1e9:.4g}e9 parameters x {self.dtype_bytes} bytes",
            ),
            ("- activations", self.activation_bytes, "of the largest step, and the runtime"),
            ("= left for K and V", self.kv_bytes, ""),
        )
        lines = [f"{self.model.name} on {self.gpu.name} (GB = 1e9 bytes)"]
        lines += [f"{label:<20}{value / GB:>9.3f} GB  {note}".rstrip() for label, value, note in rows]
        per_token = self.model.kv_bytes_per_token(self.kv_dtype_bytes)
        lines.append(f"  a block of {self.block_size}: {self.block_bytes:,} bytes ({per_token:,} a token)")
        lines.append(f"  {self.num_blocks:,} blocks = {self.num_tokens:,} tokens")
        return "\n".join(lines)


def peak_activation_bytes(
    model: str | ModelShape, num_tokens: int = 2048, num_rows: int = 128, dtype_bytes: int = 2
) -> float:
    """Bytes that an engine takes beside weights, K and V, estimated: `RUNTIME_BYTES`, and intermediate results of the
    largest step, by the shapes of the largest tensors alive at once: in an MLP the residual, its input, and as many
    vectors of ffn_size as it has matrices, for each token; then the logits of each row in 32 bits.

    A real engine runs its largest step and measures (vLLM: `determine_available_memory`), often 1 to 4 GB.

    Args:
        num_tokens: the token budget of a step; the default is vLLM's `max_num_batched_tokens`.
        num_rows: sequences in a step; the default is vLLM's `max_num_seqs`.
    """
    shape = model_shape(model)
    per_token = (2 * shape.hidden_size + shape.mlp_matrices * shape.ffn_size) * dtype_bytes
    return RUNTIME_BYTES + num_tokens * per_token + num_rows * shape.vocab_size * 4


def kv_capacity(
    model: str | ModelShape,
    gpu: str | Gpu,
    utilization: float = 0.9,
    activation_bytes: float | None = None,
    dtype_bytes: int = 2,
    kv_dtype_bytes: int | None = None,
    block_size: int = 16,
) -> KVCapacity:
    """What fits on one GPU.

    Args:
        utilization: share of the memory that the engine may take for everything (vLLM's `gpu_memory_utilization`: 0.9
            for years, 0.92 since).
        activation_bytes: None: `peak_activation_bytes` of its default step.
        kv_dtype_bytes: None: as the weights.

    Raises:
        InvalidRequestError: not even one block is left, with the arithmetic and the cure; or a value is out of range.
    """
    if not hasattr(utilization, "__float__") or not 0 < utilization <= 1:
        raise InvalidRequestError(f"utilization={utilization!r}: is the share of the memory in use, in (0, 1]")
    if kv_dtype_bytes is None:
        kv_dtype_bytes = dtype_bytes
    sizes = {"dtype_bytes": dtype_bytes, "kv_dtype_bytes": kv_dtype_bytes, "block_size": block_size}
    for name, value in sizes.items():
        if (name, value) != ("dtype_bytes", 0.5) and (not isinstance(value, int) or value < 1):  # weights of 4 bits
            raise InvalidRequestError(f"{name}={value!r}: must be a whole number of at least 1")
    shape = model_shape(model)
    if activation_bytes is None:
        activation_bytes = peak_activation_bytes(shape, dtype_bytes=dtype_bytes)
    if not hasattr(activation_bytes, "__float__") or not activation_bytes >= 0:
        raise InvalidRequestError(f"activation_bytes={activation_bytes!r}: must be at least 0")
    capacity = KVCapacity(
        shape, find_gpu(gpu), utilization, shape.weights_bytes(dtype_bytes), float(activation_bytes), **sizes
    )
    if capacity.num_blocks < 1:
        raise InvalidRequestError(f"{_why(capacity)}; {_cure(capacity)}.\n{capacity}")
    return capacity


def _why(capacity: KVCapacity) -> str:
    where = f"{capacity.model.name} does not fit on one {capacity.gpu.name}"
    if capacity.weights_bytes > capacity.utilization * capacity.gpu.memory_bytes:
        return f"{where}: its weights alone are too large"
    return f"{where}: weights and activations leave less than one block"


def _cure(capacity: KVCapacity) -> str:
    """What can be asked for here: more of the memory, a smaller step or block, another GPU, or a smaller dtype; a model
    is not split over several GPUs."""
    used, beside = capacity.weights_bytes + capacity.activation_bytes, capacity.weights_bytes + RUNTIME_BYTES
    usable = capacity.utilization * capacity.gpu.memory_bytes
    own = []
    if used + capacity.block_bytes <= capacity.gpu.memory_bytes:
        own.append("allow a larger utilization")
    if beside + capacity.block_bytes <= usable:
        own.append("give a step fewer tokens (max_num_batched_tokens)")
    if used < usable:
        own.append(f"take smaller blocks (block_size={capacity.block_size})")
    larger = _that_hold(capacity, capacity.weights_bytes)
    smaller = _that_hold(capacity, capacity.model.weights_bytes(1)) if capacity.dtype_bytes > 1 else []
    cures = [*own, *([f"take {_one_of(larger)}"] if larger else [])]
    if smaller:
        where = "here" if capacity.gpu.name in smaller else f"on {_one_of([n for n in smaller if n not in larger])}"
        cures.append(f"store the weights in 8 bits {where} (dtype_bytes=1)")
    if not cures:
        even = ", not even in 8 bits" if capacity.dtype_bytes > 1 else ""
        cures.append(f"take a smaller model: no GPU of the table holds it{even}")
    return f"{', or '.join(cures)}; this simulator knows one GPU"


def _that_hold(capacity: KVCapacity, weights_bytes: float) -> list[str]:
    need = weights_bytes + capacity.activation_bytes + capacity.block_bytes
    devices = {gpu.name: gpu for gpu in (*GPUS.values(), capacity.gpu)}
    return [gpu.name for gpu in devices.values() if capacity.utilization * gpu.memory_bytes >= need]


def _one_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
