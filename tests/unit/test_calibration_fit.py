"""The fit finds constants that are known, says how sure it is, and is not led astray by a step that was held up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from cbserve import CBServeError, Roofline
from cbserve.calibrating.fit import Constant, least_squares
from cbserve.core.plan import Row, StepPlan
from cbserve.core.request import SamplingParams
from cbserve.hardware.models import model_shape

BASE = Roofline(model_shape("smollm2-135m"), 80e9, 12e9, dtype_bytes=4, kv_passes=3.0)
TRUE = {"eff_compute": 0.7, "eff_memory": 0.5, "overhead_s": 0.02, "overlap": 0.3}
CONSTANTS = {
    "eff_compute": Constant(0.5, 0.01, 1.0, 0.01),
    "eff_memory": Constant(0.5, 0.01, 1.0, 0.01),
    "overhead_s": Constant(0.01, 0.0, 0.2, 1e-4),
    "overlap": Constant(0.5, 0.0, 1.0, 0.02),
}


def plan(num_rows: int, num_tokens: int, context: int) -> StepPlan:
    row = Row(0, "r", 0, context, range(num_tokens), (), SamplingParams(), context + num_tokens)
    return StepPlan(0, [row] * num_rows)


PLANS = [plan(1, n, 0) for n in (16, 64, 128, 256, 512)]
PLANS += [plan(batch, 1, context) for batch in (1, 2, 4, 8, 16, 32) for context in (64, 512)]


def fitted(seconds: np.ndarray):
    def residuals(values: Mapping[str, float]) -> np.ndarray:
        cost = replace(BASE, **values)
        return np.log([cost(p) for p in PLANS]) - np.log(seconds)

    return least_squares(residuals, CONSTANTS, range(len(PLANS)))


def times(**constants: float) -> np.ndarray:
    cost = replace(BASE, **(TRUE | constants))
    return np.array([cost(p) for p in PLANS])


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("overhead_s", [0.0, 0.02])
def test_exact_times_give_the_constants_back(overlap, overhead_s):
    fit = fitted(times(overlap=overlap, overhead_s=overhead_s))
    for name, value in (TRUE | {"overlap": overlap, "overhead_s": overhead_s}).items():
        assert fit.values[name] == pytest.approx(value, rel=2e-2, abs=2e-3), name
    assert np.abs(fit.residuals).max() < 1e-2


def test_error_bars_cover_the_truth_and_shrink_with_the_noise():
    covered, widths = 0, []
    for noise in (0.08, 0.01):
        errors = []
        for seed in range(12):
            wobble = np.exp(np.random.default_rng(seed).normal(0, noise, len(PLANS)))
            fit = fitted(times() * wobble)
            off = abs(fit.values["eff_compute"] - TRUE["eff_compute"])
            covered += off <= 3 * fit.errors["eff_compute"]
            errors.append(fit.errors["eff_compute"])
        widths.append(np.median(errors))
    assert covered >= 20  # of 24
    assert widths[1] < widths[0] / 3


def test_a_step_that_was_held_up_does_not_bend_the_fit():
    wobble = np.exp(np.random.default_rng(1).normal(0, 0.01, len(PLANS)))
    plain, seconds = fitted(times() * wobble), times() * wobble
    seconds[3] *= 3  # another process took the core
    bent = fitted(seconds)
    assert bent.values["eff_compute"] == pytest.approx(plain.values["eff_compute"], rel=0.05)
    assert np.abs(bent.residuals).argmax() == 3


def test_a_constant_at_its_bound_has_no_error_bar():
    fit = fitted(times(overlap=0.0) * np.exp(np.random.default_rng(0).normal(0, 1e-4, len(PLANS))))
    assert fit.values["overlap"] <= 2e-3


@pytest.mark.parametrize(
    ("residuals", "words"),
    [([0.1, 0.2], "for 4 constants: measure more"), ([0.1, float("nan"), 0.1, 0.1, 0.1], "is not finite")],
)
def test_what_cannot_be_fitted(residuals, words):
    with pytest.raises(CBServeError, match=words):
        least_squares(lambda values: np.array(residuals), CONSTANTS, range(len(residuals)))


def test_contexts_that_are_gathered_cross_memory_three_times():
    step = plan(4, 1, 100)
    once, gathered = replace(BASE, kv_passes=1.0).of(step), BASE.of(step)
    assert gathered.bytes - once.bytes == 2 * 4 * 101 * BASE.model.kv_bytes_per_token(4)
    assert gathered.flops == once.flops
    with pytest.raises(CBServeError, match="kv_passes=0.5"):
        replace(BASE, kv_passes=0.5)


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_a_ramp_gathers_too(overlap):
    cost = replace(BASE, overlap=overlap)
    singly = [cost(plan(4, 1, 100 + step)) for step in range(40)]
    assert list(cost.ramp(plan(4, 1, 100), 40).durations()) == pytest.approx(singly, rel=1e-9)
