"""Lab 3, PagedAttention: the block pool, the look-up, decode attention in torch and Triton, exercises 4 and 5."""

from __future__ import annotations

import json
import random
from typing import Any

from cbserve.core.errors import SchedulerError
from cbserve.course.exercise import Case, Exercise, call, is_written
from cbserve.course.exercises.attention_faults import named_fault
from cbserve.course.exercises.paging import (
    AttentionCase,
    agrees,
    as_value,
    block_by_block,
    gave,
    kernel_is_written,
    reference,
    runs_kernel,
    tensors,
    told,
)
from cbserve.course.exercises.pool_audit import first_fault, pool_picture
from cbserve.course.exercises.pools import (
    CountedPool,
    EnginePool,
    Op,
    run_engine,
    run_script,
    script_told,
)
from cbserve.course.exercises.slips import Slip, named_slip
from cbserve.course.values import close
from cbserve.kernels.jit import KernelError
from cbserve.serving import request_name

# ---- ex1: the block pool --------------------------------------------------------------------------------------------


def _pool_cases(seed: int) -> list[Case]:
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


def _run_pool(answer: Any, args: Case) -> Any:
    if not (isinstance(answer, type) and issubclass(answer, CountedPool)):
        raise SchedulerError("a subclass of CountedPool is wanted: keep the line `class MyPool(CountedPool):`")
    return run_engine(answer, args[1]) if args[0] == "engine" else run_script(answer, args[1], args[2])


def _num_blocks(args: Case) -> int:
    return int(args[1]["num_blocks"] if args[0] == "engine" else args[1])


def _sound_pool(value: Any, expected: Any) -> bool:
    """Which block ids are handed out is the learner's choice: the same calls, and an audit that finds no fault."""
    calls, wanted = (json.loads(run["log"]) for run in (value, expected))
    same = [[(call["call"], call.get("count")) for call in log] for log in (calls, wanted)]
    rest = [(run.get("steps"), run.get("stopped")) for run in (value, expected)]
    return first_fault(len(wanted[0]["ref_counts"]), calls)[1] == "" and same[0] == same[1] and rest[0] == rest[1]


def _diagnose_pool(args: Case, value: Any, expected: Any) -> str:
    rule = first_fault(_num_blocks(args), json.loads(value["log"]))[1]
    if not rule and value.get("stopped"):
        rule = f"the engine stopped: {value['stopped'][:160]}"
    return rule


def _words_pool(answer: Any, args: Case) -> str:
    if args[0] == "script":
        return script_told(args[1], args[2])
    setting = args[1]
    rows = zip(setting["prompts"], setting["lengths"], setting["samples"], strict=True)
    requests = ", ".join(
        f"{request_name(i)} {prompt}+{length}" + (f" x{samples}" if samples > 1 else "")
        for i, (prompt, length, samples) in enumerate(rows)
    )
    return f"the engine on your pool of {setting['num_blocks']} blocks of 4: {requests} on {setting['slots']} slots"


# ---- ex2: the look-up -----------------------------------------------------------------------------------------------


