"""An engine core in a process of its own: the busy loop around an `EngineCore`, and the child's entry.

The loop is the specification's: drain the input (wait there when idle), make a step, hand over what it says.
Process mode is this wrapper; the core inside does not know of it.

Endings.
- Shutdown is a state, RUNNING -> REQUESTED -> SHUTTING_DOWN, moved by signals or by the parent; a second
  signal changes nothing. With a timeout of 0 every live request ends at once with finish reason abort; with
  more they go on until the deadline. Meanwhile ADD is answered with abort and UTILITY with an error. The
  client is told first, for where there are other cores what was aborted can go on in them.
- An exception anywhere ends the loop: every client is told ENGINE_CORE_DEAD with the innermost cause, and the
  process ends with status 1.
- The parent's death, however it came, closes the pipe that is our standard input: then nobody is left to
  answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from io import FileIO
from types import FrameType
from typing import BinaryIO

import msgspec

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineDeadError, EngineError, innermost
from mainspring.base.log import set_up_logging
from mainspring.base.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from mainspring.base.protocols import Clock
from mainspring.engine.build import build_engine
from mainspring.engine.client import CacheFacts
from mainspring.engine.core import EngineCore
from mainspring.engine.lockstep import Lockstep
from mainspring.engine.mailbox import ClientGone, ClientStalled, Item, Mailbox, Refused, ZmqMailbox
from mainspring.engine.wire import RequestType, Utility

logger = logging.getLogger(__name__)

HANDSHAKE_VERSION = 1
PROCESS_NAME = b"mainspring-core"
ORPHAN_POLL_S = 0.5
ORPHAN_GRACE_S = 1.5  # for the loop to leave a step before an orphan is ended by force
SHUTTING_DOWN_TEXT = "the engine core is shutting down"
NOT_READ_TEXT = "its front end did not read for so long that the engine core could keep no more for it"
TOLD_TO_END_TEXT = "it was told to end"


class Hello(msgspec.Struct, array_like=True, tag=True):
    """Child to parent, first of all."""

    version: int
    pid: int


class LaunchConfig(msgspec.Struct, array_like=True, tag=True):
    """Parent to child, on its standard input, which then stays open: its end is the parent's."""

    version: int
    engine: EngineConfig
    input_address: str
    output_addresses: list[str]  # by client index
    shutdown_timeout_s: float
    log_level: str


class Ready(msgspec.Struct, array_like=True, tag=True):
    """Child to parent: it serves, and this is what was measured."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool

    @property
    def cache_facts(self) -> CacheFacts:
        return CacheFacts(self.num_gpu_blocks, self.block_size, self.enable_prefix_caching)


class Failed(msgspec.Struct, array_like=True, tag=True):
    """Child to parent: it will never serve. `kind` is the exception's class."""

    kind: str
    cause: str


class ShutdownState(IntEnum):
    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


