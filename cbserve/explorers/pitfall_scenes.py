"""Two pitfalls of serving as scenes: a long prompt that holds up everybody's tokens, and the wait for a first token."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from cbserve.core import given
from cbserve.core.errors import InvalidRequestError
from cbserve.core.trace import StepEvent
from cbserve.explorers.machines import Machines
from cbserve.explorers.scene import Answer, Control, Scene
from cbserve.explorers.scene_runs import (
    CHAT_PROMPT,
    CHUNK,
    LEAD,
    LONG_ANSWER,
    SLOTS,
    Machine,
    its_model,
    machine_of,
    menus,
    others,
    run,
    settled,
    wait_of_last,
)
from cbserve.explorers.showing import choices
from cbserve.viz import lines
from cbserve.viz.figure import Figure
from cbserve.viz.findings import plural
from cbserve.viz.style import percent, round_ms, said_s
from cbserve.viz.token_gaps import TokenRow, token_gaps
from cbserve.workloads.tokens import own_tokens
from cbserve.workloads.workload import Job

WHOLE = 10**9  # a token budget that cuts nothing
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, WHOLE)
PROMPTS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
OTHERS = (1, 2, 4, 8, 16, 32)
LIMITS_S = (0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
QUICK = 2_000  # tokens: up to here a point costs next to nothing
LENGTHS = (250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


# ---- pitfall 2: a long prefill among decodes ------------------------------------------------------------------------


def long_prefill(
    machines: Machines, gpu: str, model: str, prompt_tokens: int, token_budget: int, num_others: int, itl_s: float
) -> Iterator[Answer]:
    """A prompt of `prompt_tokens` joins `num_others` answers in progress, cut to chunks or whole: the others' gaps.

    Raises:
        InvalidRequestError: it does not fit on that GPU, is longer than the model was made for, or finds no room in a
            step beside the decodes.
    """
    machine = machine_of(machines, gpu, model)
    machine.require_length(prompt_tokens)
    if token_budget <= num_others:
        raise InvalidRequestError(
            f"a chunk of {plural(token_budget, 'token')} a step: it must be above {num_others}, a token for each of "
            "the other answers, or none is left for the prompt; choose a larger chunk, or fewer other answers"
        )
    for budgets in (sorted({token_budget, WHOLE}), sorted({*BUDGETS, token_budget})):
        found = {b: _joined(machine, prompt_tokens, b, num_others) for b in budgets}
        runs = {budget: joined for budget, joined in found.items() if joined is not None}
        if token_budget not in runs or WHOLE not in runs:
            raise machine.too_small(prompt_tokens, num_others)
        worst = {budget: max(gap for _, gap in gaps) for budget, (gaps, _) in runs.items()}
        said = f"their longest gap is {said_s(worst[token_budget])}; the limit is {round_ms(itl_s)}"
        if len(budgets) > 2:
            kept = max((budget for budget, gap in worst.items() if gap <= itl_s), default=0)
            largest = {0: "no chunk here keeps it", WHOLE: "even the whole prompt in one step keeps it"}
            said += f", and {largest.get(kept, f'{_chunk(kept)} is the largest that keeps it')}"
        ttft_s, whole_s = runs[token_budget][1], runs[WHOLE][1]
        yield (
            partial(_gaps_figure, machine, prompt_tokens, token_budget, num_others, itl_s, runs),
            [
                ("The others", f"{said}."),
                ("The long prompt", f"its first token comes after {said_s(ttft_s)}; uncut, after {said_s(whole_s)}."),
            ],
        )


Joined = tuple[list[tuple[float, float]], float]


def _gaps_figure(
    machine: Machine, prompt_tokens: int, token_budget: int, num_others: int, itl_s: float, runs: dict[int, Joined],
    width: int,
) -> Figure:  # fmt: skip
    (gaps, _), (whole, _) = runs[token_budget], runs[WHOLE]
    longest, longest_whole = max(gap for _, gap in gaps), max(gap for _, gap in whole)
    until = max(ttft for _, ttft in runs.values()) + LEAD * min(gap for _, gap in gaps)
    shown = [
        TokenRow(_chunk(budget), [t for t, _ in found if t < until], ttft) for budget, (found, ttft) in runs.items()
    ]
    prompt = f"prompt of {plural(prompt_tokens, 'token')}"
    many = f"{num_others} other answers" if num_others > 1 else "another answer"
    if token_budget == WHOLE:
        title = f"A {prompt} in one step stops {many} for {said_s(longest)}"
    else:
        title = (
            f"Chunks of {token_budget:,}: a {prompt} holds up {many} for {said_s(longest)} "
            f"at a time instead of {said_s(longest_whole)}"
        )
    header = ["chunk", "longest gap (ms)", "gaps beyond the limit", "TTFT of the long prompt (ms)"]
    rows = [
        [_chunk(budget), 1e3 * max(g for _, g in found), sum(g > itl_s for _, g in found), 1e3 * ttft]
        for budget, (found, ttft) in runs.items()
    ]
    return token_gaps(
        shown, list(runs).index(token_budget), itl_s, title=title, x_name="seconds since the long prompt came",
        event="a long prompt comes", table=(header, rows), width=width,
        caption=f"{_simulated(machine)} A tick is a token that every other answer gets; ✕: the longest gap is "
        f"beyond the ITL limit of {round_ms(itl_s)}. Smaller chunks make shorter gaps and a later first token for the "
        "long prompt (▲).",
    )  # fmt: skip


@lru_cache(512)
def _joined(machine: Machine, prompt_tokens: int, token_budget: int, num_others: int) -> Joined | None:
    """(gaps of the others as (seconds since the long prompt arrived, seconds), TTFT of the long prompt); None: there is
    no room for all."""
    arrival_s, step_s = settled(machine, num_others, token_budget)
    # So long do the others need to go on: while they come, before the long prompt, during it, and behind it
    steps = 4 * LEAD + num_others * CHAT_PROMPT // token_budget + prompt_tokens // (token_budget - num_others)
    jobs = [*others(num_others, steps), Job(arrival_s, own_tokens(0, prompt_tokens), LONG_ANSWER)]
    simulation = run(machine, jobs, token_budget)
    _, ttft_s = wait_of_last(simulation, jobs)
    if math.isnan(ttft_s):
        return None
    gaps, last = [], 0.0
    for step in simulation.trace.events:
        if isinstance(step, StepEvent):
            among = step.num_steady > 0 or any(row.kind == "decode" for row in step.rows)
            for end in step.ends():
                if end > arrival_s - LEAD * step_s and last and among:
                    gaps.append((end - arrival_s, end - last))
                last = end
    return gaps, ttft_s


# ---- pitfall 3: the first token waits for the prompt ----------------------------------------------------------------


def cold_start(
    machines: Machines, gpu: str, model: str, prompt_tokens: int, cached_share: float, num_others: int, ttft_s: float
) -> Iterator[Answer]:
    """TTFT against the length of the prompt: on an idle engine, and as the controls say.

    Raises:
        InvalidRequestError: it does not fit on that GPU, or is longer than the model was made for.
    """
    machine = machine_of(machines, gpu, model)
    machine.require_length(prompt_tokens)
    for longest in (QUICK, math.inf):
        lengths = sorted({prompt_tokens, *(int(min(n, machine.longest_prompt)) for n in LENGTHS if n <= longest)})
        idle = [_waits(machine, n, 0.0, 0)[1] for n in lengths]
        own = [_waits(machine, n, cached_share, num_others)[1] for n in lengths]
        queue_s, here = _waits(machine, prompt_tokens, cached_share, num_others)
        if math.isnan(here):
            raise machine.too_small(prompt_tokens, num_others)
        series = {"idle engine, nothing cached": (lengths, idle)}
        parts = [f"{percent(cached_share)} cached"] * (cached_share > 0)
        parts += [plural(num_others, "other answer")] * (num_others > 0)
        if parts:
            series[", ".join(parts)] = (lengths, own)
        series["this prompt"] = ([prompt_tokens], [here])
        enough = _enough(machine, cached_share, num_others, ttft_s, dict(zip(lengths, own, strict=True)))
        among = f" Each of its steps gives a token to {plural(num_others, 'other answer')} too." if num_others else ""
        draw = partial(
            lines, series, title=f"A prompt of {plural(prompt_tokens, 'token')} waits {said_s(here)} for its first "
            f"token; {round_ms(ttft_s)} {enough}", x_name="prompt tokens", y_name="TTFT in seconds",
            log_x=True, log_y=True, reference=(ttft_s, f"TTFT limit {round_ms(ttft_s)}"),
            caption=f"{_simulated(machine)} No other prompt is in front of it: it computes its own, {CHUNK:,} tokens a "
            f"step.{among} Continuous batching cannot shorten that; a cached prefix can.",
        )  # fmt: skip
        rows = [list(row) for row in zip(lengths, idle, own, strict=True)]
        table = (["prompt tokens", "idle engine (s)", "as set (s)"], rows)
        told = _where_it_goes(machine, prompt_tokens, cached_share, num_others, queue_s, here)
        yield (lambda width, draw=draw, table=table: replace(draw(width=width), table=table)), told


def _enough(machine: Machine, cached_share: float, num_others: int, ttft_s: float, known: dict[int, float]) -> str:
    """For how many tokens the limit is enough, to about one in a hundred."""
    lengths = list(known)
    last = bisect_right(lengths, ttft_s, key=lambda n: _or_never(known[n]))  # the first that waits too long
    if last == len(lengths):
        if lengths[-1] == machine.longest_prompt:
            return f"is enough for the longest that the model takes, {lengths[-1]:,} tokens"
        return f"is enough for {lengths[-1]:,} tokens and more"
    low = lengths[last - 1] if last else 1
    between = range(low, lengths[last], max(1, low // 100))
    fits = bisect_right(between, ttft_s, key=lambda n: _or_never(_waits(machine, n, cached_share, num_others)[1]))
    return f"is enough for about {between[fits - 1]:,} tokens" if fits else "is not enough for a single token"


def _or_never(seconds: float) -> float:
    return math.inf if math.isnan(seconds) else seconds


def _where_it_goes(
    machine: Machine, prompt_tokens: int, cached_share: float, num_others: int, queue_s: float, here: float
) -> list[tuple[str, str]]:
    alone = _waits(machine, prompt_tokens, 0.0, 0)[1]
    cost = machine.device.cost
    work = (cost.work(prompt_tokens, 0, 0, 0), cost.work(0, prompt_tokens * (prompt_tokens + 1), 0, 0))
    weights, attention = (said_s(flops / (cost.flops * cost.eff_compute)) for flops, _ in work)
    told = [
        ("This prompt", f"{said_s(here)} with these settings, {said_s(alone)} on an idle engine with nothing cached."),
        (
            "Where it goes",
            f"of the {said_s(alone)}, multiplying with the weights takes {weights}, in proportion to the tokens, and "
            f"attention {attention}, in proportion to their square.",
        ),
    ]
    if num_others:
        without = _waits(machine, prompt_tokens, cached_share, 0)[1]
        told.append(
            (
                "The others",
                f"without them it would wait {said_s(without)}. Of the {said_s(here)}, {said_s(queue_s)} pass until a "
                "step of theirs ends; then each step computes their tokens too.",
            )
        )
    return told


@lru_cache(4096)
def _waits(machine: Machine, prompt_tokens: int, cached_share: float, num_others: int) -> tuple[float, float]:
    """Seconds until one prompt is admitted, and until its first token, when it finds `cached_share` of itself in the
    prefix cache and `num_others` decoding; nan: there is no room for it, or not for all."""
    prompt = own_tokens(0, prompt_tokens)
    start = 1e6 if num_others or cached_share else 0.0  # when the request before, which fills the cache, has ended
    jobs = [Job(0.0, prompt[:cached], 1)] if (cached := int(prompt_tokens * cached_share)) else []
    jobs += others(num_others, 60 + prompt_tokens // 1024, start - settled(machine, num_others, CHUNK)[0])
    jobs.append(Job(start, prompt, LONG_ANSWER))
    return wait_of_last(run(machine, jobs, CHUNK, cached > 0), jobs)


# ---- both -----------------------------------------------------------------------------------------------------------


def _chunk(budget: int) -> str:
    return "whole" if budget == WHOLE else f"chunk {budget:,}"


def _simulated(machine: Machine) -> str:
    return f"Simulated for {machine.name}, not measured."


def _prompt(machines: Machines, prompt_tokens: int | None) -> int:
    """As given, or what fits the machine."""
    if prompt_tokens is None:
        longest = machine_of(machines, machines.gpu, machines.model).longest_prompt
        prompt_tokens = int(min(2_000 if machines.is_cpu else 10_000, longest))
    return given.integer("prompt_tokens", prompt_tokens, 1)


def long_prefill_scene(
    gpu: Any = "a100-80", model: Any = None, *, prompt_tokens: int | None = None, token_budget: int = 512,
    num_others: int = 8, itl_s: float = 0.1,
) -> Scene:  # fmt: skip
    """A long prompt among answers in progress, with a slider for the chunk that it is cut to.

    Shows the gaps between the tokens of the others, beside those of an uncut prompt, and in its table every chunk size.
    Simulated: the engine's own scheduler, step times of a roofline.

    Args:
        gpu, model: as for `pareto_explorer`: by name, or "this" for this machine as `cbserve calibrate` measured it.
        prompt_tokens: of the prompt that joins; None: 10,000, or 2,000 where a CPU was calibrated, or the most that the
            model was made for.
        token_budget: of a step, decodes included.
        num_others: answers in progress, 1 to 127.
        itl_s: limit of the gaps, in seconds.

    Raises:
        CBServeError: an argument out of range, no such GPU or model, no calibration, it does not fit, or the model was
            made for less.
    """
    machines = Machines(gpu, model)
    prompt_tokens = _prompt(machines, prompt_tokens)
    token_budget = given.integer("token_budget", token_budget, 1, most=WHOLE)
    num_others = given.integer("num_others", num_others, 1, most=SLOTS - 1)
    itl_s = given.positive("itl_s", itl_s)
    controls = menus(machines) | {
        "prompt_tokens": Control("prompt tokens", choices(PROMPTS, prompt_tokens)),
        "token_budget": Control(
            "chunk (tokens a step)", choices(BUDGETS, token_budget, lambda b: _chunk(b).removeprefix("chunk "))
        ),
        "num_others": Control("other answers", choices(OTHERS, num_others)),
        "itl_s": Control("ITL limit", choices(LIMITS_S, itl_s, round_ms)),
    }
    values = (machines.gpu, machines.model, prompt_tokens, token_budget, num_others, itl_s)
    return _scene(long_prefill, machines, controls, values)


def cold_start_scene(
    gpu: Any = "a100-80", model: Any = None, *, prompt_tokens: int | None = None, cached_share: float = 0.0,
    num_others: int = 0, ttft_s: float = 0.2,
) -> Scene:  # fmt: skip
    """How long the first token takes by the length of the prompt, with sliders for what is cached and who else runs.

    Simulated: the engine's own scheduler, step times of a roofline.

    Args:
        gpu, model: as for `pareto_explorer`: by name, or "this" for this machine as `cbserve calibrate` measured it.
        prompt_tokens: of the prompt that is looked at; None: as for `long_prefill_scene`.
        cached_share: of it that the prefix cache holds already, in 0..0.99.
        num_others: answers in progress, 0 to 127.
        ttft_s: limit of the wait, in seconds.

    Raises:
        CBServeError: an argument out of range, no such GPU or model, no calibration, it does not fit, or the model was
            made for less.
    """
    machines = Machines(gpu, model)
    prompt_tokens = _prompt(machines, prompt_tokens)
    cached_share = given.number("cached_share", cached_share, lambda v: 0 <= v <= 0.99, "a share from 0 to 0.99")
    num_others = given.integer("num_others", num_others, 0, most=SLOTS - 1)
    ttft_s = given.positive("ttft_s", ttft_s)
    controls = menus(machines) | {
        "prompt_tokens": Control("prompt tokens", choices(LENGTHS, prompt_tokens)),
        "cached_share": Control("of it cached", choices(SHARES, cached_share, percent)),
        "num_others": Control("other answers", choices((0, *OTHERS), num_others)),
        "ttft_s": Control("TTFT limit", choices(LIMITS_S, ttft_s, round_ms)),
    }
    values = (machines.gpu, machines.model, prompt_tokens, cached_share, num_others, ttft_s)
    return _scene(cold_start, machines, controls, values)


def _scene(
    answers: Callable[..., Iterator[Answer]], machines: Machines, controls: dict[str, Control], values: Sequence[Any]
) -> Scene:
    first = dict(zip(controls, values, strict=True))
    return Scene(partial(answers, machines), controls, first, partial(its_model, machines))
