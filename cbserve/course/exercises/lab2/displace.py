"""Exercise 6 of lab 2: premium displaces standard."""

from __future__ import annotations

import random
from typing import Any

from cbserve.core.policies import Priority
from cbserve.core.request import Sequence
from cbserve.course.exercise import BrokenRuleError, Case, Exercise, call
from cbserve.course.exercises.driving import NO_END, Setting, a_class, answers_for_you, drive, gave, picture, told
from cbserve.course.values import described
from cbserve.serving import request_name


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex6 {seed}")
    fixed: list[Setting] = [
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [1, 1, 0], "slots": 2},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [1, 1, 1], "slots": 2},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [2, 1, 0], "slots": 2},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [0, 0, 1], "slots": 2},
        {"lengths": [4, 4, 3], "arrivals": [0, 1, 2], "priorities": [1, 1, 0], "slots": 3},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [2, 2, 1], "slots": 2},
        # C arrives last of the equals and sits in slot 0.
        {"lengths": [2, 9, 8, 3], "arrivals": [0, 1, 3, 5], "priorities": [1, 1, 1, 0], "slots": 2},
    ]
    drawn: list[Setting] = []
    for _ in range(5):
        n = rng.randint(5, 7)
        drawn.append(
            {
                "lengths": [rng.randint(2, 9) for _ in range(n)],
                "arrivals": [0, *sorted(rng.sample(range(1, 14), n - 1))],
                "priorities": [rng.randint(0, 2) for _ in range(n)],
                "slots": 2,
            }
        )
    return [(setting,) for setting in [*fixed, *drawn]]


class _Withheld(Priority):
    def displaces(self, candidate: Sequence, running: list[Sequence], now_s: float) -> Sequence | None:
        raise answers_for_you("super().displaces")


def _run(answer: Any, args: Case) -> Any:
    class Asked(a_class(answer, "PremiumFirst", _Withheld)):  # type: ignore[misc]
        def displaces(self, candidate: Sequence, running: list[Sequence], now_s: float) -> Sequence | None:
            victim = call(super().displaces, (candidate, running, now_s))
            if victim is not None and not any(victim is seq for seq in running):
                wrong = victim.request.request_id if isinstance(victim, Sequence) else described(victim)
                raise BrokenRuleError(f"displaces names one of `running`, or None, and not {wrong}")
            return victim

    return drive(args[0], policy=Asked())


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    setting = args[0]
    names = [request_name(i) for i in range(len(setting["lengths"]))]
    urgency = dict(zip(names, setting["priorities"], strict=True))
    if NO_END in value["stopped"]:
        return "a loop in your displaces never ends: go over `running` once"
    mine, theirs = (run["gave_way"].split() for run in (value, expected))
    first = next((i for i, pair in enumerate(mine) if i >= len(theirs) or pair != theirs[i]), None)
    if first is None:
        return "a more urgent request waited although a less urgent one held a place; a smaller priority is more urgent"
    pair, step = mine[first].split("@")
    candidate, victim = pair.split(">")
    if urgency[candidate] == urgency[victim]:
        return f"step {step}: {candidate} displaced {victim}, which is as urgent; then both lose work, and nobody gains"
    if urgency[candidate] > urgency[victim]:
        return f"step {step}: {candidate} displaced {victim}, which is more urgent; a smaller priority goes first"
    return (
        f"step {step}: {candidate} took the place of {victim}, and another running request was less urgent, or as "
        "urgent and arrived later"
    )


EXERCISE = Exercise(
    id="lab2.ex6",
    title="Duty 4: premium displaces standard",
    difficulty=3,
    importance=4,
    minutes=12,
    points=4,
    hints=(
        "The engine asks only when there is no room. So there are two questions left: who would have to go, and is "
        "the newcomer worth it?",
        "The one to go has the largest priority number; among equals, the one that arrived last has the least to "
        "lose. Then compare strictly.",
        "max(running, key=...) with the pair (seq.request.priority, seq.arrival_s) finds the victim. Return it only "
        "if candidate.request.priority is smaller, else None.",
    ),
    cases=_cases,
    reference=lambda setting: drive(setting, policy=Priority(displace=True)),
    diagnose=_diagnose,
    run=_run,
    words=lambda answer, args: f"the engine with your displaces: {told(args[0])}",
    gave=gave,
    figure=picture,
)
