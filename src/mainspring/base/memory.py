"""How much memory is free: on the machine, and within the control groups that this process is in."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still allocate: free on the machine, and free within its control groups."""
    return min([_machine_free_bytes(proc), *_cgroup_free_bytes(proc, cgroups)])


def _machine_free_bytes(proc: Path) -> int:
    if (meminfo := _read(proc / "meminfo")) is not None:
        for line in meminfo.splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    # all there is: nothing better is known here
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_free_bytes(proc: Path, cgroups: Path) -> list[int]:
    """Limit minus use of the process's memory group and of each group above it, where they have limits.

    Page cache that can be dropped (`inactive_file`) counts as free: a model's mapped file is much of it.
    """
    found: list[int] = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, use_name = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, use_name = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(root):
                break
            limit, use = _number(directory / limit_name), _number(directory / use_name)
            if limit is not None and use is not None:
                found.append(max(0, limit - use + _inactive_file_bytes(directory)))
    return found


def _inactive_file_bytes(directory: Path) -> int:
    for line in (_read(directory / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # not there on this platform, or not for us to read: then it says nothing
        return None
