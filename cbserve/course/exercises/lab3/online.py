"""Exercise 4 of lab 3: the same block by block, with an online softmax."""

from __future__ import annotations

import random
from typing import Any

from cbserve.course.exercise import BrokenRuleError, Case, Exercise, call, is_written
from cbserve.course.exercises.attention_faults import named_fault, not_finite
from cbserve.course.exercises.paging import (
    agrees,
    as_value,
    attention_case,
    block_by_block,
    gave,
    kernel_is_written,
    reference,
    runs_kernel,
    tensors,
    told,
)


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex4 {seed}")
    size = {"block_size": 16}
    cases = [
        attention_case(rng, 2, 2, 16, **size),
        attention_case(rng, 2, 2, 48, **size),
        attention_case(rng, 2, 2, 37, **size),
        attention_case(rng, 4, 2, 37, **size),
        attention_case(rng, 4, 2, 40, block_size=32, scale=0.1),
        attention_case(rng, 4, 1, rng.randint(17, 60), head_dim=32, **size),
        attention_case(rng, 2, 2, 1, **size),
        attention_case(rng, 4, 2, 40, loud=True, **size),
        attention_case(rng, 4, 2, 20, poison=True, **size),
    ]
    return [(case,) for case in cases]


def _is_written(answer: Any) -> bool:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return is_written(answer)
    return kernel_is_written(answer[0]) or is_written(answer[1])


def _run(answer: Any, args: Case) -> Any:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BrokenRuleError('two answers are wanted, one of them written: check("lab3.ex4", decode_kernel, absorb)')
    return as_value(call(block_by_block(*answer), tensors(args[0])), args[0])


def _words(answer: Any, args: Case) -> str:
    name = "decode_kernel" if isinstance(answer, tuple) and runs_kernel(*answer) else "absorb"
    return f"your {name}, {told(args[0])}"


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    (case,) = args
    if value["not finite"] == case["heads"] * case["head_dim"] and not (case.get("poison") or case.get("loud")):
        return (
            "no number of the output is finite: was it stored, for the heads that this program owns? Or is a factor "
            "infinite at the first block, where the old maximum is -inf: exp(old - new) is 0 there, exp(new - old) not"
        )
    if value["not finite"] and case.get("loud"):
        return (
            "exp of a large score is infinite: take off the largest score of all blocks so far, which never falls, "
            "and no exponent is above 0"
        )
    if value["not finite"]:
        return not_finite(case)
    if rule := named_fault(case, value, ("slot", "seen", "score", "head", "values"), online=True):
        return rule
    if rule := named_fault(case, value, ("softmax",)):
        return rule
    return "per block: scores, mask, the new maximum, rescale total and values, add this block's; at the end divide"


EXERCISE = Exercise(
    id="lab3.ex4",
    title="The same block by block: an online softmax",
    difficulty=5,
    importance=4,
    minutes=30,
    points=5,
    hints=(
        "You see one block at a time, and the maximum so far may be too small. What do the sums that you have already "
        "become when a larger one arrives? For the kernel write down first which element of the flat cache [block, "
        "place, kv_head, column] is.",
        "Keep three things for each head: the best score so far, the total of the exponentials, and the weighted sum "
        "of V. Before a block is added, total and values shrink by exp(old best - new best). In the kernel a token's "
        "row is (block * BLOCK_SIZE + place) * KV_HEADS + kv_head, and each row has HEAD_DIM elements.",
        "In this order: scores, with -inf beyond the context; the new best, the larger of the old and this block's; "
        "shrink both sums; weights = exp(scores - new best); add their sum to total, and weights times V to values. "
        "In the kernel row[:, None] * HEAD_DIM + column[None, :] points to a tile of rows, and seen[:, None] masks it "
        "in both loads.",
    ),
    cases=_cases,
    reference=reference,
    diagnose=_diagnose,
    compare=agrees,
    run=_run,
    written=_is_written,
    words=_words,
    gave=gave,
)
