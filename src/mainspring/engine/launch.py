"""Starts an engine core in a process of its own, and sees it to its end.

`python -m mainspring.engine.proc` is started like any program, never by multiprocessing's spawn: a script
without a main guard, a notebook and `python -` must work. Its standard input is a pipe that carries the
configuration and then stays open, so that it sees our end; a second pipe carries HELLO, READY or FAILED back.

It leads a session of its own: Ctrl-C in a terminal is for us, who may only want an answer to stop.

The folder of the sockets is removed by whoever of the two sees the child's end (`socket_folder.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgspec

from mainspring.base import errors
from mainspring.base.children import python_path
from mainspring.base.config import EngineConfig
from mainspring.base.errors import ConfigError, EngineDeadError, EngineError
from mainspring.engine.proc import HANDSHAKE_VERSION, Failed, Hello, LaunchConfig, Ready
from mainspring.engine.socket_folder import SocketFolder

READY_TIMEOUT_S = 600.0
LOOK_S = 0.1  # how often is looked whether a start was given up
KILL_AFTER_S = 5.0  # beyond what draining may take
GIVE_UP_S = 1.0  # for a child that does not serve yet: nobody's request ends with it
NUM_FILES = 28  # descriptors that must be free, half of which are used: a socket that gets none may abort
_Message = Hello | Ready | Failed
ConfigSource = EngineConfig | Callable[[], EngineConfig]  # a function is called once it is needed


class CoreAddress(msgspec.Struct, array_like=True, frozen=True):
    """What a front end in another process must know to join a running core."""

    pid: int
    input_address: str
    output_addresses: list[str]  # by client index
    ready: Ready


class CoreProcess:
    """A running core. `close` ends it; so does our own end, in whatever way."""

    def __init__(
        self,
        config: ConfigSource,
        *,
        num_clients: int = 1,
        shutdown_timeout_s: float = 0.0,
        given_up: threading.Event | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Returns once it is ready. `inherited`: descriptors that the process gets besides.

        Raises what it raised: `ConfigError`, `CheckpointError`, or `EngineDeadError` with the process's end
        and its cause. It is ended if anything is raised here, also by Ctrl-C, and if another thread sets
        `given_up` meanwhile.
        """
        _check_open_files(NUM_FILES + 4 * num_clients)
        self._folder = SocketFolder()
        self.input_address = f"ipc://{self._folder.path}/input"
        self.output_addresses = [f"ipc://{self._folder.path}/output-{i}" for i in range(num_clients)]
        self._shutdown_timeout_s = shutdown_timeout_s
        self._given_up = given_up
        read_end, write_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                # -P: what lies in the current folder must not be taken for a module.
                [sys.executable, "-P", "-m", "mainspring.engine.proc", str(write_end), self._folder.path],
                stdin=subprocess.PIPE,
                pass_fds=(write_end, *inherited),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        except BaseException:
            os.close(read_end)
            self._folder.remove()
            raise
        finally:
            os.close(write_end)
        self._release = weakref.finalize(self, _release, self.process, self._folder, os.getpid())
        try:
            with os.fdopen(read_end, "rb", buffering=0) as handshake:
                self.ready = self._shake_hands(handshake.fileno(), config)
        except BaseException:
            self._end(GIVE_UP_S)
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> CoreAddress:
        """For other front ends, where there is to be more than one."""
        return CoreAddress(self.pid, self.input_address, self.output_addresses, self.ready)

    def how_it_ended(self) -> str | None:
        """None while it runs; else pid and exit status or signal, in words."""
        status = self.process.poll()
        if status is None:
            return None
        self._folder.remove()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the engine core's process (pid {self.pid}) {how}"

    def ask_to_end(self) -> None:
        """Returns at once; `close` waits."""
        _ask_to_end(self.process)

    def close(self) -> None:
        """Ask it to end, wait, and end it by force if it does not. Idempotent."""
        self._end(self._shutdown_timeout_s + KILL_AFTER_S)

    def _end(self, kill_after_s: float) -> None:
        _end(self.process, self._folder, kill_after_s)
        self._release.detach()

    def _shake_hands(self, handshake: int, config: ConfigSource) -> Ready:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        hello = self._hear(handshake, deadline_s)
        if not isinstance(hello, Hello) or hello.version != HANDSHAKE_VERSION:
            raise EngineDeadError(f"the engine core speaks another version: {hello}")
        launch = LaunchConfig(
            HANDSHAKE_VERSION,
            config() if callable(config) else config,
            self.input_address,
            self.output_addresses,
            self._shutdown_timeout_s,
            logging.getLevelName(logging.getLogger("mainspring").getEffectiveLevel()),
        )
        try:
            body = msgspec.msgpack.encode(launch)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"a path is not UTF-8 text ({error}): rename it, or set in_process=True"
            ) from None
        with contextlib.suppress(BrokenPipeError):  # it has ended; what follows says how
            self._write(len(body).to_bytes(4, "little") + body, deadline_s)
        match self._hear(handshake, deadline_s):
            case Ready() as ready:
                return ready
            case Failed(kind, cause):
                if kind.endswith("MemoryError"):  # numpy has one of its own
                    raise MemoryError(cause)
                known = getattr(errors, kind, None)
                if (
                    isinstance(known, type)
                    and issubclass(known, EngineError)
                    and known is not EngineDeadError
                ):
                    raise known(cause)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(KILL_AFTER_S)
                end = self.how_it_ended() or f"the engine core's process (pid {self.pid}) does not end"
                raise EngineDeadError(f"{end} while it was starting: {cause}")
            case other:
                raise EngineDeadError(f"the engine core said {other} where READY was expected")

    def _hear(self, handshake: int, deadline_s: float) -> _Message:
        size = int.from_bytes(self._read(handshake, 4, deadline_s), "little")
        message: _Message = msgspec.msgpack.decode(self._read(handshake, size, deadline_s), type=_Message)
        return message

    def _wait(self, file: int, event: int, deadline_s: float) -> None:
        while not _is_ready(file, event, LOOK_S):
            if time.monotonic() > deadline_s:
                raise EngineDeadError(
                    f"the engine core (pid {self.pid}) was not ready within {READY_TIMEOUT_S:.0f} s"
                )
            if self._given_up is not None and self._given_up.is_set():
                raise EngineDeadError("the start of the engine core was given up")

    def _write(self, data: bytes, deadline_s: float) -> None:
        """More than a pipe holds, and a core that is stopped reads nothing."""
        assert self.process.stdin is not None
        file, rest = self.process.stdin.fileno(), memoryview(data)
        os.set_blocking(file, False)
        while rest:
            self._wait(file, select.POLLOUT, deadline_s)
            rest = rest[os.write(file, rest) :]

    def _read(self, handshake: int, size: int, deadline_s: float) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(handshake, select.POLLIN, deadline_s)
            piece = os.read(handshake, size - len(data))
            if not piece:
                self.process.wait()
                raise EngineDeadError(f"{self.how_it_ended()} while it was starting")
            data += piece
        return data


