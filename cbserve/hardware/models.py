"""What the KV cache of public models takes, from their published shapes (config.json of each checkpoint)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The part of a transformer's shape that decides its KV cache, and its size for compute.

    Args:
        num_kv_heads: fewer than `num_heads` is grouped-query attention (Ainslie et al., arXiv 2305.13245), as many is
            multi-head attention.
        num_params: all parameters; a forward pass takes about 2 FLOPs each for every token.
        source: where the shape is from.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_params: float
    source: str

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of K and V of one token in all layers: 2 x layers x KV heads x head_dim x `dtype_bytes`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def block_bytes(self, block_size: int = 16, dtype_bytes: int = 2) -> int:
        """Bytes of one block of `block_size` tokens in all layers."""
        return block_size * self.kv_bytes_per_token(dtype_bytes)

    def block_bytes_all_heads(self, block_size: int = 16, dtype_bytes: int = 2) -> int:
        """The same if each query head had its own K and V, 2 x L x H x d_k x P x bytes: right for multi-head only."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * block_size * dtype_bytes


_VIDUR = "Vidur, model_config.py"
_AICONFIGURATOR = "NVIDIA aiconfigurator, model_configs"

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("OPT-13B", 40, 40, 40, 128, 12.85e9, "Zhang et al., arXiv 2205.01068, table 1"),
        ModelShape("Llama-2-7B", 32, 32, 32, 128, 6.738e9, _VIDUR),
        ModelShape("Llama-2-70B", 80, 64, 8, 128, 68.98e9, _VIDUR),
        ModelShape("Llama-3.1-8B", 32, 32, 8, 128, 8.030e9, _AICONFIGURATOR),
        ModelShape("Llama-3.1-70B", 80, 64, 8, 128, 70.55e9, _AICONFIGURATOR),
        ModelShape("Qwen2.5-7B", 28, 28, 4, 128, 7.615e9, "Hugging Face, Qwen/Qwen2.5-7B, config.json"),
        ModelShape("Qwen3-32B", 64, 64, 8, 128, 32.8e9, _AICONFIGURATOR),
        ModelShape("SmolLM2-135M", 30, 9, 3, 64, 0.1345e9, "Hugging Face, HuggingFaceTB/SmolLM2-135M, config.json"),
    )
}


@dataclass(frozen=True)
class Gpu:
    """What a GPU computes and moves, per second: dense bf16 FLOPs; bytes in one direction over its host link."""

    name: str
    flops: float
    host_link_bytes_s: float
    source: str


_DATASHEET = "NVIDIA datasheet, dense; NVIDIA aiconfigurator, systems"

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-80 SXM", 312e12, 32e9, _DATASHEET + "; PCIe Gen4 x16"),
        Gpu("H100 SXM", 989.4e12, 64e9, _DATASHEET + "; PCIe Gen5 x16"),
    )
}
