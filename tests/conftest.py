"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model, from the cache only: tests never use the network."""
    from cbserve.models.fetch import model_path
    from cbserve.models.weights import load_model

    if model_path("smollm2-135m") is None:
        pytest.skip("SmolLM2-135M is not in the cache; bring it with: python -m cbserve model fetch")
    return load_model("smollm2-135m")


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """A shell starts what runs in its background with SIGINT ignored; tests of Ctrl-C, and what they start, want it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
