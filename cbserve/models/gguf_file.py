"""Read a Llama model from a GGUF file (llama.cpp's format) as what its Hugging Face folder would hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from cbserve.errors import ModelError
from cbserve.models.config import ModelConfig
from cbserve.models.tokenizer import Tokenizer

_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(
    path: Path, name: str, on_tensor: Callable[[int], None] = lambda num_bytes: None
) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    """Config, dequantised float32 tensors by checkpoint name, and tokenizer of the GGUF file at `path`.

    `on_tensor` is told the bytes of each tensor as it has been dequantised. Raises `ModelError` if the file is not a
    whole GGUF of a Llama model with a byte-level BPE vocabulary.
    """
    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch the model again") from error
    config = _config(path, name, fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in _TENSOR_NAMES:
            target = _TENSOR_NAMES[tensor.name]
        elif tensor.name.startswith("blk."):
            _, layer, kind, _ = tensor.name.split(".")
            target = f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
            if kind in heads:
                values = _undo_permutation(values, heads[kind])
        else:
            continue  # rope_freqs and the like: no part of a checkpoint
        weights[target] = torch.from_numpy(np.array(values))  # a copy: the file is memory-mapped
        on_tensor(tensor.n_bytes)
    return config, weights, _tokenizer(path, fields)


def _config(path: Path, name: str, fields: dict[str, Any], tied: bool) -> ModelConfig:
    _expect(path, fields, "general.architecture", "llama")
    hidden_size, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    tokens = fields["tokenizer.ggml.tokens"]
    return ModelConfig(
        name=name,
        num_layers=fields["llama.block_count"],
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", num_heads),
        head_dim=fields.get("llama.rope.dimension_count", hidden_size // num_heads),
        intermediate_size=fields["llama.feed_forward_length"],
        vocab_size=fields.get("llama.vocab_size", len(tokens)),
        rope_theta=_decimal(fields.get("llama.rope.freq_base", 10_000.0)),
        rms_norm_eps=_decimal(fields["llama.attention.layer_norm_rms_epsilon"]),
        max_position=fields["llama.context_length"],
        tie_word_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )


def _tokenizer(path: Path, fields: dict[str, Any]) -> Tokenizer:
    _expect(path, fields, "tokenizer.ggml.model", "gpt2")
    _expect(path, fields, "tokenizer.ggml.pre", "smollm")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    # "smollm": digits stand alone (every Unicode number does), only then GPT-2's split into words.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return Tokenizer(
        backend,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
        chat_template=fields.get("tokenizer.chat_template"),
    )


def _undo_permutation(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k back into a checkpoint's order: llama.cpp stores rotation pairs side by side within each head."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _decimal(value: float) -> float:
    """The decimal that was meant by a float32: 1e-05, where its nearest double is 9.99999974737875e-06."""
    return float(str(np.float32(value)))


def _expect(path: Path, fields: dict[str, Any], key: str, only: str) -> None:
    if fields.get(key) != only:
        raise ModelError(
            f"{path}: {key} is {fields.get(key)!r}, but only {only!r} is supported; use the model's safetensors"
        )
