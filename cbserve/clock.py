"""Time as an argument: a real clock for measured runs, a virtual one for simulated runs. Seconds from its creation."""

from __future__ import annotations

import math
import time
from typing import Protocol

from cbserve.core.errors import InvalidRequestError

LATEST_S = 1e11  # of a virtual clock; doubles lie 15 us apart there


class Clock(Protocol):
    kind: str  # "measured" or "simulated"

    def now(self) -> float: ...

    def advance(self, duration_s: float) -> None:
        """A step of `duration_s` was computed."""

    def advance_to(self, end_s: float) -> None:
        """Steps were computed, the last of which ends at `end_s`."""

    def wait_until(self, time_s: float) -> None:
        """Nothing to do before `time_s`."""

    def restart(self) -> None:
        """Back to 0: a new run begins."""


class RealClock:
    """`time.perf_counter`, from 0. A step has taken its time already, so `advance` does nothing."""

    kind = "measured"

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def advance(self, duration_s: float) -> None:
        pass

    def advance_to(self, end_s: float) -> None:
        pass

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))


class VirtualClock:
    """Moves only when told: the same inputs give the same trace."""

    kind = "simulated"

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, duration_s: float) -> None:
        if not hasattr(duration_s, "__float__") or not 0 <= duration_s < math.inf:
            raise InvalidRequestError(f"step_time_s gave {duration_s!r}: a step takes a finite number of seconds >= 0")
        self._now += duration_s
        if self._now > LATEST_S:
            raise InvalidRequestError(
                f"a step of {duration_s:.3g} s brings the clock to {self._now:.3g} s, but it counts to {LATEST_S:.0e} "
                "s: look at overhead_s, efficiencies and peaks of the cost model"
            )

    def advance_to(self, end_s: float) -> None:
        self.advance(end_s - self._now)
        self._now = end_s

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)
