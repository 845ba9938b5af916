"""Hand a learner's duty or policy to the real engine, and tell in plain values who ran in which step.

A run is written as one word for each step, one character for each slot: "AB. AB. .BC" is three steps on three slots.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from cbserve.clock import VirtualClock
from cbserve.core.batching import ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.errors import SchedulerError
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.policies import FCFS, Policy
from cbserve.core.request import Request, SamplingParams, Sequence
from cbserve.core.scheduler import Scheduler
from cbserve.core.stopping import StopChecker
from cbserve.core.trace import Admitted, Arrived, Finished, Left, Preempted, StepEvent, StepRow, Trace
from cbserve.course.exercise import BrokenRuleError
from cbserve.course.values import described, shown
from cbserve.engine import Engine
from cbserve.executors.scripted import EOS, ScriptedExecutor
from cbserve.recorder import quiet
from cbserve.serving import request_name
from cbserve.viz import timeline

EMPTY = "."
BLOCK_SIZE = 4
#: How often one thing may be asked of the scheduler or its queue in a step; the engine itself asks some 100 times.
PATIENCE = 10_000
NO_END = "did not come back"

#: What to serve: `lengths` (an EOS ends the answer), and where wanted `max_tokens`, `ignore_eos`, `prompts`, `arrivals`
#: and `priorities`, one each; `slots`, `budget` (tokens a step), `num_blocks` of 4 tokens, `prefix_caching`, `eos`, the
#: ids that end an answer. Token number n of an answer has the id n, and the last of its length the id 0. Prompts begin
#: alike. A step takes one second.
Setting = dict[str, Any]


def drive(setting: Setting, scheduler: type[Scheduler] = Scheduler, policy: Policy | None = None) -> dict[str, str]:
    """{"steps": who ran, "gave_way": "D>B@4" for each displacement, "stopped": why the engine refused to go on}."""
    lengths = setting["lengths"]
    names = [request_name(i) for i in range(len(lengths))]
    batching = ContinuousBatching(max_num_seqs=setting["slots"], max_num_batched_tokens=setting.get("budget") or 2048)
    pool = BlockPool(setting.get("num_blocks") or 1000, BLOCK_SIZE)
    asked: Counter[str] = Counter()
    policy = FCFS() if policy is None else policy
    policy.__class__ = _watched(type(policy), asked)
    kv = KVCacheManager(pool, enable_prefix_caching=setting.get("prefix_caching", False))
    engine = Engine(
        _watched(scheduler, asked)(kv, batching, policy, StopChecker(setting.get("eos", [EOS]))),
        ScriptedExecutor(dict(zip(names, lengths, strict=True))),
        VirtualClock(),
    )
    requests = zip(names, _each(setting, "prompts", 4), _most(setting), strict=True)
    times, urgency = _each(setting, "arrivals", 0), _each(setting, "priorities", 0)
    ignores = _each(setting, "ignore_eos", False)
    stopped = ""
    try:
        with quiet():
            for (name, prompt, most), time_s, priority, ignore in zip(requests, times, urgency, ignores, strict=True):
                params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=ignore)
                engine.add_request(Request(name, range(1, 1 + prompt), params, float(time_s), priority))
            for _ in range(20 * sum(lengths) + 200):
                if not engine.has_unfinished:
                    break
                asked.clear()
                engine.step(partial=False)
            else:
                stopped = "it did not come to an end"
            if not stopped and (left := engine.scheduler.running):
                stopped = f"{left[0].request.request_id} is complete and keeps its slot"
    except SchedulerError as error:
        stopped = str(error)
    trace = engine.trace
    return {"steps": written(trace, setting["slots"]), "gave_way": _displacements(trace), "stopped": stopped}


def _watched(kind: type, asked: Counter[str]) -> Any:
    """A subclass of `kind` that ends a loop without end: its attributes are asked for over and over in one step."""

    class Watched(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            asked[name] += 1
            if asked[name] > PATIENCE:
                what = "peek()" if asked["peek"] > PATIENCE / 10 else "the scheduler"
                raise SchedulerError(f"a duty {NO_END}: it asked {what} thousands of times in one step")
            return super().__getattribute__(name)

    return Watched


def a_class(answer: Any, name: str, between: type) -> Any:
    """A subclass of the answer in which `between` comes before the engine's class that both derive from: what `super()`
    finds in the answer is what `between` lets it find.

    Raises BrokenRuleError for an answer that is no such class.
    """
    base = between.__base__ or object
    line = f"keep the line `class {name}({base.__name__}):`"
    if not (isinstance(answer, type) and issubclass(answer, base)):
        raise BrokenRuleError(f"a subclass of {base.__name__} is wanted, and this is {described(answer)}: {line}")
    if answer.__module__.split(".")[0] == "cbserve":
        raise BrokenRuleError(f"this is the engine's own class: {line}")
    return type(name, (answer, between), {})


def answers_for_you(method: str) -> BrokenRuleError:
    """What a method raises that an answer must do without."""
    return BrokenRuleError(f"`{method}` would answer for you: this exercise is that rule, so write it out")


def sequences(duty: str, given: Any) -> Iterator[Sequence]:
    """What a duty named, one by one as it names them. Raises BrokenRuleError for anything but sequences."""
    if not isinstance(given, Iterable) or isinstance(given, str | dict):
        raise BrokenRuleError(f"{duty} returns a list of sequences, or yields them, and this is {described(given)}")
    for seq in given:
        if not isinstance(seq, Sequence):
            raise BrokenRuleError(f"{duty} names sequences, and this is {described(seq)}")
        yield seq


def written(trace: Trace, slots: int) -> str:
    """One word a step, one character a slot."""
    names = {event.seq_id: event.request_id for event in trace.of(Admitted)}
    words = []
    for step in trace.steps:
        word = [EMPTY] * slots
        for row in step.rows:
            word[row.slot] = names[row.seq_id]
        words.append("".join(word))
    return " ".join(words)


def random_setting(rng: random.Random, tight: bool, short_steps: bool) -> Setting:
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


def told(setting: Setting) -> str:
    """The setting in one line: "2 slots; A: prompt 4, answer 3; B: prompt 4, answer 6"."""
    lengths, prompts = setting["lengths"], _each(setting, "prompts", 4)
    caps, times = _each(setting, "max_tokens", None), _each(setting, "arrivals", 0)
    urgency, ignores = _each(setting, "priorities", None), _each(setting, "ignore_eos", False)
    parts = [f"{setting['slots']} slots"]
    if setting.get("num_blocks"):
        parts.append(f"{setting['num_blocks']} blocks of {BLOCK_SIZE} tokens")
    if setting.get("budget"):
        parts.append(f"{setting['budget']} tokens a step")
    if setting.get("prefix_caching"):
        parts.append("prompts begin alike, known prefixes are cached")
    if setting.get("eos"):
        parts.append(f"EOS is one of {setting['eos']}, token n has the id n")
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        more = f", max_tokens {caps[i]}" if setting.get("max_tokens") else ""
        more += ", EOS ignored" if ignores[i] else ""
        more += f", priority {urgency[i]}" if urgency[i] is not None else ""
        more += f", arrives at {times[i]}" if times[i] else ""
        parts.append(f"{request_name(i)}: prompt {prompt}, answer {length}{more}")
    return "; ".join(parts)


def gave(value: Any) -> str:
    """What came of a run in one line: "slots by step: AB AB AB C."; any other value as it is shown everywhere."""
    if not (isinstance(value, dict) and "steps" in value):
        return shown(value)
    words, parts = value["steps"].split(), []
    if words:
        cut = f" ... ({len(words)} steps)" if len(words) > 40 else ""
        parts.append(f"slots by step: {' '.join(words[:40])}{cut}")
    for pair in value["gave_way"].split()[:8]:
        names, step = pair.split("@")
        candidate, victim = names.split(">")
        parts.append(f"step {step}: {candidate} took the place of {victim}")
    if value["stopped"]:
        parts.append(f"stopped: {value['stopped']}")
    return "; ".join(parts) or "nobody ran"


def first_wrong_step(value: dict[str, str], expected: dict[str, str]) -> tuple[int, str, str]:
    """(step, your word, the engine's word); a word is "" where a run has ended."""
    yours, engines = value["steps"].split(), expected["steps"].split()
    for step in range(max(len(yours), len(engines))):
        mine, theirs = (words[step] if step < len(words) else "" for words in (yours, engines))
        if mine != theirs:
            return step, mine, theirs
    return len(engines), "", ""


def picture(args: tuple[Any, ...], value: Any, expected: Any) -> str:
    """SVG of both runs around the first step in which they differ; "" where there is none to draw."""
    if not isinstance(value, dict) or not value["steps"]:
        return ""
    step, mine, theirs = first_wrong_step(value, expected)
    if mine == theirs:
        return ""
    traces = [as_trace(run["steps"]) for run in (value, expected)]
    title = f"Step {step} is the first in which your run differs from the engine's own"
    first = max(0, step - 6)
    return timeline(
        *traces, title=title, labels=["yours", "the engine's own"], first_step=first, last_step=step + 8
    ).svg


def as_trace(steps: str) -> Trace:
    """The inverse of `written`: a trace with what the written run knows, for the timeline."""
    words = steps.split()
    trace = Trace(
        {"num_slots": len(words[0]), "batching": "ContinuousBatching()", "policy": "FCFS", "clock": "simulated"}
    )
    letters = sorted(set(steps) - {" ", EMPTY})
    ids = {letter: i for i, letter in enumerate(letters)}
    for letter in letters:
        trace.emit(Arrived(0.0, letter, 4, None))
    running: dict[str, int] = {}  # letter -> slot
    given = dict.fromkeys(letters, 0)
    for step, word in enumerate([*words, EMPTY * len(words[0])]):
        here = {letter: slot for slot, letter in enumerate(word) if letter != EMPTY}
        for letter, slot in list(running.items()):
            if here.get(letter) != slot:
                trace.emit(Finished(float(step), step - 1, letter, ids[letter], "stop", None, given[letter]))
                trace.emit(Left(float(step), step - 1, letter, ids[letter], slot))
                del running[letter]
        for letter, slot in here.items():
            if letter not in running:
                trace.emit(Admitted(float(step), step, letter, ids[letter], slot, given[letter] > 0))
            running[letter] = slot
            given[letter] += 1
        if step < len(words):
            rows = tuple(
                StepRow(ids[letter], slot, "prefill" if given[letter] == 1 else "decode", 1, 1, given[letter])
                for letter, slot in here.items()
            )
            trace.emit(StepEvent(step, float(step), float(step + 1), rows, 0, len(rows), 0))
    return trace


def _displacements(trace: Trace) -> str:
    """ "D>B@4" for each: D took the place of B in step 4."""
    found = [event for event in trace.of(Preempted) if event.cause == "displaced"]
    return " ".join(f"{event.reason.split()[0]}>{event.request_id}@{event.step}" for event in found)


def _most(setting: Setting) -> list[int]:
    """max_tokens of each request: in a small pool its length, since a request that can never fit is refused."""
    return setting.get("max_tokens") or (setting["lengths"] if setting.get("num_blocks") else _each(setting, "", 99))


def _each(setting: Setting, name: str, default: Any) -> list[Any]:
    return setting.get(name) or [default] * len(setting["lengths"])
