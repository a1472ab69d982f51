"""The floors of the house: imports go down, and rooms of one floor do not know each other.

Deferred and typing-only imports count, for a reader has to follow them too. `ROOMS` is the plan's table; a
room or an arrow that is not in it is a failure, so whoever adds one changes the table in the same commit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "mainspring"


class Room(NamedTuple):
    floor: int
    rooms: set[str]  # of ours, that it may import
    others: set[str]  # distributions beside the standard library


ARRAYS = {"numpy", "msgspec"}
BELOW_BENCH = {
    *("base", "core", "kernels", "checkpoint", "grammar", "transfer"),
    *("models", "worker", "executor", "engine", "frontend"),
}
ROOMS = {
    "base": Room(0, set(), ARRAYS),
    "core": Room(1, {"base"}, ARRAYS),
    "kernels": Room(1, {"base"}, {"numpy", "mainspring_native"}),
    "checkpoint": Room(1, {"base"}, {"numpy", "msgspec", "safetensors", "huggingface_hub", "tqdm"}),
    "grammar": Room(1, {"base"}, ARRAYS | {"llguidance"}),
    "transfer": Room(1, {"base"}, ARRAYS | {"zmq"}),
    "models": Room(2, {"base", "kernels", "checkpoint"}, ARRAYS),
    "worker": Room(3, {"base", "kernels", "models", "transfer"}, ARRAYS | {"tqdm"}),
    "executor": Room(4, {"base", "worker"}, ARRAYS),
    "engine": Room(5, {"base", "core", "grammar", "transfer", "executor"}, ARRAYS | {"zmq"}),
    "frontend": Room(
        6,
        {"base", "checkpoint", "grammar", "engine"},
        ARRAYS | {"tokenizers", "jinja2", "tqdm", "opentelemetry"},
    ),
    "server": Room(
        7, {"base", "checkpoint", "frontend"}, ARRAYS | {"starlette", "uvicorn", "prometheus_client"}
    ),
    "bench": Room(7, BELOW_BENCH, ARRAYS | {"tqdm"}),
    "testing": Room(7, BELOW_BENCH, ARRAYS),
    "cli": Room(8, BELOW_BENCH | {"server", "bench", "testing"}, ARRAYS | {"tqdm", "uvloop", "yaml"}),
}
DEVICE_FILES = {"torch_ops.py", "collectives.py"}  # and the folder triton/: where kernels may name torch
BLIND = {  # what a room must not know of the standard library
    "core": {"socket", "select", "time", "threading", "multiprocessing", "subprocess", "asyncio"},
    "base": {"socket", "select", "time", "multiprocessing", "subprocess", "asyncio"},
}


class Arrow(NamedTuple):
    path: Path
    line: int
    target: str  # dotted name of the module


def arrows(root: Path) -> Iterator[Arrow]:
    """Every import below `root`, wherever in a file it stands, `import_module("...")` included."""
    for path in sorted(root.rglob("*.py")):
        package = (root.name, *path.relative_to(root).parent.parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            match node:
                case ast.Import(names=names):
                    targets = [alias.name for alias in names]
                case ast.ImportFrom(module=module, names=names, level=level):
                    above = list(package[: len(package) - level + 1]) if level else []
                    base = ".".join([*above, *([module] if module else [])])
                    # `from mainspring import x` names the room in x
                    targets = [f"{base}.{alias.name}" for alias in names] if base == root.name else [base]
                case ast.Call(
                    func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    targets = [name]
                case _:
                    continue
            yield from (Arrow(path, node.lineno, target) for target in targets)


def room_of(path: Path, root: Path) -> str | None:
    """The room a file is in; None for the package's own `__init__.py` and `__main__.py`."""
    first = path.relative_to(root).parts[0].removesuffix(".py")
    return None if first.startswith("__") else first


