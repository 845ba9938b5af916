"""What a Llama-architecture model looks like, and its translation from and to a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbserve.errors import ModelError

# Settings of a Llama config.json that change the arithmetic and that `LlamaModel` computes in one way only.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}


def gpu_dtype(capability: tuple[int, int]) -> str:
    """The 16-bit type that a CUDA device computes in hardware: bfloat16 from compute capability 8.0 on.

    By capability and not by `torch.cuda.is_bf16_supported()`, which is true on a T4 (7.5), where it is emulated.
    """
    return "bfloat16" if capability >= (8, 0) else "float16"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-architecture model (Touvron et al., arXiv 2302.13971, section 2.2).

    `num_kv_heads < num_heads` is grouped-query attention (Ainslie et al., arXiv 2305.13245).
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_position: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        for field in (*sizes, "vocab_size", "max_position"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"model {self.name!r}: {field} is {value!r}, but must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model {self.name!r}: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"model {self.name!r}: head_dim is {self.head_dim}, but rotary embedding needs an even one"
            )

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """Bytes that K and V of one token take in all layers: 2 x layers x KV heads x head_dim x `dtype_bytes`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor in a Hugging Face checkpoint of this model."""
        d, ffn = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (d,),
                prefix + "self_attn.q_proj.weight": (q, d),
                prefix + "self_attn.k_proj.weight": (kv, d),
                prefix + "self_attn.v_proj.weight": (kv, d),
                prefix + "self_attn.o_proj.weight": (d, q),
                prefix + "post_attention_layernorm.weight": (d,),
                prefix + "mlp.gate_proj.weight": (ffn, d),
                prefix + "mlp.up_proj.weight": (ffn, d),
                prefix + "mlp.down_proj.weight": (d, ffn),
            }
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], name: str, source: str) -> ModelConfig:
        """Read the dictionary of a `config.json`; `source` names the file in errors.

        Raises `ModelError` for another architecture, and for a setting that would change the arithmetic silently.
        """
        architectures = hf.get("architectures") or [hf.get("model_type")]
        if hf.get("model_type") != "llama" or not set(architectures) <= {"LlamaForCausalLM", "llama"}:
            raise ModelError(
                f"{source}: architecture {', '.join(map(str, architectures))} (model_type {hf.get('model_type')!r}) "
                "is not supported; use a model whose config.json says LlamaForCausalLM, such as SmolLM2 or TinyLlama"
            )
        # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ModelError(f"{source}: rope_parameters is {rope!r}, not an object; copy config.json again")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        unsupported = {key: hf[key] for key, only in _FIXED.items() if hf.get(key, only) not in (only, None)}
        if rope_type != "default":
            unsupported["rope_type"] = rope_type
        if hf.get("quantization_config"):
            unsupported["quantization_config"] = hf["quantization_config"].get("quant_method")
        if unsupported:
            raise ModelError(
                f"{source}: {', '.join(f'{key}={value!r}' for key, value in unsupported.items())} is not supported; "
                "use a plain Llama checkpoint: silu, no biases, no quantisation, no rope scaling"
            )
        try:
            num_heads = hf["num_attention_heads"]
            return cls(
                name=name,
                num_layers=hf["num_hidden_layers"],
                hidden_size=hf["hidden_size"],
                num_heads=num_heads,
                num_kv_heads=hf.get("num_key_value_heads") or num_heads,
                head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
                intermediate_size=hf["intermediate_size"],
                vocab_size=hf["vocab_size"],
                rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
                rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
                max_position=hf.get("max_position_embeddings", 2048),
                tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
                bos_token_id=hf.get("bos_token_id"),
                eos_token_ids=as_ids(hf.get("eos_token_id")),
            )
        except KeyError as error:
            raise ModelError(
                f"{source}: the key {error} is missing; copy config.json from the model's repository again"
            ) from error
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{source}: a value is no number ({error}); copy config.json from the model's repository again"
            ) from error

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The `config.json` of this model, in keys that transformers 4 and 5 and vLLM read; `dtype` as "float32"."""
        eos = self.eos_token_ids
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **_FIXED,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A token id field of a config (absent, one id or a list) as a tuple."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
