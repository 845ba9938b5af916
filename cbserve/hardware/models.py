"""Sizes of public models, from their published shapes: parameters, and what their KV cache takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cbserve.core import given
from cbserve.core.errors import InvalidRequestError
from cbserve.errors import ModelError
from cbserve.files import read_object
from cbserve.hardware.names import did_you_mean

_LARGEST = 2**31  # of a size: no product of them leaves the range of a float
_KINDS: dict[Any, tuple[type, str]] = {"str": (str, "text"), "bool": (bool, "true or false")}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder-only transformer: all that its FLOPs and bytes follow from.

    Args:
        num_kv_heads: below `num_heads`: grouped-query attention (Ainslie et al., arXiv 2305.13245).
        head_dim: not always `hidden_size / num_heads`.
        source: where the shape is from.
        tie_word_embeddings: the output head is the input embedding.
        mlp_matrices: 3 of hidden_size x ffn_size with a gate (SwiGLU: Shazeer, arXiv 2002.05202), 2 without (OPT, GPT).
        published_params: all parameters as their authors count them, with norms, biases and positions, which the
            formulas below leave out (less than 1 %); None: by formula.
        max_position_embeddings: most tokens of prompt and answer that it was made for; None: not known.

    Raises:
        InvalidRequestError: a size is no whole number of at least 1, or another field is of a wrong kind.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    source: str
    tie_word_embeddings: bool = False
    mlp_matrices: int = 3
    published_params: float | None = None
    max_position_embeddings: int | None = field(default=None, compare=False)  # no FLOP and no byte follows from it

    def __post_init__(self) -> None:
        for name, kind in [(option.name, option.type) for option in fields(self)]:
            value = getattr(self, name)
            if kind == "int":
                given.integer(name, value, 1, most=_LARGEST)
            elif kind in _KINDS:
                given.instance(name, value, *_KINDS[kind])
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequestError(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if self.published_params is not None:
            given.positive("published_params", self.published_params)
        if self.max_position_embeddings is not None:
            given.integer("max_position_embeddings", self.max_position_embeddings, 1, most=_LARGEST)

    @property
    def layer_params(self) -> int:
        """Weights in the matrices of one layer: Q and O, K and V, and the MLP's."""
        d, dh = self.hidden_size, self.head_dim
        attention = 2 * d * self.num_heads * dh + 2 * d * self.num_kv_heads * dh
        return attention + self.mlp_matrices * d * self.ffn_size

    @property
    def matmul_params(self) -> int:
        """Weights that a forward pass multiplies with: the output head counts, the input embedding is a look-up.

        A token takes 2 FLOPs for each, and a step reads each once.
        """
        return self.num_layers * self.layer_params + self.vocab_size * self.hidden_size

    @property
    def matrix_params(self) -> int:
        """Weights in all matrices, the input embedding too."""
        return self.matmul_params + (0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size)

    @property
    def num_params(self) -> float:
        """All parameters: as published, or else those in matrices."""
        return self.published_params or self.matrix_params

    def weights_bytes(self, dtype_bytes: int = 2) -> float:
        """Bytes of the whole model in memory."""
        return dtype_bytes * self.num_params

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of K and V of one token in all layers: 2 x layers x KV heads x head_dim x `dtype_bytes`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def block_bytes(self, block_size: int = 16, dtype_bytes: int = 2) -> int:
        """Bytes of one block of `block_size` tokens in all layers."""
        return block_size * self.kv_bytes_per_token(dtype_bytes)

    def block_bytes_all_heads(self, block_size: int = 16, dtype_bytes: int = 2) -> int:
        """The same if each query head had its own K and V, 2 x L x H x d_k x P x bytes: right for multi-head only."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * block_size * dtype_bytes

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, Any], name: str | None = None) -> ModelShape:
        """Read a Hugging Face `config.json`: its path, the folder that it lies in, or what it contains.

        Raises:
            ModelError: the file cannot be read; a key is missing or its value wrong; the architecture is another than
                dense SwiGLU with grouped queries. The message names file and key.
        """
        if isinstance(config, Mapping):
            return _from_mapping(config, name or str(config.get("_name_or_path") or "config"), "config")
        path = Path(config, "config.json") if os.path.isdir(config) else Path(config)
        content = read_object(path, ModelError, "give the path of a model's config.json")
        return _from_mapping(content, name or path.absolute().parent.name, str(path))


# Architectures with just the matrices that `layer_params` counts. Others may have the same keys and other arithmetic.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Keys of architectures whose FLOPs and bytes follow other formulas.
_OTHER_FORMULAS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "num_local_experts": "a mixture of experts (MoE)",
    "num_experts": "a mixture of experts (MoE)",
    "n_routed_experts": "a mixture of experts (MoE)",
}


def _from_mapping(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    kind = config.get("model_type")
    for key, what in _OTHER_FORMULAS.items():
        if config.get(key):
            raise ModelError(
                f"{source}: {key}={config[key]!r}: {kind!r} is {what}, whose FLOPs and bytes follow other formulas; "
                f"take a dense model: {', '.join(_MODEL_TYPES)}"
            )
    if kind not in _MODEL_TYPES:
        raise ModelError(f"{source}: model_type={kind!r} is not supported; it must be one of {', '.join(_MODEL_TYPES)}")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise ModelError(
            f"{source}: sliding_window={config['sliding_window']!r}: attention to a window reads less than is counted "
            "here; set it to null to count attention to everything"
        )

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(
                f"{source}: the key {key!r} is missing; copy config.json from the model's repository again"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{source}: {key}={value!r}: must be a whole number of at least 1")
        return value

    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ModelError(f"{source}: tie_word_embeddings={tied!r}: must be true or false")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"{source}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}; copy it again"
        )
    head_dim = size("head_dim", hidden // heads)
    length = None if config.get("max_position_embeddings") is None else size("max_position_embeddings")
    return ModelShape(
        name, size("num_hidden_layers"), hidden, heads, kv_heads, head_dim, size("intermediate_size"),
        size("vocab_size"), source, tie_word_embeddings=tied, max_position_embeddings=length,
    )  # fmt: skip


_VIDUR = "Vidur, model_config.py"
_AICONFIGURATOR = "NVIDIA aiconfigurator, model_configs"
_OPT = "Zhang et al., arXiv 2205.01068, table 1"


def _opt(name: str, layers: int, hidden: int, heads: int, params: float) -> ModelShape:
    """Multi-head attention, an MLP of two matrices four times as wide, tied embeddings."""
    return ModelShape(name, layers, hidden, heads, heads, 128, 4 * hidden, 50272, _OPT, True, 2, params, 2048)


def _swiglu(
    name: str, layers: int, hidden: int, heads: int, kv: int, head_dim: int, ffn: int, vocab: int, params: float,
    length: int, source: str, tied: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(name, layers, hidden, heads, kv, head_dim, ffn, vocab, source, tied, 3, params, length)


def _hub(repository: str, reported: bool = False) -> str:
    return f"{'reported: ' if reported else ''}Hugging Face, {repository}, config.json"


# The last number: positions. Llama 2: Touvron et al., arXiv 2307.09288, table 1; Llama 3.1: Grattafiori et al., arXiv
# 2407.21783; TinyLlama: Zhang et al., arXiv 2401.02385; others: `max_position_embeddings` of their config.json, without
# stretched rotary embeddings.
# DeepSeek-V3 is not here: its latent attention caches one vector of 512 + 64 values for all heads, and a token visits a
# few of its experts, so neither KV bytes nor FLOPs follow from these fields. Nor is Mixtral, for its experts.
MODELS = {
    shape.name: shape
    for shape in (
        _opt("OPT-13B", 40, 5120, 40, 12.85e9),
        _opt("OPT-66B", 64, 9216, 72, 65.7e9),
        _opt("OPT-175B", 96, 12288, 96, 175e9),
        _swiglu("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, 6.738e9, 4096, _VIDUR),
        _swiglu("Llama-2-13B", 40, 5120, 40, 40, 128, 13824, 32000, 13.02e9, 4096, _VIDUR),
        _swiglu("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, 68.98e9, 4096, _VIDUR),
        _swiglu("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 8.030e9, 131072, _AICONFIGURATOR),
        _swiglu("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 70.55e9, 131072, _AICONFIGURATOR),
        _swiglu("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, 405.8e9, 131072, _AICONFIGURATOR),
        # Without the sliding window of its first version.
        _swiglu(
            "Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, 7.241e9, 32768, _hub("mistralai/Mistral-7B-v0.2", True)
        ),
        _swiglu(
            "Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, 0.494e9, 32768, _hub("Qwen/Qwen2.5-0.5B", True), True
        ),
        _swiglu("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 7.615e9, 131072, _hub("Qwen/Qwen2.5-7B")),
        _swiglu("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 8.19e9, 40960, _AICONFIGURATOR),
        # Heads x head_dim is 8192, not the hidden size.
        _swiglu("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 32.8e9, 40960, _AICONFIGURATOR),
        _swiglu(
            "SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, 0.1345e9, 8192, _hub("HuggingFaceTB/SmolLM2-135M"), True
        ),
        _swiglu(
            "SmolLM2-360M",
            32,
            960,
            15,
            5,
            64,
            2560,
            49152,
            0.362e9,
            8192,
            _hub("HuggingFaceTB/SmolLM2-360M", True),
            True,
        ),
        _swiglu("TinyLlama-1.1B", 22, 2048, 32, 4, 64, 5632, 32000, 1.100e9, 2048, "TinyLlama, lit_gpt/config.py"),
    )
}

_BY_NAME = {name.lower(): shape for name, shape in MODELS.items()}
for _size in ("8B", "70B"):  # 3.1 changed the rotary scaling, and so the length, not the shape
    _llama_3_1 = MODELS[f"Llama-3.1-{_size}"]
    _BY_NAME[f"llama-3-{_size}".lower()] = replace(_llama_3_1, name=f"Llama-3-{_size}", max_position_embeddings=8192)


def model_shape(model: str | os.PathLike[str] | ModelShape) -> ModelShape:
    """The shape of a model: by name in any case ("llama-3.1-8b"), or from the path of a Hugging Face `config.json`.

    Raises:
        InvalidRequestError: neither a name in the table nor a path; the message lists the names.
        ModelError: the config.json does not describe a model whose arithmetic is known here.
    """
    if isinstance(model, ModelShape):
        return model
    found = _BY_NAME.get(str(model).strip().lower())
    if found is not None:
        return found
    if str(model).endswith(".json") or os.path.exists(model):
        return ModelShape.from_config(model)
    raise InvalidRequestError(
        f"model={given.short(str(model))} is not in the table{did_you_mean(str(model), _BY_NAME)}; take one of "
        f"{', '.join(map(str.lower, MODELS))}, or give the path of a Hugging Face config.json"
    )
