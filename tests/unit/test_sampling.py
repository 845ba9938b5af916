"""Sampling: each filter against a plain numpy reference, and random numbers that know their place."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cbserve.models.sampling import SamplingRow, sample, uniform


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def reference_probabilities(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """vLLM's order, one row, written as it is defined: temperature, min_p, top-k, top-p."""
    scaled = logits.astype(np.float64) / row.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < row.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if row.top_k > 0:
        p[order[row.top_k :]] = 0
    p /= p.sum()
    if row.top_p < 1:
        before = np.cumsum(p[order]) - p[order]  # probability of everything better
        p[order[1:][before[1:] >= row.top_p]] = 0
        p /= p.sum()
    return p


def draws(logits: torch.Tensor, row: SamplingRow, count: int) -> np.ndarray:
    rows = [replace(row, position=position) for position in range(count)]
    return np.array(sample(logits.expand(count, -1), rows)[0])


COMBINATIONS = [
    SamplingRow(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product([0.5, 1.0, 2.0], [-1, 1, 5, 50], [1e-9, 0.3, 0.9, 1.0], [0.0, 0.05])
]


@pytest.mark.parametrize("vocab", [50, 6400])
@pytest.mark.parametrize("row", COMBINATIONS, ids=str)
def test_the_token_is_the_references_inverse_of_the_same_number(row, vocab):
    """Exact, not statistical: the drawn token is where the reference's cumulative probability passes the same u."""
    logits = random_logits(1, vocab)
    cumulative = np.cumsum(reference_probabilities(logits[0].numpy(), row))
    ids = draws(logits, row, 64)
    for position, id in enumerate(ids):
        u = uniform(row.seed, row.sample_index, position) * cumulative[-1]
        low = cumulative[id - 1] if id else 0.0
        assert low - 1e-6 <= u <= cumulative[id] + 1e-6


@pytest.mark.parametrize("row", [SamplingRow(), SamplingRow(1.3, 20, 0.9, 0.01), SamplingRow(0.7, -1, 0.8, 0.0)])
def test_frequencies_follow_the_distribution(row):
    logits = random_logits(1, 50, seed=4, scale=1.5)
    p = reference_probabilities(logits[0].numpy(), row)
    count = 20_000
    observed = np.bincount(draws(logits, row, count), minlength=50)
    assert not observed[p == 0].any()
    expected = p * count
    common = expected > 5
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)  # five standard deviations


@pytest.mark.parametrize("row", [SamplingRow(0.0), SamplingRow(5.0, top_k=1), SamplingRow(5.0, top_p=0.0)])
def test_greedy_and_its_limits_give_the_best_token(row):
    logits = random_logits(16, 3000)
    rows = [replace(row, position=position) for position in range(16)]
    assert sample(logits, rows)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [0, -1, 50, 51])
def test_top_k_of_the_vocabulary_or_more_keeps_all(top_k):
    logits = random_logits(1, 50)
    base = SamplingRow(temperature=2.0)
    assert draws(logits, replace(base, top_k=top_k), 200).tolist() == draws(logits, base, 200).tolist()


def test_a_nucleus_wider_than_the_shortlist_is_found():
    """Nearly flat logits: the nucleus of 0.9 takes thousands of tokens. One row of the batch is peaked."""
    logits = random_logits(2, 8000, scale=0.1)
    logits[1, 7] = 30.0
    row = SamplingRow(top_p=0.9)
    kept = reference_probabilities(logits[0].numpy(), row) > 0
    assert kept.sum() > 2000
    rows = [replace(row, position=position) for position in range(300) for _ in range(2)]
    ids = np.array(sample(logits.repeat(300, 1), rows)[0]).reshape(300, 2)
    assert kept[ids[:, 0]].all() and len(set(ids[:, 0])) > 200
    assert (ids[:, 1] == 7).all()
    assert ids[:, 0].tolist() == draws(logits[:1], row, 300).tolist()


def test_a_row_gives_the_same_token_alone_in_any_batch_and_in_any_order():
    rng = np.random.default_rng(0)
    rows = [
        SamplingRow(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 3.0])),
            top_k=int(rng.choice([-1, 1, 3, 40])),
            top_p=float(rng.choice([0.2, 0.9, 1.0])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(2**63)),
            sample_index=int(rng.integers(4)),
            position=int(rng.integers(1000)),
            num_logprobs=rng.choice([None, 0, 3]),
        )
        for _ in range(64)
    ]
    logits = random_logits(64, 2000)
    together, logprobs = sample(logits, rows)
    for index in range(64):
        alone, own = sample(logits[index : index + 1], [rows[index]])
        assert alone == [together[index]]
        assert (own[0] is None) == (logprobs[index] is None)
        if own[0] is not None:
            assert list(own[0]) == list(logprobs[index])
            assert own[0] == pytest.approx(logprobs[index], abs=1e-5)
    order = rng.permutation(64).tolist()
    assert sample(logits[order], [rows[i] for i in order])[0] == [together[i] for i in order]


def test_the_logits_are_left_as_they_were():
    logits = random_logits(4, 100)
    before = logits.clone()
    sample(logits, [SamplingRow(0.5, 5, 0.5, 0.1, num_logprobs=2)] * 4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("field", ["seed", "sample_index", "position"])
def test_each_name_of_a_random_number_matters(field):
    base = {"seed": 7, "sample_index": 0, "position": 0}
    numbers = [uniform(**(base | {field: value})) for value in range(2000)]
    assert len(set(numbers)) == 2000
    assert all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.03
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1


def test_random_numbers_are_the_same_everywhere_for_ever():
    """Written down once: a changed generator would change every seeded text of every user."""
    assert uniform(0, 0, 0) == 0.13870941014555416
    assert uniform(-1, 2, 3) == uniform(2**64 - 1, 2, 3) == 0.2815569767288524


def test_logprobs_are_raw_and_the_chosen_token_comes_first():
    logits = random_logits(3, 40)
    raw = logits.log_softmax(-1)
    rows = [
        SamplingRow(temperature=9.0, top_k=30, seed=seed, num_logprobs=count) for seed, count in enumerate([None, 0, 5])
    ]
    ids, logprobs = sample(logits, rows)
    assert logprobs[0] is None
    assert logprobs[1] == pytest.approx({ids[1]: float(raw[1, ids[1]])})
    best = raw[2].topk(5).indices.tolist()
    assert list(logprobs[2]) == list(dict.fromkeys([ids[2], *best]))
    assert all(value == pytest.approx(float(raw[2, id])) for id, value in logprobs[2].items())


def test_logprobs_beyond_the_vocabulary_give_all():
    assert len(sample(random_logits(1, 10), [SamplingRow(0.0, num_logprobs=99)])[1][0]) == 10


def test_masked_logits_are_never_drawn_and_the_smallest_temperature_is_finite():
    logits = random_logits(1, 50)
    logits[0, ::2] = -torch.inf
    assert (draws(logits, SamplingRow(temperature=50.0), 200) % 2 == 1).all()
    assert draws(logits, SamplingRow(temperature=1e-30), 3).tolist() == [int(logits.argmax())] * 3


def test_one_row_of_parameters_a_row_of_logits():
    assert sample(torch.empty(0, 10), []) == ([], [])
    with pytest.raises(ValueError, match="2 rows of logits but 1"):
        sample(random_logits(2, 10), [SamplingRow()])
