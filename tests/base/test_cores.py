"""How many cores may be used, where the affinity mask and the control groups say different things."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mainspring.base import cores
from mainspring.base.config import EngineArgs, ModelFacts, resolve, usable_cores
from mainspring.base.errors import ConfigError

ONE = "100000 100000\n"
V1 = {"cpu/a/cpu.cfs_quota_us": "150000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}


@pytest.fixture(autouse=True)
def eight_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: 8)


def roots(folder: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    """With this `/proc/self/cgroup`, and these files below `/sys/fs/cgroup`."""
    for name, text in {
        "proc/self/cgroup": lines,
        **{f"cg/{name}": text for name, text in files.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc", folder / "cg"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": ONE}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "500000 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": ONE}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("4:cpu,cpuacct:/a\n1:name=systemd:/\n", V1, 2),
        ("0::/a\n", {"a/cpu.max": "1000000000 100000\n"}, 8),
        ("", {}, 8),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 8),
        ("0::/a\n", {"a/cpu.max": "100000\n"}, 8),
        ("0::/a\n", {"a/cpu.max": "0 0\n"}, 8),
        ("0::/a\n", {"b/cpu.max": ONE}, 8),
        ("no colons\n\n", {"cpu.max": ONE}, 8),
        ("4:cpuacct:/a\n", V1, 8),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_the_least_of_mask_and_quotas(tmp_path: Path, lines: str, files: dict[str, str], expected: int):
    assert cores.usable_cores(*roots(tmp_path, lines, files)) == expected


def test_without_control_groups_the_mask_decides(tmp_path: Path):
    assert cores.usable_cores(tmp_path / "proc", tmp_path / "cg") == 8
    assert cores.cpu_quota(tmp_path / "proc", tmp_path / "cg") is None


def test_threads_beyond_a_quota_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda *roots: 1.5)
    assert usable_cores() == 2
    facts = ModelFacts(path="", architecture="llama", max_position_embeddings=64, vocab_size=8)
    with pytest.raises(ConfigError, match="num_threads 3 must be at most 2"):
        resolve(EngineArgs(num_threads=3), facts)


def test_the_mask_is_the_systems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert cores.allowed_cores() == len(os.sched_getaffinity(0))
