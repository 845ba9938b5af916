"""What a calibration is worth, and what a target that was missed tells: in words, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cbserve.calibration import CPU_TIME_COMMAND, Calibration

if TYPE_CHECKING:
    from cbserve.calibrating.measured_run import Agreement

# The target of TPOT in `twin.TARGETS`: what moves a step by more can miss it alone.
_STEP = 0.10
# Constants take each other's place in part, so a prediction is better than the bar of a single one suggests. Seen: at
# most 14 % where the twin kept its targets, 41 % of an efficiency where it missed three of four.
_BAR = 0.25
# An engine has at most one runnable thread a core; half a process more may be the system's own.
_OTHERS = 0.5


def doubts(calibration: Calibration) -> str:
    """Why its constants may predict badly, and what to do; "" where nothing speaks against them."""
    found = [*_wide(calibration), *_off(calibration), *_busy(calibration)]
    if not found:
        return ""
    if calibration.is_cpu_time:
        cure = "when the machine is quiet, and for longer: --budget 120"
    else:
        cure = f"when the machine is quiet; or by CPU time, which counts no other process: {CPU_TIME_COMMAND}"
    return (
        f"Take these constants with care: {'; '.join(found)}. A prediction from them may miss its targets. Measure "
        f"again {cure}"
    )


def _wide(calibration: Calibration) -> list[str]:
    shortest = min((p.seconds for p in calibration.points if not p.kind.startswith("swap")), default=math.inf)
    limits = {name: _BAR * value for name, value in calibration.values.items()}
    limits |= {"overlap": _BAR, "overhead_s": _STEP * shortest}  # overlap is a share of 1; overhead is in every step
    wide = [name for name, error in calibration.errors.items() if not error <= limits.get(name, math.inf)]
    said = [f"{name} is {text}" for name, text in calibration.constants() if name in wide]
    return [f"{' and '.join(said)}, so other values fit nearly as well"] if said else []


def _off(calibration: Calibration) -> list[str]:
    off = calibration.median_error
    return [f"half of the steps are more than {off:.0%} off the fit"] if off > _STEP else []


def _busy(calibration: Calibration) -> list[str]:
    load, cores = (calibration.environment.get(name) for name in ("load_average", "cores"))
    if calibration.is_cpu_time or load is None or cores is None or load <= cores + _OTHERS:
        return []
    where = f"load average {load:.1f} on {cores} core{'s' * (cores != 1)}"
    return [f"others used the machine ({where}), and a step takes less time without them"]


def verdict(agreement: Sequence[Agreement], before: float, after: float, is_cpu_time: bool = False) -> str:
    """What targets kept or missed tell of the prediction.

    Args:
        before, after: how much longer a step took than in the calibration, before the run and after it.
    """
    missed = ", ".join(row.name for row in agreement if not row.is_kept)
    steps = f"a step took {before:+.0%} before the run and {after:+.0%} after it, compared with the calibration"
    has_changed = max(abs(before), abs(after)) > _STEP
    if not missed and not has_changed:
        return "Every target is kept."
    if not missed:
        return f"Every target is kept, although {steps}: another run may miss them."
    if not has_changed:
        return (
            f"Missed: {missed}. The machine was as fast as when it was calibrated: {steps}. Either it was held up in "
            "between (--repeat 3 takes the median of three runs), or the cost model does not describe it."
        )
    quiet = "when the machine is quiet" + ("" if is_cpu_time else ", or with --cpu-time")
    if min(before, after) > _STEP or max(before, after) < -_STEP:
        was = "slower" if before > 0 else "faster"
        return (
            f"Missed: {missed}. The machine was {was} than when it was calibrated: {steps}. That says nothing of the "
            f"cost model; measure it anew with --calibrate, {quiet}."
        )
    return (
        f"Missed: {missed}. The speed of the machine changed: {steps}. That tells of what else runs here, and nothing "
        f"of the cost model; repeat it {quiet}."
    )
