"""Exercise 2 of lab 2: admit while there is room."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

from cbserve.core.duties import Step
from cbserve.core.plan import Reason
from cbserve.core.request import Sequence, SequenceState
from cbserve.core.scheduler import Scheduler
from cbserve.course.exercise import Case, Exercise
from cbserve.course.exercises.driving import (
    EMPTY,
    NO_END,
    Setting,
    a_class,
    answers_for_you,
    drive,
    first_wrong_step,
    gave,
    picture,
    random_setting,
    sequences,
    told,
)


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex2 {seed}")
    fixed: list[Setting] = [
        {"lengths": [3, 6, 2, 4], "slots": 2},
        {"lengths": [6, 5, 4], "prompts": [4, 4, 4], "slots": 3, "num_blocks": 5},
        {"lengths": [6, 5, 2, 2], "prompts": [8, 12, 2, 2], "slots": 4, "num_blocks": 4},
        {"lengths": [3, 3, 3, 3], "prompts": [6, 6, 6, 1], "slots": 4, "budget": 8},
        # Blocks for the tokens of this step are enough: not for the next one, not for the rest of a prompt.
        {"lengths": [2, 2], "prompts": [4, 4], "slots": 2, "num_blocks": 2},
        {"lengths": [6, 2], "prompts": [5, 12], "slots": 2, "budget": 6, "num_blocks": 4},
        # B finds 8 tokens of its prompt in A's blocks, needs one block more, and none is free until A has left.
        {
            "lengths": [8, 3],
            "prompts": [8, 12],
            "arrivals": [0, 6],
            "slots": 2,
            "num_blocks": 4,
            "prefix_caching": True,
        },
    ]
    drawn = [random_setting(rng, tight, short) for tight in (False, True) for short in (False, True, True)]
    drawn.append(random_setting(rng, tight=True, short_steps=False) | {"prefix_caching": True})
    return [(setting,) for setting in [*fixed, *drawn]]


AT_ONCE = "admit returned all at once"


class _Withheld(Scheduler):
    """The engine's `admit` and `blocked` do not answer; the engine itself asks `blocked` when it seats somebody."""

    seats = False

    def admit(self, step: Step) -> Iterator[Sequence]:
        raise answers_for_you("super().admit")

    def blocked(self, seq: Sequence, step: Step) -> Reason | None:
        if not self.seats:
            raise answers_for_you("self.blocked")
        return super().blocked(seq, step)

    def _admit(self, seq: Sequence, step: Step) -> None:
        self.seats = True
        super()._admit(seq, step)
        self.seats = False


def _run(answer: Any, args: Case) -> dict[str, str]:
    class Asked(a_class(answer, "Admitting", _Withheld)):  # type: ignore[misc]
        def admit(self, step: Step) -> Iterator[Sequence]:
            return sequences("admit", super().admit(step))

    run = drive(args[0], Asked)
    if run["stopped"] and not inspect.isgeneratorfunction(answer.admit):
        run["stopped"] += f" ({AT_ONCE})"
    return run


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    (setting,), stopped = args, value["stopped"]
    if NO_END in stopped:
        if "peek" in stopped:
            return (
                "your loop asked the same first request again without yielding it; return when it has no room, or "
                "the loop never ends"
            )
        return "a loop in your admit never ends: return when the first in the queue has no room"
    if "has no room" in stopped:
        if AT_ONCE in stopped:
            return (
                "the list was full before anybody had a seat, so slots, budget and blocks were out of date: yield, do "
                "not collect"
            )
        if "slot" in stopped:
            return "a sequence was admitted without a free slot: look at self.free_slots before each one"
        if "block" in stopped and setting.get("prefix_caching"):
            return (
                "a sequence was admitted without blocks for its tokens of this step: blocks_needed wants all tokens "
                "that its table shall hold, the cached ones (self.kv.num_cached_tokens) and those of this step"
            )
        if "block" in stopped:
            return "a sequence was admitted without blocks for its tokens of this step: compare blocks needed and free"
        return "a sequence was admitted when the step's token budget was used up: num_new_tokens(seq, step) is 0 then"
    if "not waiting" in stopped and f", {SequenceState.RUNNING}, " in stopped:
        cure = "yield, do not collect" if AT_ONCE in stopped else "ask peek() again after each yield"
        return f"the same request came twice: {cure}"
    if "not waiting" in stopped:
        return "admit names sequences that wait, each once; the scheduler takes them out of the queue: peek, not pop"
    if not value["steps"]:
        return "requests wait, and nobody is admitted: yield the first in the queue while it has room"
    step, mine, theirs = first_wrong_step(value, expected)
    early, late = (sorted(set(a) - set(b) - {EMPTY}) for a, b in ((mine, theirs), (theirs, mine)))
    if early:
        return (
            f"step {step}: {early[0]} joined although the first in the queue had no room; nobody is pulled forward, "
            "or a long request would wait for ever"
        )
    if late and setting.get("num_blocks"):
        return f"step {step}: {late[0]} has a slot, tokens, and blocks for this step; reserve nothing for later steps"
    if _only_when_idle(value["steps"]):
        return f"step {step}: a slot is free while others run; that is the moment to admit, not when all have left"
    if _one_a_step(value["steps"], expected["steps"]):
        return f"step {step}: one was admitted and the next had room too; go on until the queue is empty or room ends"
    if late:
        return f"step {step}: {late[0]} is first in the queue and has room, but was not admitted"
    return f"step {step}: the same requests run, but were admitted in another order; the queue's order is peek()'s"


def _joined(steps: str) -> list[tuple[set[str], set[str]]]:
    """For each step (who is new, who ran in the step before and still does)."""
    found, before = [], set[str]()
    for word in steps.split():
        here = set(word) - {EMPTY}
        found.append((here - before, here & before))
        before = here
    return found


def _only_when_idle(steps: str) -> bool:
    return bool(steps) and all(not stayed for new, stayed in _joined(steps) if new)


def _one_a_step(steps: str, expected: str) -> bool:
    return all(len(new) <= 1 for new, _ in _joined(steps)) and any(len(new) > 1 for new, _ in _joined(expected))


EXERCISE = Exercise(
    id="lab2.ex2",
    title="Duty 3: admit while there is room",
    difficulty=4,
    importance=5,
    minutes=20,
    points=5,
    hints=(
        "Who is asked first, and what are the three things that can be missing? What happens to the second in the "
        "queue when the first has no room?",
        "Loop while self.policy.peek() gives somebody. Return as soon as a slot, a token of the budget, or a block is "
        "missing for that one. Otherwise yield it; the scheduler seats it before your loop goes on.",
        "tokens = self.num_new_tokens(seq, step) is 0 when the budget is used up. Blocks suffice if "
        "self.kv.blocks_needed(seq, self.kv.num_cached_tokens(seq) + tokens) is at most self.kv.num_free_blocks.",
    ),
    cases=_cases,
    reference=lambda setting: drive(setting),
    diagnose=_diagnose,
    run=_run,
    words=lambda answer, args: f"the engine with your admit: {told(args[0])}",
    gave=gave,
    figure=picture,
)
