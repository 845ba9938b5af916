"""Decode attention in C: against a loop in float64, what it refuses, and what becomes of it without a compiler."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_attention import naive, problem

from cbserve import LLM, SamplingParams
from cbserve.kernels import c_library
from cbserve.kernels.backends import TORCH, C, choose_backend
from cbserve.kernels.c_attention import CPagedAttention
from cbserve.kernels.jit import KernelError
from cbserve.kernels.paged_attention import paged_attention

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")


def attention(q, k_cache, v_cache, tables, query_start, contexts, scale):
    size = k_cache.shape[1]
    own = [row[: -(-n // size)] for row, n in zip(tables.tolist(), contexts.tolist(), strict=True)]
    step = CPagedAttention(own, query_start.diff().tolist(), contexts.tolist(), size, q.dtype, q.device)
    return step.run(q, k_cache, v_cache, scale)


def check(arguments):
    torch.testing.assert_close(attention(*arguments).double(), naive(*arguments), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1)], id="the first token of all"),
        pytest.param([(1, 15), (1, 16), (1, 17), (1, 1)], id="around a block boundary"),
        pytest.param([(1, 127), (1, 128), (1, 129), (1, 300)], id="around a chunk of C"),
        pytest.param([(1, 12), (1, 30), (9, 9), (4, 20)], id="decodes, then prompts"),
        pytest.param([(9, 9), (1, 30)], id="a decode behind a prompt"),
        pytest.param([(5, 21)], id="no decode"),
    ],
)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
def test_equals_the_float64_loop(lens, head_dim):
    check(problem(lens, head_dim=head_dim, kv_heads=1, block_size=16))


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    block_size=st.sampled_from([1, 4, 8, 16, 32]),
    seed=st.integers(0, 2**16),
)
def test_any_shapes(contexts, kv_heads, group, block_size, seed):
    lens = [(1, context) for context in contexts]
    check(problem(lens, kv_heads=kv_heads, group=group, block_size=block_size, seed=seed))


@needs_compiler
@pytest.mark.parametrize("size", [1e-20, 1.0, 100.0, 1e4])
def test_scores_of_any_size(size):
    """Tiny ones weigh all alike; of huge ones the largest takes all, and the others must not become NaN."""
    q, *rest = problem([(1, 200), (1, 3)], group=3)
    check((q * size, *rest))


@needs_compiler
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e-42, 3e38, -3e38])
@pytest.mark.parametrize("position", [0, 70, 149])  # in each chunk of C
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_no_number_reaches_its_own_sequence_only(where, position, value):
    q, k, v, tables, *rest = problem([(1, 150), (1, 9)], group=3)
    if where == "q":
        q[0, 1, 3] = value
    else:
        {"k": k, "v": v}[where][tables[0, position // 8], position % 8, 0, 3] = value
    ours, theirs = (operation(q, k, v, tables, *rest) for operation in (attention, paged_attention))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ours[1].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("v_value", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("context", [1, 64, 150])
def test_where_all_scores_are_minus_infinity_nothing_is_seen(context, v_value):
    q, k, v, tables, *rest = problem([(1, context), (1, 9)], group=3)
    q[0, :, 3] = 1.0
    k[tables[0], :, :, 3] = -torch.inf
    v[tables[0, 0], 0, 0, 3] = v_value
    ours, theirs = (operation(q, k, v, tables, *rest) for operation in (attention, paged_attention))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ours[0, 0, 0] == 0


@needs_compiler
def test_queries_need_not_lie_side_by_side():
    q, *rest = problem([(1, 20), (1, 9)], group=3)
    wide = torch.cat([q, q], 1)[:, : q.shape[1]]  # as a model slices q out of its q, k and v
    torch.testing.assert_close(attention(wide, *rest), attention(q, *rest))
    torch.testing.assert_close(attention(q.transpose(0, 1).contiguous().transpose(0, 1), *rest), attention(q, *rest))


@needs_compiler
def test_torchs_default_device_does_not_matter():
    arguments = problem([(1, 12), (1, 140)])
    expected = attention(*arguments)
    with torch.device("meta"):
        result = attention(*arguments)
    assert torch.equal(result, expected)


@needs_compiler
def test_a_sequence_does_not_notice_the_others():
    q, k, v, tables, start, contexts, scale = problem([(1, 12), (1, 140), (1, 100)])
    together = attention(q, k, v, tables, start, contexts, scale)
    for s in range(3):
        alone = attention(q[s : s + 1], k, v, tables[s : s + 1], torch.tensor([0, 1]), contexts[s : s + 1], scale)
        assert torch.equal(alone[0], together[s])


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 8, dtype=torch.float64)}, "q is torch.float64 on cpu"),
        ({"q": torch.zeros(1, 3, 8)}, "3 query heads of 8 on 2 KV heads"),
        ({"q": torch.zeros(1, 4, 16)}, "q has shape [1, 4, 16], k_cache [3, 8, 2, 8]"),
        ({"k": torch.zeros(3, 2, 8, 8).transpose(1, 2)}, "k_cache is torch.float32 on cpu, strides"),
        ({"q": torch.zeros(0, 4, 8)}, "q has shape [0, 4, 8]"),
        ({"v": torch.zeros(2, 8, 2, 8)}, "v_cache [2, 8, 2, 8]"),
        ({name: torch.zeros(6, 4, 2, 8) for name in "kv"}, "twice [num_blocks, 8, kv_heads, head_dim]"),
        ({"v": torch.zeros(3, 8, 2, 8, device="meta")}, "v_cache is torch.float32 on meta"),
        ({"table": [3]}, "blocks 3 to 3 in a cache of 3"),
        ({"table": [-1]}, "blocks -1 to -1 in a cache of 3"),
        ({"context": 9}, "a context of 9 tokens in 1 blocks of 8"),
        ({"context": 0}, "a context of 0 tokens in 1 blocks of 8"),
    ],
)
def test_what_would_read_beyond_the_cache_is_refused(change, message):
    good = {"q": torch.zeros(1, 4, 8), "k": torch.zeros(3, 8, 2, 8), "v": torch.zeros(3, 8, 2, 8)}
    a = good | {"table": [0], "context": 8} | change
    with pytest.raises(KernelError, match=re.escape(message)):
        step = CPagedAttention([a["table"]], [1], [a["context"]], 8, torch.float32, torch.device("cpu"))
        step.run(a["q"], a["k"], a["v"], 1.0)


@needs_compiler
@pytest.mark.parametrize(("tables", "contexts"), [([[0]], [8]), ([[0], [1]], [8]), ([[0]], [8, 8])])
def test_two_queries_need_two_tables_and_contexts(tables, contexts):
    with pytest.raises(ValueError, match="shorter"):
        CPagedAttention(tables, [1, 1], contexts, 8, torch.float32, torch.device("cpu"))


@needs_compiler
def test_the_engine_gives_the_text_of_the_torch_backend():
    prompts = [[(7 * i + j) % 200 + 5 for i in range(5 + 9 * j)] for j in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

    def tokens(backend):
        llm = LLM("tiny", backend=backend, verbose=False, block_size=8, num_blocks=40)
        assert llm.executor.backend.name == backend
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    assert tokens("c") == tokens("torch")


# ---- the compiler ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_library_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CBSERVE_HOME", str(tmp_path))
    c_library.c_library.cache_clear()
    yield tmp_path / "kernels"
    c_library.c_library.cache_clear()


def compiler(folder: Path, script: str) -> str:
    path = folder / "some-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_compiler
def test_a_library_is_compiled_once(no_library_yet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo x >> {tmp_path}/calls; exec cc "$@"'))
    for _ in range(2):
        c_library.c_library.cache_clear()  # as in a new process
        c_library.c_library()
    assert (tmp_path / "calls").read_text() == "x\n"
    assert [path.suffix for path in no_library_yet.iterdir()] == [".so"]


@needs_compiler
def test_the_compiler_may_have_arguments(no_library_yet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, 'test "$1" = -DX && exec cc "$@"') + " -DX")
    assert choose_backend("auto", "cpu", torch.float32, [64, 576]) is C


@needs_compiler
@pytest.mark.parametrize("bytes_left", [0, 10_000])
def test_a_library_that_was_cut_short_is_compiled_again(no_library_yet: Path, bytes_left: int) -> None:
    c_library.c_library()
    (path,) = no_library_yet.iterdir()
    whole = path.read_bytes()
    path.unlink()  # what this process has loaded stays as it is
    path.write_bytes(whole[:bytes_left])
    load = "from cbserve.kernels.c_library import c_library; c_library()"
    subprocess.run([sys.executable, "-c", load], check=True)  # to load a torn one would end the process
    assert len(path.read_bytes()) == len(whole)


def test_a_compiler_that_hangs_is_waited_for_once(
    no_library_yet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, f"echo x >> {tmp_path}/calls; exec sleep 60"))
    monkeypatch.setattr(c_library, "_LIMIT_S", 0.5)
    for _ in range(2):
        with pytest.raises(KernelError, match="takes more than 0.5 s"):
            choose_backend("c", "cpu", torch.float32, [64, 576])
    assert choose_backend("auto", "cpu", torch.float32, [64, 576]) is TORCH
    assert (tmp_path / "calls").read_text() == "x\n"


@needs_compiler
def test_two_threads_compile_one_library(no_library_yet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, f'echo x >> {tmp_path}/calls; exec cc "$@"'))
    with ThreadPoolExecutor(2) as pool:
        chosen = list(pool.map(lambda _: choose_backend("auto", "cpu", torch.float32, [64]), range(2)))
    assert chosen == [C, C]
    assert (tmp_path / "calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'sorry: no such thing' >&2; exit 1", "sorry: no such thing"),
        ("echo something > /dev/null; exit 0", "No such file"),  # it gave nothing
        ('while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"', "file too short"),
        (None, "there is no C compiler 'no-such-compiler'"),
    ],
)
def test_without_a_working_compiler_torch_computes(
    script: str | None, said: str, no_library_yet: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler" if script is None else compiler(tmp_path, script))
    with pytest.raises(KernelError, match=said):
        choose_backend("c", "cpu", torch.float32, [64, 576])
    assert choose_backend("auto", "cpu", torch.float32, [64, 576]) is TORCH
    assert not any(path.name.endswith(".tmp") for path in no_library_yet.glob("*"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CBSERVE_HOME", "~no-such-user/x", "home directory"),
        ("CBSERVE_HOME", "/dev/null", "Not a directory"),
        ("CC", "cc 'no closing quote", "there is no C compiler"),
        ("CC", " ", "there is no C compiler ' '"),
        pytest.param("CC", "cc -fvisibility=hidden", "undefined symbol", marks=needs_compiler),
    ],
)
def test_with_wrong_settings_torch_computes(
    name: str, value: str, said: str, no_library_yet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(KernelError, match=said):
        choose_backend("c", "cpu", torch.float32, [64, 576])
    assert choose_backend("auto", "cpu", torch.float32, [64, 576]) is TORCH


def test_elsewhere_than_on_linux_torch_computes(no_library_yet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(KernelError, match="on Linux only, this is darwin"):
        choose_backend("c", "cpu", torch.float32, [64, 576])
    assert choose_backend("auto", "cpu", torch.float32, [64, 576]) is TORCH


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "head_dim", "device"),
    [(torch.bfloat16, 64, "cpu"), (torch.float32, 20, "cpu"), (torch.float32, 64, "cuda")],
)
def test_what_c_cannot_compute_is_left_to_others(dtype, head_dim, device) -> None:
    with pytest.raises(KernelError, match="backend 'c' computes float32 on a CPU"):
        choose_backend("c", device, dtype, [head_dim])
    assert choose_backend("auto", "cpu", torch.float32, [64, 576]) is C
    if device == "cpu":
        assert choose_backend("auto", device, dtype, [head_dim]) is TORCH
