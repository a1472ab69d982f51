"""What is free, where a machine and its control groups say different things."""

from __future__ import annotations

from pathlib import Path

import pytest

from mainspring.base.memory import free_memory_bytes
from mainspring.models import weights
from mainspring.worker import worker

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:  99 kB\nMemAvailable:    8388608 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", "cg/memory.max": "max\n", "cg/memory.current": "5\n"}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/memory.max": f"{3 * GIB}\n",
                "cg/a/memory.current": f"{2 * GIB}\n",
                "cg/a/memory.stat": f"anon 7\ninactive_file {GIB}\n",
                "cg/a/b/memory.max": "max\n",
                "cg/a/b/memory.current": f"{2 * GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n7:memory:/x\n",
                "cg/memory/x/memory.limit_in_bytes": f"{GIB}\n",
                "cg/memory/x/memory.usage_in_bytes": "1000\n",
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/memory/memory.usage_in_bytes": "2000\n",
            },
            GIB - 1000,
        ),
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": "100\n", "cg/memory.current": "300\n"},
            0,
        ),
    ],
)
def test_free_memory_is_the_least_of_machine_and_control_groups(tmp_path, files, expected):
    write(tmp_path, {**MEMINFO, **files})
    assert free_memory_bytes(tmp_path / "proc", tmp_path / "cg") == expected


def test_free_memory_where_there_is_no_proc(tmp_path):
    assert free_memory_bytes(tmp_path, tmp_path) > 2**20


def test_free_memory_of_this_machine():
    assert free_memory_bytes() > 2**20


def test_weights_and_pool_are_measured_alike():
    assert weights.free_memory_bytes is worker.free_memory_bytes is free_memory_bytes
