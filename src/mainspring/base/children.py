"""For processes of ours that are started like any program."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

import mainspring


def python_path() -> str:
    """`PYTHONPATH` for a child, so that it finds the package that runs here, wherever that came from. An
    installed one it finds by itself, and a folder of packages must not come before the standard library."""
    root = str(Path(mainspring.__file__).parents[1])
    inherited = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return inherited
    return os.pathsep.join(filter(None, [root, inherited]))
