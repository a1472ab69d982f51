"""A file's bytes in memory, read when they are touched; and what is said where that cannot be."""

from __future__ import annotations

import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np

from mainspring.base.errors import CheckpointError


class MappedFile:
    """A file, mapped: its bytes as `buffer`, and as the array `bytes`. Raises `CheckpointError`; `what` was
    expected, as "a GGUF file"."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.buffer = _map(path, what)
        self.bytes = np.frombuffer(self.buffer, np.uint8)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def drop_pages(self) -> None:
        """Take the file's pages out of this process's memory; they are read again when touched."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Idempotent. Views that were given out stay valid: the map itself goes with the last of them."""
        self.bytes = np.empty(0, np.uint8)
        with suppress(BufferError):  # a view is still in use
            self.buffer.close()


def _map(path: Path, what: str) -> mmap.mmap:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is a device or a pipe; expected {what}")
            if status.st_size == 0:
                raise CheckpointError(f"{path}: the file is empty; expected {what}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except IsADirectoryError:
        raise CheckpointError(f"{path}: is a directory; expected {what}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except CheckpointError:  # which is a ValueError, too
        raise
    except (OSError, ValueError) as error:  # no permission, a name with a null byte
        why = getattr(error, "strerror", None) or error  # without the path, which is named already
        raise CheckpointError(f"{path}: cannot be read as a file: {why}") from None


def _open_at_once(path: str, flags: int) -> int:
    """A pipe would be waited for until somebody writes to it; for files the flag has no meaning."""
    return os.open(path, flags | os.O_NONBLOCK)
