"""What fits beside the weights: known answers, the arithmetic that is shown, and refusals."""

from dataclasses import replace

import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.hardware.capacity import kv_capacity, peak_activation_bytes
from cbserve.hardware.gpus import Gpu
from cbserve.hardware.models import ModelShape, model_shape

EIGHTY = Gpu("80 GB", 312e12, 80e9, 2e12, 32e9, 0, "exercise")


def seven_billion(layers, kv_heads, head_dim):
    """14 GB of weights in 16 bits, and a KV cache of the given shape."""
    return ModelShape("7B", layers, 4096, 32, kv_heads, head_dim, 11008, 32000, "exercise", published_params=7e9)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "token_bytes", "whole", "most"),
    [
        (40, 8, 125, 160_000, 201, 177),  # 160 KB a token, in decimal
        (40, 8, 128, 160 * 1024, 196, 172),  # 160 KiB a token
    ],
)
def test_the_exercise(layers, kv_heads, head_dim, token_bytes, whole, most):
    """An 80 GB GPU, 14 GB of weights, requests of 2,048 tokens: how many at once, with all of the memory or 90 %?"""
    model = seven_billion(layers, kv_heads, head_dim)
    assert model.kv_bytes_per_token() == token_bytes
    for utilization, requests in ((1.0, whole), (0.9, most)):
        capacity = kv_capacity(model, EIGHTY, utilization, activation_bytes=0)
        assert capacity.kv_bytes == utilization * 80e9 - 14e9
        assert capacity.num_tokens // 2048 == requests == int(capacity.kv_bytes / (token_bytes * 2048))


def test_the_exercise_in_blocks():
    capacity = kv_capacity(seven_billion(40, 8, 125), EIGHTY, 0.9, activation_bytes=0)
    assert (capacity.num_blocks, capacity.num_tokens) == (22_656, 22_656 * 16)


@pytest.mark.parametrize(("model", "requests"), [("llama-2-7b", 54), ("mistral-7b", 216), ("qwen2.5-7b", 493)])
def test_common_models_of_seven_billion(model, requests):
    """The same exercise with what the models really take a token."""
    shape = replace(model_shape(model), published_params=7e9)  # the exercise's 14 GB, whatever it has
    assert kv_capacity(shape, EIGHTY, 0.9, activation_bytes=0).num_tokens // 2048 == requests


def test_it_is_close_to_what_vllm_finds():
    """vLLM 0.19 allocated 2,588 blocks on an RTX 4090 for 256 sequences, and took 1.24 GB beside weights, K and V."""
    assert kv_capacity("llama-3.1-8b", "rtx4090", activation_bytes=1.238e9).num_blocks == 2588
    estimated = peak_activation_bytes("llama-3.1-8b", num_tokens=2048, num_rows=256)
    assert kv_capacity("llama-3.1-8b", "rtx4090", activation_bytes=estimated).num_blocks == pytest.approx(
        2588, rel=0.01
    )


def test_dtype_and_blocks():
    base = kv_capacity("llama-3.1-8b", "a100-80", activation_bytes=1e9)
    fp8 = kv_capacity("llama-3.1-8b", "a100-80", activation_bytes=1e9, kv_dtype_bytes=1)
    assert fp8.weights_bytes == base.weights_bytes == pytest.approx(16.06e9)
    assert fp8.num_tokens == pytest.approx(2 * base.num_tokens, abs=32)
    large = kv_capacity("llama-3.1-8b", "a100-80", activation_bytes=1e9, block_size=256)
    assert large.num_tokens <= base.num_tokens < large.num_tokens + 256


def test_activations_grow_with_the_step():
    small, large = (peak_activation_bytes("llama-3.1-8b", tokens) for tokens in (2048, 8192))
    assert large - small == 6144 * 2 * (2 * 4096 + 3 * 14336)
    assert kv_capacity("llama-3.1-8b", "h100").activation_bytes == small


