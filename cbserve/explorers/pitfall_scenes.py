"""Two pitfalls of serving as scenes: a long prompt that holds up everybody's tokens, and the wait for a first token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from cbserve.core.batching import ContinuousBatching
from cbserve.core.errors import InvalidRequestError
from cbserve.core.trace import Admitted, StepEvent
from cbserve.explorers.scene import Answer, Control, Scene
from cbserve.explorers.showing import choices
from cbserve.hardware.capacity import kv_capacity
from cbserve.hardware.gpus import GPUS
from cbserve.hardware.gpus import gpu as find_gpu
from cbserve.hardware.models import MODELS, model_shape
from cbserve.hardware.roofline import Roofline
from cbserve.simulation import Simulation, simulate
from cbserve.viz import lines
from cbserve.viz.figure import Figure
from cbserve.viz.style import percent, round_ms, said_s
from cbserve.viz.token_gaps import TokenRow, token_gaps
from cbserve.workloads.tokens import own_tokens
from cbserve.workloads.workload import Job, Workload

WHOLE = 10**9  # a token budget that cuts nothing
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, WHOLE)
PROMPTS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
OTHERS = (1, 2, 4, 8, 16, 32)
LIMITS_S = (0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
ARRIVAL_S = 0.2  # of the long prompt; the others have been decoding for a while
CHAT_PROMPT, LONG_ANSWER = 100, 8
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
QUICK = 2_000  # tokens: up to here a point costs next to nothing
LENGTHS = (250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


# ---- pitfall 2: a long prefill among decodes ------------------------------------------------------------------------


def long_prefill(
    gpu: str, model: str, prompt_tokens: int, token_budget: int, num_others: int, itl_s: float
) -> Iterator[Answer]:
    """A prompt of `prompt_tokens` joins `num_others` answers in progress, cut to chunks or whole: the others' gaps.

    Raises:
        InvalidRequestError: it does not fit on that GPU.
    """
    for budgets in (sorted({token_budget, WHOLE}), sorted({*BUDGETS, token_budget})):
        runs = {b: _joined(gpu, model, prompt_tokens, b, num_others) for b in budgets if b > num_others}
        figure = _gaps_figure(gpu, model, prompt_tokens, token_budget, num_others, itl_s, runs)
        worst = {budget: max(gap for _, gap in gaps) for budget, (gaps, _) in runs.items()}
        said = f"their longest gap is {said_s(worst[token_budget])}; the limit is {round_ms(itl_s)}"
        if len(budgets) > 2:
            kept = [budget for budget, gap in worst.items() if gap <= itl_s]
            said += f", and {_chunk(max(kept))} is the largest that keeps it" if kept else ", which no chunk here keeps"
        ttft_s, whole_s = runs[token_budget][1], runs[WHOLE][1]
        yield (
            figure,
            [
                ("The others", f"{said}."),
                ("The long prompt", f"its first token comes after {said_s(ttft_s)}; uncut, after {said_s(whole_s)}."),
            ],
        )


Joined = tuple[list[tuple[float, float]], float]


def _gaps_figure(
    gpu: str, model: str, prompt_tokens: int, token_budget: int, num_others: int, itl_s: float, runs: dict[int, Joined]
) -> Figure:
    (gaps, _), (whole, _) = runs[token_budget], runs[WHOLE]
    longest, longest_whole = max(gap for _, gap in gaps), max(gap for _, gap in whole)
    until = max(ttft for _, ttft in runs.values()) + 0.1
    shown = [
        TokenRow(_chunk(budget), [t for t, _ in found if t < until], ttft) for budget, (found, ttft) in runs.items()
    ]
    many = f"{num_others} other answers" if num_others > 1 else "another answer"
    if token_budget == WHOLE:
        title = f"A prompt of {prompt_tokens:,} tokens in one step stops {many} for {said_s(longest)}"
    else:
        title = (
            f"Chunks of {token_budget:,}: a prompt of {prompt_tokens:,} tokens holds up {many} for {said_s(longest)} "
            f"at a time instead of {said_s(longest_whole)}"
        )
    header = ["chunk", "longest gap (ms)", "gaps beyond the limit", "TTFT of the long prompt (ms)"]
    rows = [
        [_chunk(budget), 1e3 * max(g for _, g in found), sum(g > itl_s for _, g in found), 1e3 * ttft]
        for budget, (found, ttft) in runs.items()
    ]
    return token_gaps(
        shown, list(runs).index(token_budget), itl_s, title=title, x_name="seconds since the long prompt came",
        event="a long prompt comes", table=(header, rows),
        caption=f"{_simulated(gpu, model)} A tick is a token that every other answer gets; ✕: the longest gap is "
        f"beyond the ITL limit of {round_ms(itl_s)}. Smaller chunks make shorter gaps and a later first token for the "
        "long prompt (▲).",
    )  # fmt: skip


@lru_cache(512)
def _joined(gpu: str, model: str, prompt_tokens: int, token_budget: int, num_others: int) -> Joined:
    """(gaps of the others as (seconds since the long prompt arrived, seconds), TTFT of the long prompt)."""
    if token_budget <= num_others:
        raise InvalidRequestError(f"chunk {token_budget}: {num_others} decodes leave no room in it; take a larger one")
    steps = 120 + -(-prompt_tokens // (token_budget - num_others))  # so long do the others need to go on
    jobs = [Job(0.0, own_tokens(i, CHAT_PROMPT), steps) for i in range(num_others)]
    jobs.append(Job(ARRIVAL_S, own_tokens(num_others, prompt_tokens), LONG_ANSWER))
    batching = ContinuousBatching(max_num_seqs=num_others + 1, max_num_batched_tokens=token_budget)
    run = _run(gpu, model, jobs, batching)
    if run.refused:
        raise InvalidRequestError(f"a prompt of {prompt_tokens:,} tokens: {run.refused[0][1]}")
    gaps, last = [], 0.0
    for step in run.trace.events:
        if isinstance(step, StepEvent):
            among = step.num_steady > 0 or any(row.kind == "decode" for row in step.rows)
            for end in step.ends():
                if end > ARRIVAL_S - 0.1 and last and among:
                    gaps.append((end - ARRIVAL_S, end - last))
                last = end
    return gaps, _ttft_s(run, num_others, ARRIVAL_S)


# ---- pitfall 3: the first token waits for the prompt ----------------------------------------------------------------


def cold_start(
    gpu: str, model: str, prompt_tokens: int, cached_share: float, num_others: int, ttft_s: float
) -> Iterator[Answer]:
    """TTFT against the length of the prompt: on an idle engine, and as the controls say.

    Raises:
        InvalidRequestError: it does not fit on that GPU.
    """
    for longest in (QUICK, math.inf):
        lengths = sorted({prompt_tokens, *(n for n in LENGTHS if n <= longest)})
        idle = [_first_token_s(gpu, model, n, 0.0, 0) for n in lengths]
        own = [_first_token_s(gpu, model, n, cached_share, num_others) for n in lengths]
        here, alone = own[lengths.index(prompt_tokens)], idle[lengths.index(prompt_tokens)]
        if math.isnan(here):
            room = kv_capacity(model, gpu).num_tokens
            raise InvalidRequestError(
                f"a prompt of {prompt_tokens:,} tokens: the KV pool of {model} on one {gpu} has room for {room:,}; "
                "take a shorter prompt or a larger GPU"
            )
        series = {"idle engine, nothing cached": (lengths, idle)}
        parts = [f"{percent(cached_share)} cached"] * (cached_share > 0) + [f"{num_others} others"] * (num_others > 0)
        if parts:
            series[", ".join(parts)] = (lengths, own)
        series["this prompt"] = ([prompt_tokens], [here])
        fits = [n for n, wait in zip(lengths, own, strict=True) if wait <= ttft_s]
        most = f"{round_ms(ttft_s)} {f'is enough for {max(fits):,}' if fits else 'is not enough for any length here'}"
        figure = lines(
            series, title=f"A prompt of {prompt_tokens:,} tokens waits {said_s(here)} for its first token; {most}",
            x_name="prompt tokens", y_name="TTFT in seconds", log_x=True, log_y=True,
            reference=(ttft_s, f"TTFT limit {round_ms(ttft_s)}"),
            caption=f"{_simulated(gpu, model)} Nobody waits in front of it: all of this is the prefill. Continuous "
            "batching cannot shorten it; a cached prefix can.",
        )  # fmt: skip
        cost = Roofline.on(gpu, model)
        matrices = cost.model.num_layers * cost.model.layer_params
        linear = prompt_tokens * 2 * matrices / (cost.flops * cost.eff_compute)
        rows = [list(row) for row in zip(lengths, idle, own, strict=True)]
        yield (
            replace(figure, table=(["prompt tokens", "idle engine (s)", "as set (s)"], rows)),
            [
                (
                    "This prompt",
                    f"{said_s(here)} with these settings, {said_s(alone)} on an idle engine with nothing cached.",
                ),
                (
                    "Where it goes",
                    f"multiplying with the weights takes {said_s(linear)} of the {said_s(alone)}, in proportion to the "
                    "tokens; most of the rest is attention, which grows with their square.",
                ),
            ],
        )


@lru_cache(4096)
def _first_token_s(gpu: str, model: str, prompt_tokens: int, cached_share: float, num_others: int) -> float:
    """TTFT of one prompt that finds `cached_share` of itself in the prefix cache and `num_others` decoding; nan: the
    pool is too small for it."""
    prompt = own_tokens(0, prompt_tokens)
    start = 1e4  # when the request before, which fills the cache, has long ended
    jobs = [Job(0.0, prompt[:cached], 1)] if (cached := int(prompt_tokens * cached_share)) else []
    steps = 60 + prompt_tokens // 1024
    jobs += [Job(start - 0.1, own_tokens(1 + i, CHAT_PROMPT), steps) for i in range(num_others)]
    jobs.append(Job(start, prompt, LONG_ANSWER))
    batching = ContinuousBatching(max_num_seqs=num_others + 2, max_num_batched_tokens=2048)
    return _ttft_s(_run(gpu, model, jobs, batching, cached > 0), len(jobs) - 1, start)


# ---- both -----------------------------------------------------------------------------------------------------------


def _run(gpu: str, model: str, jobs: Sequence[Job], batching: ContinuousBatching, caching: bool = False) -> Simulation:
    capacity = kv_capacity(model, gpu)
    return simulate(
        Workload("scene", jobs), Roofline.on(gpu, model), capacity.num_blocks, batching=batching,
        enable_prefix_caching=caching,
    )  # fmt: skip


def _ttft_s(run: Simulation, index: int, arrival_s: float) -> float:
    """Of the request that arrived as number `index`; nan: it was refused."""
    events = run.trace.events
    seq_ids = {e.seq_id for e in events if isinstance(e, Admitted) and e.request_id == str(index)}
    for step in events:
        if isinstance(step, StepEvent) and any(row.seq_id in seq_ids and row.num_sampled for row in step.rows):
            return next(step.ends()) - arrival_s
    return math.nan


def _chunk(budget: int) -> str:
    return "whole" if budget == WHOLE else f"chunk {budget:,}"


def _simulated(gpu: str, model: str) -> str:
    return f"Simulated for {model_shape(model).name} on one {find_gpu(gpu).name}, not measured."


def _machine(gpu: str, model: str) -> dict[str, Control]:
    return {
        "gpu": Control("GPU", [(name, name) for name in GPUS], is_menu=True),
        "model": Control("model", [(name, name) for name in MODELS], is_menu=True),
    }


def long_prefill_scene(
    gpu: str = "a100-80", model: str = "llama-3.1-8b", *, prompt_tokens: int = 10_000, token_budget: int = 512,
    num_others: int = 8, itl_s: float = 0.1,
) -> Scene:  # fmt: skip
    """A long prompt among answers in progress, with a slider for the chunk that it is cut to.

    Shows the gaps between the tokens of the others, beside those of an uncut prompt, and in its table every chunk size.
    Simulated: the engine's own scheduler, step times of a roofline.

    Args:
        gpu, model: by name, as in `GPUS` and `MODELS`.
        prompt_tokens: of the prompt that joins.
        token_budget: of a step, decodes included.
        num_others: answers in progress.
        itl_s: limit of the gaps, in seconds.

    Raises:
        InvalidRequestError: no such GPU or model, or it does not fit.
    """
    controls = _machine(gpu, model) | {
        "prompt_tokens": Control("prompt tokens", choices(PROMPTS, prompt_tokens)),
        "token_budget": Control(
            "chunk (tokens a step)", choices(BUDGETS, token_budget, lambda b: _chunk(b).removeprefix("chunk "))
        ),
        "num_others": Control("other answers", choices(OTHERS, num_others)),
        "itl_s": Control("ITL limit", choices(LIMITS_S, itl_s, round_ms)),
    }
    values = (find_gpu(gpu).name, model_shape(model).name, prompt_tokens, token_budget, num_others, itl_s)
    return Scene(long_prefill, controls, dict(zip(controls, values, strict=True)))


def cold_start_scene(
    gpu: str = "a100-80", model: str = "llama-3.1-8b", *, prompt_tokens: int = 10_000, cached_share: float = 0.0,
    num_others: int = 0, ttft_s: float = 0.2,
) -> Scene:  # fmt: skip
    """How long the first token takes by the length of the prompt, with sliders for what is cached and who else runs.

    Simulated: the engine's own scheduler, step times of a roofline.

    Args:
        gpu, model: by name, as in `GPUS` and `MODELS`.
        prompt_tokens: of the prompt that is looked at.
        cached_share: of it that the prefix cache holds already, in 0..0.99.
        num_others: answers in progress.
        ttft_s: limit of the wait, in seconds.

    Raises:
        InvalidRequestError: no such GPU or model, or it does not fit.
    """
    controls = _machine(gpu, model) | {
        "prompt_tokens": Control("prompt tokens", choices(LENGTHS, prompt_tokens)),
        "cached_share": Control("of it cached", choices(SHARES, cached_share, percent)),
        "num_others": Control("other answers", choices((0, *OTHERS), num_others)),
        "ttft_s": Control("TTFT limit", choices(LIMITS_S, ttft_s, round_ms)),
    }
    values = (find_gpu(gpu).name, model_shape(model).name, prompt_tokens, cached_share, num_others, ttft_s)
    return Scene(cold_start, controls, dict(zip(controls, values, strict=True)))
