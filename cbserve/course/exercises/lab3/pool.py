"""Exercise 1 of lab 3: the block pool: allocate, free, share."""

from __future__ import annotations

import json
import random
from typing import Any

from cbserve.course.exercise import BrokenRuleError, Case, Exercise
from cbserve.course.exercises.pool_audit import first_fault, pool_picture
from cbserve.course.exercises.pools import CountedPool, EnginePool, Op, run_engine, run_script, script_told
from cbserve.course.values import described
from cbserve.serving import request_name


def _cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex1 {seed}")
    scripts: list[list[Op]] = [
        [("allocate", "A", 3), ("free", "A"), ("allocate", "B", 6)],
        [("allocate", "A", 4), ("allocate too many", 3), ("allocate", "B", 2), ("allocate too many", 1)],
        [("allocate", "A", 2), ("share", "A", "B"), ("free", "A"), ("free", "B"), ("allocate", "C", 6)],
        [("allocate", "A", 2), ("free", "A"), ("free again", "A")],
        [("allocate", "A", 2), ("free", "A"), ("share free", "A")],
    ]
    engine = [_engine_setting(rng) for _ in range(4)]
    return [
        *(("script", 6, ops) for ops in scripts),
        *(("script", 10, _random_script(rng, 10)) for _ in range(3)),
        *(("engine", setting) for setting in engine),
    ]


def _random_script(rng: random.Random, num_blocks: int) -> list[Op]:
    """Twenty calls that are in order, with an allocation too large here and there."""
    ops: list[Op] = []
    tables: dict[str, int] = {}  # holder -> how many blocks
    shared: dict[str, str] = {}  # holder -> whose blocks it has
    free = num_blocks
    for number in range(20):
        name, kind = request_name(number), rng.random()
        if kind < 0.4 and free:
            tables[name] = rng.randint(1, min(3, free))
            shared[name] = name
            free -= tables[name]
            ops.append(("allocate", name, tables[name]))
        elif kind < 0.6 and tables:
            parent = rng.choice(sorted(tables))
            tables[name], shared[name] = tables[parent], shared[parent]
            ops.append(("share", parent, name))
        elif kind < 0.7:
            ops.append(("allocate too many", free + rng.randint(1, 3)))
        elif tables:
            gone = rng.choice(sorted(tables))
            count, root = tables.pop(gone), shared.pop(gone)
            free += count * (root not in shared.values())
            ops.append(("free", gone))
    return ops or [("allocate", "A", 1)]


def _engine_setting(rng: random.Random) -> dict[str, Any]:
    """Prompts that end in the middle of a block, several samples of some, and a pool that runs out."""
    samples = [1, 2, 3, 1, rng.randint(1, 3)]
    rng.shuffle(samples)
    lengths = [rng.randint(2, 9) for _ in samples]
    prompts = [rng.randint(1, 10) for _ in samples]
    most = max(n * -(-(p + t) // 4) for n, p, t in zip(samples, prompts, lengths, strict=True))
    return {
        "lengths": lengths,
        "prompts": prompts,
        "samples": samples,
        "num_blocks": most + rng.randint(0, 3),
        "slots": rng.randint(3, 5),
    }


def _run(answer: Any, args: Case) -> Any:
    if not (isinstance(answer, type) and issubclass(answer, CountedPool)):
        line = "keep the line `class MyPool(CountedPool):`"
        raise BrokenRuleError(f"a subclass of CountedPool is wanted, and this is {described(answer)}: {line}")
    return run_engine(answer, args[1]) if args[0] == "engine" else run_script(answer, args[1], args[2])


def _num_blocks(args: Case) -> int:
    return int(args[1]["num_blocks"] if args[0] == "engine" else args[1])


def _sound_pool(value: Any, expected: Any) -> bool:
    """Which block ids are handed out is the learner's choice: the same calls, and an audit that finds no fault."""
    calls, wanted = (json.loads(run["log"]) for run in (value, expected))
    same = [[(call["call"], call.get("count")) for call in log] for log in (calls, wanted)]
    rest = [(run.get("steps"), run.get("stopped")) for run in (value, expected)]
    return first_fault(len(wanted[0]["ref_counts"]), calls)[1] == "" and same[0] == same[1] and rest[0] == rest[1]


def _diagnose(args: Case, value: Any, expected: Any) -> str:
    rule = first_fault(_num_blocks(args), json.loads(value["log"]))[1]
    if not rule and value.get("stopped"):
        rule = f"the engine stopped: {value['stopped'][:160]}"
    return rule


def _words(answer: Any, args: Case) -> str:
    if args[0] == "script":
        return script_told(args[1], args[2])
    setting = args[1]
    rows = zip(setting["prompts"], setting["lengths"], setting["samples"], strict=True)
    requests = ", ".join(
        f"{request_name(i)} {prompt}+{length}" + (f" x{samples}" if samples > 1 else "")
        for i, (prompt, length, samples) in enumerate(rows)
    )
    return f"the engine on your pool of {setting['num_blocks']} blocks of 4: {requests} on {setting['slots']} slots"


EXERCISE = Exercise(
    id="lab3.ex1",
    title="The block pool: allocate, free, share",
    difficulty=3,
    importance=5,
    minutes=20,
    points=5,
    hints=(
        "Two lists hold the whole truth: which blocks are free, and how many tables hold each block. What must be "
        "true of both after every call?",
        "A block is in free_blocks exactly when its count is 0. allocate looks whether there are enough before it "
        "takes the first. free takes one holder away, and only the last one makes the block free.",
        "allocate: compare count with len(self.free_blocks), raise or pop count ids and set their counts to 1. share: "
        "count + 1. free: a count of 0 raises; else count - 1, and append when it has become 0.",
    ),
    cases=_cases,
    reference=lambda *args: _run(EnginePool, args),
    diagnose=_diagnose,
    compare=_sound_pool,
    run=_run,
    words=_words,
    gave=lambda value: value["last call"],
    figure=lambda args, value, expected: pool_picture(_num_blocks(args), json.loads(value["log"])),
)
