"""What tests of several rooms share."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring.checkpoint.catalog import pull


def pytest_configure() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that; tests
    of Ctrl-C need it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """A program sets up the package's logger for its process, which here runs other tests after it."""
    logger = logging.getLogger("mainspring")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct, fetched into the cache if it is not there."""
    return pull("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The file of Gemma 3 270M, likewise."""
    return pull("gemma3-270m", progress=False)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, likewise."""
    return pull("all-minilm-l6-v2", progress=False)
