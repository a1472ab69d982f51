"""The folder of a core's sockets: readable by us alone, and not left behind.

It goes when the core ends, by the hand of the core or of who sees its end. Where both were killed it stays;
therefore it is locked as long as the process that made it lives, and who makes the next one removes those
that nobody holds and in which nothing but sockets is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time

from mainspring.base.errors import ConfigError

PREFIX = "mainspring-sockets-"
MAX_BYTES = 90  # of its path: a socket's may have some 107, its name in the folder included
FORGOTTEN_S = 60.0  # a younger one may be about to be locked


class SocketFolder:
    def __init__(self) -> None:
        """Raises `ConfigError` if its path would be too long for sockets."""
        _remove_forgotten(tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        if len(os.fsencode(self.path)) > MAX_BYTES:
            os.rmdir(self.path)
            raise ConfigError(
                f"the folder for temporary files is too long for sockets ({tempfile.gettempdir()}): "
                "set TMPDIR to a shorter one, or in_process=True"
            )
        self._locks = [os.open(self.path, os.O_RDONLY)]  # emptied by whoever removes the folder
        fcntl.flock(self._locks[0], fcntl.LOCK_SH)

    def remove(self) -> None:
        """Idempotent, and for any thread: an end may be seen by one while another brings it about."""
        if self._locks:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(IndexError):
                os.close(self._locks.pop())


def _remove_forgotten(parent: str) -> None:
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX):
            continue
        with contextlib.suppress(OSError):  # it is gone, it is not ours, or it is held
            facts = entry.stat(follow_symlinks=False)
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > FORGOTTEN_S:
                _remove_unless_held(entry.path)


def _remove_unless_held(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = os.listdir(folder)
        if all(stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode) for name in names):
            for name in names:
                os.unlink(name, dir_fd=folder)
            os.rmdir(path)
    finally:
        os.close(folder)