class JoinedCore:
    """A running core that another process has started and will end; to a client as a `CoreProcess`."""

    def __init__(self, address: CoreAddress) -> None:
        self.pid = address.pid
        self.input_address = address.input_address
        self.output_addresses = address.output_addresses
        self.ready = address.ready
        self._handle: int | None = None  # readable once the process has ended; its number may be used again
        self._has_ended = False
        try:
            self._handle = os.pidfd_open(self.pid) if sys.platform == "linux" else None
        except ProcessLookupError:
            self._has_ended = True

    def how_it_ended(self) -> str | None:
        """None while it runs. Its status is known only to who started it."""
        if not self._has_ended:
            if self._handle is not None:
                self._has_ended = _is_ready(self._handle, select.POLLIN, 0.0)
            else:
                self._has_ended = not _exists(self.pid)
        return f"the engine core's process (pid {self.pid}) has ended" if self._has_ended else None

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _is_ready(file: int, event: int, wait_s: float) -> bool:
    """`event`: `select.POLLIN` or `POLLOUT`; a broken pipe is ready too."""
    poller = select.poll()  # `select.select` takes no descriptor above 1023
    poller.register(file, event)
    return bool(poller.poll(wait_s * 1000))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()


def _end(process: subprocess.Popen[bytes], folder: SocketFolder, kill_after_s: float) -> None:
    if process.poll() is None:
        _ask_to_end(process)
        try:
            process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            logging.getLogger(__name__).warning("the engine core does not end and is killed")
            process.kill()
            process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    folder.remove()


def _release(process: subprocess.Popen[bytes], folder: SocketFolder, owner: int) -> None:
    """Nobody holds the `CoreProcess` any more, or the interpreter ends."""
    if os.getpid() == owner:  # a forked child has a copy of us, but the core is not its
        _end(process, folder, KILL_AFTER_S)


def _check_open_files(num_needed: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd"))
    if limit != resource.RLIM_INFINITY and limit - num_open < num_needed:
        raise ConfigError(
            f"this process may have {limit} files open and has {num_open}; an engine core needs {num_needed} "
            "more: raise the limit (ulimit -n), or set in_process=True"
        )
