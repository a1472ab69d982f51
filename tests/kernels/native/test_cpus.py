"""How many threads start where nobody said: control groups may allow less than the affinity mask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

native = pytest.importorskip("mainspring_native")


def usable(folder: Path, lines: str, files: dict[str, str]) -> int:
    """With this `/proc/self/cgroup`, and these files below `/sys/fs/cgroup`."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(lines)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found: int = native.num_usable_cpus(str(folder / "proc"), str(folder / "cgroup"))
    return found


ONE = "100000 100000\n"


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": ONE}),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": ONE}),
        ("0::/\n", {"cpu.max": "50000 100000\n"}),
        ("0::/of/the/host\n", {"cpu.max": ONE}),
        (
            "4:cpu,cpuacct:/a\n1:name=systemd:/\n",
            {"cpu/a/cpu.cfs_quota_us": "1", "cpu/a/cpu.cfs_period_us": "9"},
        ),
        ("4:cpuacct,cpu:/a\n0::/\n", {"cpu/cpu.cfs_quota_us": "9000", "cpu/cpu.cfs_period_us": "9000"}),
    ],
)
def test_the_least_quota_counts(lines: str, files: dict[str, str], tmp_path: Path) -> None:
    """Of the process's own group and of all above it, in both versions."""
    assert usable(tmp_path, lines, files) == 1


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        ("", {}),
        ("0::/\n", {}),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}),
        ("0::/a\n", {"a/cpu.max": "1000000000 100000\n"}),
        ("0::/a\n", {"a/cpu.max": ""}),
        ("0::/a\n", {"a/cpu.max": "100000\n"}),
        ("0::/a\n", {"b/cpu.max": ONE}),
        ("no colons\n\n", {"cpu.max": ONE}),
        ("4:cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "1", "cpu/a/cpu.cfs_period_us": "9"}),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}),
    ],
)
def test_without_a_quota_the_affinity_mask_does(lines: str, files: dict[str, str], tmp_path: Path) -> None:
    assert usable(tmp_path, lines, files) == len(os.sched_getaffinity(0))