def test_the_arithmetic_is_shown():
    shown = str(kv_capacity("llama-3.1-8b", "a100-80", activation_bytes=1e9))
    for words in (
        "Llama-3.1-8B on A100-80 SXM",
        "85.198 GB  as CUDA reports it",
        "x 0.9",
        "76.678 GB",
        "16.060 GB  8.03e9 parameters x 2 bytes",
        "1.000 GB",
        "59.618 GB",
        "131,072 a token",
        "28,428 blocks",
    ):
        assert words in shown
    assert "80.000 GB  as described" in str(kv_capacity("llama-3.1-8b", EIGHTY))


@pytest.mark.parametrize(
    ("model", "gpu", "given", "cure"),
    [
        (
            "llama-3.1-70b",
            "a100-80",
            {},
            "take one of B200, GB200, or store the weights in 8 bits here (dtype_bytes=1)",
        ),
        ("llama-3.1-70b", "a100-80", {"dtype_bytes": 4}, "8 bits here (dtype_bytes=1)"),
        ("llama-3.1-70b", "l40s", {"utilization": 0.8}, "or store the weights in 8 bits on H200 SXM (dtype_bytes=1)"),
        ("llama-3.1-70b", "h200", {"dtype_bytes": 1, "activation_bytes": 80e9}, "take one of B200, GB200; this"),
        ("llama-3.1-8b", "a100-80", {"utilization": 1e-9}, "allow a larger utilization"),
        (
            "llama-3.1-8b",
            "a100-80",
            {"activation_bytes": 1e13},
            "give a step fewer tokens (max_num_batched_tokens)",
        ),
        ("llama-3.1-8b", "a100-80", {"block_size": 10**9}, "take smaller blocks (block_size=1000000000)"),
        ("llama-3.1-405b", "a100-80", {}, "smaller model: no GPU of the table holds it, not even in 8 bits; this"),
        ("llama-3.1-405b", "a100-80", {"dtype_bytes": 1}, "smaller model: no GPU of the table holds it; this"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_can_be_asked_instead(model, gpu, given, cure):
    with pytest.raises(InvalidRequestError) as error:
        kv_capacity(model, gpu, **given)
    said = str(error.value)
    assert cure in said and "; this simulator knows one GPU" in said
    assert "split" not in said  # over several GPUs: nothing here can be asked to


def test_a_refusal_shows_the_arithmetic():
    with pytest.raises(InvalidRequestError) as error:
        kv_capacity("llama-3.1-70b", "h100")
    for words in ("its weights alone are too large", "141.100 GB", "76.541 GB"):
        assert words in str(error.value)


def test_a_refusal_looks_at_a_gpu_that_is_described_by_hand_too():
    with pytest.raises(InvalidRequestError, match=r"in 8 bits here \(dtype_bytes=1\)"):
        kv_capacity("llama-3.1-70b", EIGHTY)


def test_less_than_one_block_is_refused():
    with pytest.raises(InvalidRequestError, match="less than one block"):
        kv_capacity("llama-3.1-8b", "a100-80", activation_bytes=60.617e9)
    assert kv_capacity("llama-3.1-8b", "a100-80", activation_bytes=60.615e9).num_blocks == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"utilization": 0}, "utilization=0"),
        ({"utilization": 90}, "utilization=90"),
        ({"activation_bytes": -1}, "activation_bytes=-1"),
        ({"dtype_bytes": 0}, "dtype_bytes=0"),
        ({"kv_dtype_bytes": 0}, "kv_dtype_bytes=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"gpu": "a1"}, "gpu='a1'"),
        ({"model": "a1"}, "model='a1'"),
    ],
)
def test_values_out_of_range(wrong, words):
    with pytest.raises(InvalidRequestError, match=words):
        kv_capacity(**({"model": "llama-3.1-8b", "gpu": "a100-80"} | wrong))
