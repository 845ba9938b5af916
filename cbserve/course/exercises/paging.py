"""Decode attention over a paged cache, as a learner writes it: cases, and the way into the engine.

A case is plain (sizes and a seed); `tensors` makes it into what the learner's function is called with.
"""

from __future__ import annotations

import dis
import importlib.util
import os
import random
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cbserve.course.exercise import BrokenRuleError, is_written
from cbserve.course.values import close, described
from cbserve.kernels.jit import Kernel, KernelError, interpreting
from cbserve.kernels.paged_attention import paged_attention

#: decode(q [heads, head_dim], k_cache, v_cache, block_table, context_len, scale) -> [heads, head_dim], one sequence.
Decode = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
#: heads, kv_heads, head_dim, block_size, context, seed; where wanted `scale` (else head_dim ** -0.5), `loud` (large
#: scores) and `poison` (NaN in slots that hold no token).
AttentionCase = dict[str, Any]
State = tuple[Tensor, Tensor, Tensor]
Absorb = Callable[[State, Tensor, Tensor, Tensor, int, float], State]


class Arguments(NamedTuple):
    q: Tensor  # [heads, head_dim]
    k_cache: Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor
    block_table: Tensor  # int64 [blocks of the context]
    context_len: int
    scale: float


# ---- into the engine ------------------------------------------------------------------------------------------------


