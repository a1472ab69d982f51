"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mainspring.checkpoint.catalog import pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct, fetched into the cache if it is not there."""
    return pull("smollm2-135m", progress=False)
