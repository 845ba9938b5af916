"""Lab 2: the engine's own duties pass, and each slip hears the rule that it breaks."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from cbserve.core.bounds import continuous_steps_bound, static_steps, step_speedup_bound
from cbserve.core.policies import Priority
from cbserve.core.scheduler import Scheduler
from cbserve.course.checking import examine
from cbserve.course.exercises import get, ids_of
from cbserve.course.exercises.driving import as_trace, drive, written
from cbserve.course.exercises.lab2.memory import max_requests

IDS = [f"lab2.ex{n}" for n in range(1, 7)]


# ---- ex1 ------------------------------------------------------------------------------------------------------------


def is_complete(tokens, max_tokens, eos, ignore_eos):
    return len(tokens) >= max_tokens or (tokens[-1] in eos and not ignore_eos)


class Retiring(Scheduler):
    def retire(self):
        eos = self.stop_checker.eos_token_ids
        return [
            seq
            for seq in self.running
            if is_complete(seq.output_token_ids or [-1], seq.max_tokens, eos, seq.request.params.ignore_eos)
        ]


def retiring(choose: Callable[[Scheduler], Any]) -> type[Scheduler]:
    return type("Retiring", (Scheduler,), {"retire": choose})


def finished(self):
    return [seq for seq in self.running if seq.is_finished]


def unguarded(self):
    eos = self.stop_checker.eos_token_ids
    return [s for s in self.running if is_complete(s.output_token_ids, s.max_tokens, eos, s.request.params.ignore_eos)]


def endless(self):
    found = []
    while self.running:
        found = finished(self)
    return found


class SuperRetiring(Scheduler):
    def retire(self):
        return super().retire()


def asking(eos=None, max_tokens=None, ignore_eos=None):
    """A retire that takes a usual value for one of the arguments of is_complete."""

    def retire(self):
        return [
            seq
            for seq in self.running
            if is_complete(
                seq.output_token_ids or [-1],
                max_tokens or seq.max_tokens,
                eos or self.stop_checker.eos_token_ids,
                seq.request.params.ignore_eos if ignore_eos is None else ignore_eos,
            )
        ]

    return retire


RETIRE = [
    ((lambda t, n, eos, ignore: len(t) >= n, Retiring), "the last token is an EOS"),
    ((lambda t, n, eos, ignore: t[-1] in eos and not ignore, Retiring), "complete without an EOS too"),
    ((lambda t, n, eos, ignore: len(t) > n or is_complete(t, n + 1, eos, ignore), Retiring), "without an EOS too"),
    ((lambda t, n, eos, ignore: len(t) >= n or t[-1] in eos, Retiring), "ignore_eos=True means"),
    ((lambda t, n, eos, ignore: len(t) >= n - 1 or is_complete(t, n, eos, ignore), Retiring), "this answer goes on"),
    ((lambda t, n, eos, ignore: is_complete(t, n, eos, ignore) or 0 in t, Retiring), "ignore"),
    ((is_complete, retiring(lambda self: [])), "a complete sequence was never returned"),
    ((is_complete, retiring(lambda self: list(self.running))), "returned a sequence that goes on"),
    ((is_complete, retiring(lambda self: finished(self)[:1])), "every complete sequence in the step in which it ends"),
    ((is_complete, retiring(lambda self: finished(self) * 2)), "or the same one twice"),
    (
        (is_complete, retiring(lambda self: [s for s in finished(self) if s.num_output_tokens >= s.max_tokens])),
        "a complete sequence was never returned",
    ),
    (
        (is_complete, retiring(lambda self: finished(self) if len(finished(self)) == len(self.running) else [])),
        "every complete sequence in the step in which it ends",
    ),
    ((is_complete, retiring(unguarded)), "has no output token; look at the list before its last item"),
    ((is_complete, retiring(endless)), "go over self.running once"),
    ((is_complete, retiring(asking(eos=[0]))), "self.stop_checker.eos_token_ids says which ids end it"),
    ((is_complete, retiring(asking(ignore_eos=False))), "seq.request.params.ignore_eos says whether an EOS ends it"),
    ((is_complete, retiring(asking(max_tokens=99))), "a complete sequence was never returned"),
    ((is_complete, SuperRetiring), "`super().retire` would answer for you"),
]


# ---- ex2 ------------------------------------------------------------------------------------------------------------


def has_room(self, seq, step, slots=True, budget=True, blocks=True, end=None):
    """What `admit` asks of the first in the queue; `end(seq, tokens)`: up to which token there must be blocks."""
    tokens = self.num_new_tokens(seq, step)
    if (slots and not self.free_slots) or (budget and not tokens):
        return False
    length = end(seq, tokens) if end else self.kv.num_cached_tokens(seq) + tokens
    return not blocks or self.kv.blocks_needed(seq, length) <= self.kv.num_free_blocks


def admitting(head_only=True, most=99, idle=False, pop=False, **rules):
    """An admit with one rule left out, or one rule too many."""

    def admit(self, step):
        admitted = 0
        if idle and self.running:
            return
        for seq in list(self.policy):
            if admitted < most and has_room(self, seq, step, **rules):
                admitted += 1
                if pop:
                    self.policy.remove(seq)
                yield seq
            elif head_only:
                return

    return type("Admitting", (Scheduler,), {"admit": admit})


class PeekAdmitting(Scheduler):
    def admit(self, step):
        while (seq := self.policy.peek()) is not None and has_room(self, seq, step):
            yield seq


def skipping(self, step):
    """Yields while there is room, and asks on for ever when there is none."""
    while (seq := self.policy.peek()) is not None:
        if has_room(self, seq, step):
            yield seq


def skipping_in_the_queue(self, step):
    while True:
        for seq in list(self.policy):
            if has_room(self, seq, step):
                yield seq


def collected(self, step):
    return [self.policy.peek() for _ in self.free_slots if len(self.policy)]


def listed(self, step):
    return [seq for seq in self.policy if has_room(self, seq, step)]


def asked_once(self, step):
    seq = self.policy.peek()
    while seq is not None and self.free_slots:
        yield seq


def last_first(self, step):
    waiting = list(self.policy)[::-1]
    for seq in waiting:
        if has_room(self, seq, step):
            yield seq


class SuperAdmitting(Scheduler):
    def admit(self, step):
        yield from super().admit(step)


class AskingBlocked(Scheduler):
    def admit(self, step):
        while (seq := self.policy.peek()) is not None and self.blocked(seq, step) is None:
            yield seq


class AskingSuper(Scheduler):
    def admit(self, step):
        while (seq := self.policy.peek()) is not None and super().blocked(seq, step) is None:
            yield seq


ADMIT = [
    (admitting(slots=False), "without a free slot"),
    (admitting(blocks=False), "without blocks for its tokens of this step"),
    (admitting(budget=False), "token budget was used up"),
    (admitting(head_only=False), "nobody is pulled forward"),
    (type("Admitting", (Scheduler,), {"admit": last_first}), "nobody is pulled forward"),
    (admitting(most=1), "the next had room too"),
    (admitting(idle=True), "not when all have left"),
    (admitting(end=lambda seq, tokens: seq.num_prompt_tokens + seq.max_tokens), "reserve nothing for later steps"),
    (admitting(end=lambda seq, tokens: seq.num_tokens), "reserve nothing for later steps"),
    (admitting(end=lambda seq, tokens: seq.num_tokens + 1), "reserve nothing for later steps"),
    (admitting(pop=True), "peek, not pop"),
    (type("Admitting", (Scheduler,), {"admit": lambda self, step: []}), "nobody is admitted"),
    (type("Admitting", (Scheduler,), {"admit": skipping}), "asked the same first request again without yielding it"),
    (type("Admitting", (Scheduler,), {"admit": skipping_in_the_queue}), "a loop in your admit never ends"),
    (type("Admitting", (Scheduler,), {"admit": collected}), "the same request came twice: yield, do not collect"),
    (type("Admitting", (Scheduler,), {"admit": listed}), "out of date: yield, do not collect"),
    (type("Admitting", (Scheduler,), {"admit": asked_once}), "ask peek() again after each yield"),
    (admitting(end=lambda seq, tokens: tokens), "the cached ones (self.kv.num_cached_tokens)"),
    (
        admitting(end=lambda seq, tokens: seq.num_computed_tokens + tokens),
        "the cached ones (self.kv.num_cached_tokens)",
    ),
    (Scheduler, "the engine's own class: keep the line"),
    (SuperAdmitting, "`super().admit` would answer for you"),
    (AskingBlocked, "`self.blocked` would answer for you"),
    (AskingSuper, "`self.blocked` would answer for you"),
]


# ---- ex3 to ex5 -----------------------------------------------------------------------------------------------------

BOUND = [
    (lambda T, S: max(sum(T) / S, max(T)), "round the tokens over the slots up"),
    (lambda T, S: max(sum(T) // S, max(T)), "`//` rounds down"),
    (lambda T, S: math.ceil(sum(T) / S), "no number of slots makes the run shorter"),
    (lambda T, S: max(T), "at most `slots` tokens a step"),
    (lambda T, S: static_steps(T, S), "steps of static batching"),
    (lambda T, S: math.ceil(sum(T) / S) + max(T), "not their sum"),
    (lambda T, S: min(math.ceil(sum(T) / S), max(T)), "no number of slots|at most `slots` tokens"),
    (lambda T, S: sum(T), "one slot alone"),
    (lambda T, S: 10_000_000, "the larger of two limits"),
]
SPEEDUP = [
    (lambda T, S: 1 / step_speedup_bound(T, S), "stands on its head"),
    (lambda T, S: S * static_steps(T, S) / sum(T), "slots that are always full"),
    (
        lambda T, S: static_steps(T, S) / math.ceil(sum(T) / S),
        "longest answer limits continuous batching too",
    ),
    (lambda T, S: static_steps(T, S) / max(T), "slots limit continuous batching too"),
    (lambda T, S: static_steps(T, S) - continuous_steps_bound(T, S), "the ratio is asked"),
    (lambda T, S: len(T) * max(T) / sum(T), "one batch of `slots` requests after the other"),
    (lambda T, S: 1.0, "counted the same"),
    (lambda T, S: 77.0, "the steps of static batching"),
]
MEMORY = [
    (lambda g, w, k, c, s=1.0: (s * g - w) / (k * c), "requests are whole"),
    (lambda g, w, k, c, s=1.0: math.ceil((s * g - w) / (k * c)), "round down"),
    (lambda g, w, k, c, s=1.0: math.floor((s * g - w) / (k * c)), "never return less than 0"),
    (lambda g, w, k, c, s=1.0: max_requests(g, w, k, c), "memory_share is not used"),
    (lambda g, w, k, c, s=1.0: math.floor(s * (g - w) / (k * c)), "the share is of the whole memory"),
    (lambda g, w, k, c, s=1.0: math.floor(s * g / (k * c)), "the weights lie in the same memory"),
    (lambda g, w, k, c, s=1.0: math.floor((s * g - w) / k), "how many tokens fit"),
    (lambda g, w, k, c, s=1.0: math.floor((s * g - w) / (2 * k * c)), "no further factor of 2"),
    (lambda g, w, k, c, s=1.0: math.floor((s * g - w) / (k * 1024 * c)), "bytes already"),
    (lambda g, w, k, c, s=1.0: 5, "all arguments are in bytes"),
]


# ---- ex6 ------------------------------------------------------------------------------------------------------------


def premium(choose: Callable[..., Any]) -> type[Priority]:
    return type("PremiumFirst", (Priority,), {"displaces": lambda self, new, running, now_s: choose(new, running)})


def urgency(seq):
    return seq.request.priority, seq.arrival_s


def least_urgent(new, running):
    victim = max(running, key=urgency)
    return victim if new.request.priority < victim.request.priority else None


def latest(new, running):
    victim = max(running, key=lambda seq: seq.arrival_s)
    return victim if new.request.priority < victim.request.priority else None


def first_of_the_least_urgent(new, running):
    victim = max(running, key=lambda seq: (seq.request.priority, -seq.arrival_s))
    return victim if new.request.priority < victim.request.priority else None


class SuperPremium(Priority):
    def displaces(self, candidate, running, now_s):
        self.displace = True
        return super().displaces(candidate, running, now_s)


def in_the_last_slot(new, running):
    victim = max(running, key=lambda seq: (seq.request.priority, seq.slot))
    return victim if new.request.priority < victim.request.priority else None


def premium_is_zero(new, running):
    victim = max(running, key=urgency)
    return victim if new.request.priority == 0 < victim.request.priority else None


def sorts(new, running):
    running.sort(key=urgency)
    return least_urgent(new, running)


def not_more_urgent(new, running):
    victim = max(running, key=urgency)
    return victim if new.request.priority <= victim.request.priority else None


DISPLACE = [
    (premium(lambda new, running: None), "a smaller priority is more urgent"),
    (premium(lambda new, running: max(running, key=urgency)), "which is as urgent"),
    (premium(not_more_urgent), "which is as urgent"),
    (
        premium(lambda new, running: next((s for s in running if s.request.priority < new.request.priority), None)),
        "waited although",
    ),
    (premium(first_of_the_least_urgent), "as urgent and arrived later"),
    (premium(latest), "another running request was less urgent"),
    (premium(lambda new, running: new), "names one of `running`"),
    (premium(lambda new, running: new), "and not C"),
    (premium(in_the_last_slot), "as urgent and arrived later"),
    (premium(premium_is_zero), "waited although"),
    (premium(sorts), "your function changed `running`"),
    (SuperPremium, "`super().displaces` would answer for you"),
]  # fmt: skip

RIGHT = {
    "lab2.ex1": (is_complete, Retiring),
    "lab2.ex2": PeekAdmitting,
    "lab2.ex3": continuous_steps_bound,
    "lab2.ex4": step_speedup_bound,
    "lab2.ex5": max_requests,
    "lab2.ex6": premium(least_urgent),
}
TABLES = {"ex1": RETIRE, "ex2": ADMIT, "ex3": BOUND, "ex4": SPEEDUP, "ex5": MEMORY, "ex6": DISPLACE}
WRONG = [(f"lab2.{ex}", answer, rule) for ex, table in TABLES.items() for answer, rule in table]


def test_the_lab_has_six_exercises() -> None:
    assert ids_of("lab2") == IDS


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("seed", range(20))
def test_a_right_answer_passes(id: str, seed: int) -> None:
    outcome = examine(get(id), RIGHT[id], seed)
    assert outcome.status == "passed", outcome


@pytest.mark.parametrize(("id", "answer", "rule"), WRONG, ids=[f"{id} {rule}" for id, _, rule in WRONG])
@pytest.mark.parametrize("seed", range(2))
def test_a_slip_hears_the_rule_that_it_breaks(id: str, answer: Any, rule: str, seed: int) -> None:
    outcome = examine(get(id), answer, seed)
    assert outcome.status == "failed"
    said = dict(outcome.lines)["rule"]
    assert any(words in said for words in rule.split("|")), said


@pytest.mark.parametrize(
    ("id", "stub"),
    [
        ("lab2.ex1", (lambda t, n, e, i: ..., type("Retiring", (Scheduler,), {"retire": lambda self: None}))),
        ("lab2.ex2", type("Admitting", (Scheduler,), {"admit": lambda self, step: None})),
        ("lab2.ex6", type("PremiumFirst", (Priority,), {"displaces": lambda self, new, running, now_s: ...})),
        *((id, lambda *args: ...) for id in IDS[2:5]),
    ],
)
def test_a_stub_is_not_attempted(id: str, stub: Any) -> None:
    assert examine(get(id), stub).status == "not-attempted"


@pytest.mark.parametrize("id", ["lab2.ex1", "lab2.ex2", "lab2.ex6"])
def test_every_request_of_every_case_is_served(id: str) -> None:
    """A request that can never fit is refused, and a case without it would put no rule to the test."""
    cases = [case for seed in range(3) for case in get(id).cases(seed)]
    assert get(id).cases(1) == get(id).cases(1) != get(id).cases(2)
    settings = [case[-1] for case in cases if isinstance(case[-1], dict)]
    for setting in settings:
        run = drive(setting, policy=Priority(displace=True))
        assert len(set(run["steps"]) - {" ", "."}) == len(setting["lengths"]) and not run["stopped"]


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ((lambda t, n, eos, ignore: ..., retiring(finished)), "is_complete: not attempted"),
        ((is_complete, retiring(lambda self: ...)), "Retiring: not attempted"),
    ],
)
def test_the_part_that_is_a_stub_is_named_and_not_counted_as_wrong(answers: Any, part: str) -> None:
    outcome = examine(get("lab2.ex1"), answers)
    assert outcome.status == "not-attempted" and part in dict(outcome.lines)["note"]


def test_a_run_is_told_in_words_and_whole() -> None:
    lines = dict(examine(get("lab2.ex2"), admitting(most=1)).lines)
    assert lines["gave"].startswith("slots by step: A. ") and "{" not in lines["gave"] and "..." not in lines["gave"]
    assert "A: prompt 4, answer 3" in lines["ran"]
    assert "stopped: " in dict(examine(get("lab2.ex2"), admitting(slots=False)).lines)["gave"]
    moved = dict(examine(get("lab2.ex6"), premium(latest)).lines)["gave"]
    assert "took the place of" in moved and "stopped" not in moved


def test_a_written_run_becomes_a_trace_and_is_written_again() -> None:
    run = "AB. AB. .BC .BC"
    trace = as_trace(run)
    assert written(trace, 3) == run
    assert trace.meta["clock"] == "simulated"  # as a virtual clock is called in every trace


def test_the_first_wrong_step_is_drawn() -> None:
    outcome = examine(get("lab2.ex2"), admitting(most=1))
    assert outcome.figure.startswith("<svg") and "Step 0 is the first in which" in outcome.figure
    assert examine(get("lab2.ex2"), admitting(slots=False)).lines  # a run that the engine stopped still speaks


@pytest.mark.parametrize(
    ("gpu", "weights", "token", "share", "fits"),
    [
        (80e9, 14e9, 160e3, 1.0, 201),
        (80 * 2**30, 14 * 2**30, 160 * 2**10, 1.0, 211),
        (80e9, 14e9, 160e3, 0.9, 177),
        (80e9, 14e9, 512 * 2**10, 1.0, 61),  # Llama-2-7B
        (80e9, 14e9, 128 * 2**10, 1.0, 245),  # Mistral-7B
    ],
)
def test_the_handouts_numbers(gpu: float, weights: float, token: float, share: float, fits: int) -> None:
    assert max_requests(gpu, weights, token, 2048, share) == fits
