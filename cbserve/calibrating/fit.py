"""Least squares of a few bounded constants, with error bars. Nothing here knows what is fitted.

Levenberg-Marquardt (Marquardt 1963) with derivatives by finite differences; a large residual counts linearly (Huber
1964), so that a step that was held up by another process does not bend the fit. Error bars are those of a jackknife
(Efron & Tibshirani 1993, chapter 11): each group of measurements is left out once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbserve.core.errors import InvalidRequestError

Array = NDArray[np.float64]
_HUBER = 1.345 * 1.4826  # times the median absolute residual: 95 % efficient where errors are normal


@dataclass(frozen=True, slots=True)
class Constant:
    """What is to be fitted: where to begin, between which bounds, and a step that changes residuals visibly."""

    start: float
    low: float
    high: float
    step: float


@dataclass(frozen=True)
class Fit:
    """`values` and `errors` (one standard error) by name, and `residuals` at the end."""

    values: dict[str, float]
    errors: dict[str, float]
    residuals: Array


def least_squares(
    residuals: Callable[[Mapping[str, float]], Array],
    constants: Mapping[str, Constant],
    groups: Sequence[Hashable],
    max_rounds: int = 30,
    tolerance: float = 1e-4,
    polish: int = 0,
) -> Fit:
    """The constants with the smallest residuals.

    Args:
        residuals: constants by name -> one number for each measurement, usually log(predicted / measured): a relative
            error, so that short and long steps count alike.
        groups: for each measurement, what it belongs to; a jackknife leaves out one group at a time.
        tolerance: stop when a round improves the sum of squares by a smaller share.
        polish: at most so many evaluations of a search without derivatives afterwards. Residuals that are a staircase,
            those of a simulated run for instance, need it, and steps that are wider than its treads.

    Raises:
        InvalidRequestError: fewer measurements than constants, or a residual that is not finite.
    """
    names = list(constants)
    low, high, steps = (np.array([getattr(c, f) for c in constants.values()]) for f in ("low", "high", "step"))

    def at(x: Array) -> Array:
        found = np.asarray(residuals(dict(zip(names, map(float, x), strict=True))), dtype=np.float64)
        if not np.isfinite(found).all():
            raise InvalidRequestError("a residual is not finite: a measured or predicted time is 0, or not a number")
        return found

    x = np.clip([c.start for c in constants.values()], low, high)
    r = at(x)
    if len(r) < len(names) or len(groups) != len(r):
        raise InvalidRequestError(
            f"{len(r)} measurements ({len(groups)} with a group) for {len(names)} constants: measure more"
        )
    jacobian, damping = _jacobian(at, x, r, steps, high), 1e-3
    for _ in range(max_rounds):
        weights = _weights(r)
        before = float(weights @ r**2)
        for _ in range(8):
            trial = _step(x, r, jacobian, weights, low, high, damping)
            there = at(trial)
            if float(weights @ there**2) < before:
                break
            damping *= 6
        else:
            break  # no direction helps any more
        x, r, damping = trial, there, damping / 6
        jacobian = _jacobian(at, x, r, steps, high)
        if float(weights @ r**2) > (1 - tolerance) * before:
            break
    if polish:
        x, r = _polish(at, x, r, jacobian, steps, low, high, polish)
    errors = _jackknife(x, r, jacobian, groups, low, high)
    return Fit(dict(zip(names, x.tolist(), strict=True)), dict(zip(names, errors.tolist(), strict=True)), r)


def _polish(
    at: Callable[[Array], Array],
    x: Array,
    r: Array,
    jacobian: Array,
    steps: Array,
    low: Array,
    high: Array,
    most: int,
) -> tuple[Array, Array]:
    """Compass search (Hooke & Jeeves 1961) along the axes of the linearised problem, the valley's floor among them."""
    scaled = jacobian * steps
    axes = np.linalg.eigh(scaled.T @ scaled)[1].T * steps
    limit, size = _HUBER * float(np.median(np.abs(r))), 1.0
    best = _loss(r, limit)
    while size > 0.05:
        improved = False
        for axis in (*axes, *-axes):
            if most <= 0:
                return x, r
            trial = np.clip(x + size * axis, low, high)
            there, most = at(trial), most - 1
            if (loss := _loss(there, limit)) < best:
                x, r, best, improved = trial, there, loss, True
        size /= 1 if improved else 2
    return x, r


def _loss(r: Array, limit: float) -> float:
    """Huber's: squares up to `limit`, then linear."""
    size = np.abs(r)
    return float(np.where(size <= limit, size**2, limit * (2 * size - limit)).sum())


def _weights(r: Array) -> Array:
    limit = max(_HUBER * float(np.median(np.abs(r))), 1e-9)
    return np.minimum(1.0, limit / np.maximum(np.abs(r), 1e-12))


def _jacobian(at: Callable[[Array], Array], x: Array, r: Array, steps: Array, high: Array) -> Array:
    columns = []
    for i, step in enumerate(steps):
        step = step if x[i] + step <= high[i] else -step
        moved = x.copy()
        moved[i] += step
        columns.append((at(moved) - r) / step)
    return np.stack(columns, axis=1)


def _step(x: Array, r: Array, jacobian: Array, weights: Array, low: Array, high: Array, damping: float) -> Array:
    """Towards the minimum of the linearised problem; a constant that a bound stops stays there, the others go on."""
    free = np.ones(len(x), dtype=bool)
    for _ in range(len(x)):
        j = jacobian[:, free]
        normal = (j.T * weights) @ j
        normal += damping * np.diag(np.diag(normal)) + 1e-15 * np.eye(len(normal))
        move = np.zeros(len(x))
        move[free] = -np.linalg.solve(normal, (j.T * weights) @ r)
        stopped = free & (((x <= low) & (move < 0)) | ((x >= high) & (move > 0)))
        if not stopped.any():
            break
        free &= ~stopped
        if not free.any():
            return x
    else:
        move[~free] = 0.0
    return np.clip(x + move, low, high)


def _jackknife(x: Array, r: Array, jacobian: Array, groups: Sequence[Hashable], low: Array, high: Array) -> Array:
    """Standard errors: the linearised fit again without each group, sqrt((g - 1) / g x sum of squared deviations)."""
    weights, labels = _weights(r), np.array([hash(g) for g in groups])
    found = []
    for label in dict.fromkeys(labels.tolist()):
        kept = labels != label
        if kept.sum() >= len(x):
            found.append(_step(x, r[kept], jacobian[kept], weights[kept], low, high, 0.0))
    if len(found) < 2:
        return np.full(len(x), np.nan)
    deviations = np.array(found) - np.mean(found, axis=0)
    return np.asarray(np.sqrt((len(found) - 1) / len(found) * (deviations**2).sum(axis=0)))