def slot_of(position: int, block_table: list[int], block_size: int) -> tuple[int, int]:
    """(block, place in the block) of a position (Kwon et al. 2023, section 4.3)."""
    return block_table[position // block_size], position % block_size


def _slot_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex2 {seed}")
    fixed: list[Case] = [(5, [7, 2, 9], 4), (0, [7, 2, 9], 4), (3, [7, 2, 9], 4), (4, [7, 2, 9], 4), (11, [7, 2, 9], 4)]
    drawn: list[Case] = []
    for _ in range(6):
        block_size, blocks = rng.choice((8, 16, 32)), rng.randint(2, 6)
        table = rng.sample(range(100, 1000), blocks)
        drawn.append((rng.randrange(block_size * blocks), table, block_size))
    return fixed + drawn


def _run_slot(answer: Any, args: Case) -> Any:
    value = call(answer, args)
    if value is not None and not (isinstance(value, list | tuple) and len(value) == 2):
        raise SchedulerError(f"a pair (block, place in the block) is wanted, and this is {value!r}")
    return value


_SLOT_SLIPS: list[Slip] = [
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


def _diagnose_slot(args: Case, value: Any, expected: Any) -> str:
    if rule := named_slip(_SLOT_SLIPS, args, tuple(value)):
        return rule
    if value[0] not in args[1]:
        return f"{value[0]} is no block of this sequence; the block is an entry of block_table"
    return "which entry of the table, and which place in that block: block_size positions share an entry"


# ---- ex3: decode attention in torch ---------------------------------------------------------------------------------


def _attention_case(rng: random.Random, heads: int, kv_heads: int, context: int, **more: Any) -> AttentionCase:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 16, "block_size": 4, "context": context}
    return {**sizes, "seed": rng.randrange(1, 10**6), **more}


def _decode_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex3 {seed}")
    cases = [
        _attention_case(rng, 2, 2, 8),
        _attention_case(rng, 2, 2, 10),
        _attention_case(rng, 4, 2, 11),
        _attention_case(rng, 1, 1, 1),
        *(
            _attention_case(rng, group * kv, kv, rng.randint(2, 40), block_size=rng.choice((4, 8)))
            for group, kv in ((3, 2), (2, 3), (4, 2))
        ),
        _attention_case(rng, 4, 2, 13, loud=True),
        _attention_case(rng, 4, 2, 10, poison=True),
    ]
    return [(case,) for case in cases]


def _diagnose_decode(args: Case, value: Any, expected: Any) -> str:
    (case,) = args
    if value["not finite"]:
        return _not_finite(case)
    if rule := named_fault(case, value, ("slot", "seen", "score", "head", "softmax", "values")):
        return rule
    return "for each head: softmax over the positions 0 .. context_len - 1 of q . k * scale, then the mean of V by it"


def _not_finite(case: AttentionCase) -> str:
    if case.get("poison"):
        return (
            "a slot without a token holds whatever was there before, NaN here, and 0 x NaN is NaN: its K and V must "
            "not enter the sums at all"
        )
    if case.get("loud"):
        return "exp of a large score is infinite: take the maximum off before exp, which changes no weight"
    return "there are numbers that are not finite: a row without a single seen position, or something never written"


# ---- ex4: the same block by block -----------------------------------------------------------------------------------


def _online_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex4 {seed}")
    size = {"block_size": 16}
    cases = [
        _attention_case(rng, 2, 2, 16, **size),
        _attention_case(rng, 2, 2, 48, **size),
        _attention_case(rng, 2, 2, 37, **size),
        _attention_case(rng, 4, 2, 37, **size),
        _attention_case(rng, 4, 1, rng.randint(17, 60), head_dim=32, **size),
        _attention_case(rng, 2, 2, 1, **size),
        _attention_case(rng, 4, 2, 40, loud=True, **size),
        _attention_case(rng, 4, 2, 20, poison=True, **size),
    ]
    return [(case,) for case in cases]


def _online_is_written(answer: Any) -> bool:
    if not isinstance(answer, tuple) or len(answer) != 2:
        return is_written(answer)
    return kernel_is_written(answer[0]) or is_written(answer[1])


def _run_online(answer: Any, args: Case) -> Any:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise KernelError('two answers are wanted, one of them written: check("lab3.ex4", decode_kernel, absorb)')
    return as_value(block_by_block(*answer)(*tensors(args[0])), args[0])


def _words_online(answer: Any, args: Case) -> str:
    name = "decode_kernel" if isinstance(answer, tuple) and runs_kernel(*answer) else "absorb"
    return f"your {name}, {told(args[0])}"


def _diagnose_online(args: Case, value: Any, expected: Any) -> str:
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
        return _not_finite(case)
    if rule := named_fault(case, value, ("slot", "seen", "score", "head", "values"), online=True):
        return rule
    if rule := named_fault(case, value, ("softmax",)):
        return rule
    return "per block: scores, mask, the new maximum, rescale total and values, add this block's; at the end divide"


# ---- ex5: exercise 4 of the handout ---------------------------------------------------------------------------------

GB, KB, KIB = 10**9, 10**3, 2**10


def preemption_cost(
    num_tokens: int, kv_bytes_per_token: float, link_bytes_per_s: float, prefill_tokens_per_s: float
) -> dict[str, float]:
    """What it costs to swap a request out and in again, and what to compute its tokens anew; times in milliseconds."""
    num_bytes = num_tokens * kv_bytes_per_token
    out_ms = 1000 * num_bytes / link_bytes_per_s
    recompute_ms = 1000 * num_tokens / prefill_tokens_per_s
    return {"bytes": num_bytes, "out_ms": out_ms, "round_trip_ms": 2 * out_ms, "recompute_ms": recompute_ms}


def _cost_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex5 {seed}")
    fixed: list[Case] = [(4096, 160 * KB, 32 * GB, 10_000), (4096, 512 * KIB, 32 * GB, 16_000)]
    drawn: list[Case] = [
        (
            rng.randint(100, 9000),
            rng.choice((56, 128, 320, 800)) * KIB,
            rng.choice((5, 12.5, 26, 64)) * GB,
            rng.choice((2_500, 15_800, 45_500)),
        )
        for _ in range(5)
    ]
    return fixed + drawn


_COST_SLIPS: dict[str, list[Slip]] = {
    "bytes": [
        (lambda n, k, link, rate: k, "every cached token has its K and V: multiply by the number of tokens"),
        (lambda n, k, link, rate: 2 * n * k, "kv_bytes_per_token holds K and V already: no further factor of 2"),
        (lambda n, k, link, rate: n * k * 1024, "the arguments are bytes already: convert units where you call it"),
        (lambda n, k, link, rate: n * k * 1000, "the arguments are bytes already: convert units where you call it"),
        (lambda n, k, link, rate: n * k / 1e6, "bytes are asked, not megabytes"),
        (lambda n, k, link, rate: n * k / 2**20, "bytes are asked, not MiB"),
    ],
    "out_ms": [
        (lambda n, k, link, rate: n * k / link, "these are seconds: milliseconds are asked"),
        (lambda n, k, link, rate: 2000 * n * k / link, "out is one way; the round trip is the one that counts twice"),
        (lambda n, k, link, rate: 8000 * n * k / link, "the link is given in bytes a second: there are no bits here"),
        (lambda n, k, link, rate: 500 * n * k / link, "the link's rate holds in one direction: do not double it"),
        (lambda n, k, link, rate: link / (n * k), "the fraction stands on its head: bytes over bytes a second"),
        (lambda n, k, link, rate: 1000 * link / (n * k), "the fraction stands on its head: bytes over bytes a second"),
    ],
    "round_trip_ms": [
        (lambda n, k, link, rate: 1000 * n * k / link, "what went out must come in again before it can go on: twice"),
        (lambda n, k, link, rate: 2 * n * k / link, "these are seconds: milliseconds are asked"),
        (
            lambda n, k, link, rate: 1000 * n * k / link + 1000 * n / rate,
            "what is swapped in is not computed again: the round trip is two transfers",
        ),
        (lambda n, k, link, rate: 4000 * n * k / link, "the round trip is out and in: twice, not four times"),
    ],
    "recompute_ms": [
        (lambda n, k, link, rate: n / rate, "these are seconds: milliseconds are asked"),
        (lambda n, k, link, rate: rate / n, "the fraction stands on its head: tokens over tokens a second"),
        (lambda n, k, link, rate: 1000 * rate / n, "the fraction stands on its head: tokens over tokens a second"),
        (
            lambda n, k, link, rate: 2000 * n / rate,
            "computing the tokens once is enough: there is no way back to pay for",
        ),
        (
            lambda n, k, link, rate: 1000 * n * k / rate,
            "prefill computes tokens, not bytes: tokens over tokens a second",
        ),
    ],
}
_COST_RULES = {
    "bytes": "cached tokens times bytes a token",
    "out_ms": "bytes over bytes a second, in milliseconds",
    "round_trip_ms": "out and in again",
    "recompute_ms": "one prefill of all cached tokens, in milliseconds",
}


def _diagnose_cost(args: Case, value: Any, expected: Any) -> str:
    for key, rule in _COST_RULES.items():
        if not close(value[key], expected[key]):
            return f"{key!r}: {named_slip(_COST_SLIPS[key], args, value[key]) or rule}"
    return ""


# ---- ex6: exercise 5 of the handout ---------------------------------------------------------------------------------


def gains(prefill_share: float, hit_rate: float, memory: int, context: int, shared: int) -> dict[str, float]:
    """How much a prefix cache gains on one GPU: in compute (Amdahl's law) and in the size of the batch.

    memory, context, shared: tokens of KV that fit, that a request has, that all requests have in common.
    """
    own = context - shared
    batch = ((memory - shared) / own) / (memory / context)
    return {"compute": 1 / (1 - prefill_share * hit_rate), "batch": batch}


def scale_out(replicas: int, prefill_share: float, hit_one: float, hit_many: float) -> dict[str, Any]:
    """Throughput of `replicas` GPUs over that of one, whose hit rate is `hit_one`."""
    times = replicas * (1 - prefill_share * hit_one) / (1 - prefill_share * hit_many)
    return {"times": times, "super_linear": times > replicas}


def _scaling_cases(seed: int) -> list[Case]:
    rng = random.Random(f"lab3.ex6 {seed}")
    cases: list[Case] = [
        ("gains", 0.6, 0.5, 10_000, 2_000, 1_000),
        ("gains", 0.8, 0.9, 100_000, 1_200, 1_000),
        ("gains", 0.3, 0.0, 50_000, 500, 0),
        ("scale_out", 4, 0.5, 0.25, 0.75),
        ("scale_out", 4, 0.5, 0.5, 0.5),
        ("scale_out", 8, 0.75, 0.5, 0.25),
        ("scale_out", 2, 0.0, 0.25, 0.75),
    ]
    for _ in range(3):
        shared = rng.randint(100, 900)
        f, h = (round(rng.uniform(0.2, 0.9), 2) for _ in range(2))
        cases.append(("gains", f, h, rng.randint(20_000, 400_000), shared + rng.randint(50, 2000), shared))
        low, high = sorted(round(rng.uniform(0.05, 0.95), 2) for _ in range(2))
        high = high if high > low else high + 0.02
        hits = (low, high) if rng.random() < 0.6 else (high, low)
        cases.append(("scale_out", rng.randint(2, 16), f, *hits))
    return cases


def _run_scaling(answer: Any, args: Case) -> Any:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise SchedulerError('two answers are wanted: check("lab3.ex6", gains, scale_out)')
    return answer[args[0] == "scale_out"](*args[1:])


_COMPUTE_SLIPS: list[Slip] = [
    (
        lambda f, h, M, c, s: 1 / (1 - h),
        "a hit saves prefill alone: only the share of time that prefill takes can shrink (Amdahl's law)",
    ),
    (lambda f, h, M, c, s: 1 / (1 - f), "this is the bound, with every token a hit; the hit rate is missing"),
    (lambda f, h, M, c, s: 1 - f * h, "this is the time that is left: the gain is its inverse"),
    (lambda f, h, M, c, s: f * h, "this is the share of time that is saved: the gain is 1 over what is left"),
    (lambda f, h, M, c, s: 1 / (f * h), "divide by the time that is left, 1 - f h, not by the time that is saved"),
    (lambda f, h, M, c, s: 1 + f * h, "time saved is no throughput won: the gain is 1 over the time that is left"),
    (
        lambda f, h, M, c, s: 1 / (f * (1 - h)),
        "decode takes its time as before: 1 - f stays beside what is left of prefill",
    ),
]
_BATCH_SLIPS: list[Slip] = [
    (lambda f, h, M, c, s: (M - s) / (c - s), "this is the new batch; the gain is the new batch over the old, M / c"),
    (lambda f, h, M, c, s: M / c, "this is the batch without sharing; the gain is the new batch over it"),
    (
        lambda f, h, M, c, s: c / (c - s),
        "this is the bound: the shared tokens take memory too, once: (M - s) / (c - s)",
    ),
    (lambda f, h, M, c, s: M / (c - s), "the shared tokens take memory too, once; and the gain is over M / c"),
    (
        lambda f, h, M, c, s: ((M - s) / c) / (M / c),
        "each request stores only its own tokens, c - s; the shared ones are there already",
    ),
    (
        lambda f, h, M, c, s: (M / c) / ((M - s) / (c - s)),
        "the fraction stands on its head: the batch with sharing over the batch without",
    ),
    (
        lambda f, h, M, c, s: ((M - s) // (c - s)) / (M // c),
        "leave the batches unrounded here: the bound is a limit for large memory",
    ),
]
_TIMES_SLIPS: list[Slip] = [
    (lambda n, f, a, b: n, "each replica's hit rate changes with n; n times is what comes out if it does not"),
    (
        lambda n, f, a, b: n / (1 - f * b),
        "one replica has a cache too: compare with its throughput, at hit_one",
    ),
    (
        lambda n, f, a, b: n * (1 - f * b) / (1 - f * a),
        "upside down: a higher hit rate means less time, and more throughput",
    ),
    (lambda n, f, a, b: (1 - f * a) / (1 - f * b), "this is the gain of each replica; there are n of them"),
    (lambda n, f, a, b: n * (1 - a) / (1 - b), "a hit saves prefill alone: the share of prefill is missing"),
    (lambda n, f, a, b: n * b / a, "throughput is not in proportion to the hit rate: a hit saves prefill alone"),
]


def _diagnose_scaling(args: Case, value: Any, expected: Any) -> str:
    numbers = args[1:]
    if args[0] == "gains":
        if not close(value["compute"], expected["compute"]):
            return named_slip(_COMPUTE_SLIPS, numbers, value["compute"]) or "'compute': 1 over the share of time left"
        return named_slip(_BATCH_SLIPS, numbers, value["batch"]) or "'batch': the batch with sharing over M / c"
    if not close(value["times"], expected["times"]):
        return named_slip(_TIMES_SLIPS, numbers, value["times"]) or "'times': n, times each replica's own gain"
    replicas, _, one, many = numbers
    if one == many or numbers[1] == 0:
        return "exactly n times is linear: super-linear is more than n times the throughput of one"
    if many < one:
        return "more replicas are faster, but by less than their number: super-linear means more than n times"
    return "the hit rate rises with the pooled cache, so each replica is faster than one alone: that is super-linear"


EXERCISES = (
    Exercise(
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
            "allocate: compare count with len(self.free_blocks), raise or pop count ids and set their counts to 1. "
            "share: count + 1. free: a count of 0 raises; else count - 1, and append when it has become 0.",
        ),
        cases=_pool_cases,
        reference=lambda *args: _run_pool(EnginePool, args),
        diagnose=_diagnose_pool,
        compare=_sound_pool,
        run=_run_pool,
        words=_words_pool,
        gave=lambda value: value["last call"],
        figure=lambda args, value, expected: pool_picture(_num_blocks(args), json.loads(value["log"])),
    ),
    Exercise(
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
        cases=_slot_cases,
        reference=slot_of,
        diagnose=_diagnose_slot,
        run=_run_slot,
    ),
    Exercise(
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
        cases=_decode_cases,
        reference=reference,
        diagnose=_diagnose_decode,
        compare=agrees,
        run=lambda answer, args: as_value(answer(*tensors(args[0])), args[0]),
        words=lambda answer, args: f"your paged_decode, {told(args[0])}",
        gave=gave,
    ),
    Exercise(
        id="lab3.ex4",
        title="The same block by block: an online softmax",
        difficulty=5,
        importance=4,
        minutes=30,
        points=5,
        hints=(
            "You see one block at a time, and the maximum so far may be too small. What do the sums that you have "
            "already become when a larger one arrives? For the kernel write down first which element of the flat "
            "cache [block, place, kv_head, column] is.",
            "Keep three things for each head: the best score so far, the total of the exponentials, and the weighted "
            "sum of V. Before a block is added, total and values shrink by exp(old best - new best). In the kernel a "
            "token's row is (block * BLOCK_SIZE + place) * KV_HEADS + kv_head, and each row has HEAD_DIM elements.",
            "In this order: scores, with -inf beyond the context; the new best, the larger of the old and this "
            "block's; shrink both sums; weights = exp(scores - new best); add their sum to total, and weights times V "
            "to values. In the kernel row[:, None] * HEAD_DIM + column[None, :] points to a tile of rows, and "
            "seen[:, None] masks it in both loads.",
        ),
        cases=_online_cases,
        reference=reference,
        diagnose=_diagnose_online,
        compare=agrees,
        run=_run_online,
        written=_online_is_written,
        words=_words_online,
        gave=gave,
    ),
    Exercise(
        id="lab3.ex5",
        title="Exercise 4 of the handout: what a preemption moves",
        difficulty=2,
        importance=4,
        minutes=10,
        points=3,
        hints=(
            "What has to cross the link, in bytes? And what has to be computed if nothing crosses it?",
            "Every cached token crosses once on the way out and once on the way in. Recomputing is one prefill of the "
            "same tokens.",
            "An amount over a rate a second gives seconds, for bytes over the link as for tokens over the prefill; a "
            "second has 1,000 ms. K and V are both in kv_bytes_per_token already.",
        ),
        cases=_cost_cases,
        reference=preemption_cost,
        diagnose=_diagnose_cost,
    ),
    Exercise(
        id="lab3.ex6",
        title="Exercise 5 of the handout: when is scaling super-linear?",
        difficulty=3,
        importance=4,
        minutes=15,
        points=3,
        hints=(
            "A hit saves prefill and nothing else. What part of the time can it save at most?",
            "Time that is left: 1 - f h. Tokens that a request stores by itself: c - s, beside s once for all. For n "
            "replicas compare n times the throughput at the new hit rate with one at its own.",
            "compute is 1 over the time that is left. batch is the number of requests with sharing over the number "
            "without. times: write one replica's speed as 1 over its time left, once with hit_many and once with "
            "hit_one; then n of the first over one of the second.",
        ),
        cases=_scaling_cases,
        reference=lambda kind, *args: (gains if kind == "gains" else scale_out)(*args),
        diagnose=_diagnose_scaling,
        run=_run_scaling,
        words=lambda answer, args: f"{args[0]}({', '.join(map(str, args[1:]))})",
    ),
)
