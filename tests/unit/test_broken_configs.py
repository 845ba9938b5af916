"""A config.json whose values are not what they should be: a ModelError, whatever the value."""

import json

import pytest

from cbserve.errors import ModelError
from cbserve.models.weights import export_model, load_model

BROKEN = {
    "rope_theta": "x", "rms_norm_eps": None, "max_position_embeddings": "x", "rope_parameters": "x",
    "num_attention_heads": "4", "vocab_size": "x", "hidden_size": None, "num_hidden_layers": 5,
}  # fmt: skip


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_value_is_a_model_error_in_whole_words(key, tmp_path):
    path = export_model("tiny", tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: BROKEN[key]}))
    with pytest.raises(ModelError) as error:
        load_model(path.parent)
    assert "reposthemory" not in str(error.value)


@pytest.mark.parametrize("value", [0, "x"])
def test_a_model_takes_at_least_one_position(value, tmp_path):
    path = export_model("tiny", tmp_path / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": value}))
    with pytest.raises(ModelError, match="max_position"):
        load_model(path.parent)
