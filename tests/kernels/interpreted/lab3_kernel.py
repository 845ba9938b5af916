"""Exercise 4 of lab 3 in its Triton form: a right kernel passes, each slip hears the rule that it breaks.

Each wrong kernel is the right one with one line changed, in a file of its own: the interpreter reads sources.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cbserve import LLM, SamplingParams
from cbserve.course.checking import examine
from cbserve.course.exercises import get
from cbserve.course.exercises.paging import as_attention, launch_decode

KERNEL = """
from cbserve.course.exercises.paging import triton_language
from cbserve.kernels.jit import Kernel

tl = triton_language()


@Kernel
def decode_kernel(
    q, k_cache, v_cache, block_table, out, context_len, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.arange(0, GROUP)
    column = tl.arange(0, HEAD_DIM)
    place = tl.arange(0, BLOCK_SIZE)
    head = kv_head * GROUP + row
    own = head[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + own)
    best = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    values = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for index in range(0, tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(block_table + index)
        seen = index * BLOCK_SIZE + place < context_len
        slot = block * BLOCK_SIZE + place
        at = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        k = tl.load(k_cache + at, mask=seen[:, None], other=0.0)
        v = tl.load(v_cache + at, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - top)
        weights = tl.exp(scores - top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        values = values * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        best = top
    tl.store(out + own, values / total[:, None])
"""
SLIPS = [
    ("total * shrink +", "total +", "`total` must shrink with it"),
    ("values * shrink[:, None] +", "values +", "`values` must shrink with it"),
    ("shrink = tl.exp(best - top)", "shrink = tl.exp(top - top)", "softmax not rescaled"),
    ("seen = index * BLOCK_SIZE + place < context_len", "seen = place < BLOCK_SIZE", "missing mask in the last block"),
    ('tl.where(seen[None, :], scores, -float("inf"))', "tl.where(seen[None, :], scores, 0.0)", "the weight exp(0)"),
    ('scores = tl.where(seen[None, :], scores, -float("inf"))', "", "missing mask on the scores"),
    ("v = tl.load(v_cache + at, mask=seen[:, None], other=0.0)", "v = tl.load(v_cache + at)", "0 x NaN is NaN"),
    ("head = kv_head * GROUP + row", "head = kv_head + row * KV_HEADS", "KV head index"),
    ("slot * KV_HEADS + kv_head", "slot * KV_HEADS", "KV head index"),
    ("slot = block * BLOCK_SIZE + place", "slot = block + place", "block id used as position"),
    ("slot = block * BLOCK_SIZE + place", "slot = index * BLOCK_SIZE + place", "block id used as position"),
    (" * scale\n", "\n", "softmax without scale"),
    (" * scale\n", " * 0.25\n", "`scale` is not used"),
    ("    tl.store(", "    tl.store(q + own, queries * 2)\n    tl.store(", "your function changed `q`"),
    ("    tl.store(", "    tl.load(q)  # ", "was it stored"),
    ("values / total[:, None]", "values", "the weights of a head must add up to 1"),
]


def kernel(folder: Path, old: str = "", new: str = "") -> Any:
    assert old in KERNEL
    path = folder / "answer.py"
    path.write_text(KERNEL.replace(old, new) if old else KERNEL)
    spec = importlib.util.spec_from_file_location(f"answer_{folder.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.decode_kernel


def absorb(state: Any, q: Any, k: Any, v: Any, seen: int, scale: float) -> Any:
    """Not written."""


@pytest.mark.parametrize("seed", range(3))
def test_a_right_kernel_passes(tmp_path: Path, seed: int) -> None:
    outcome = examine(get("lab3.ex4"), (kernel(tmp_path), absorb), seed)
    assert outcome.status == "passed", outcome


@pytest.mark.parametrize(("old", "new", "rule"), SLIPS, ids=[f"{n} {rule}" for n, (_, _, rule) in enumerate(SLIPS)])
def test_a_slip_hears_the_rule_that_it_breaks(tmp_path: Path, old: str, new: str, rule: str) -> None:
    outcome = examine(get("lab3.ex4"), (kernel(tmp_path, old, new), absorb))
    assert outcome.status == "failed" and rule in dict(outcome.lines)["rule"], outcome


def test_an_error_in_the_kernel_shows_its_line(tmp_path: Path) -> None:
    outcome = examine(get("lab3.ex4"), (kernel(tmp_path, "tl.trans(k)", "tl.transposed(k)"), absorb))
    assert outcome.status == "error" and "tl.transposed" in dict(outcome.lines)["line"], outcome


def test_the_engine_runs_on_the_kernel(tmp_path: Path) -> None:
    mine = kernel(tmp_path)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    texts = [
        LLM("tiny", device="cpu", verbose=False, attention=op)
        .generate(["ab"], params, use_tqdm=False)[0]
        .outputs[0]
        .text
        for op in (None, as_attention(lambda *arguments: launch_decode(mine, *arguments)))
    ]
    assert texts[0] == texts[1]
