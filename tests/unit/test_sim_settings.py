"""What `cbserve sim` understands: options, objectives, grids."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbserve.errors import CBServeError
from cbserve.sim.settings import OPTIONS, Settings, in_options, parse
from cbserve.sim.sweep import grid, key_of, read_axes


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("chunk", "512", 512),
        ("rate", "1.5", 1.5),
        ("dtype_bytes", "0.5", 0.5),
        ("dtype_bytes", "1", 1),
        ("utilization", "1", 1.0),
        ("overhead", "0", 0.0),
        ("prefix_caching", "on", True),
        ("batching", "prefill-first", "prefill-first"),
        ("slo", "ttft=0.5, itl=0.1", (("ttft", 0.5), ("itl", 0.1))),
    ],
)
def test_values_are_read(name: str, text: str, value: object) -> None:
    assert parse(name, text) == value


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("chunk", "0", "chunk='0': must be a whole number of at least 1"),
        ("chunk", "9" * 400, "of at least 1 and at most 1,000,000,000,000"),
        ("requests", "1" + 30 * "0", "and at most 10,000,000"),
        ("seed", "9" * 5000, "must be a whole number of at least 0"),
        ("kv_dtype_bytes", "16", "at most 8"),
        ("chunk", "many", "must be a whole number"),
        ("chunk", "2.5", "must be a whole number"),
        ("dtype_bytes", "0.3", "0.5 or a whole number of at least 1"),
        ("kv_dtype_bytes", "0.5", "must be a whole number of at least 1"),
        ("rate", "nan", "must be a number above 0"),
        ("rate", "inf", "must be a number above 0"),
        ("utilization", "1.1", "a share above 0 and at most 1"),
        ("overhead", "-1", "at least 0"),
        ("prefix_caching", "yes", "on or off"),
        ("batching", "magic", "there are static, continuous, mixed, prefill-first"),
        ("slo", "ttft", "must be NAME=SECONDS"),
        ("slo", "0.5", "for example --slo ttft=0.5,itl=0.1"),
        ("slo", "ttf=1", "ttft, tpot, itl, e2e"),
        ("slo", "ttft=0", "ttft='0': must be a number above 0 of seconds"),
        ("slo", "ttft=1,ttft=2", "given twice"),
        ("slo", "", "must be NAME=SECONDS"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, text: str, said: str) -> None:
    with pytest.raises(CBServeError) as refused:
        parse(name, text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"trace": "a.csv", "requests": 5}, "--requests"),
        ({"trace": "a.csv", "workload": "azure-conv"}, "--workload"),
        ({"trace": "a.csv", "seed": 0}, "--seed"),
        ({"batch_size": 8}, "--batch-size"),
        ({"batching": "static", "chunk": 512}, "--chunk"),
        ({"batching": "static", "max_num_seqs": 8}, "--max-num-seqs"),
        ({"num_blocks": 100, "utilization": 0.5}, "--utilization"),
        ({"swap_space": 1.0}, "--swap-space"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(given: dict[str, object], flag: str) -> None:
    settings = Settings(**given)
    with pytest.raises(CBServeError, match=f"{flag} has no effect with "):
        settings.check()
    settings.normal().check()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("a smaller dtype (dtype_bytes=1)", "a smaller dtype (--dtype-bytes 1)"),
        ("enlarge the pool (num_blocks, kv_cache_bytes)", "enlarge the pool (--num-blocks, --utilization)"),
        ("raise max_num_batched_tokens", "raise --chunk"),
        ("prompt 5 + max_tokens 9; lower max_tokens", "prompt 5 + max_tokens 9; lower --max-tokens"),
        ("--num-blocks, my_num_blocks", "--num-blocks, my_num_blocks"),
    ],
)
def test_messages_of_the_library_name_options(message: str, said: str) -> None:
    assert in_options(message) == said


def test_a_grid_is_every_combination_once() -> None:
    axes = read_axes("rate=0.5,1; --max-num-seqs=8,16 ;prefix-caching=on,off,on")
    assert axes == {"rate": [0.5, 1.0], "max_num_seqs": [8, 16], "prefix_caching": [True, False]}
    points = grid(Settings(), axes)
    assert len(points) == len(set(points)) == 8
    assert points[0] == Settings(rate=0.5, max_num_seqs=8, prefix_caching=True)


def test_points_that_mean_the_same_are_one() -> None:
    points = grid(Settings(), read_axes("batching=static,mixed;chunk=256,512"))
    assert [(point.batching, point.chunk) for point in points] == [("static", None), ("mixed", 256), ("mixed", 512)]


def test_an_option_without_effect_anywhere_in_a_grid_is_refused() -> None:
    with pytest.raises(CBServeError, match="--chunk has no effect with --batching static"):
        grid(Settings(batching="static", chunk=512), read_axes("rate=1,2"))
    assert len(grid(Settings(chunk=512), read_axes("batching=static,mixed"))) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no option"),
        (";;", "names no option"),
        ("rate", "must be OPTION=VALUE"),
        ("speed=1,2", "'speed=1,2': must be OPTION=VALUE,VALUE,... with an option of workload, requests"),
        ("trace=a,b", "must be OPTION=VALUE"),
        ("rate=1,", "rate='': must be a number above 0"),
        ("rate=1;rate=2", "rate is given twice"),
        ("batching=mixed,magic", "batching='magic': there are static"),
        ("seed=" + ",".join(map(str, range(400))) + ";limit=" + ",".join(map(str, range(1, 301))), "120,000 points"),
    ],
)
def test_a_malformed_grid_is_refused(text: str, said: str) -> None:
    with pytest.raises(CBServeError) as refused:
        grid(Settings(), read_axes(text))
    assert "--sweep: " in str(refused.value) and said in str(refused.value)


def test_every_setting_is_part_of_the_key(tmp_path: Path) -> None:
    trace = tmp_path / "a.csv"
    trace.write_text("one")
    base = Settings(trace=str(trace))
    keys = {key_of(base)}
    for name, option in OPTIONS.items():
        old = getattr(base, name)
        other = (not old) if isinstance(old, bool) else {"slo": (("ttft", 1.0),), "gpu": "h100"}.get(name, "other")
        keys.add(key_of(replace(base, **{name: other})))
        assert option.metadata["help"]
    fit = tmp_path / "fit.json"
    for path, settings in ((trace, base), (fit, replace(base, gpu=str(fit)))):
        for content in ("two", "three"):  # the same name, another content
            path.write_text(content)
            keys.add(key_of(settings))
    assert len(keys) == len(OPTIONS) + 5
    assert json.loads(key_of(base))["settings"]["trace"] == str(trace)
