"""Known faults of a learner's attention: what a wrong result most often comes from, and the rule that it breaks.

Every fault is a parameter of `attend`, so that a wrong value can be named by the fault, or by the two, that give it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cbserve.course.exercises.paging import Arguments, AttentionCase, agrees, as_value, tensors

#: aspect -> {fault: the rule it breaks}
FAULTS: dict[str, dict[str, str]] = {
    "slot": {
        "no table": "block id used as position: position p was read from slot p; the block table says where it lies",
        "not scaled": "block id used as position: block b begins at slot b * block_size, not at slot b",
    },
    "seen": {
        "whole block": "missing mask in the last block: slots from context_len on hold no token of this sequence",
        "zeroed": "a masked score is -inf: with 0 the slot still gets the weight exp(0)",
        "loaded as 0": "missing mask on the scores: K loaded as 0 gives the score 0, and with it the weight exp(0)",
        "full blocks only": "the last block is partly filled and was left out: round the number of blocks up",
        "one less": "context_len counts the query's own token: its position is seen too",
    },
    "score": {
        "own scale": "`scale` is not used: q . k is multiplied by head_dim ** -0.5, and another number was given",
        "no scale": "softmax without scale: multiply q . k by `scale` first",
        "divided": "q . k is multiplied by `scale`, not divided by it",
        "scaled twice": "q . k is multiplied by `scale` and by head_dim ** -0.5: `scale` alone is all of it",
    },
    "head": {
        "modulo": "KV head index: query head h reads KV head h // group, so neighbours share one; this is h % kv_heads",
        "first": "KV head index: every query head read KV head 0; query head h reads KV head h // group",
    },
    "softmax": {
        "heads": "softmax over the wrong axis: the weights of one head over all positions add up to 1",
        "no softmax": "the weights are the softmax of the scores, not the scores themselves",
        "not divided": "the weights of a head must add up to 1: divide by the sum of the exponentials",
    },
    "values": {
        "no table": "V of the wrong block: V of a position lies in the same slot as its K",
        "not scaled": "V of the wrong block: V of a position lies in the same slot as its K",
        "keys": "K was summed up in place of V",
    },
}
#: The same for a softmax that goes block by block.
ONLINE_FAULTS: dict[str, str] = {
    "nothing": "softmax not rescaled: when the maximum grows, what was summed up before shrinks by exp(old - new)",
    "values kept": "softmax not rescaled: `total` shrinks by exp(old - new), and `values` must shrink with it",
    "total kept": "softmax not rescaled: `values` shrinks by exp(old - new), and `total` must shrink with it",
    "maximum of the block": "the new maximum is the larger of the old one and the block's, or `best` may fall again",
    "inverted": "rescaling is upside down: exp(old - new) is at most 1, since the maximum never falls",
    "divided in between": "divided by `total` after every block: divide once, at the end, when all blocks are in",
    "last block": "only the last block counted: total and values go on from what they were",
}


def attend(arguments: Arguments, faults: dict[str, str], online: str = "") -> Tensor:
    """Attention with faults: aspect -> fault. `online`: how the softmax goes wrong from block to block."""
    q, k_cache, v_cache, table, context, scale = arguments
    block_size, kv_heads = k_cache.shape[1:3]
    group = len(q) // kv_heads
    seen = faults.get("seen", "")
    last = {"full blocks only": context // block_size * block_size, "one less": context - 1}.get(seen, context)
    if seen in ("whole block", "zeroed", "loaded as 0"):
        last = len(table) * block_size
    position = torch.arange(last)
    block, offset = table[position // block_size], position % block_size
    slots = {"": block * block_size + offset, "no table": position, "not scaled": block + offset}
    heads = torch.arange(len(q))
    kv_head = {"": heads // group, "modulo": heads % kv_heads, "first": heads * 0}[faults.get("head", "")]
    k = k_cache.flatten(0, 1)[slots[faults.get("slot", "")]][:, kv_head]  # [positions, heads, head_dim]
    of_v = faults.get("values", "")
    v = k if of_v == "keys" else v_cache.flatten(0, 1)[slots[of_v or faults.get("slot", "")]][:, kv_head]
    usual = q.shape[1] ** -0.5
    factors = {"": scale, "own scale": usual, "no scale": 1.0, "divided": 1 / scale, "scaled twice": scale * usual}
    factor = factors[faults.get("score", "")]
    scores = torch.einsum("hd,thd->ht", q, k) * factor
    if seen in ("zeroed", "loaded as 0"):
        scores[:, context:] = 0
    if seen == "loaded as 0":
        v[context:] = 0
    if online:
        return _online(scores, v, block_size, online)
    kind = faults.get("softmax", "")
    if kind == "no softmax":
        weights = scores
    elif kind == "not divided":
        weights = (scores - scores.amax(1, keepdim=True)).exp()
    else:
        weights = scores.softmax(0 if kind == "heads" else 1)
    return torch.einsum("ht,thd->hd", weights, v)


def _online(scores: Tensor, v: Tensor, block_size: int, fault: str) -> Tensor:
    best = torch.full((len(scores),), -torch.inf)
    total, values = torch.zeros(len(scores)), torch.zeros(len(scores), v.shape[2])
    for first in range(0, scores.shape[1], block_size):
        part = scores[:, first : first + block_size]
        top = part.amax(1) if fault == "maximum of the block" else torch.maximum(best, part.amax(1))
        shrink = torch.exp(top - best if fault == "inverted" and first else best - top)
        weights = torch.exp(part - top[:, None])
        of_total = 1.0 if fault in ("nothing", "total kept", "maximum of the block") else shrink
        of_values = 1.0 if fault in ("nothing", "values kept", "maximum of the block") else shrink
        if fault == "last block":
            of_total = of_values = 0.0
        total = total * of_total + weights.sum(1)
        sums = torch.einsum("ht,thd->hd", weights, v[first : first + block_size])
        values = values * (of_values[:, None] if isinstance(of_values, Tensor) else of_values) + sums
        values = values / total[:, None] if fault == "divided in between" else values
        best = top
    return values / total[:, None]


def named_fault(case: AttentionCase, value: Any, aspects: Sequence[str], online: bool = False) -> str:
    """The rule of the fault that gives `value`, or the first rule of the two that give it together; "" if none do."""
    arguments = tensors(case)
    singles = [{aspect: fault} for aspect in aspects for fault in FAULTS[aspect]]
    pairs = [a | b for a, b in itertools.combinations(singles, 2) if len(a | b) == 2]
    kinds = ["", *ONLINE_FAULTS] if online else [""]
    tries = [(faults, kind) for faults in [{}, *singles] for kind in kinds] + [(pair, "") for pair in pairs]
    for faults, kind in tries:
        if not faults and not kind:
            continue
        try:
            same = agrees(value, as_value(attend(arguments, faults, kind), case))
        except IndexError:  # no position is left: a context without one full block, and full blocks only
            continue
        if same:
            rules = [FAULTS[aspect][fault] for aspect, fault in faults.items()]
            return [*rules, ONLINE_FAULTS.get(kind, "")][0] + (
                " (and one fault more)" if len(faults) + bool(kind) > 1 else ""
            )
    return ""


def not_finite(case: AttentionCase) -> str:
    """The rule that a result with numbers that are not finite breaks."""
    if case.get("poison"):
        return (
            "a slot without a token holds whatever was there before, NaN here, and 0 x NaN is NaN: its K and V must "
            "not enter the sums at all"
        )
    if case.get("loud"):
        return "exp of a large score is infinite: take the maximum off before exp, which changes no weight"
    return "there are numbers that are not finite: a row without a single seen position, or something never written"
