"""A value over the time of a run whose length nobody knows yet."""

from __future__ import annotations

import math


class OverTime:
    """The mean and the highest of a value within equal parts of a run, and its peak.

    At most `MOST` parts are kept. When the run goes beyond them, each two become one: between half and all of them are
    in use. Their width is a power of two of a second, so that it is whole seconds in a run of minutes or days.

    Attributes:
        width_s: seconds of a part.
        peak: the highest value; 0 before the first.
    """

    MOST = 128

    def __init__(self) -> None:
        self.width_s = 2.0**-20
        self.peak: float = 0
        self._start_s = self._end_s = math.nan
        self._areas = [0.0] * self.MOST  # of each part: value x seconds
        self._tops = [0.0] * self.MOST

    def add(self, start_s: float, end_s: float, first: float, last: float) -> None:
        """It went evenly from `first` to `last`, and was 0 since the end of what was added before."""
        if math.isnan(self._start_s):
            self._start_s = start_s
        self._end_s = end_s
        self.peak = max(self.peak, first, last)
        while end_s > self._edge(self.MOST):
            self._double()
        at, part, value = start_s, int((start_s - self._start_s) / self.width_s), first
        while at < end_s:
            until = min(end_s, self._edge(part + 1))
            before, value = value, first + (last - first) * (until - start_s) / (end_s - start_s)
            self._areas[part] += (until - at) * (before + value) / 2
            self._tops[part] = max(self._tops[part], before, value)
            at, part = until, part + 1

    def parts(self) -> list[tuple[float, float, float]]:
        """(middle in seconds, mean, highest value) of each part; the last part ends with the run."""
        found = []
        for part, (area, top) in enumerate(zip(self._areas, self._tops, strict=True)):
            low, high = self._edge(part), min(self._end_s, self._edge(part + 1))
            if low < high:
                found.append(((low + high) / 2, area / (high - low), top))
        return found

    def _edge(self, part: int) -> float:
        return self._start_s + part * self.width_s

    def _double(self) -> None:
        self.width_s *= 2
        pairs = zip(self._areas[::2], self._areas[1::2], strict=True)
        self._areas = [a + b for a, b in pairs] + [0.0] * (self.MOST // 2)
        self._tops = [*map(max, self._tops[::2], self._tops[1::2]), *[0.0] * (self.MOST // 2)]
