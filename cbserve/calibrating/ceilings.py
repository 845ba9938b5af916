"""What a device reaches at best: a large matrix product and a large copy. The efficiencies are shares of these two."""

from __future__ import annotations

from collections.abc import Callable

import torch

_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}  # far beyond any cache
_MATRIX = {"cpu": 1024, "cuda": 8192}


class Ceilings:
    """The best matrix product and the best copy so far: `flops` and `bytes_s`, in a second.

    A copy counts what is read and what is written. `timer` gives seconds.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, timer: Callable[[], float]) -> None:
        kind, self._timer = device.type, timer
        self._is_cuda, self.flops, self.bytes_s = kind == "cuda", 0.0, 0.0
        self._size, self._copied = _MATRIX[kind], 2 * _COPY_BYTES[kind]
        self._a, self._b = (torch.randn(self._size, self._size, dtype=dtype, device=device) for _ in range(2))
        self._source = torch.ones(_COPY_BYTES[kind] // dtype.itemsize, dtype=dtype, device=device)
        self._target = torch.empty_like(self._source)

    def measure(self) -> None:
        self.flops = max(self.flops, 2 * self._size**3 / self._seconds(lambda: self._a @ self._b))
        self.bytes_s = max(self.bytes_s, self._copied / self._seconds(lambda: self._target.copy_(self._source)))

    def _seconds(self, run: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(3):
            self._wait()
            began = self._timer()
            run()
            self._wait()
            best = min(best, self._timer() - began)
        return best

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
