"""Exercise 2 of lab 3: the look-up, from position to block."""

from __future__ import annotations

import random
from typing import Any

from cbserve.course.exercise import BrokenRuleError, Case, Exercise, call
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.course.values import described, plain


def slot_of(position: int, block_table: list[int], block_size: int) -> tuple[int, int]:
    """(block, place in the block) of a position (Kwon et al. 2023, section 4.3)."""
    return block_table[position // block_size], position % block_size


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex2 {seed}")
    fixed: list[Case] = [(5, [7, 2, 9], 4), (0, [7, 2, 9], 4), (3, [7, 2, 9], 4), (4, [7, 2, 9], 4), (11, [7, 2, 9], 4)]
    drawn: list[Case] = []
    for _ in range(6):
        block_size, blocks = rng.choice((8, 16, 32)), rng.randint(2, 6)
        table = rng.sample(range(100, 1000), blocks)
        drawn.append((rng.randrange(block_size * blocks), table, block_size))
    return fixed + drawn


def _run(answer: Any, args: Case) -> Any:
    value = plain(call(answer, args))
    if value not in (None, ...) and not (isinstance(value, list | tuple) and len(value) == 2):
        raise BrokenRuleError(f"a pair (block, place in the block) is wanted, and this is {described(value)}")
    return value


_SLIPS: list[Slip] = [
    (
        lambda p, t, b: (p // b, p % b),
        "this is the logical block, its number in the sequence: the block table says which block of the pool it is",
    ),
    (lambda p, t, b: (t[p // b], p), "the place counts from the beginning of the block, not of the sequence"),
    (lambda p, t, b: (p % b, t[p // b]), "the pair is the other way round: block first, then the place in it"),
    (
        lambda p, t, b: (t[p], p % b),
        "position used as index of the table: an entry of the table stands for block_size positions",
    ),
    (
        lambda p, t, b: (t[p % b], p // b),
        "// gives which block of the sequence, % the place in it; here they changed roles",
    ),
    (lambda p, t, b: (t[p % b], p % b), "// gives which entry of the table, % the place in the block"),
    (lambda p, t, b: (t[p // b] * b, p % b), "the block's id is asked, not the slot at which it begins"),
    (
        lambda p, t, b: (t[p // b] + p // b, p % b),
        "block id used as position: an id is a name, and nothing is added to it",
    ),
    (
        lambda p, t, b: (t[p // b] + p % b, p % b),
        "block id used as position: an id is a name, and nothing is added to it",
    ),
    (lambda p, t, b: (t[(p - 1) // b], (p - 1) % b), "positions count from 0: do not take one off"),
    (lambda p, t, b: (t[(p + 1) // b], (p + 1) % b), "positions count from 0: do not add one"),
    (lambda p, t, b: (t[p // b], p % b + 1), "places count from 0: do not add one"),
]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SLIPS, args, tuple(value)):
        return rule
    if value[0] not in args[1]:
        return f"{value[0]} is no block of this sequence; the block is an entry of block_table"
    return "which entry of the table, and which place in that block: block_size positions share an entry"


EXERCISE = Exercise(
    id="lab3.ex2",
    title="The look-up: from position to block",
    difficulty=1,
    importance=5,
    minutes=5,
    points=1,
    hints=(
        "How many positions share one entry of the table?",
        "Whole blocks before the position tell which entry; what is left over tells the place.",
        "divmod(position, block_size) gives both at once. Only one of the two goes through block_table.",
    ),
    cases=_cases,
    reference=slot_of,
    diagnose=_diagnose,
    run=_run,
)
