"""How many threads make the matrix products of a step fastest, here and now."""

from __future__ import annotations

import functools
import statistics
import time

import torch
import torch.nn.functional as F

_BUDGET_S = 0.12
_MOST = torch.get_num_threads()  # before an engine sets it for the whole process


@functools.cache
def choose_num_threads() -> int:
    """1, 2, 4, ... or as many as torch would take (cores, affinity and OMP_NUM_THREADS allow): the fastest of them.

    Measured once in a process, in under 0.3 s, on a chain of small matrix products such as one decode step has. More
    threads are not always faster: where another process uses a core, each product waits for the thread that shares it.
    """
    before, most = torch.get_num_threads(), _MOST
    candidates = sorted({1, most, *(2**i for i in range(1, most.bit_length()))})
    if most == 1:
        return 1
    x = torch.ones(8, 576, dtype=torch.float32)
    weights = [torch.ones(1536, 576, dtype=torch.float32) for _ in range(4)]
    times: dict[int, list[float]] = {count: [] for count in candidates}
    try:
        stop = time.perf_counter() + _BUDGET_S
        # In turns, so that what else the machine does meets all alike. The first turn also starts the threads.
        while time.perf_counter() < stop or not all(times.values()):
            for count in candidates:
                torch.set_num_threads(count)
                began = time.perf_counter()
                for weight in weights:
                    F.linear(x, weight)
                times[count].append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    # The median, not the best: being held up is what we want to know. A thread must pay for itself.
    best = 1
    for count in candidates:
        if statistics.median(times[count]) < 0.95 * statistics.median(times[best]):
            best = count
    return best
