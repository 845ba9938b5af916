"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model, from the cache only: tests never use the network."""
    from cbserve.models.weights import load_model, model_path

    if model_path("smollm2-135m") is None:
        pytest.skip("SmolLM2-135M is not in the cache; bring it with: python -m cbserve model fetch")
    return load_model("smollm2-135m")
