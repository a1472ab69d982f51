"""What a test leaves: processes, descriptors, threads, shared memory; compared with what it found.

Every process that is started meanwhile, by whomever, inherits a mark in its environment. Linux only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "MAINSPRING_TEST_MARK"
LEAVING_BOUND_S = 5.0


class Surroundings:
    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._files = _open_files()
        self._threads = _threads()
        self._zombies = _zombies()
        self._shared_memory = _shared_memory()

    def pids(self, command: str = "") -> list[int]:
        """Of the processes that were started meanwhile and whose command line has these words."""
        others = [entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
        named = [pid for pid in others if command.encode() in _read(pid, "cmdline")]
        return sorted(int(pid) for pid in named if self.mark.encode() in _read(pid, "environ"))

    @property
    def workers(self) -> list[int]:
        """In the order in which they were started."""
        return self.pids("mainspring.worker.proc")

    def remains(self) -> list[str]:
        left = [f"process {pid}: {_read(str(pid), 'cmdline')!r}" for pid in self.pids()]
        left += [f"zombie {pid}" for pid in _zombies() - self._zombies]
        left += [f"descriptor {name}" for name in _open_files() - self._files]
        left += [f"thread {name}" for name in _threads() - self._threads]
        return left + [f"shared memory {name}" for name in _shared_memory() - self._shared_memory]

    def assert_clean(self, timeout_s: float = LEAVING_BOUND_S) -> None:
        wait_until(lambda: not self.remains(), timeout_s, lambda: f"this is left: {self.remains()}")


def wait_until(is_true: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s, otherwise()
        time.sleep(0.01)


@contextmanager
def watched_surroundings() -> Iterator[Surroundings]:
    """At the end nothing may be left, and processes that are left are killed."""
    before = os.environ.get(MARK)
    surroundings = Surroundings()
    os.environ[MARK] = surroundings.mark
    try:
        yield surroundings
        surroundings.assert_clean()
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        for pid in surroundings.pids():
            os.kill(pid, signal.SIGKILL)


def _read(pid: str, name: str) -> bytes:
    """Empty where it has ended meanwhile, is a zombie, or is not ours."""
    try:
        return Path("/proc", pid, name).read_bytes()
    except OSError:
        return b""


def _open_files() -> set[str]:
    """Descriptors and where they lead; that of the listing itself leads nowhere any more."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.is_alive()}


def _zombies() -> set[int]:
    children = [
        pid
        for task in os.listdir("/proc/self/task")
        for pid in _read("self", f"task/{task}/children").decode().split()
    ]
    return {int(pid) for pid in children if b") Z " in _read(pid, "stat")}


def _shared_memory() -> set[str]:
    """Of our making: this machine may have others."""
    return {name for name in os.listdir("/dev/shm") if "mainspring" in name}
