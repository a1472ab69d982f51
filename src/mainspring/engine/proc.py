"""An engine core in a process of its own: the busy loop around an `EngineCore`, and the child's entry.

The loop is the specification's: drain the input (wait there when idle), make a step, hand over what it says.
Process mode is this wrapper; the core inside does not know of it.

Endings.
- Shutdown is a state, RUNNING -> REQUESTED -> SHUTTING_DOWN, moved by signals or by the parent; a second
  signal changes nothing. With a timeout of 0 every live request ends at once with finish reason abort; with
  more they go on until the deadline. Meanwhile ADD is answered with abort and UTILITY with an error.
- An exception anywhere ends the loop: every client is told ENGINE_CORE_DEAD with the innermost cause, and the
  process ends with status 1.
- The parent's death, however it came, closes the pipe that is our standard input: then nobody is left to
  answer.
"""

from __future__ import annotations

import ctypes
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
from types import FrameType
from typing import BinaryIO

import msgspec

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineError, innermost
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
from mainspring.engine.core import EngineCore
from mainspring.engine.mailbox import ClientGone, Item, Mailbox, ZmqMailbox
from mainspring.engine.wire import RequestType, Utility

logger = logging.getLogger(__name__)

HANDSHAKE_VERSION = 1
PROCESS_NAME = b"mainspring-core"
ORPHAN_POLL_S = 0.5
ORPHAN_GRACE_S = 1.5  # for the loop to leave a step before an orphan is ended by force
SHUTTING_DOWN_TEXT = "the engine core is shutting down"


class Hello(msgspec.Struct, array_like=True, tag=True):
    """Child to parent, first of all."""

    version: int
    pid: int


class LaunchConfig(msgspec.Struct, array_like=True, tag=True):
    """Parent to child, on its standard input, which then stays open: its end is the parent's."""

    version: int
    engine: EngineConfig
    directory: str  # of the sockets; whoever ends last removes it
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
        engine: EngineCore,
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
        if self._clock() >= self._deadline_s:
            self._abort_all()
        return self._engine.has_work()

    def _abort_all(self) -> None:
        self._engine.scheduler.abort_all()

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
                except EngineError:
                    raise
                except Exception as error:  # its own fault alone
                    self._engine.abort_requests([request.request_id])
                    self._say(request, FinishReason.ERROR, innermost(error))
            case (RequestType.ABORT, ClientGone(client_index)):
                gone = [r.request_id for r in self._engine.live_requests() if r.client_index == client_index]
                self._engine.abort_requests(gone)
            case (RequestType.ABORT, list() as request_ids):
                self._engine.abort_requests(request_ids)
            case (RequestType.UTILITY, Utility() as utility):
                self._answer(utility)
            case (RequestType.EXECUTOR_FAILED, cause):
                raise RuntimeError(f"Executor failed. {cause}")
            case (RequestType.WAKEUP, _):
                pass  # whoever woke the loop has noted why
            case forgotten:
                raise AssertionError(f"{forgotten[0].name} with {type(forgotten[1]).__name__}")

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


def run_engine_core(config: LaunchConfig, tell: Callable[[Ready], None], lifeline: BinaryIO) -> None:
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

    def on_signal(number: int, frame: FrameType | None) -> None:
        # The queue's lock may be held by the thread that was interrupted: the item is put by another.
        threading.Thread(target=ask_to_end, daemon=True).start()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    threading.Thread(target=_watch_parent, args=(lifeline, config, ask_to_end), daemon=True).start()

    built = build_engine(config.engine)
    engine = built.core
    try:
        if was_asked_to_end.is_set():
            return
        mailbox = ZmqMailbox(
            config.input_address, config.output_addresses, engine.aborts_queue, engine.process_aborts_queue
        )
        try:
            proc = EngineCoreProc(engine, mailbox, shutdown_timeout_s=config.shutdown_timeout_s)
            box = mailbox
            engine.on_executor_failure = lambda cause: box.post(RequestType.EXECUTOR_FAILED, cause)
            if was_asked_to_end.is_set():
                return
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


def _watch_parent(lifeline: BinaryIO, config: LaunchConfig, ask_to_end: Callable[[], None]) -> None:
    """End with the parent. Its end of the pipe closes when it dies, even by SIGKILL; where a forked child of
    its keeps a copy open, our parent's id changes."""
    parent = os.getppid()
    closed = threading.Event()

    def read() -> None:
        lifeline.read()
        closed.set()

    threading.Thread(target=read, daemon=True).start()
    while not closed.wait(ORPHAN_POLL_S):
        if os.getppid() != parent:
            break
    ask_to_end()
    time.sleep(ORPHAN_GRACE_S)
    shutil.rmtree(config.directory, ignore_errors=True)
    os._exit(1)  # the loop is in a step that does not end; nobody is left to wait for it


def main() -> int:
    """`python -m mainspring.engine.proc FD`: FD is where HELLO, READY and FAILED go."""
    encode = msgspec.msgpack.encode
    lifeline = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with os.fdopen(int(sys.argv[1]), "wb", buffering=0) as handshake:

        def tell(message: Hello | Ready | Failed) -> None:
            body = encode(message)
            handshake.write(len(body).to_bytes(4, "little") + body)

        tell(Hello(HANDSHAKE_VERSION, os.getpid()))
        size = int.from_bytes(lifeline.read(4), "little")
        body = lifeline.read(size)
        if not size or len(body) < size:
            return 1  # the parent died before it said anything
        config = msgspec.msgpack.decode(body, type=LaunchConfig)
        set_up_logging(config.log_level)
        is_ready = False

        def tell_ready(message: Ready) -> None:
            nonlocal is_ready
            is_ready = True
            tell(message)

        try:
            run_engine_core(config, tell_ready, lifeline)
        except Exception as error:
            if not is_ready:
                tell(
                    Failed(
                        type(error).__name__,
                        str(error) if isinstance(error, EngineError) else innermost(error),
                    )
                )
            logger.debug("the engine core has ended", exc_info=error)
            return 1
        finally:
            if os.getppid() == 1 or not os.path.isdir(config.directory):
                shutil.rmtree(config.directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # daemon threads may hold what the interpreter's own end would wait for