class EngineCoreProc:
    """Drives an engine by what a mailbox brings."""

    def __init__(
        self,
        engine: EngineCore | Lockstep,
        mailbox: Mailbox,
        *,
        shutdown_timeout_s: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._state = ShutdownState.RUNNING
        self._deadline_s = 0.0

    def request_shutdown(self) -> None:
        """Only notes it, so a signal handler may call this at any moment; the loop must be woken besides."""
        self._state = max(self._state, ShutdownState.REQUESTED)

    def run_busy_loop(self) -> None:
        """Returns after a shutdown; raises what ended the core otherwise."""
        try:
            while self._handle_shutdown():
                self._process_input_queue()
                self._process_engine_step()
        except BaseException as error:
            self._mailbox.announce_death(innermost(error))
            raise

    def _handle_shutdown(self) -> bool:
        """False when nothing is left to do."""
        if self._state == ShutdownState.RUNNING:
            return True
        if self._state == ShutdownState.REQUESTED:
            self._state = ShutdownState.SHUTTING_DOWN
            self._deadline_s = self._clock() + self._shutdown_timeout_s
            if self._engine.has_work() or self._engine.live_requests():  # else it ends now, which says it too
                self._mailbox.deliver({0: EngineCoreOutputs(is_leaving=True)})
        if self._clock() >= self._deadline_s or not self._engine.has_work():
            self._engine.scheduler.abort_all()  # also what a pause holds back: it would never run
        return self._engine.has_work()

    def _process_input_queue(self) -> None:
        """Everything that has arrived; waits for something while there is nothing to run."""
        self._engine.settle_if_idle()
        wait = not self._engine.has_work() and self._state == ShutdownState.RUNNING
        for item in self._mailbox.receive(wait=wait):
            self._handle_client_request(item)

    def _process_engine_step(self) -> None:
        if self._engine.has_work():
            self._mailbox.deliver(self._engine.step())

    def _handle_client_request(self, item: Item) -> None:
        match item:
            case (RequestType.ADD, EngineCoreRequest() as request):
                if self._state != ShutdownState.RUNNING:
                    self._say(request, FinishReason.ABORT)
                    return
                try:
                    self._engine.add_request(request)
                except EngineDeadError:
                    raise
                except Exception as error:  # its own fault alone
                    self._engine.abort_requests([request.request_id])
                    self._say(request, FinishReason.ERROR, innermost(error))
            case (_, Refused(client_index, answer)):
                self._mailbox.deliver({client_index: answer})
            case (RequestType.ABORT, ClientGone(client_index)):
                self._abort_client(client_index)
            case (RequestType.ABORT, ClientStalled(client_index)):
                for request in self._abort_client(client_index):
                    self._say(request, FinishReason.ERROR, NOT_READ_TEXT)
            case (RequestType.ABORT, list() as request_ids):
                self._engine.abort_requests(request_ids)
            case (RequestType.START_DP_WAVE, int() as number):
                if isinstance(self._engine, Lockstep):
                    self._engine.start_wave(number)
            case (RequestType.UTILITY, Utility() as utility):
                self._answer(utility)
            case (RequestType.EXECUTOR_FAILED, cause):
                raise RuntimeError(f"Executor failed. {cause}")
            case (RequestType.WAKEUP, _):
                pass  # whoever woke the loop has noted why
            case forgotten:
                raise AssertionError(f"{forgotten[0].name} with {type(forgotten[1]).__name__}")

    def _abort_client(self, client_index: int) -> list[EngineCoreRequest]:
        """What it had that was live."""
        requests = [r for r in self._engine.live_requests() if r.client_index == client_index]
        self._engine.abort_requests([request.request_id for request in requests])
        return requests

    def _answer(self, utility: Utility) -> None:
        result, error = b"", None
        if self._state != ShutdownState.RUNNING:
            error = SHUTTING_DOWN_TEXT
        else:
            try:
                answer = self._engine.call(utility.command)
            except Exception as failure:
                error = innermost(failure)
            else:
                if isinstance(answer, Future):  # answered when the engine has come to rest
                    answer.add_done_callback(lambda done: self._answer_late(utility, done))
                    return
                result = msgspec.msgpack.encode(answer)
        self._send_answer(utility, result, error)

    def _answer_late(self, utility: Utility, done: Future[bool]) -> None:
        error = done.exception()
        result = b"" if error is not None else msgspec.msgpack.encode(done.result())
        self._send_answer(utility, result, None if error is None else innermost(error))

    def _send_answer(self, utility: Utility, result: bytes, error: str | None) -> None:
        answer = EngineCoreOutputs(utility_output=UtilityOutput(utility.call_id, result, error))
        self._mailbox.deliver({utility.client_index: answer})

    def _say(self, request: EngineCoreRequest, reason: FinishReason, error: str | None = None) -> None:
        output = EngineCoreOutput(request.request_id, [], reason, error=error)
        self._mailbox.deliver({request.client_index: EngineCoreOutputs(outputs=[output])})


# -- the child's entry ---------------------------------------------------------------------------------------


class _ToldToEnd(BaseException):
    """By a signal, while the engine is built. It must not be taken for something that failed in there."""


class Lifeline:
    """The pipe from the parent. Its other end closes when the parent dies, even by SIGKILL; where a forked
    child of the parent's keeps a copy open, our parent's id changes."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._parent = os.getppid()
        self._closed = threading.Event()

    def read_config(self) -> LaunchConfig | None:
        """None if the parent has died before it said all."""
        size = int.from_bytes(self._pipe.read(4), "little")
        body = self._pipe.read(size)
        if not size or len(body) < size:
            self._closed.set()
            return None
        return msgspec.msgpack.decode(body, type=LaunchConfig)

    def is_cut(self) -> bool:
        return self._closed.is_set() or os.getppid() != self._parent

    def watch(self, on_cut: Callable[[], None]) -> None:
        """From now on `on_cut` is called, by a thread, when the parent has died."""

        def read() -> None:
            self._pipe.read()
            self._closed.set()

        def wait() -> None:
            while not self.is_cut():
                self._closed.wait(ORPHAN_POLL_S)
            on_cut()

        for run in (read, wait):
            threading.Thread(target=run, daemon=True).start()


def run_engine_core(
    config: LaunchConfig, tell: Callable[[Ready], None], lifeline: Lifeline, directory: str
) -> None:
    """Build an engine, say that it is ready, serve until the end. Raises what ended it."""
    name_process()
    proc: EngineCoreProc | None = None
    mailbox: ZmqMailbox | None = None
    was_asked_to_end = threading.Event()

    def ask_to_end() -> None:
        was_asked_to_end.set()
        if proc is not None and mailbox is not None:
            proc.request_shutdown()
            mailbox.post(RequestType.WAKEUP)
            time.sleep(config.shutdown_timeout_s)
            mailbox.hurry()  # the loop may be waiting for a client that does not read

    def on_signal(number: int, frame: FrameType | None) -> None:
        if proc is None:
            raise _ToldToEnd
        # The queue's lock may be held by the thread that was interrupted: the item is put by another.
        threading.Thread(target=ask_to_end, daemon=True).start()

    def end_as_orphan() -> None:
        threading.Thread(target=ask_to_end, daemon=True).start()
        time.sleep(ORPHAN_GRACE_S)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)  # the loop is in a step that does not end; nobody is left to wait for it

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    lifeline.watch(end_as_orphan)

    built = build_engine(config.engine)
    engine: EngineCore | Lockstep = built.core
    if config.engine.data_parallel is not None:
        interval = config.engine.scheduler.prefill_schedule_interval
        engine = Lockstep(built.core, prefill_schedule_interval=interval)
    gc.collect()
    gc.freeze()  # what lives as long as the engine is passed over: a full collection is a pause of the loop
    try:
        if was_asked_to_end.is_set():
            raise EngineDeadError(TOLD_TO_END_TEXT)
        mailbox = ZmqMailbox(
            config.input_address, config.output_addresses, engine.aborts_queue, engine.process_aborts_queue
        )
        try:
            proc = EngineCoreProc(engine, mailbox, shutdown_timeout_s=config.shutdown_timeout_s)
            box = mailbox
            engine.on_executor_failure = lambda cause: box.post(RequestType.EXECUTOR_FAILED, cause)
            if was_asked_to_end.is_set():
                raise EngineDeadError(TOLD_TO_END_TEXT)
            tell(
                Ready(
                    built.max_model_len,
                    built.kv_config.num_blocks,
                    built.kv_config.block_size,
                    built.enable_prefix_caching,
                    built.enable_chunked_prefill,
                )
            )
            proc.run_busy_loop()
        finally:
            mailbox.close()
    finally:
        engine.shutdown()


def name_process() -> None:
    """What `ps -o comm` and `top` show; the command line shows the module."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, PROCESS_NAME, 0, 0, 0)  # PR_SET_NAME


def main() -> int:
    """`python -m mainspring.engine.proc FD DIRECTORY`: where HELLO, READY and FAILED go; the folder of the
    sockets, which goes with us. Returns the exit status."""
    directory = sys.argv[2]
    lifeline = Lifeline(os.fdopen(os.dup(0), "rb"))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as handshake:
            return _serve(lifeline, handshake, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # sockets that are connected do not need it


def _ignore_signals() -> None:
    """We end already. A signal must not interrupt what there is to say and to clear away."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _serve(lifeline: Lifeline, handshake: FileIO, directory: str) -> int:
    is_ready = False

    def tell(message: Hello | Ready | Failed) -> None:
        nonlocal is_ready
        body = msgspec.msgpack.encode(message)
        with contextlib.suppress(BrokenPipeError):  # the lifeline is cut too
            handshake.write(len(body).to_bytes(4, "little") + body)
        is_ready = isinstance(message, Ready)

    tell(Hello(HANDSHAKE_VERSION, os.getpid()))
    config = lifeline.read_config()
    if config is None:
        return 1
    set_up_logging(config.log_level, config.engine.log_label)
    try:
        try:
            run_engine_core(config, tell, lifeline, directory)
        except Exception as error:
            _ignore_signals()
            if is_ready:
                logger.error("the engine core has ended: %s", innermost(error))
            else:
                cause = str(error) if isinstance(error, EngineError) else innermost(error)
                tell(Failed(type(error).__name__, cause))
            return 1
    except _ToldToEnd:  # while the engine was built, or just when it could not be
        _ignore_signals()
        tell(Failed(EngineDeadError.__name__, TOLD_TO_END_TEXT))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(status)  # daemon threads may hold what the interpreter's own end would wait for
