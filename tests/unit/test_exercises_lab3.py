"""Lab 3: the engine's own ways pass, and each slip hears the rule that it breaks. The Triton form of exercise 4 has its
tests among those of the interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cbserve.core.errors import ConservationError, NoFreeBlocksError
from cbserve.core.request import SamplingParams
from cbserve.course.checking import examine
from cbserve.course.exercises import get, ids_of, paging
from cbserve.course.exercises.lab3.lookup import slot_of
from cbserve.course.exercises.lab3.preemption import preemption_cost
from cbserve.course.exercises.lab3.scaling import gains, scale_out
from cbserve.course.exercises.paging import as_attention
from cbserve.course.exercises.pools import CountedPool, EnginePool, run_engine
from cbserve.kernels.jit import Kernel
from cbserve.llm import LLM

IDS = [f"lab3.ex{n}" for n in range(1, 7)]


# ---- ex1 ------------------------------------------------------------------------------------------------------------


def pool(**methods: Callable[..., Any]) -> type[CountedPool]:
    return type("MyPool", (EnginePool,), methods)


def allocate_any(self, count=1):
    blocks = [self.free_blocks.pop() for _ in range(min(count, len(self.free_blocks)))]
    for block in blocks:
        self.ref_counts[block] = 1
    return blocks


def allocate_then_look(self, count=1):
    blocks = []
    for _ in range(count):
        if not self.free_blocks:
            raise NoFreeBlocksError("none left")
        blocks.append(self.free_blocks.pop())
        self.ref_counts[blocks[-1]] = 1
    return blocks


def allocate_too_careful(self, count=1):
    if count >= len(self.free_blocks):
        raise NoFreeBlocksError("too few")
    return EnginePool.allocate(self, count)


def allocate_no_count(self, count=1):
    if count > len(self.free_blocks):
        raise NoFreeBlocksError("too few")
    return [self.free_blocks.pop() for _ in range(count)]


def allocate_keeps_listed(self, count=1):
    if count > len(self.free_blocks):
        raise NoFreeBlocksError("too few")
    blocks = self.free_blocks[:count]
    for block in blocks:
        self.ref_counts[block] = 1
    return blocks


def allocate_adds(self, count=1):
    blocks = EnginePool.allocate(self, count)
    for block in blocks:
        self.ref_counts[block] += 1
    return blocks


def free_at_once(self, block_ids):
    for block in block_ids:
        if not self.ref_counts[block]:
            raise ConservationError("twice")
        self.ref_counts[block] -= 1
        self.free_blocks.append(block)


def free_forgets_holders(self, block_ids):
    for block in block_ids:
        if not self.ref_counts[block]:
            raise ConservationError("twice")
        self.ref_counts[block] = 0
        self.free_blocks.append(block)


def free_never_lists(self, block_ids):
    for block in block_ids:
        if not self.ref_counts[block]:
            raise ConservationError("twice")
        self.ref_counts[block] -= 1


def free_never_refuses(self, block_ids):
    for block in block_ids:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] <= 0:
            self.ref_counts[block] = 0
            self.free_blocks.append(block)


def free_ignores_unheld(self, block_ids):
    EnginePool.free(self, [block for block in block_ids if self.ref_counts[block]])


def free_twice_through(self, block_ids):
    if any(not self.ref_counts[block] for block in block_ids):  # uses an iterator up
        raise ConservationError("twice")
    EnginePool.free(self, block_ids)


def free_keeps_count(self, block_ids):
    for block in block_ids:
        self.free_blocks.append(block)


def share_unlisted(self, block_ids):
    for block in block_ids:
        self.ref_counts[block] += 1


POOL = [
    (pool(allocate=allocate_any), "with too few free blocks must raise NoFreeBlocksError"),
    (pool(allocate=allocate_then_look), "allocate that raises must change nothing"),
    (pool(allocate=lambda self, count=1: [self.free_blocks.pop() for _ in range(count)]), "a block that is handed out"),
    (pool(allocate=allocate_too_careful), "that is enough"),
    (pool(allocate=allocate_no_count), "a block that is handed out has one holder"),
    (pool(allocate=allocate_keeps_listed), "was handed out and is still in the free list"),
    (pool(allocate=allocate_adds), "a block that is handed out has one holder"),
    (pool(allocate=lambda self, count=1: EnginePool.allocate(self, 1)), "returned 1 blocks"),
    (pool(free=free_at_once), "free of a shared block"),
    (pool(free=free_forgets_holders), "free of a shared block"),
    (pool(free=free_never_lists), "leak: nobody holds"),
    (pool(free=lambda self, block_ids: list(block_ids)), "leak: nobody holds"),
    (pool(free=free_twice_through), "an iterator shows its blocks to one loop"),
    (pool(free=free_never_refuses), "double free: free of a block that nobody holds must raise"),
    (pool(free=free_ignores_unheld), "double free: free of a block that nobody holds must raise"),
    (pool(free=free_keeps_count), "free takes one holder"),
    (pool(share=share_unlisted), "share of a block that nobody holds must raise"),
    (pool(share=lambda self, block_ids: list(block_ids)), "share adds one holder"),
    (pool(share=lambda self, block_ids: CountedPool.share(self, block_ids)), "CountedPool has no `share`"),
    (type("MyPool", (CountedPool,), {"allocate": EnginePool.allocate}), "CountedPool has no `free`"),
]


# ---- ex2, ex3 -------------------------------------------------------------------------------------------------------

SLOT = [
    (lambda p, t, b: (p // b, p % b), "this is the logical block"),
    (lambda p, t, b: (t[p // b], p), "from the beginning of the block"),
    (lambda p, t, b: (p % b, t[p // b]), "the other way round"),
    (lambda p, t, b: (t[min(p, len(t) - 1)], p % b), "which entry of the table"),
    (lambda p, t, b: (t[p // b] * b, p % b), "not the slot at which it begins"),
    (lambda p, t, b: (t[p // b] + p % b, p % b), "block id used as position"),
    (lambda p, t, b: (t[p // b], p % b + 1), "do not add one"),
]


def paged_decode(
    q, k_cache, v_cache, table, context, scale, scaled=True, head=None, axis=1, last=None, v_table=None, through=None
):
    group, size = len(q) // k_cache.shape[2], k_cache.shape[1]
    slots = torch.arange(context if last is None else last(context, size))
    where = (table[slots // size] * size + slots % size) if through is None else through(slots, table, size)
    heads = torch.arange(len(q)) // group if head is None else head(len(q), k_cache.shape[2])
    k = k_cache.flatten(0, 1)[where][:, heads]
    v = v_cache.flatten(0, 1)[where if v_table is None else v_table(slots, table, size)][:, heads]
    scores = torch.einsum("hd,thd->ht", q, k) * (scale if scaled else 1)
    return torch.einsum("ht,thd->hd", scores.softmax(axis), v)


def by_torch(**scale: Callable[[Any, float], float]) -> Callable[..., Any]:
    """PyTorch's own attention, whose `scale` is head_dim ** -0.5 unless it is told."""

    def answer(q, k_cache, v_cache, table, context, given):
        group = len(q) // k_cache.shape[2]
        k, v = (c[table].flatten(0, 1)[:context].repeat_interleave(group, 1) for c in (k_cache, v_cache))
        told = {name: choose(q, given) for name, choose in scale.items()}
        return scaled_dot_product_attention(q[:, None], k.transpose(0, 1), v.transpose(0, 1), **told)[:, 0]

    return answer


