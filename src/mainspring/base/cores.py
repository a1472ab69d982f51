"""How many cores this process may use: those it may run on, and what its control groups' quotas are worth.

A container is often given "two processors" as a share of time on a machine of many cores. As many threads as
cores would then stand still together, for most of every period, as soon as the share is used up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def allowed_cores() -> int:
    """Cores that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Cores' worth of time that the process's control groups, and those above them, allow; None: no limit."""
    return min(_quotas(proc, cgroups), default=None)


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The lesser of both, at least 1. A part of a core counts as one."""
    quota = cpu_quota(proc, cgroups)
    return allowed_cores() if quota is None else max(1, min(allowed_cores(), math.ceil(quota)))


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """Lines are "number:controllers:path"; version 2 has no controllers. In a container the path may be one
    of the host's, of which only the root is to be seen."""
    for line in _words(proc / "self" / "cgroup", "\n"):
        _, colon, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if colon and controllers == "":
            root, files = cgroups, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, files = cgroups / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(root):
                break
            words = [word for name in files for word in _words(directory / name)]
            if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # not "max", not -1
                yield int(words[0]) / int(words[1])


def _words(path: Path, separator: str | None = None) -> list[str]:
    try:
        return path.read_text().strip().split(separator)
    except OSError:  # not there on this platform, or not for us to read: then it limits nothing
        return []