def as_attention(decode: Decode) -> Callable[..., Tensor]:
    """What `LLM(attention=...)` takes (see `cbserve.kernels.paged_attention`), from a decode for one sequence.

    Each token of a prompt is a query too: one whose context ends with itself.
    """

    def attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Tensor, lens: Tensor, scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        bounds, block_size = starts.tolist(), k_cache.shape[1]
        for table, first, end, length in zip(tables, bounds[:-1], bounds[1:], lens.tolist(), strict=True):
            for query in range(first, end):
                context = length - (end - 1 - query)
                blocks = table[: -(-context // block_size)].long()
                out[query] = decode(q[query], k_cache, v_cache, blocks, context, scale)
        return out

    return attention


def launch_decode(
    kernel: Kernel, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_len: int, scale: float
) -> Tensor:
    """Run a learner's decode kernel: one program for each KV head. Shapes as in `Decode`.

    Raises KernelError where Triton cannot run, or for a number of query heads a KV head that is no power of two.
    """
    if why := why_no_triton():
        raise KernelError(why)
    heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    if group & (group - 1):
        raise KernelError(f"{heads} query heads on {kv_heads} KV heads: this kernel takes 1, 2, 4 or 8 a KV head")
    device = q.device if interpreting() else torch.device("cuda")
    arguments = [x.to(device).contiguous() for x in (q, k_cache, v_cache, block_table)]
    out = torch.full_like(arguments[0], torch.nan)  # what the kernel does not write is seen
    try:
        kernel[(kv_heads,)](
            *arguments, out, context_len, scale,
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        )  # fmt: skip
    except Exception as error:
        # The interpreter wraps what went wrong in the kernel, and with it the line.
        raise (error.__cause__ if type(error).__name__ == "InterpreterError" else None) or error from None
    return out.to(q.device)


def block_by_block(kernel: Any, absorb: Absorb) -> Decode:
    """A decode from whichever of the two is written: the kernel, or `absorb` where Triton cannot run."""
    if not runs_kernel(kernel, absorb):
        return lambda *arguments: _run_blocks(absorb, Arguments(*arguments))
    if not isinstance(kernel, Kernel):
        raise BrokenRuleError("the kernel is wanted as it was given: keep the line @Kernel above it")
    return lambda *arguments: launch_decode(kernel, *arguments)


def runs_kernel(kernel: Any, absorb: Any) -> bool:
    return kernel_is_written(kernel) and not (is_written(absorb) and why_no_triton())


def kernel_is_written(kernel: Any) -> bool:
    """False for the frame that a learner is given: it does not touch the cache."""
    function = getattr(kernel, "function", None) or getattr(kernel, "fn", None) or kernel
    if not isinstance(function, types.FunctionType):
        return False
    names = [step.argval for step in dis.get_instructions(function)]
    return any("k_cache" in (name if isinstance(name, tuple) else (name,)) for name in names)


def _run_blocks(absorb: Absorb, arguments: Arguments) -> Tensor:
    """One block after the other goes through `absorb`, for each KV head."""
    q, k_cache, v_cache, table, context, scale = arguments
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    group = len(q) // kv_heads
    out = torch.full_like(q, torch.nan)
    for kv_head in range(kv_heads):
        rows = slice(kv_head * group, (kv_head + 1) * group)
        state: State = (q.new_full((group,), -torch.inf), q.new_zeros(group), q.new_zeros(group, head_dim))
        for index, block in enumerate(table.tolist()):
            seen = min(block_size, context - index * block_size)
            state = absorb(state, q[rows], k_cache[block, :, kv_head], v_cache[block, :, kv_head], seen, scale)
            if not isinstance(state, tuple) or len(state) != 3:
                raise BrokenRuleError(f"absorb returns the tuple (best, total, values), and this is {described(state)}")
            for name, part in zip(("best", "total"), state, strict=False):
                _want(f"`{name}` [group]", part, [group])
            _want("`values` [group, head_dim]", state[2], [group, head_dim])
        _, total, values = state
        out[rows] = values / total[:, None]
    return out


def triton_language() -> Any:
    """`triton.language`, imported for the interpreter where there is no GPU. Without Triton a name that is enough to
    define a kernel with."""
    return types.SimpleNamespace(constexpr=int) if why_no_triton() else import_module("triton.language")


def why_no_triton() -> str:
    """An empty text where a learner's kernel can run, compiled on CUDA, else in the interpreter; or the reason."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed here (it has no build for macOS and Windows): write absorb instead"
    if torch.cuda.is_available() and not interpreting():
        return ""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # must be there before triton is imported
    numpy, triton, language = map(import_module, ("numpy", "triton", "triton.language"))
    if not (interpreting() and type(language.sum).__name__ == "InterpretedFunction"):
        return "Triton was imported before TRITON_INTERPRET=1 was set: restart the kernel and run from the top"
    versions = [tuple(int(part) for part in module.__version__.split(".")[:2]) for module in (triton, numpy)]
    if versions[0] <= (3, 6) and versions[1] >= (2, 4):
        return (
            f"Triton {triton.__version__} cannot interpret loops with numpy {numpy.__version__}: take Triton 3.7 or "
            "numpy 2.3, or write absorb instead"
        )
    return ""


# ---- cases ----------------------------------------------------------------------------------------------------------


def attention_case(rng: random.Random, heads: int, kv_heads: int, context: int, **more: Any) -> AttentionCase:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 16, "block_size": 4, "context": context}
    return {**sizes, "seed": rng.randrange(1, 10**6), **more}


def tensors(case: AttentionCase) -> Arguments:
    """The arguments of a case, float32; slots that hold no token of the sequence hold something else."""
    generator = torch.Generator().manual_seed(case["seed"])
    block_size, context, head_dim = case["block_size"], case["context"], case["head_dim"]
    used = -(-context // block_size)
    num_blocks = used + 3
    q = torch.randn(case["heads"], head_dim, generator=generator) * (150.0 if case.get("loud") else 1.5)
    shape = (2, num_blocks, block_size, case["kv_heads"], head_dim)
    k_cache, v_cache = torch.randn(shape, generator=generator).unbind(0)
    table = random.Random(case["seed"]).sample(range(1, num_blocks), used)
    if used > 1 and table == sorted(table):
        table.reverse()
    if case.get("loud"):  # the largest score comes first: a maximum that falls with the later blocks is seen
        k_cache[table[0], 0] = q[:: case["heads"] // case["kv_heads"]] / 50
    if case.get("poison"):
        free = torch.ones(num_blocks, block_size, dtype=torch.bool)
        for index, block in enumerate(table):
            free[block, : min(block_size, context - index * block_size)] = False
        k_cache[free] = v_cache[free] = torch.nan
    return Arguments(q, k_cache, v_cache, torch.tensor(table), context, case.get("scale", head_dim**-0.5))


def reference(case: AttentionCase) -> dict[str, Any]:
    """The engine's own operation on one query."""
    q, k_cache, v_cache, table, context, scale = tensors(case)
    starts, lens = torch.tensor([0, 1]), torch.tensor([context])
    return as_value(paged_attention(q[None], k_cache, v_cache, table[None], starts, lens, scale)[0], case)


def as_value(out: Any, case: AttentionCase) -> dict[str, Any]:
    """Plain values of a result: "out" has 0 for a number that is not finite, so that the rest can be compared, "not
    finite" says how many there are, and "begins" has the first four as they are.

    Raises BrokenRuleError for anything but a tensor [heads, head_dim].
    """
    _want("[heads, head_dim]", out, [case["heads"], case["head_dim"]])
    bad = ~torch.isfinite(out)
    begins = ", ".join(f"{x:.3f}" for x in out[0][:4].tolist())
    return {"not finite": int(bad.sum()), "begins": begins, "out": out.masked_fill(bad, 0).tolist()}


def _want(what: str, found: Any, shape: list[int]) -> None:
    if not isinstance(found, Tensor) or list(found.shape) != shape:
        this = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else described(found)
        raise BrokenRuleError(f"a tensor {what} is wanted, here {shape}, and this is {this}")


def agrees(value: Any, expected: Any) -> bool:
    """float32 sums in another order differ in the sixth digit."""
    same = value["not finite"] == expected["not finite"]
    return same and close(value["out"], expected["out"], rel=1e-3, abs_=1e-4)


def told(case: AttentionCase) -> str:
    text = (
        f"{case['heads']} query heads on {case['kv_heads']} KV heads of {case['head_dim']}, context "
        f"{case['context']}, blocks of {case['block_size']}, table {tensors(case).block_table.tolist()}"
    )
    text += f", scale {case['scale']}" if "scale" in case else ""
    text += ", large scores" if case.get("loud") else ""
    return text + (", NaN in slots without a token" if case.get("poison") else "")


def gave(value: Any) -> str:
    """The beginning of a result in one line."""
    count, bad = sum(map(len, value["out"])), value["not finite"]
    text = f"head 0 begins {value['begins']}"
    return f"{text}; {bad} of {count} numbers are not finite" if bad else text
