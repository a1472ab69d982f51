"""Which native library is used, and what is said of one that is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from mainspring.base.errors import ConfigError
from mainspring.kernels.native import API_VERSION, NativeOps, library, why_not


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    module = ModuleType("mainspring_native")
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, "mainspring_native", module)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, r"another version \(its API is 0, expected \d+\); pip install --upgrade"),
        ({"API_VERSION": API_VERSION + 1}, "another version"),
        (
            {"API_VERSION": API_VERSION, "runnable_variants": list},
            "this processor has none of the instruction sets",
        ),
    ],
)
def test_a_library_of_no_use_is_as_good_as_none(
    attributes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **attributes)
    assert library() is None
    with pytest.raises(ConfigError, match=f"kernels native: .*{expected}.*; or use kernels numpy"):
        NativeOps(16)


def test_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mainspring_native", None)
    assert library() is None
    assert "mainspring-native is not installed" in why_not()
