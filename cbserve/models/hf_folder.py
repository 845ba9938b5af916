"""Hugging Face model folders (config.json, *.safetensors, tokenizer.json): read with every doubt named, and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cbserve.errors import ModelError
from cbserve.models.config import ModelConfig, as_ids
from cbserve.models.tokenizer import Tokenizer

_AGAIN = "copy it from the model's repository again"


def read_config(folder: Path) -> ModelConfig:
    """The model's sizes, with the end-of-text ids of generation_config.json where there is one.

    Raises `ModelError` naming the file and the cure.
    """
    config = ModelConfig.from_hf(_read_json(folder / "config.json"), folder.name, str(folder / "config.json"))
    generation = folder / "generation_config.json"
    eos = as_ids(_read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return replace(config, eos_token_ids=eos or config.eos_token_ids)


def read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The folder's tokenizer. Raises `ModelError` if it is absent, broken, or knows more tokens than the model."""
    tokenizer = Tokenizer.load(folder, bos_token_id=config.bos_token_id, eos_token_ids=config.eos_token_ids)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{folder / 'tokenizer.json'} knows {tokenizer.vocab_size} tokens, but the model has only "
            f"{config.vocab_size} rows (vocab_size in config.json); take both files from the same repository"
        )
    return tokenizer


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor of the model by its checkpoint name, memory-mapped; other tensors in the files are ignored.

    Raises `ModelError` naming the file for what is missing, truncated or of another shape, before anything is copied.
    """
    expected = config.tensor_shapes()
    weights: dict[str, Tensor] = {}
    for path, names in _files_of(folder, expected).items():
        if not path.is_file():
            raise ModelError(
                f"{path} is missing, but holds {names[0]} and others; {_AGAIN.replace('it', 'the file', 1)}"
            )
        try:
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in set(file.keys()) & set(names)}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is truncated or damaged ({error}); {_AGAIN}") from error
    for name, shape in expected.items():
        if name not in weights:
            raise ModelError(
                f"{folder}: tensor {name} is in none of the safetensors files; {_AGAIN.replace('it', 'them', 1)}"
            )
        if weights[name].shape != shape:
            raise ModelError(
                f"{folder}: tensor {name} has shape {tuple(weights[name].shape)}, but config.json asks for {shape}; "
                "take config.json and the safetensors files from the same repository"
            )
    return weights


def write_folder(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a model into the existing `folder` so that transformers, vLLM and `read_*` load it."""
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    hf = config.to_hf(dtype)
    generation = {key: hf[key] for key in ("bos_token_id", "eos_token_id") if hf[key] is not None}
    _write_json(folder / "config.json", hf)
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(folder)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})


def _files_of(folder: Path, expected: Mapping[str, Any]) -> dict[Path, list[str]]:
    """Which file holds which of the expected tensors: from the index of a sharded checkpoint, else all in each."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        files: dict[Path, list[str]] = {}
        for name in expected:
            if name not in weight_map:
                raise ModelError(f"{index} does not say which file holds tensor {name}; {_AGAIN}")
            files.setdefault(folder / weight_map[name], []).append(name)
        return files
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"{folder} holds no *.safetensors file; copy them from the model's repository "
            "(a *.bin or *.gguf alone is not enough: convert it with save_pretrained)"
        )
    return {path: list(expected) for path in paths}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; copy {path.name} from the model's repository") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); {_AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not a JSON object; {_AGAIN}")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
