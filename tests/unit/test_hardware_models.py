"""KV bytes of public models, against values published by others and against the engine's own config."""

import pytest

from cbserve.hardware.models import GPUS, MODELS
from cbserve.models.tiny import TINY

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("name", "token", "block"),
    [
        ("OPT-13B", 800 * KIB, 12.5 * MIB),  # Kwon et al. 2023, section 3.1: 800 KB a token
        ("Llama-2-7B", 512 * KIB, 8 * MIB),
        ("Llama-3.1-8B", 128 * KIB, 2 * MIB),
        ("Llama-3.1-70B", 320 * KIB, 5 * MIB),
        ("Qwen2.5-7B", 56 * KIB, 896 * KIB),
        ("SmolLM2-135M", 22.5 * KIB, 360 * KIB),
    ],
)
def test_kv_bytes(name, token, block):
    model = MODELS[name]
    assert model.kv_bytes_per_token() == token
    assert model.block_bytes() == block
    assert model.block_bytes(dtype_bytes=1) == block / 2


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_counting_all_heads_is_right_for_multi_head_attention_alone(model):
    assert model.block_bytes_all_heads() / model.block_bytes() == model.num_heads / model.num_kv_heads
    assert model.num_heads % model.num_kv_heads == 0
    assert model.source


def test_the_formula_is_the_engines():
    from cbserve.hardware.models import ModelShape

    tiny = ModelShape("tiny", TINY.num_layers, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, 1.0, "this package")
    assert tiny.kv_bytes_per_token(4) == TINY.kv_bytes_per_token()


def test_units_of_devices():
    assert all(1e13 < gpu.flops < 1e16 and 1e10 < gpu.host_link_bytes_s < 1e12 for gpu in GPUS.values())
