from __future__ import annotations

import subprocess
import sys

import pytest

import mainspring


def test_import_brings_nothing_along():
    heavy = ["numpy", "tokenizers", "msgspec", "jinja2", "tqdm", "torch"]
    program = f"import sys, mainspring; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", mainspring.__all__)
def test_names(name):
    assert getattr(mainspring, name) is not None
    assert name in dir(mainspring)


def test_unknown_name():
    with pytest.raises(AttributeError, match="nonsense"):
        mainspring.nonsense  # noqa: B018
