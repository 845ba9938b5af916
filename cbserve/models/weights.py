"""Open a model by name or folder, and export one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cbserve.errors import ModelError
from cbserve.files import at_home
from cbserve.models.config import ModelConfig, gpu_dtype
from cbserve.models.fetch import SOURCES, fetch_model
from cbserve.models.hf_folder import read_config, read_tokenizer, read_weights, write_folder
from cbserve.models.llama import LlamaModel
from cbserve.models.tiny import TINY, tiny_weights
from cbserve.models.tokenizer import ByteTokenizer, Tokenizer


class LoadedModel(NamedTuple):
    config: ModelConfig
    model: LlamaModel
    tokenizer: Tokenizer


def load_model(
    name_or_folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Config, model and tokenizer of "smollm2-135m" (fetched if absent), "tiny" (random, by `seed`) or a local folder.

    A folder is a Hugging Face one of a Llama-architecture model: config.json, *.safetensors, tokenizer.json. `dtype`
    None chooses by `default_dtype`. Raises `ModelError` naming the file and the cure for anything else.
    """
    config, weights, tokenizer = _open(name_or_folder, seed)
    device = torch.device(device)
    return LoadedModel(config, LlamaModel(config, weights, device, dtype or default_dtype(device)), tokenizer)


def default_dtype(device: str | torch.device) -> torch.dtype:
    """float32 on a CPU; on CUDA the 16-bit type that the device computes in hardware (`gpu_dtype`)."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32
    dtype: torch.dtype = getattr(torch, gpu_dtype(torch.cuda.get_device_capability(device)))
    return dtype


def export_model(name_or_folder: str | os.PathLike[str], folder: str | os.PathLike[str], seed: int = 0) -> Path:
    """Write a model as a Hugging Face folder that transformers and vLLM load; returns `folder`.

    It appears in one rename, or not at all. Raises `ModelError` if `folder` exists and is not an empty directory.
    """
    target = at_home(folder).absolute()
    if os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder; export to another one, or empty it first")
    config, weights, tokenizer = _open(name_or_folder, seed)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(f"cannot write below {target.parent} ({error}); export to another folder") from error
    try:
        write_folder(work, config, weights, tokenizer)
        work.chmod(0o755)  # mkdtemp's are private
        if target.exists():
            target.rmdir()  # Windows does not rename onto a folder; one that was filled meanwhile is not removed
        work.rename(target)
    except OSError as error:
        raise ModelError(f"cannot write the model to {target} ({error}); export to another folder") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _open(name_or_folder: str | os.PathLike[str], seed: int) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    if name_or_folder == "tiny":
        return TINY, tiny_weights(seed), ByteTokenizer(TINY.vocab_size)
    if name_or_folder in SOURCES:
        folder = fetch_model(str(name_or_folder))
    else:
        if not isinstance(name_or_folder, str | os.PathLike):
            raise ModelError(f"model={name_or_folder!r}: must be a model's name or a folder")
        folder = Path(os.path.expanduser(name_or_folder))
        if not os.path.isdir(folder):
            names = ", ".join(f'"{name}"' for name in [*SOURCES, "tiny"])
            raise ModelError(
                f"{str(name_or_folder)!r} is neither a model's name ({names}) nor a folder; check the spelling"
            )
    config = read_config(folder)
    return config, read_weights(folder, config), read_tokenizer(folder, config)
