"""Lab 2, continuous batching: the duties retire, admit and displace, bounds in steps, exercise 2 of the handout."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

from cbserve.core.bounds import continuous_steps_bound, harmonic, static_steps, step_speedup_bound
from cbserve.core.errors import SchedulerError
from cbserve.core.policies import Policy, Priority
from cbserve.core.request import Request, SamplingParams, Sequence, SequenceState
from cbserve.core.scheduler import Scheduler
from cbserve.core.stopping import StopChecker
from cbserve.course.exercise import Case, Exercise, is_written
from cbserve.course.exercises.driving import EMPTY, NO_END, Setting, drive, first_wrong_step, gave, picture, told
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.serving import request_name


def _a_class(answer: Any, base: type, name: str) -> Any:
    if not (isinstance(answer, type) and issubclass(answer, base)):
        raise SchedulerError(f"a subclass of {base.__name__} is wanted: keep the line `class {name}({base.__name__}):`")
    return answer


def _random_setting(rng: random.Random, tight: bool, short_steps: bool) -> Setting:
    """Arrivals, lengths and slots at random; a pool that runs out, a step too small for all prompts."""
    n = rng.randint(5, 8)
    lengths = [1 + min(13, int(rng.expovariate(1 / 5))) for _ in range(n)]
    prompts = [rng.randint(1, 9) for _ in range(n)]
    arrivals = sorted(rng.choice((0, 0, rng.randint(1, 12))) for _ in range(n))
    setting: Setting = {"lengths": lengths, "prompts": prompts, "arrivals": arrivals, "slots": rng.randint(2, 4)}
    if tight:
        setting["num_blocks"] = max(-(-(p + t) // 4) for p, t in zip(prompts, lengths, strict=True)) + rng.randint(1, 3)
    if short_steps:
        setting["budget"] = rng.randint(6, 10)
    return setting


# ---- ex1: who is complete, who leaves -------------------------------------------------------------------------------


def _retire_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex1 {seed}")
    a, b = rng.sample(range(3, 60), 2)
    fixed: list[Case] = [
        ("tokens", [a, 0], 10, [0], False),
        ("tokens", [a, b], 2, [0], False),
        ("tokens", [a, b], 3, [0], False),
        ("tokens", [a, 0], 10, [0], True),
        ("tokens", [a, 2], 10, [0, 2], False),
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
    ]
    for _ in range(3):
        setting = _random_setting(rng, tight=False, short_steps=False)
        setting["max_tokens"] = [rng.choice((99, rng.randint(1, 9))) for _ in setting["lengths"]]
        engine.append(("engine", setting))
    engine.append(("engine", {"lengths": [5, 5, 5], "prompts": [20, 20, 20], "slots": 2, "budget": 8}))
    engine.append(("engine", _random_setting(rng, tight=False, short_steps=True)))
    return fixed + drawn + engine


NO_TOKEN = "IndexError on an answer without a token"


def _run_retire(answer: Any, args: Case) -> Any:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise SchedulerError('two answers are wanted: check("lab2.ex1", is_complete, Retiring)')
    is_complete, retiring = answer
    if args[0] == "tokens":
        if not is_written(is_complete):
            raise NotImplementedError("is_complete: not attempted, it is still a stub")
        return is_complete(*args[1:])
    if not is_written(retiring):
        raise NotImplementedError("is_complete is right; Retiring: not attempted, it is still a stub")
    try:
        return drive(args[1], _a_class(retiring, Scheduler, "Retiring"))
    except IndexError:  # in a step too small for its prompt a sequence runs before it has a token
        if not args[1].get("budget"):
            raise
        return {"steps": "", "gave_way": "", "stopped": NO_TOKEN}


def _reference_retire(kind: str, *args: Any) -> Any:
    if kind == "engine":
        return drive(args[0])
    tokens, max_tokens, eos, ignore_eos = args
    request = Request("A", [1], SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))
    seq = Sequence(request, 0, max_tokens)
    seq.output_token_ids += tokens
    StopChecker(eos).check(seq)  # the engine's own
    return seq.is_finished


def _diagnose_retire(args: Case, value: Any, expected: Any) -> str:
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
    stopped = value["stopped"]
    if stopped == NO_TOKEN:
        return "a sequence whose prompt is not finished has no output token; look at the list before its last item"
    if NO_END in stopped:
        return "a loop in your retire never ends: go over self.running once"
    if "is not finished" in stopped:
        return "retire returned a sequence that goes on: return only those whose answer is complete"
    if "does not run" in stopped:
        return "retire returned a sequence that is not in self.running, or the same one twice"
    step, mine, theirs = first_wrong_step(value, expected)
    if "never retired" in stopped or "did not come to an end" in stopped or "nothing can be scheduled" in stopped:
        return "a complete sequence was never returned: it keeps its slot and its blocks, and nobody can take them"
    return (
        f"step {step}: a slot is still held by an answer that is complete; return every complete sequence in the step "
        "in which it ends, not one a step and not later"
    )


def _words_retire(answer: Any, args: Case) -> str:
    if args[0] == "tokens":
        return f"is_complete({', '.join(map(repr, args[1:]))})"
    return f"the engine with your retire: {told(args[1])}"


def _picture_retire(args: Case, value: Any, expected: Any) -> str:
    return picture(args, value, expected) if args[0] == "engine" else ""


# ---- ex2: admit -----------------------------------------------------------------------------------------------------


def _admit_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex2 {seed}")
    fixed: list[Setting] = [
        {"lengths": [3, 6, 2, 4], "slots": 2},
        {"lengths": [6, 5, 4], "prompts": [4, 4, 4], "slots": 3, "num_blocks": 5},
        {"lengths": [6, 5, 2, 2], "prompts": [8, 12, 2, 2], "slots": 4, "num_blocks": 4},
        {"lengths": [3, 3, 3, 3], "prompts": [6, 6, 6, 1], "slots": 4, "budget": 8},
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
    drawn = [_random_setting(rng, tight, short) for tight in (False, True) for short in (False, True, True)]
    drawn.append(_random_setting(rng, tight=True, short_steps=False) | {"prefix_caching": True})
    return [(setting,) for setting in [*fixed, *drawn]]


AT_ONCE = "admit returned all at once"


def _run_admit(answer: Any, args: Case) -> dict[str, str]:
    run = drive(args[0], _a_class(answer, Scheduler, "Admitting"))
    if run["stopped"] and not inspect.isgeneratorfunction(answer.admit):
        run["stopped"] += f" ({AT_ONCE})"
    return run


def _diagnose_admit(args: Case, value: Any, expected: Any) -> str:
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


# ---- ex3, ex4: bounds -----------------------------------------------------------------------------------------------


def _bound_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2 bounds {seed}")
    drawn: list[Case] = []
    for heavy in (False, True, False):
        lengths = [1 + int(rng.expovariate(1 / 20)) for _ in range(rng.randint(7, 20))]
        if heavy:  # one answer is longer than all others together over the slots
            lengths[len(lengths) // 2] = sum(lengths)
        slots = rng.randint(2, 5)
        if sum(lengths) % slots == 0:
            lengths[0] += 1
        drawn.append((lengths, slots))
    return [([10, 100, 500, 30, 60, 21], 3), ([4, 4, 4, 4, 5], 3), ([9, 8, 7, 9, 6, 8, 7], 2), *drawn]


_BOUND_SLIPS: list[Slip] = [
    (
        lambda T, S: max(sum(T) / S, max(T)),
        "steps are whole: round the tokens over the slots up, since the last step may be half full",
    ),
    (
        lambda T, S: max(sum(T) // S, max(T)),
        "`//` rounds down, and the tokens that are left over need a step of their own",
    ),
    (
        lambda T, S: math.ceil(sum(T) / S),
        "one answer gives one token a step: no number of slots makes the run shorter than the longest answer",
    ),
    (
        lambda T, S: sum(T) / S,
        "one answer gives one token a step: the longest answer is a second bound, and steps are whole",
    ),
    (lambda T, S: max(T), "the slots together give at most `slots` tokens a step: that is the other bound"),
    (lambda T, S: static_steps(T, S), "these are the steps of static batching; no scheduler at all is meant here"),
    (lambda T, S: sum(T), "this is one slot alone; there are `slots` of them"),
    (
        lambda T, S: math.ceil(sum(T) / S) + max(T),
        "both limits hold at the same time, so the larger one counts, not their sum",
    ),
    (
        lambda T, S: min(math.ceil(sum(T) / S), max(T)),
        "the run must respect both limits, so it is at least as long as the larger one",
    ),
]


def _diagnose_bound(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_BOUND_SLIPS, args, value):
        return rule
    return "the larger of two limits: all tokens over the slots, rounded up, and the longest single answer"


_SPEEDUP_SLIPS: list[Slip] = [
    (lambda T, S: 1 / step_speedup_bound(T, S), "the fraction stands on its head: how many times fewer steps is asked"),
    (lambda T, S: static_steps(T, S) / math.ceil(sum(T) / S), "the longest answer limits continuous batching too"),
    (
        lambda T, S: S * static_steps(T, S) / sum(T),
        "1 / utilisation would be right with slots that are always full; use the bound in whole steps",
    ),
    (lambda T, S: static_steps(T, S) / max(T), "the slots limit continuous batching too"),
    (lambda T, S: harmonic(S), "H_B is what exponential lengths give on average; here are the lengths themselves"),
    (
        lambda T, S: static_steps(T, S) - continuous_steps_bound(T, S),
        "this is how many steps are saved; the ratio is asked",
    ),
    (
        lambda T, S: len(T) * max(T) / sum(T),
        "static batching takes one batch of `slots` requests after the other, each as long as its own longest",
    ),
    (
        lambda T, S: max(T) * math.ceil(len(T) / S) / continuous_steps_bound(T, S),
        "each static batch is as long as its own longest answer, not as the longest of all",
    ),
    (lambda T, S: 1.0, "both ways of batching were counted the same"),
    (
        lambda T, S: static_steps(sorted(T), S) / continuous_steps_bound(T, S),
        "the lengths were sorted first; static batches are filled in order of arrival",
    ),
]


def _diagnose_speedup(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SPEEDUP_SLIPS, args, value):
        return rule
    return "the steps of static batching (each batch as long as its longest) over the bound of exercise 3"


# ---- ex5: exercise 2 of the handout ---------------------------------------------------------------------------------

GB, KB, GIB, KIB = 10**9, 10**3, 2**30, 2**10


def max_requests(
    gpu_bytes: float, weights_bytes: float, kv_bytes_per_token: float, context_tokens: int, memory_share: float = 1.0
) -> int:
    """How many contexts of full length fit beside the weights into the share of memory that may be used."""
    room = memory_share * gpu_bytes - weights_bytes
    return max(0, math.floor(room / (kv_bytes_per_token * context_tokens)))


def _memory_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex5 {seed}")
    fixed: list[Case] = [
        (80 * GB, 14 * GB, 160 * KB, 2048, 1.0),
        (80 * GB, 14 * GB, 160 * KB, 2048, 0.9),
        (80 * GIB, 14 * GIB, 160 * KIB, 2048, 1.0),
        (16 * GB, 14 * GB, 160 * KB, 2048, 0.85),
    ]
    drawn: list[Case] = [
        (
            rng.choice((24, 40, 48, 80, 141)) * GB,
            rng.randint(2, 16) * GB,
            rng.choice((56, 128, 160, 512)) * KIB,
            rng.choice((700, 1366, 4096)),
            rng.choice((0.85, 0.9, 0.95)),
        )
        for _ in range(5)
    ]
    return fixed + drawn


_MEMORY_SLIPS: list[Slip] = [
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (k * c)),
        "less than no room is no request: never return less than 0",
    ),
    (lambda g, w, k, c, s: (s * g - w) / (k * c), "requests are whole: round down, half a request cannot run"),
    (lambda g, w, k, c, s: math.ceil((s * g - w) / (k * c)), "round down: the last one would not fit"),
    (lambda g, w, k, c, s: round((s * g - w) / (k * c)), "round down: the last one would not fit"),
    (lambda g, w, k, c, s: max(0, math.floor((g - w) / (k * c))), "memory_share is not used"),
    (
        lambda g, w, k, c, s: max(0, math.floor(s * (g - w) / (k * c))),
        "the share is of the whole memory, and the weights come out of it: share * gpu - weights",
    ),
    (lambda g, w, k, c, s: math.floor(s * g / (k * c)), "the weights lie in the same memory: take them off first"),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / k),
        "this is how many tokens fit; a request holds `context_tokens` of them",
    ),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (2 * k * c)),
        "kv_bytes_per_token holds K and V already: no further factor of 2",
    ),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (k * 1024 * c)),
        "the arguments are bytes already: convert units where you call it, not in here",
    ),
    (
        lambda g, w, k, c, s: math.floor((s * g - w) / (k * 1000 * c)),
        "the arguments are bytes already: convert units where you call it, not in here",
    ),
]


def _diagnose_memory(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_MEMORY_SLIPS, args, value):
        return rule
    return "bytes that are left for K and V, over the bytes of one context, rounded down; all arguments are in bytes"


# ---- ex6: displacement ----------------------------------------------------------------------------------------------


def _displace_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab2.ex6 {seed}")
    fixed: list[Setting] = [
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [1, 1, 0], "slots": 2},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [1, 1, 1], "slots": 2},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [2, 1, 0], "slots": 2},
        {"lengths": [8, 8, 3], "arrivals": [0, 1, 3], "priorities": [0, 0, 1], "slots": 2},
        {"lengths": [4, 4, 3], "arrivals": [0, 1, 2], "priorities": [1, 1, 0], "slots": 3},
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


def _run_displace(answer: Any, args: Case) -> Any:
    class Asked(_a_class(answer, Policy, "PremiumFirst")):  # type: ignore[misc]
        def displaces(self, candidate: Sequence, running: list[Sequence], now_s: float) -> Sequence | None:
            victim = super().displaces(candidate, running, now_s)
            if victim is not None and not any(victim is seq for seq in running):
                raise SchedulerError("displaces returned something that does not run: name one of `running`, or None")
            return victim  # type: ignore[no-any-return]

    return drive(args[0], policy=Asked())


def _diagnose_displace(args: Case, value: Any, expected: Any) -> str:
    setting = args[0]
    names = [request_name(i) for i in range(len(setting["lengths"]))]
    urgency = dict(zip(names, setting["priorities"], strict=True))
    if NO_END in value["stopped"]:
        return "a loop in your displaces never ends: go over `running` once"
    if "does not run" in value["stopped"]:
        return "displaces names one of `running`, the sequence itself, or None"
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


EXERCISES = (
    Exercise(
        id="lab2.ex1",
        title="Duties 1 and 2: who is complete, and who leaves",
        difficulty=2,
        importance=5,
        minutes=12,
        points=3,
        hints=(
            "An answer can end in two ways, and a request can switch one of them off. Which argument belongs to which "
            "way?",
            "Look at the last token only, and count the tokens. `or` joins the two ways; `not ignore_eos` guards the "
            "first.",
            "retire goes over self.running and keeps each seq for which is_complete(...) is true. The arguments are "
            "seq.output_token_ids, seq.max_tokens, self.stop_checker.eos_token_ids and seq.request.params.ignore_eos.",
        ),
        cases=_retire_cases,
        reference=_reference_retire,
        diagnose=_diagnose_retire,
        run=_run_retire,
        words=_words_retire,
        gave=gave,
        figure=_picture_retire,
    ),
    Exercise(
        id="lab2.ex2",
        title="Duty 3: admit while there is room",
        difficulty=4,
        importance=5,
        minutes=20,
        points=5,
        hints=(
            "Who is asked first, and what are the three things that can be missing? What happens to the second in the "
            "queue when the first has no room?",
            "Loop while self.policy.peek() gives somebody. Return as soon as a slot, a token of the budget, or a "
            "block is "
            "missing for that one. Otherwise yield it; the scheduler seats it before your loop goes on.",
            "tokens = self.num_new_tokens(seq, step) is 0 when the budget is used up. Blocks suffice if "
            "self.kv.blocks_needed(seq, self.kv.num_cached_tokens(seq) + tokens) is at most self.kv.num_free_blocks.",
        ),
        cases=_admit_cases,
        reference=lambda setting: drive(setting),
        diagnose=_diagnose_admit,
        run=_run_admit,
        words=lambda answer, args: f"the engine with your admit: {told(args[0])}",
        gave=gave,
        figure=picture,
    ),
    Exercise(
        id="lab2.ex3",
        title="The fewest steps that any scheduler can need",
        difficulty=2,
        importance=4,
        minutes=7,
        points=2,
        hints=(
            "What limits a run when there are many short answers? And what when there is one very long one?",
            "All slots full in every step is the best case for the sum. One token a step is the best case for one "
            "answer. "
            "Both limits hold.",
            "Divide the sum by the slots and round up, math.ceil does; then take the larger of that and the longest "
            "answer.",
        ),
        cases=_bound_cases,
        reference=continuous_steps_bound,
        diagnose=_diagnose_bound,
    ),
    Exercise(
        id="lab2.ex4",
        title="The most that refilling can gain",
        difficulty=2,
        importance=4,
        minutes=7,
        points=2,
        hints=(
            "Compare two runs of the same requests on the same slots. Which number of steps do you have already?",
            "Lab 1 counted static steps: each batch, in order of arrival, is as long as its longest. Your bound "
            "counts the "
            "fewest steps.",
            "Sum max(batch) over slices of `slots` requests, and divide by continuous_bound(lengths, slots).",
        ),
        cases=_bound_cases,
        reference=step_speedup_bound,
        diagnose=_diagnose_speedup,
    ),
    Exercise(
        id="lab2.ex5",
        title="Exercise 2 of the handout, with its units",
        difficulty=2,
        importance=5,
        minutes=12,
        points=3,
        hints=(
            "Write down what lies in GPU memory beside K and V, and what one request of full length needs.",
            "The share applies to the whole memory, and the weights come out of that share. What is left is divided "
            "among "
            "requests, and a request is whole.",
            "room = memory_share * gpu_bytes - weights_bytes. Divide by kv_bytes_per_token * context_tokens, round "
            "down "
            "with math.floor, and never go below 0.",
        ),
        cases=_memory_cases,
        reference=max_requests,
        diagnose=_diagnose_memory,
    ),
    Exercise(
        id="lab2.ex6",
        title="Duty 4: premium displaces standard",
        difficulty=3,
        importance=4,
        minutes=12,
        points=4,
        hints=(
            "The engine asks only when there is no room. So there are two questions left: who would have to go, and "
            "is the "
            "newcomer worth it?",
            "The one to go has the largest priority number; among equals, the one that arrived last has the least to "
            "lose. "
            "Then compare strictly.",
            "max(running, key=...) with the pair (seq.request.priority, seq.arrival_s) finds the victim. Return it "
            "only "
            "if candidate.request.priority is smaller, else None.",
        ),
        cases=_displace_cases,
        reference=lambda setting: drive(setting, policy=Priority(displace=True)),
        diagnose=_diagnose_displace,
        run=_run_displace,
        words=lambda answer, args: f"the engine with your displaces: {told(args[0])}",
        gave=gave,
        figure=picture,
    ),
)