def decode(**slips: Any) -> Callable[..., Any]:
    return lambda *args: paged_decode(*args, **slips)


def masked(fill: float) -> Callable[..., Any]:
    """Whole blocks, with the scores behind the context replaced by `fill`."""

    def answer(q, k_cache, v_cache, table, context, scale):
        group = len(q) // k_cache.shape[2]
        k, v = (c[table].flatten(0, 1).repeat_interleave(group, 1) for c in (k_cache, v_cache))
        scores = torch.einsum("hd,thd->ht", q, k) * scale
        scores[:, context:] = fill
        return torch.einsum("ht,thd->hd", scores.softmax(1), v)

    return answer


def naive_exp(q, k_cache, v_cache, table, context, scale):
    k, v = (c[table].flatten(0, 1)[:context].repeat_interleave(len(q) // c.shape[2], 1) for c in (k_cache, v_cache))
    weights = torch.exp(torch.einsum("hd,thd->ht", q, k) * scale)
    return torch.einsum("ht,thd->hd", weights / weights.sum(1, keepdim=True), v)


DECODE = [
    (decode(last=lambda context, size: -(-context // size) * size), "missing mask in the last block"),
    (decode(last=lambda context, size: context // size * size), "round the number of blocks up"),
    (decode(last=lambda context, size: context - 1), "its position is seen too"),
    (masked(0.0), "a masked score is -inf"),
    (masked(-torch.inf), "0 x NaN is NaN"),
    (naive_exp, "exp of a large score is infinite"),
    (decode(through=lambda slots, table, size: slots), "block id used as position"),
    (decode(through=lambda slots, table, size: table[slots // size] + slots % size), "block id used as position"),
    (decode(scaled=False), "softmax without scale"),
    (by_torch(), "`scale` is not used"),
    (by_torch(scale=lambda q, given: q.shape[1] ** -0.5), "`scale` is not used"),
    (by_torch(scale=lambda q, given: given * q.shape[1] ** -0.5), "`scale` alone is all of it"),
    (by_torch(scale=lambda q, given: 1 / given), "not divided by it"),
    (decode(axis=0), "softmax over the wrong axis"),
    (decode(head=lambda heads, kv: torch.arange(heads) % kv), "KV head index"),
    (decode(head=lambda heads, kv: torch.zeros(heads, dtype=torch.long)), "KV head index"),
    (decode(v_table=lambda slots, table, size: slots), "V of the wrong block"),
    (decode(scaled=False, head=lambda heads, kv: torch.arange(heads) % kv), "softmax without scale"),
    (lambda q, k, v, table, context, scale: paged_decode(q, k, k, table, context, scale), "K was summed up"),
    (lambda q, *rest: torch.ones_like(q), "softmax over the positions"),
]


# ---- ex4, in torch --------------------------------------------------------------------------------------------------


@Kernel
def idle_kernel(q, k_cache, v_cache, block_table, out, context_len, scale):
    """A frame that was not filled."""
    head = tl.program_id(0)  # noqa: F821, F841
    ...


def absorb(state, q, k, v, seen, scale, grow=True, of_total=True, of_values=True, masked=True, factor=None):
    best, total, values = state
    n = seen if masked else len(k)
    scores = q @ k[:n].T * (factor or scale)
    top = torch.maximum(best, scores.amax(1)) if grow else scores.amax(1)
    shrink = torch.exp(best - top)
    weights = torch.exp(scores - top[:, None])
    total = total * (shrink if of_total else 1) + weights.sum(1)
    values = values * (shrink[:, None] if of_values else 1) + weights @ v[:n]
    return top, total, values


def absorbing(**slips: Any) -> tuple[Any, Any]:
    return idle_kernel, lambda *args: absorb(*args, **slips)


def no_maximum(state, q, k, v, seen, scale):
    weights = torch.exp(q @ k[:seen].T * scale)
    return state[0], state[1] + weights.sum(1), state[2] + weights @ v[:seen]


def minus_infinity(state, q, k, v, seen, scale):
    scores = q @ k.T * scale
    scores[:, seen:] = -torch.inf
    top = torch.maximum(state[0], scores.amax(1))
    shrink, weights = torch.exp(state[0] - top), torch.exp(scores - top[:, None])
    return top, state[1] * shrink + weights.sum(1), state[2] * shrink[:, None] + weights @ v


def upside_down(state, q, k, v, seen, scale):
    scores = q @ k[:seen].T * scale
    top = torch.maximum(state[0], scores.amax(1))
    grow, weights = torch.exp(top - state[0]), torch.exp(scores - top[:, None])
    return top, state[1] * grow + weights.sum(1), state[2] * grow[:, None] + weights @ v[:seen]


def divided(state, q, k, v, seen, scale):
    best, total, values = absorb(state, q, k, v, seen, scale)
    return best, total, values / total[:, None]


def last_only(state, q, k, v, seen, scale):
    fresh = torch.full_like(state[0], -torch.inf), state[1] * 0, state[2] * 0
    return absorb(fresh, q, k, v, seen, scale)


ONLINE = [
    (absorbing(of_total=False, of_values=False), "softmax not rescaled"),
    (absorbing(of_values=False), "`values` must shrink with it"),
    (absorbing(of_total=False), "`total` must shrink with it"),
    (absorbing(grow=False, of_total=False, of_values=False), "softmax not rescaled|the larger of the old one"),
    ((idle_kernel, lambda *args: absorb(*args, grow=False)), "all blocks so far"),
    ((idle_kernel, upside_down), "at the first block, where the old maximum is -inf"),
    ((idle_kernel, divided), "divide once, at the end"),
    (absorbing(masked=False), "missing mask in the last block"),
    (absorbing(factor=1.0), "softmax without scale"),
    (absorbing(factor=0.25), "`scale` is not used"),
    ((idle_kernel, no_maximum), "exp of a large score is infinite"),
    ((idle_kernel, minus_infinity), "0 x NaN is NaN"),
    ((idle_kernel, last_only), "only the last block counted"),
    ((idle_kernel, lambda state, *rest: (state[0], state[1] + 1, state[2] + 1)), "per block: scores, mask"),
]


# ---- ex5, ex6 -------------------------------------------------------------------------------------------------------


def cost(**wrong: Callable[..., float]) -> Callable[..., Any]:
    return lambda *args: {**preemption_cost(*args), **{key: formula(*args) for key, formula in wrong.items()}}


COST = [
    (cost(bytes=lambda n, k, link, rate: 2 * n * k), "no further factor of 2"),
    (cost(bytes=lambda n, k, link, rate: k), "multiply by the number of tokens"),
    (cost(bytes=lambda n, k, link, rate: n * k * 1024), "bytes already"),
    (cost(out_ms=lambda n, k, link, rate: n * k / link), "'out_ms': these are seconds"),
    (cost(out_ms=lambda n, k, link, rate: 2000 * n * k / link), "out is one way"),
    (cost(out_ms=lambda n, k, link, rate: 8000 * n * k / link), "no bits"),
    (cost(round_trip_ms=lambda n, k, link, rate: 1000 * n * k / link), "come in again"),
    (cost(round_trip_ms=lambda n, k, link, rate: 1000 * n * (k / link + 1 / rate)), "is not computed again"),
    (cost(recompute_ms=lambda n, k, link, rate: n / rate), "'recompute_ms': these are seconds"),
    (cost(recompute_ms=lambda n, k, link, rate: 1000 * rate / n), "stands on its head"),
    (cost(recompute_ms=lambda n, k, link, rate: 1000 * n * k / rate), "tokens, not bytes"),
    (cost(recompute_ms=lambda n, k, link, rate: 7.0), "one prefill of all cached tokens"),
    (lambda *args: preemption_cost(*args)["bytes"], "a dict is wanted"),
]


def gaining(compute=None, batch=None) -> tuple[Any, Any]:
    def answer(*args):
        wrong = {"compute": compute, "batch": batch}
        return {**gains(*args), **{key: formula(*args) for key, formula in wrong.items() if formula}}

    return answer, scale_out


def scaling(times=None, verdict=None) -> tuple[Any, Any]:
    def answer(n, f, a, b):
        value = times(n, f, a, b) if times else scale_out(n, f, a, b)["times"]
        return {"times": value, "super_linear": verdict(value, n, a, b) if verdict else value > n}

    return gains, answer


SCALING = [
    (gaining(compute=lambda f, h, M, c, s: 1 / (1 - h)), "Amdahl's law"),
    (gaining(compute=lambda f, h, M, c, s: 1 - f * h), "the gain is its inverse"),
    (gaining(compute=lambda f, h, M, c, s: 1 / (1 - f)), "the hit rate is missing"),
    (gaining(compute=lambda f, h, M, c, s: 9.5), "1 over the share of time left"),
    (gaining(batch=lambda f, h, M, c, s: (M - s) / (c - s)), "the new batch over the old"),
    (gaining(batch=lambda f, h, M, c, s: c / (c - s)), "this is the bound"),
    (gaining(batch=lambda f, h, M, c, s: ((M - s) / c) / (M / c)), "only its own tokens"),
    (gaining(batch=lambda f, h, M, c, s: (M / c) / ((M - s) / (c - s))), "stands on its head"),
    (scaling(times=lambda n, f, a, b: n), "each replica's hit rate changes"),
    (scaling(times=lambda n, f, a, b: n / (1 - f * b)), "one replica has a cache too"),
    (scaling(times=lambda n, f, a, b: n * (1 - f * b) / (1 - f * a)), "upside down"),
    (scaling(times=lambda n, f, a, b: (1 - f * a) / (1 - f * b)), "there are n of them"),
    (scaling(times=lambda n, f, a, b: n * (1 - a) / (1 - b)), "the share of prefill is missing"),
    (scaling(verdict=lambda times, n, a, b: times >= n), "exactly n times is linear"),
    (scaling(verdict=lambda times, n, a, b: times > 1), "exactly n times is linear|by less than their number"),
    (scaling(verdict=lambda times, n, a, b: False), "that is super-linear"),
    (scaling(verdict=lambda times, n, a, b: b > a), "exactly n times is linear"),
]

RIGHT = {
    "lab3.ex1": EnginePool,
    "lab3.ex2": slot_of,
    "lab3.ex3": paged_decode,
    "lab3.ex4": (idle_kernel, absorb),
    "lab3.ex5": preemption_cost,
    "lab3.ex6": (gains, scale_out),
}
TABLES = {"ex1": POOL, "ex2": SLOT, "ex3": DECODE, "ex4": ONLINE, "ex5": COST, "ex6": SCALING}
WRONG = [(f"lab3.{ex}", answer, rule) for ex, table in TABLES.items() for answer, rule in table]


def test_the_lab_has_six_exercises() -> None:
    assert ids_of("lab3") == IDS


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("seed", range(20))
def test_a_right_answer_passes(id: str, seed: int) -> None:
    outcome = examine(get(id), RIGHT[id], seed)
    assert outcome.status == "passed", outcome


@pytest.mark.parametrize(
    ("id", "answer", "rule"), WRONG, ids=[f"{n} {id} {rule}" for n, (id, _, rule) in enumerate(WRONG)]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_slip_hears_the_rule_that_it_breaks(id: str, answer: Any, rule: str, seed: int) -> None:
    outcome = examine(get(id), answer, seed)
    assert outcome.status == "failed", outcome
    said = dict(outcome.lines)["rule"]
    assert any(words in said for words in rule.split("|")), said


@pytest.mark.parametrize(
    ("id", "stub"),
    [
        ("lab3.ex1", type("MyPool", (CountedPool,), dict.fromkeys(("allocate", "free"), lambda self, x: None))),
        ("lab3.ex4", (idle_kernel, lambda *args: ...)),
        ("lab3.ex6", (lambda *args: ..., lambda *args: ...)),
        *((id, lambda *args: ...) for id in ("lab3.ex2", "lab3.ex3", "lab3.ex5")),
    ],
)
def test_a_stub_is_not_attempted(id: str, stub: Any) -> None:
    assert examine(get(id), stub).status == "not-attempted"


@Kernel
def some_kernel(q, k_cache, v_cache, block_table, out, context_len, scale):
    """Not right, but written: it touches the cache."""
    tl.store(out, tl.load(k_cache))  # noqa: F821


def test_where_triton_is_missing_the_check_says_so_and_takes_absorb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging.importlib.util, "find_spec", lambda name: None)
    alone = examine(get("lab3.ex4"), (some_kernel, lambda *args: ...))
    assert alone.status == "error" and "write absorb instead" in dict(alone.lines)["raised"]
    assert examine(get("lab3.ex4"), (some_kernel, absorb)).status == "passed"
    assert paging.triton_language().constexpr  # enough to define a kernel with


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("lab3.ex1", slot_of),
        ("lab3.ex2", lambda p, table, size: table[p // size] * size + p % size),
        ("lab3.ex3", lambda *args: [1.0]),
        ("lab3.ex3", lambda *args: paged_decode(*args)[None]),
        ("lab3.ex3", lambda *args: paged_decode(*args).flatten()),
        ("lab3.ex3", lambda *args: print("no return")),
        ("lab3.ex4", absorb),
        ("lab3.ex4", (idle_kernel, lambda *args: print("no return"))),
        ("lab3.ex4", (idle_kernel, lambda *args: absorb(*args)[2])),
        ("lab3.ex4", (idle_kernel, lambda state, *rest: (state[0][:, None], *state[1:]))),
        ("lab3.ex6", gains),
    ],
)
def test_an_answer_of_the_wrong_kind_is_told_what_is_wanted(id: str, answer: Any) -> None:
    outcome = examine(get(id), answer)
    said = dict(outcome.lines)["rule"]
    assert outcome.status == "failed" and ("wanted" in said or "absorb returns the tuple" in said)


@pytest.mark.parametrize("seed", range(10))
def test_a_maximum_that_falls_again_never_passes(seed: int) -> None:
    assert examine(get("lab3.ex4"), (idle_kernel, lambda *args: absorb(*args, grow=False)), seed).status == "failed"


def test_a_result_that_is_nan_is_shown_as_nan() -> None:
    lines = dict(examine(get("lab3.ex3"), lambda q, *rest: q * torch.nan).lines)
    assert lines["gave"] == "head 0 begins nan, nan, nan, nan; 32 of 32 numbers are not finite"
    one = dict(examine(get("lab3.ex3"), lambda q, *rest: q.index_fill(1, torch.tensor([1]), torch.inf)).lines)
    assert ", inf, " in one["gave"] and one["gave"].endswith("; 2 of 32 numbers are not finite")


def test_an_exception_of_the_pool_shows_the_learners_line() -> None:
    outcome = examine(get("lab3.ex1"), pool(free=lambda self, block_ids: self.no_such_list.append(1)))
    assert outcome.status == "error" and "no_such_list" in dict(outcome.lines)["line"]


def test_cases_are_seeded_and_every_engine_run_forks_and_ends() -> None:
    assert get("lab3.ex1").cases(1) == get("lab3.ex1").cases(1) != get("lab3.ex1").cases(2)
    settings = [case[1] for seed in range(5) for case in get("lab3.ex1").cases(seed) if case[0] == "engine"]
    runs = [run_engine(EnginePool, setting) for setting in settings]
    assert all(not run["stopped"] and '"share"' in run["log"] for run in runs)
    longest = [max(len(step.split(",")) for step in run["steps"].split()) for run in runs]
    assert all(most > 1 for most in longest)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (pool(free=free_never_lists), "Leak: nobody holds"),
        (pool(free=free_at_once), "Free of a shared block"),
        (pool(allocate=allocate_any), "Allocate with too few"),
    ],
)
def test_the_pool_is_drawn_after_the_first_wrong_call(answer: Any, words: str) -> None:
    figure = examine(get("lab3.ex1"), answer).figure
    assert figure.startswith("<svg") and words in figure and "The pool after call" in figure


def test_the_engine_runs_on_the_pool_and_the_attention() -> None:
    params = SamplingParams(max_tokens=12, n=2, seed=3, ignore_eos=True)
    how: dict[str, Any] = {"device": "cpu", "verbose": False, "num_blocks": 12, "block_size": 8, "max_num_seqs": 4}
    mine = LLM("tiny", block_pool=EnginePool, attention=as_attention(paged_decode), debug=True, **how)
    runs = [llm.generate(["one page", "and two"], params, use_tqdm=False) for llm in (LLM("tiny", **how), mine)]
    texts = [[answer.text for output in run for answer in output.outputs] for run in runs]
    assert texts[0] == texts[1] and mine.scheduler.kv.pool.num_used == 0


def test_a_pool_without_memory_of_content_finds_no_prefix() -> None:
    llm = LLM("tiny", device="cpu", verbose=False, block_pool=EnginePool, enable_prefix_caching=True, block_size=8)
    prompt, params = "the same twenty-four letters", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    texts = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text for _ in range(2)]
    assert texts[0] == texts[1] and not llm.scheduler.kv.pool.findable()


@pytest.mark.parametrize(
    ("token_bytes", "num_bytes", "out_ms"),
    [(160e3, 655.36e6, 20.48), (512 * 2**10, 2_147_483_648, 67.1), (128 * 2**10, 536_870_912, 16.8)],
)
def test_the_handouts_transfer(token_bytes: float, num_bytes: float, out_ms: float) -> None:
    cost = preemption_cost(4096, token_bytes, 32e9, 10_000)
    assert cost["bytes"] == num_bytes and cost["out_ms"] == pytest.approx(out_ms, abs=0.05)
    assert cost["round_trip_ms"] == 2 * cost["out_ms"]
