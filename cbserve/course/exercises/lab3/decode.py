"""Exercise 3 of lab 3: decode attention over pages, in torch."""

from __future__ import annotations

import random
from typing import Any

from cbserve.course.exercise import Case, Exercise, call
from cbserve.course.exercises.attention_faults import named_fault, not_finite
from cbserve.course.exercises.paging import agrees, as_value, attention_case, gave, reference, tensors, told


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex3 {seed}")
    cases = [
        attention_case(rng, 2, 2, 8),
        attention_case(rng, 2, 2, 10),
        attention_case(rng, 4, 2, 11),
        attention_case(rng, 1, 1, 1),
        attention_case(rng, 4, 2, 11, scale=0.1),
        *(
            attention_case(rng, group * kv, kv, rng.randint(2, 40), block_size=block_size, head_dim=head_dim)
            for group, kv, block_size, head_dim in ((3, 2, 8, 16), (2, 3, 4, 32), (4, 2, 16, 8))
        ),
        attention_case(rng, 4, 2, 13, loud=True),
        attention_case(rng, 4, 2, 10, poison=True),
    ]
    return [(case,) for case in cases]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    (case,) = args
    if value["not finite"]:
        return not_finite(case)
    if rule := named_fault(case, value, ("slot", "seen", "score", "head", "softmax", "values")):
        return rule
    return "for each head: softmax over the positions 0 .. context_len - 1 of q . k * scale, then the mean of V by it"


EXERCISE = Exercise(
    id="lab3.ex3",
    title="Decode attention over pages, in torch",
    difficulty=4,
    importance=5,
    minutes=25,
    points=4,
    hints=(
        "First bring K and V of the context side by side, as if there were no pages. Attention itself then knows "
        "nothing of blocks.",
        "k_cache[block_table] has the blocks in order: flatten the first two dimensions, and keep context_len "
        "positions. Then give every query head the KV head that it shares: h // (heads / kv_heads).",
        "repeat_interleave(group, dim=1) lines KV heads up with query heads. Scores are [heads, positions]: "
        "einsum('hd,thd->ht') * scale, softmax over the last axis, einsum('ht,thd->hd') with V.",
    ),
    cases=_cases,
    reference=reference,
    diagnose=_diagnose,
    compare=agrees,
    run=lambda answer, args: as_value(call(answer, tensors(args[0])), args[0]),
    words=lambda answer, args: f"your paged_decode, {told(args[0])}",
    gave=gave,
)
