"""Choosing tokens on the device: greedy, or temperature, min_p, top-k, top-p and a draw, in vLLM's order.

No sorting: what top-k and top-p keep is all that is at least as good as a threshold, and the bits of non-negative
floating-point numbers are in the order of the numbers, so the threshold is found bit by bit (a radix select).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cbserve.kernels.jit import Kernel, check_tensor, power_of_two

if TYPE_CHECKING:
    import triton.language as tl


def sample_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """One token a row, int64 [R]: the first, in order of ids, at which the cumulative probability passes u.

    logits: float32 [R, vocab]. temperature: float32 [R], 0 is greedy. top_k: int32 [R], 0 and -1 keep all; ties with
    the k-th best stay. top_p, min_p: float32 [R]; top-p keeps the fewest best tokens that reach it, and ties with the
    last. u: float64 [R] in [0, 1), `models.sampling.uniform`.
    """
    greedy = temperature == 0
    # Relative to the best token, a logit can be divided by the smallest temperature without becoming inf - inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1, temperature).unsqueeze(1)
    scaled = scaled.masked_fill(scaled < min_p.log().unsqueeze(1), -torch.inf)
    best = scaled.sort(descending=True).values
    vocab = logits.shape[-1]
    kept = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
    scaled = scaled.masked_fill(scaled < best.gather(-1, kept.unsqueeze(1) - 1), -torch.inf)
    best = scaled.sort(descending=True).values
    mass = best.exp().cumsum(-1, dtype=torch.float64)
    reached = (mass < top_p.double().unsqueeze(1) * mass[:, -1:]).sum(-1, keepdim=True).clamp(max=vocab - 1)
    nucleus = torch.where(top_p.unsqueeze(1) < 1, best.gather(-1, reached), -torch.inf)
    cumulative = scaled.masked_fill(scaled < nucleus, -torch.inf).exp().cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    return torch.where(greedy, logits.argmax(-1), drawn)


@Kernel
def _distance(row_logits, token, inside, best, temperature):
    """How far a logit lies below the best, in units of the temperature; and the bits of that, which sort like it."""
    logit = tl.load(row_logits + token, mask=inside, other=-float("inf"))
    distance = tl.abs((logit - best) / temperature)
    return distance, distance.to(tl.int32, bitcast=True)


@Kernel
def _threshold(row_logits, vocab, best, temperature, limit, needed, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The smallest bits, at most `limit`, such that tokens up to there are `needed` many, or have that mass."""
    low = 0
    high = limit
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.zeros([TILE], tl.float64)
        for start in range(0, vocab, TILE):
            token = start + tl.arange(0, TILE)
            distance, bits = _distance(row_logits, token, token < vocab, best, temperature)
            weight = tl.exp(-distance).to(tl.float64) if BY_MASS else 1.0
            reached += tl.where((bits <= middle) & (token < vocab), weight, 0.0)
        if tl.sum(reached, axis=0) >= needed:
            high = middle
        else:
            low = middle + 1
    return low


@Kernel
def _mass(row_logits, vocab, best, temperature, limit, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        distance, bits = _distance(row_logits, token, token < vocab, best, temperature)
        total += tl.where((bits <= limit) & (token < vocab), tl.exp(-distance).to(tl.float64), 0.0)
    return tl.sum(total, axis=0)


@Kernel
def _sample_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, us, out, vocab, TILE: tl.constexpr, INFINITY: tl.constexpr
):
    """One row a program; the row stays in the L2 cache while it is read again and again."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * vocab
    tops = tl.full([TILE], -float("inf"), tl.float32)
    tokens = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        logit = tl.load(row_logits + token, mask=token < vocab, other=-float("inf"))
        tokens = tl.where(logit > tops, token, tokens)
        tops = tl.maximum(tops, logit)
    best = tl.max(tops, axis=0)
    chosen = tl.min(tl.where(tops == best, tokens, vocab), axis=0)

    temperature = tl.load(temperatures + row)
    if temperature > 0:
        limit = INFINITY
        min_p = tl.load(min_ps + row)
        if min_p > 0:
            limit = tl.maximum(-tl.log(min_p), 0.0).to(tl.int32, bitcast=True)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab):
            limit = _threshold(row_logits, vocab, best, temperature, limit, top_k, False, TILE)
        top_p = tl.load(top_ps + row)
        mass = _mass(row_logits, vocab, best, temperature, limit, TILE)
        if top_p < 1:
            limit = _threshold(row_logits, vocab, best, temperature, limit, top_p.to(tl.float64) * mass, True, TILE)
            mass = _mass(row_logits, vocab, best, temperature, limit, TILE)
        goal = tl.load(us + row) * mass
        before = tl.zeros([], tl.float64)
        passed = 0  # tokens at which the cumulative mass has not passed the goal yet
        last = 0
        for start in range(0, vocab, TILE):
            token = start + tl.arange(0, TILE)
            distance, bits = _distance(row_logits, token, token < vocab, best, temperature)
            kept = (bits <= limit) & (token < vocab)
            weight = tl.where(kept, tl.exp(-distance).to(tl.float64), 0.0)
            cumulative = before + tl.cumsum(weight, axis=0)
            passed += tl.sum(((cumulative <= goal) & (token < vocab)).to(tl.int32), axis=0)
            last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), axis=0))
            before += tl.sum(weight, axis=0)
        chosen = tl.minimum(passed, last)  # rounding may leave the last sum a little short of the goal
    tl.store(out + row, chosen.to(tl.int64))


def sample_tokens_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """`sample_tokens` as a Triton kernel. Raises KernelError for what it cannot take."""
    check_tensor("logits", logits, (None, None), (torch.float32,))
    rows, vocab = logits.shape
    for name, x, dtype in (
        *(("temperature", temperature, torch.float32), ("top_k", top_k, torch.int32)),
        *(("top_p", top_p, torch.float32), ("min_p", min_p, torch.float32), ("u", u, torch.float64)),
    ):
        check_tensor(name, x, (rows,), (dtype,), logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _sample_kernel[(rows,)](logits, temperature, top_k, top_p, min_p, u, out, vocab, **sampling_config(vocab))
    return out


def sampling_config(vocab: int) -> dict[str, int]:
    tile = min(power_of_two(vocab), 2048)
    return {"TILE": tile, "INFINITY": 0x7F800000, "num_warps": min(max(tile // 256, 1), 16)}