def stairs_climbed(root: Path) -> list[str]:
    problems = []
    for path, line, target in arrows(root):
        room = room_of(path, root)
        where = f"{path.relative_to(root)}:{line}"
        if room is None:
            continue
        if room not in ROOMS:
            problems.append(f"{where}: the plan has no room {room}")
            continue
        top, *rest = target.split(".")
        if top == root.name:
            other = rest[0] if rest else ""
            if other in ROOMS and other != room and other not in ROOMS[room].rooms:
                problems.append(f"{where}: {room} may not import {other}")
        elif top in sys.stdlib_module_names:
            if top in BLIND.get(room, ()):
                problems.append(f"{where}: {room} must not know {top}")
        elif top in {"torch", "triton"}:
            if room != "kernels" or not (path.name in DEVICE_FILES or path.parent.name == "triton"):
                problems.append(f"{where}: {top} outside the kernels' device files")
        elif top not in ROOMS[room].others:
            problems.append(f"{where}: {room} may not import {top}")
    return problems


def test_imports_go_down():
    assert stairs_climbed(PACKAGE) == []


def test_the_table_itself_goes_down():
    for name, room in ROOMS.items():
        for other in room.rooms:
            assert ROOMS[other].floor < room.floor, f"{name} -> {other}"


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("core/a.py", "import mainspring.worker.worker", "core may not import worker"),
        ("core/a.py", "def f():\n    from mainspring.kernels import ops", "core may not import kernels"),
        ("core/a.py", "if TYPE_CHECKING:\n    from mainspring import engine", "core may not import engine"),
        ("core/a.py", "from ..engine import core", "core may not import engine"),
        (
            "core/a.py",
            "import importlib\nimportlib.import_module('mainspring.cli')",
            "core may not import cli",
        ),
        ("core/a.py", "from time import monotonic", "core must not know time"),
        ("worker/a.py", "import torch.cuda", "torch outside the kernels' device files"),
        ("frontend/a.py", "import requests", "frontend may not import requests"),
        ("bench/a.py", "from mainspring.testing import fake_model", "bench may not import testing"),
        ("attic/a.py", "import os", "the plan has no room attic"),
    ],
)
def test_a_climb_is_seen(tmp_path: Path, file: str, text: str, complaint: str):
    path = tmp_path / "mainspring" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert [problem.split(": ", 1)[1] for problem in stairs_climbed(tmp_path / "mainspring")] == [complaint]


def test_what_is_allowed_is_not_seen(tmp_path: Path):
    for file, text in {
        "core/a.py": "import heapq\nimport msgspec\nfrom mainspring.base import messages\nfrom . import b",
        "kernels/torch_ops.py": "import torch",
        "kernels/triton/norm.py": "import triton",
        "cli/a.py": "from mainspring.bench import scheduler",
        "__init__.py": "from mainspring.frontend.llm import LLM",
    }.items():
        path = tmp_path / "mainspring" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert stairs_climbed(tmp_path / "mainspring") == []


WATCHED_IMPORT = """
import importlib, pkgutil, sys

class Watch:
    '''Sees every attempt, also those that an `except ImportError` would hide.'''
    tried = set()
    def find_spec(self, name, path=None, target=None):
        if name in {"torch", "triton", "mainspring_native"}:
            self.tried.add(name)

sys.meta_path.insert(0, Watch())
for room in sys.argv[1:]:
    package = importlib.import_module("mainspring." + room)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(module.name)
print(*sorted(Watch.tried))
"""


def test_import_loads_neither_torch_nor_native_kernels():
    """They are loaded when a device is opened, not because somebody looked at the engine."""
    quiet = ("base", "core", "engine", "frontend", "server", "cli")
    there = [name for name in quiet if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()]
    assert {"base", "core", "engine", "frontend", "cli"} <= set(there)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, *there],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "statement", ["import mainspring", "import mainspring.cli", "from mainspring.cli import main"]
)
def test_import_is_lean(statement: str):
    """Arrays and tokenizers are loaded by the first use of `LLM`, so that `--help` and `import` are quick."""
    show = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert {"numpy", "tokenizers", "jinja2"} & set(done.stdout.split()) == set()
