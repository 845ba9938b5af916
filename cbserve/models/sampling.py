"""From logits to tokens: temperature, min_p, top-k, top-p, in vLLM's order; random numbers that know their place.

A row's token is a function of its own logits and its own `SamplingRow`. Neither the other rows nor their order nor
their number enters, so a request gives the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# How many candidates are sorted at first when looking for a nucleus; each further try takes 16 times as many.
_SHORTLIST = 64
_CHUNK = 64
_GREEDY_BELOW = 1e-5  # as in vLLM: logits divided by less overflow
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingRow:
    """How to choose one token. `temperature` 0 is greedy; `top_k` 0 or -1 keeps all, `top_p` 1 and `min_p` 0 too.

    `seed`, `sample_index` (which of a request's n samples) and `position` (the token's place in its sequence) name the
    random number. `num_logprobs`: None for no log-probabilities, N for those of the chosen token and of the N best.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    position: int = 0
    num_logprobs: int | None = None


# (logits [R, V], temperature, top_k, top_p, min_p, u: one value a row each) -> int64 [R]
SampleTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], sample_tokens: SampleTokens | None = None
) -> tuple[list[int], list[dict[int, float] | None]]:
    """One token a row of float32 `logits` [R, V], and the log-probabilities that were asked for.

    Log-probabilities are raw, as in vLLM: the log-softmax of the logits as they came, whatever was sampled with. The
    chosen token comes first, then the N best in falling order (the chosen one is not repeated). `sample_tokens` is a
    kernel that chooses for all rows at once (`cbserve.kernels.sampling`). Raises `ValueError` unless each row of logits
    has one of `rows`.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(rows)} rows of sampling parameters; give one each")
    if not rows:
        return [], []
    if sample_tokens is not None:
        token_ids: list[int] = sample_tokens(logits, *_columns(rows, logits.device)).tolist()
        return token_ids, _raw_logprobs(logits, token_ids, rows)
    token_ids = logits.argmax(dim=-1).tolist()
    random = [index for index, row in enumerate(rows) if row.temperature >= _GREEDY_BELOW]
    if random:
        drawn = _draw(logits if len(random) == len(rows) else logits[random], [rows[index] for index in random])
        for index, token_id in zip(random, drawn, strict=True):
            token_ids[index] = token_id
    return token_ids, _raw_logprobs(logits, token_ids, rows)


def _columns(rows: Sequence[SamplingRow], device: torch.device) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p and u of all rows, as a kernel takes them."""
    temperatures = [row.temperature if row.temperature >= _GREEDY_BELOW else 0.0 for row in rows]
    draws = [uniform(row.seed, row.sample_index, row.position) for row in rows]
    return (
        torch.tensor(temperatures, dtype=torch.float32, device=device),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
        torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
        torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
        torch.tensor(draws, dtype=torch.float64, device=device),
    )


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its three names (SplitMix64; Steele et al., OOPSLA 2014)."""
    state = 0
    for name in (seed, sample_index, position):
        state = _mix64(state ^ (name & _MASK64))
    # 52 bits: then u * total < total holds for any float64 total, and no draw can fall off the end.
    return (state >> 12) * 2.0**-52


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Tokens [R] by inversion: the first one, in order of ids, at which the cumulative weight passes u."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

    # Relative to the best token, a logit can be divided by the smallest temperature without becoming inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / column([row.temperature for row in rows])
    if any(row.min_p > 0 for row in rows):  # p >= min_p * p_best, in logarithms
        scaled.masked_fill_(scaled < column([row.min_p for row in rows]).log(), -torch.inf)
    _keep_top_k(scaled, [row.top_k for row in rows])
    _keep_top_p(scaled, [row.top_p for row in rows])
    cumulative = scaled.exp_().cumsum(dim=-1, dtype=torch.float64)
    u = column([uniform(row.seed, row.sample_index, row.position) for row in rows], torch.float64)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1).tolist()


def _keep_top_k(scaled: Tensor, top_k: list[int]) -> None:
    """Drop, in place, what is smaller than the k-th best of its row [R, V]; ties with it stay, as in vLLM."""
    vocab = scaled.shape[-1]
    active = [index for index, k in enumerate(top_k) if 0 < k < vocab]
    if not active:
        return
    best = _best(scaled[active], max(top_k[index] for index in active))
    kth = torch.tensor([[top_k[index] - 1] for index in active], device=scaled.device)
    _drop_below(scaled, active, best.gather(-1, kth))


def _keep_top_p(scaled: Tensor, top_p: list[float]) -> None:
    """Drop, in place, what is outside the nucleus: the fewest best tokens whose probabilities reach p (Holtzman et al.,
    arXiv 1904.09751). The best token always stays; ties with the last one stay too."""
    active = [index for index, p in enumerate(top_p) if p < 1]
    if not active:
        return
    logits = scaled[active]
    needed = logits.exp().sum(dim=-1, dtype=torch.float64).unsqueeze(1)
    needed *= torch.tensor([[top_p[index]] for index in active], dtype=torch.float64, device=scaled.device)
    size = min(_SHORTLIST, logits.shape[-1])
    while True:  # a nucleus is short nearly always, and sorting a vocabulary costs milliseconds a row
        best = _best(logits, size)
        mass = best.exp().cumsum(dim=-1, dtype=torch.float64)
        if size == logits.shape[-1] or bool((mass[:, -1:] >= needed).all()):
            break
        size = min(16 * size, logits.shape[-1])
    last = (mass < needed).sum(dim=-1, keepdim=True).clamp_(max=size - 1)
    _drop_below(scaled, active, best.gather(-1, last))


def _best(values: Tensor, k: int) -> Tensor:
    """The k best values of each row [R, V] in falling order, [R, k].

    In a large vocabulary, first the k chunks with the best maxima: they hold all of them, and maxima cost a tenth.
    """
    vocab = values.shape[-1]
    if vocab % _CHUNK == 0 and 4 * k * _CHUNK <= vocab:
        chunks = values.unflatten(-1, (-1, _CHUNK))
        promising = chunks.amax(dim=-1).topk(k, dim=-1).indices
        values = chunks.gather(1, promising.unsqueeze(-1).expand(-1, -1, _CHUNK)).flatten(1)
    return values.topk(k, dim=-1).values


def _drop_below(scaled: Tensor, active: list[int], threshold: Tensor) -> None:
    """Set to -inf, in place, what is below its row's `threshold` [len(active), 1]."""
    limits = torch.full((scaled.shape[0], 1), -torch.inf, dtype=scaled.dtype, device=scaled.device)
    limits[active] = threshold
    scaled.masked_fill_(scaled < limits, -torch.inf)


def _raw_logprobs(logits: Tensor, token_ids: list[int], rows: Sequence[SamplingRow]) -> list[dict[int, float] | None]:
    result: list[dict[int, float] | None] = [None] * len(rows)
    wanted = {index: row.num_logprobs for index, row in enumerate(rows) if row.num_logprobs is not None}
    if not wanted:
        return result
    logprobs = logits[list(wanted)].log_softmax(dim=-1)
    best = logprobs.topk(min(max(wanted.values()), logits.shape[-1]), dim=-1)
    chosen = torch.tensor([[token_ids[index]] for index in wanted], device=logits.device)
    for (index, count), own, values, ids in zip(
        wanted.items(), logprobs.gather(-1, chosen).squeeze(1).tolist(), best.values.tolist(), best.indices.tolist(),
        strict=True,
    ):  # fmt: skip
        result[index] = {token_ids[index]: own} | dict(zip(ids[:count], values[:count], strict=True))
    return result
