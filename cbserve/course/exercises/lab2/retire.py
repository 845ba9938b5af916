"""Exercise 1 of lab 2: who is complete, and who leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cbserve.core.request import Request, SamplingParams, Sequence
from cbserve.core.scheduler import Scheduler
from cbserve.core.stopping import StopChecker
from cbserve.course.exercise import BrokenRuleError, Case, Exercise, call, is_written
from cbserve.course.exercises.driving import (
    NO_END,
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
    rng = random.Random(f"lab2.ex1 {seed}")
    a, b = rng.sample(range(3, 60), 2)
    fixed: list[Case] = [
        ("tokens", [a, 0], 10, [0], False),
        ("tokens", [a, b], 2, [0], False),
        ("tokens", [a, b], 3, [0], False),
        ("tokens", [a, 0], 10, [0], True),
        ("tokens", [a, 2], 10, [0, 2], False),
        ("tokens", [a, 0], 10, [1, 2], False),
        ("tokens", [a, 0, b], 10, [0], True),
        ("tokens", [a, 0, b, 0], 4, [0], True),
        ("tokens", [a], 1, [0], False),
    ]
    drawn: list[Case] = []
    for _ in range(6):
        tokens = [rng.randint(3, 60) for _ in range(rng.randint(1, 5))]
        ends = rng.random() < 0.4
        drawn.append(("tokens", tokens + [0] * ends, len(tokens) + rng.randint(0, 2), [0, 1], rng.random() < 0.3))
    engine: list[Case] = [
        ("engine", {"lengths": [3, 3, 5, 2, 2], "slots": 2}),
        ("engine", {"lengths": [9, 9, 2, 9], "max_tokens": [3, 4, 9, 2], "slots": 2}),
        ("engine", {"lengths": [2, 2, 3], "max_tokens": [5, 9, 9], "ignore_eos": [True, False, False], "slots": 2}),
        ("engine", {"lengths": [9, 3, 9], "eos": [0, 4], "slots": 2}),
        ("engine", {"lengths": [99, 3, 2], "max_tokens": [None, 9, 9], "slots": 2, "num_blocks": 4}),
    ]
    for _ in range(3):
        setting = random_setting(rng, tight=False, short_steps=False)
        setting["max_tokens"] = [rng.choice((99, rng.randint(1, 9))) for _ in setting["lengths"]]
        engine.append(("engine", setting))
    engine.append(("engine", {"lengths": [5, 5, 5], "prompts": [20, 20, 20], "slots": 2, "budget": 8}))
    engine.append(("engine", random_setting(rng, tight=False, short_steps=True)))
    return fixed + drawn + engine


NO_TOKEN = "IndexError on an answer without a token"


class _Withheld(Scheduler):
    def retire(self) -> list[Sequence]:
        raise answers_for_you("super().retire")


def _run(answer: Any, args: Case) -> Any:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BrokenRuleError('two answers are wanted: check("lab2.ex1", is_complete, Retiring)')
    is_complete, retiring = answer
    if args[0] == "tokens":
        if not is_written(is_complete):
            raise NotImplementedError("is_complete: not attempted, it is still a stub")
        return call(is_complete, args[1:])
    if not is_written(retiring):
        raise NotImplementedError("is_complete is right; Retiring: not attempted, it is still a stub")

    class Asked(a_class(retiring, "Retiring", _Withheld)):  # type: ignore[misc]
        def retire(self) -> Iterator[Sequence]:
            return sequences("retire", super().retire())

    try:
        return drive(args[1], Asked)
    except IndexError:  # in a step too small for its prompt a sequence runs before it has a token
        if not args[1].get("budget"):
            raise
        return {"steps": "", "gave_way": "", "stopped": NO_TOKEN}


def _reference(kind: str, *args: Any) -> Any:
    if kind == "engine":
        return drive(args[0])
    tokens, max_tokens, eos, ignore_eos = args
    request = Request("A", [1], SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))
    seq = Sequence(request, 0, max_tokens)
    seq.output_token_ids += tokens
    StopChecker(eos).check(seq)  # the engine's own
    return seq.is_finished


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    if args[0] == "tokens":
        tokens, max_tokens, eos, ignore_eos = args[1:]
        if expected:
            if tokens[-1] in eos and not ignore_eos:
                return "the last token is an EOS: the answer is complete, however few tokens it has"
            return "the answer has max_tokens tokens: it is complete without an EOS too"
        if len(tokens) < max_tokens and not any(token in eos for token in tokens):
            return "no EOS, and fewer than max_tokens tokens: this answer goes on"
        if tokens[-1] in eos:
            return "ignore_eos=True means: an EOS does not end the answer"
        return "only the last token is new: an EOS before it was ignored, or the answer would have ended there"
    setting, stopped = args[1], value["stopped"]
    if setting.get("ignore_eos"):
        asked = "; seq.request.params.ignore_eos says whether an EOS ends it"
    elif setting.get("eos"):
        asked = "; self.stop_checker.eos_token_ids says which ids end it"
    else:
        asked = ""
    if stopped == NO_TOKEN:
        return "a sequence whose prompt is not finished has no output token; look at the list before its last item"
    if NO_END in stopped:
        return "a loop in your retire never ends: go over self.running once"
    if "is not finished" in stopped:
        return f"retire returned a sequence that goes on: return only those whose answer is complete{asked}"
    if "does not run" in stopped:
        return "retire returned a sequence that is not in self.running, or the same one twice"
    step, mine, theirs = first_wrong_step(value, expected)
    for_ever = ("never retired", "did not come to an end", "nothing can be scheduled")
    if mine == theirs or any(words in stopped for words in for_ever):
        return f"a complete sequence was never returned: it keeps its slot and its blocks for ever{asked}"
    return (
        f"step {step}: a slot is still held by an answer that is complete; return every complete sequence in the step "
        "in which it ends, not one a step and not later"
    )


def _words(answer: Any, args: Case) -> str:
    if args[0] == "tokens":
        return f"is_complete({', '.join(map(repr, args[1:]))})"
    return f"the engine with your retire: {told(args[1])}"


def _picture(args: Case, value: Any, expected: Any) -> str:
    return picture(args, value, expected) if args[0] == "engine" else ""


EXERCISE = Exercise(
    id="lab2.ex1",
    title="Duties 1 and 2: who is complete, and who leaves",
    difficulty=2,
    importance=5,
    minutes=12,
    points=3,
    hints=(
        "An answer can end in two ways, and a request can switch one of them off. Which argument belongs to which way?",
        "Look at the last token only, and count the tokens. `or` joins the two ways; `not ignore_eos` "
        "guards the first.",
        "retire goes over self.running and keeps each seq for which is_complete(...) is true. The arguments are "
        "seq.output_token_ids, seq.max_tokens, self.stop_checker.eos_token_ids and seq.request.params.ignore_eos.",
    ),
    cases=_cases,
    reference=_reference,
    diagnose=_diagnose,
    run=_run,
    words=_words,
    gave=gave,
    figure=_picture,
)
