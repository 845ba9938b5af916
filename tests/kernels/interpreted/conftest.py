"""These tests run in Triton's interpreter, on CPU tensors; `tests/kernels/test_interpreter.py` starts them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cbserve.kernels.jit import interpreting


@pytest.fixture(autouse=True, scope="session")
def poisoned() -> Iterator[None]:
    """Memory that is allocated and not written is NaN, or the largest integer."""
    assert interpreting(), "these tests need TRITON_INTERPRET=1, in a process of their own: run test_interpreter.py"
    # Not use_deterministic_algorithms, which imports torch's compiler, for seconds.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(2).isnan().all() and torch.ones(2).new_empty(2).isnan().all()
    yield
