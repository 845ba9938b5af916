"""The Llama forward pass over packed tokens: no batch dimension, no cache, no padding; attention is passed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cbserve.models.config import ModelConfig

# attend(layer, q [N, heads, head_dim], k [N, kv_heads, head_dim], v [N, kv_heads, head_dim]) -> [N, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Fused(Protocol):
    """Operations between matrix products; `cbserve.kernels.backends.Backend` has them."""

    @property
    def add_rms_norm(self) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]: ...

    @property
    def rotary(self) -> Callable[[Tensor, Tensor], Tensor]: ...

    @property
    def silu_and_mul(self) -> Callable[[Tensor], Tensor]: ...


# Below this many elements a call of oneDNN costs more than the product.
_WORTH_PACKING = 1 << 16


class LlamaModel:
    """Weights of a Llama-architecture model (Touvron et al., arXiv 2302.13971) and its forward pass.

    `weights` maps the names of a Hugging Face checkpoint (`ModelConfig.tensor_shapes`) to tensors; they are copied.
    Matrices that read the same input are fused: q, k and v; gate and up.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], device: str | torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype

        def load(*names: str) -> Tensor:
            # cat copies even a single tensor: a view would keep a whole memory-mapped file alive.
            return torch.cat([weights[name + ".weight"].to(self.device, dtype) for name in names])

        self.embedding = load("model.embed_tokens")
        self.layers = [_Layer(config, f"model.layers.{index}.", load) for index in range(config.num_layers)]
        self.final_norm = RMSNorm(load("model.norm"), config.rms_norm_eps)
        # Tied: one table, read by row when embedding and as a matrix here. Packing makes a copy of its own.
        self.lm_head = Linear(self.embedding if config.tie_word_embeddings else load("lm_head"))
        self.rotation = _rotation_table(config).to(self.device)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, logit_rows: Tensor, kernels: Fused | None = None
    ) -> Tensor:
        """Logits after some of N packed tokens, which may belong to any number of sequences.

        token_ids, positions: int64 [N]; a position is the token's place in its own sequence. `attend(layer, q, k, v)`
        is called once a layer with rotated q [N, heads, head_dim] and k [N, kv_heads, head_dim], and with v; it stores
        K and V as it likes and returns [N, heads, head_dim]. logit_rows: int64 [R], which of the N tokens want logits.
        Returns float32 [R, vocab]. `kernels` does what lies between the matrix products in fewer passes over memory.

        head_dim of q and k is in pair-interleaved order (see `_interleave_pairs`), which attention cannot notice.
        """
        rotation = self.rotation[positions].unsqueeze(1)
        hidden = F.embedding(token_ids, self.embedding)
        if kernels is not None:
            return self._forward_fused(hidden, rotation.squeeze(1), attend, logit_rows, kernels)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project(layer.attention_norm(hidden), rotation)
            hidden = hidden + layer.output(attend(index, q, k, v).flatten(1))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        return self.lm_head(self.final_norm(hidden[logit_rows])).float()

    def _forward_fused(
        self, hidden: Tensor, rotation: Tensor, attend: Attend, logit_rows: Tensor, kernels: Fused
    ) -> Tensor:
        """The same with each residual addition fused into the norm that follows it."""
        eps, residual = self.config.rms_norm_eps, torch.zeros_like(hidden)
        for index, layer in enumerate(self.layers):
            x, residual = kernels.add_rms_norm(hidden, residual, layer.attention_norm.weight, eps)
            qkv = layer.qkv(x).unflatten(-1, (-1, layer.head_dim))
            qk = kernels.rotary(qkv[:, : layer.num_rotated], rotation)
            q, k, v = qk[:, : layer.num_heads], qk[:, layer.num_heads :], qkv[:, layer.num_rotated :]
            x = layer.output(attend(index, q, k, v).flatten(1))
            x, residual = kernels.add_rms_norm(x, residual, layer.mlp_norm.weight, eps)
            hidden = layer.down(kernels.silu_and_mul(layer.gate_up(x)))
        hidden, residual = hidden[logit_rows], residual[logit_rows]
        if not len(logit_rows):
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        x, _ = kernels.add_rms_norm(hidden, residual, self.final_norm.weight, eps)
        return self.lm_head(x).float()


class _Layer:
    def __init__(self, config: ModelConfig, prefix: str, load: Callable[..., Tensor]) -> None:
        self.num_heads, self.num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        self.head_dim = config.head_dim
        self.attention_norm = RMSNorm(load(prefix + "input_layernorm"), config.rms_norm_eps)
        qkv = load(*(f"{prefix}self_attn.{name}_proj" for name in "qkv"))
        rotated_rows = self.num_rotated * self.head_dim
        qkv[:rotated_rows] = _interleave_pairs(qkv[:rotated_rows], self.head_dim)
        self.qkv = Linear(qkv)
        self.output = Linear(load(prefix + "self_attn.o_proj"))
        self.mlp_norm = RMSNorm(load(prefix + "post_attention_layernorm"), config.rms_norm_eps)
        self.gate_up = Linear(load(prefix + "mlp.gate_proj", prefix + "mlp.up_proj"))
        self.down = Linear(load(prefix + "mlp.down_proj"))

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of [N, hidden], the first two rotated by `rotation`, complex [N, 1, head_dim / 2]."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv[:, : self.num_rotated], qkv[:, self.num_rotated :]
        pairs = torch.view_as_complex(qk.float().unflatten(-1, (-1, 2)))
        qk = torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v


class RMSNorm:
    """x w / sqrt(mean(x^2) + eps) over the last dimension of [N, hidden] (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        size = weight.shape[0]
        # The same as (w sqrt(d)) x / hypot(|x|, sqrt(d eps)): four operations instead of a dozen of torch on a
        # CPU, where a decode step of 30 layers spends milliseconds on them.
        self._scaled_weight = weight * size**0.5
        self._floor = weight.new_tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":  # one fused kernel there, summing in float32
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._scaled_weight).div_(length.hypot_(self._floor))


class Linear:
    """x [N, in] -> [N, out] without bias.

    On a CPU in float32 the weight [out, in] is reordered once into oneDNN's blocked layout, as torch's own compiler
    does it; otherwise oneDNN reorders at every call, which doubles the time at batch sizes of 2 to 8. The given weight
    is not kept then.
    """

    def __init__(self, weight: Tensor) -> None:
        self._out_features = weight.shape[0]
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self._weight)
        if not x.shape[0]:  # a step in mid-prefill wants no logits, and oneDNN refuses to plan a product without rows
            return x.new_empty(0, self._out_features)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")


def _pack(weight: Tensor) -> Tensor | None:
    """`weight` in oneDNN's layout, or None where that does not pay; its private operators are not in every build."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    if weight.numel() < _WORTH_PACKING:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return packed


def _rotation_table(config: ModelConfig) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864): e^(i m theta_j), complex64 [max_position, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float64), config.rope_theta**-exponents)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _interleave_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k from a checkpoint's order within each head (x_0 .. x_h, y_0 .. y_h) to x_0, y_0, x_1, y_1, ...

    Rotary embedding turns each (x_j, y_j) like a complex number. Side by side they are one in memory, so the whole
    rotation is a single complex product. q and k change order alike, so their dot products stay what they are.
    """
    return weight.view(-1, 2, head_dim // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
