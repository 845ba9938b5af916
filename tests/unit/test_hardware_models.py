"""Sizes of public models, against values published by others, against the engine's own config, and from config.json."""

import json
from dataclasses import replace

import pytest

from cbserve.core.errors import InvalidRequestError
from cbserve.errors import ModelError
from cbserve.hardware.models import MODELS, ModelShape, model_shape
from cbserve.models.tiny import TINY

KIB, MIB = 2**10, 2**20

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "token", "block"),
    [
        ("OPT-13B", 800 * KIB, 12.5 * MIB),  # Kwon et al. 2023, section 3.1: 800 KB a token
        ("OPT-66B", 2304 * KIB, 36 * MIB),
        ("OPT-175B", 4608 * KIB, 72 * MIB),
        ("Llama-2-7B", 512 * KIB, 8 * MIB),
        ("Llama-2-13B", 800 * KIB, 12.5 * MIB),
        ("Llama-2-70B", 320 * KIB, 5 * MIB),
        ("Llama-3.1-8B", 128 * KIB, 2 * MIB),
        ("Llama-3.1-70B", 320 * KIB, 5 * MIB),
        ("Llama-3.1-405B", 504 * KIB, 7.875 * MIB),
        ("Mistral-7B", 128 * KIB, 2 * MIB),
        ("Qwen2.5-0.5B", 12 * KIB, 192 * KIB),
        ("Qwen2.5-7B", 56 * KIB, 896 * KIB),
        ("Qwen3-8B", 144 * KIB, 2.25 * MIB),
        ("Qwen3-32B", 256 * KIB, 4 * MIB),
        ("SmolLM2-135M", 22.5 * KIB, 360 * KIB),
        ("SmolLM2-360M", 40 * KIB, 640 * KIB),
        ("TinyLlama-1.1B", 22 * KIB, 352 * KIB),
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


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_the_matrices_hold_what_the_authors_count(model):
    assert model.matrix_params == pytest.approx(model.published_params, rel=0.01)
    assert model.num_params == model.published_params
    assert model.weights_bytes() == 2 * model.num_params


def test_matmul_params_leave_out_the_input_embedding():
    llama, smollm = MODELS["Llama-3.1-8B"], MODELS["SmolLM2-135M"]
    assert llama.matmul_params == pytest.approx(7.505e9, rel=1e-4)
    assert llama.matrix_params - llama.matmul_params == 128256 * 4096
    assert smollm.matrix_params == smollm.matmul_params  # tied: one matrix is both


def _tiny() -> ModelShape:
    return ModelShape.from_config(TINY.to_hf("float32"), name="tiny")


def test_the_formulas_are_the_engines():
    tiny = _tiny()
    assert tiny.kv_bytes_per_token(4) == TINY.kv_bytes_per_token()
    matrices = [shape for shape in TINY.tensor_shapes().values() if len(shape) == 2]
    assert tiny.num_params == tiny.matrix_params == sum(rows * columns for rows, columns in matrices)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "llama-3.1-8b", " LLAMA-3.1-8B"])
def test_lookup_ignores_case(name):
    assert model_shape(name) is MODELS["Llama-3.1-8B"]
    assert model_shape(MODELS["Llama-3.1-8B"]) is MODELS["Llama-3.1-8B"]


@pytest.mark.parametrize(("name", "length"), [("llama-3-8b", 8192), ("llama-3.1-8b", 131072), ("llama-3-70b", 8192)])
def test_llama_3_has_the_shape_of_3_1_and_a_shorter_context(name, length):
    shape = model_shape(name)
    assert shape == replace(MODELS[shape.name.replace("3-", "3.1-")], name=shape.name)
    assert shape.max_position_embeddings == length


def test_every_model_of_the_table_says_how_long_a_context_it_was_made_for():
    assert all(shape.max_position_embeddings >= 2048 for shape in MODELS.values())


def test_an_unknown_name_is_answered_with_all_names():
    with pytest.raises(InvalidRequestError, match=r"'llama-9'") as error:
        model_shape("llama-9")
    assert all(name.lower() in str(error.value) for name in MODELS)


def test_a_config_gives_the_shape_of_the_table(tmp_path):
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
    table = MODELS["Llama-3.1-8B"]
    for given in (folder, folder / "config.json", str(folder / "config.json")):
        shape = model_shape(given)
        assert shape.name == "My-Llama"
        assert (shape.matrix_params, shape.kv_bytes_per_token()) == (table.matrix_params, table.kv_bytes_per_token())
        assert str(folder / "config.json") == shape.source


def test_optional_keys_of_a_config():
    bare = {key: LLAMA_3_8B[key] for key in LLAMA_3_8B if key not in ("num_key_value_heads", "tie_word_embeddings")}
    shape = ModelShape.from_config(bare)
    assert (shape.num_kv_heads, shape.head_dim, shape.tie_word_embeddings) == (32, 128, False)
    qwen3 = LLAMA_3_8B | {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True, "sliding_window": None}
    shape = ModelShape.from_config(qwen3)
    assert (shape.head_dim, shape.matrix_params) == (64, shape.matmul_params)
    assert ModelShape.from_config(LLAMA_3_8B | {"sliding_window": 4096, "use_sliding_window": False}).num_layers == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"intermediate_size": "14336"}, "intermediate_size='14336'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"head_dim": 1.5}, "head_dim=1.5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
        ({"model_type": "gpt_neox"}, "model_type='gpt_neox'"),
        ({"model_type": None}, "model_type=None"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral' is a mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "'qwen3_moe' is a mixture of experts"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "'deepseek_v3' is multi-head latent attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_by_file_and_key(tmp_path, change, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B | change), encoding="utf-8")
    with pytest.raises(ModelError) as error:
        model_shape(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_file_that_is_no_config(tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match="config.json"):
        model_shape(str(path))
