"""Many workers as one: a process per rank, every plan sent to all of them.

Theory of operation.
- A plan is encoded once and the same bytes go to every rank. They are a few kilobytes, so they go through
  the socket that each worker has anyway; a ring of shared memory would save a copy and leave segments behind
  when a process is killed (docs/design.md has the figures).
- Of a step one rank answers, the first of the last stage; of everything else all do. Answers of a rank come
  in the order of what it was asked, so they need no numbers.
- One thread listens to all ranks, and sees their ends: a socket that closes, whatever closed it. The first
  failure ends all workers; whoever waits gets its cause, and the callback is called, once. A rank whose peer
  has gone says so too, but it is the peer that knows why; so causes are gathered for a moment.
- A step that takes longer than `EXECUTE_TIMEOUT_S` counts as a failure: a worker may be stopped, and its
  peers wait for it.

Workers are started like any program, not by multiprocessing's spawn (see `engine/launch.py`). They end when
their socket does, so they outlive neither `close` nor our own end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from mainspring.base import errors
from mainspring.base.children import python_path
from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineDeadError, EngineError
from mainspring.base.messages import (
    Command,
    CommandResult,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from mainspring.executor.links import Link, close_links, make_links
from mainspring.worker.proc import (
    Call,
    Done,
    Execute,
    Failed,
    GetMemory,
    GetSpecs,
    Initialize,
    Load,
    Order,
    Sample,
    decode_answer,
    decode_result,
    encode,
    result_rank,
)

logger = logging.getLogger(__name__)

EXECUTE_TIMEOUT_S = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300"))
LOAD_TIMEOUT_S = 1800.0
LOOK_S = 0.25  # how often deadlines are looked at
GATHER_S = 0.5  # for the causes of others, after the first failure
END_S, TERM_S = 5.0, 4.0  # for workers to end by themselves; then after SIGTERM
PEER_GONE = "PeerGoneError"


class _Question(NamedTuple):
    """What a rank owes an answer to."""

    future: Future[Any]
    kind: Any  # of the answer
    deadline_s: float


class _Rank:
    """A worker's process and what it owes us."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], orders: Connection) -> None:
        self.number = number
        self.process = process
        self.orders = orders
        self.owes: deque[_Question] = deque()

    def hang_up(self) -> None:
        """It will hear no more of us, and so it ends; what it still says can be heard."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.orders.fileno())) as ours:
            ours.shutdown(socket.SHUT_WR)

    def how_it_ended(self) -> str:
        try:
            status = self.process.wait(GATHER_S)
        except subprocess.TimeoutExpired:
            return f"worker {self.number} (pid {self.process.pid}) has closed its socket"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"worker {self.number} (pid {self.process.pid}) {how}"


class MultiprocExecutor:
    """The `Executor` protocol over one process per rank."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the workers and waits until all have the model. Raises what they raise."""
        self._config = config
        self._closed = False
        self._failure: str | None = None
        self._lock = threading.Lock()  # around what ranks owe, and the failure
        self._callback: Callable[[str], None] | None = None
        self._ranks: list[_Rank] = []
        self._listener: threading.Thread | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # -- the contract ----------------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        by_rank = self._ask_all(GetSpecs(), list[KVCacheSpec])
        firsts = range(0, len(by_rank), self._config.tensor_parallel_size)
        return [spec for first in firsts for spec in by_rank[first]]

    def determine_available_memory(self) -> int:
        """As if every rank held all layers: the least of what they have, by the share of layers they hold."""
        num_layers = [len(specs) for specs in self._ask_all(GetSpecs(), list[KVCacheSpec])]
        total = sum(num_layers[:: self._config.tensor_parallel_size])
        memory: list[int] = self._ask_all(GetMemory(), int)
        return min(have * total // max(1, held) for have, held in zip(memory, num_layers, strict=True))

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self._ask_all(Initialize(config, max_model_len), bool)

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        return self._step(Execute(plan), non_block)

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        return self._step(Sample(mask), non_block)

    def execute_dummy_batch(self) -> None:
        raise NotImplementedError("ranks in lock-step have one worker each, in the core's process")

    def has_any_rank_work(self, has_work: bool) -> bool:
        return has_work

    def call(self, command: Command) -> list[CommandResult]:
        return self._ask_all(Call(command), Any)

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            self._callback = callback
            failure = self._failure
        if failure is not None:
            callback(failure)

    def close(self) -> None:
        """End the workers: by themselves, else by signals. Idempotent."""
        self._closed = True
        self._fail("the executor is closed", tell=False)
        for rank in self._ranks:
            rank.hang_up()
        for wait_s, end in ((END_S, subprocess.Popen.terminate), (TERM_S, subprocess.Popen.kill)):
            deadline_s = time.monotonic() + wait_s
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline_s - time.monotonic()))
            for rank in self._ranks:
                if rank.process.poll() is None:
                    end(rank.process)
        for rank in self._ranks:
            rank.process.wait()
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join()
        for rank in self._ranks:
            rank.orders.close()

    # -- starting --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = self._config
        world_size = config.tensor_parallel_size * config.pipeline_parallel_size
        address = "" if config.collectives == "pipes" else f"tcp://127.0.0.1:{_free_port()}"
        links = make_links(world_size) if not address else [{} for _ in range(world_size)]
        level = logging.getLevelName(logging.getLogger("mainspring").getEffectiveLevel())
        try:
            for number in range(world_size):
                self._ranks.append(_spawn(number, links[number]))
        finally:
            close_links(links)  # theirs now
        self._listener = threading.Thread(target=self._listen, name="mainspring-workers", daemon=True)
        self._listener.start()
        loads = []
        for rank in self._ranks:
            descriptors = {number: link.descriptor for number, link in links[rank.number].items()}
            loads.append(
                self._ask(rank, Load(config, rank.number, descriptors, address, level), bool, LOAD_TIMEOUT_S)
            )
        for loaded in loads:
            loaded.result()

    # -- asking ----------------------------------------------------------------------------------------------

    def _step(self, order: Order, non_block: bool) -> Future[Any]:
        body, answers = encode(order), result_rank(self._config)
        future: Future[Any] = Future()
        for rank in self._ranks:
            if rank.number == answers:
                self._send(
                    rank, body, _Question(future, ModelRunnerOutput | None, _deadline(EXECUTE_TIMEOUT_S))
                )
            else:
                self._send(rank, body)
        if not non_block:
            future.exception()  # waits; who reads the result gets the exception
        return future

    def _ask_all(self, order: Order, kind: Any) -> list[Any]:
        asked = [self._ask(rank, order, kind, EXECUTE_TIMEOUT_S) for rank in self._ranks]
        return [future.result() for future in asked]

    def _ask(self, rank: _Rank, order: Order, kind: Any, timeout_s: float) -> Future[Any]:
        future: Future[Any] = Future()
        self._send(rank, encode(order), _Question(future, kind, _deadline(timeout_s)))
        return future

    def _send(self, rank: _Rank, body: bytes, question: _Question | None = None) -> None:
        with self._lock:
            if self._failure is not None:
                if question is None:
                    return
                question.future.set_exception(EngineDeadError(self._failure))
                return
            if question is not None:
                rank.owes.append(question)
        with contextlib.suppress(OSError):  # it has ended; the listener sees that too, and knows why
            rank.orders.send_bytes(body)

    # -- hearing ---------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        by_socket = {rank.orders: rank for rank in self._ranks}
        while self._failure is None:
            for orders in wait(list(by_socket), LOOK_S):
                if (cause := self._hear(by_socket[orders])) is not None:  # type: ignore[index]
                    if self._closed:
                        return
                    self._end_all(self._cause_among_all(cause))
                    return
            self._look_at_deadlines()

    def _hear(self, rank: _Rank) -> tuple[_Rank, Failed | None] | None:
        """One answer; or who failed, and what it said of it."""
        try:
            answer = decode_answer(rank.orders.recv_bytes())
        except (EOFError, OSError):
            return rank, None
        if isinstance(answer, Failed):
            return rank, answer
        assert isinstance(answer, Done)
        with self._lock:
            if not rank.owes:
                return None  # given up meanwhile
            question = rank.owes.popleft()
        question.future.set_result(decode_result(answer.result, question.kind))
        return None

    def _cause_among_all(self, first: tuple[_Rank, Failed | None]) -> Failed:
        """What ended the first of them: who only lost a peer is passed over, if another knows more."""
        rank, failed = first
        if failed is not None and failed.kind != PEER_GONE:
            return failed
        deadline_s = time.monotonic() + GATHER_S
        ends = [] if failed is not None else [rank]
        others = {other.orders: other for other in self._ranks if other is not rank}
        while others and (left_s := deadline_s - time.monotonic()) > 0:
            for orders in wait(list(others), left_s):
                other = others[orders]  # type: ignore[index]
                try:
                    answer = decode_answer(other.orders.recv_bytes())
                except (EOFError, OSError):
                    ends.append(others.pop(orders))  # type: ignore[call-overload]
                    continue
                if isinstance(answer, Failed) and answer.kind != PEER_GONE:
                    return answer
                if isinstance(answer, Failed):
                    del others[orders]  # type: ignore[arg-type]
        if ends:
            return Failed(EngineDeadError.__name__, ends[0].how_it_ended())
        assert failed is not None
        return failed

    def _look_at_deadlines(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            late = [rank for rank in self._ranks if rank.owes and rank.owes[0].deadline_s < now_s]
        if late:
            self._end_all(
                Failed(
                    EngineDeadError.__name__,
                    f"worker {late[0].number} (pid {late[0].process.pid}) did not answer within "
                    f"{EXECUTE_TIMEOUT_S:g} s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)",
                )
            )

    def _end_all(self, failed: Failed) -> None:
        known = getattr(errors, failed.kind, EngineDeadError)
        is_ours = isinstance(known, type) and issubclass(known, EngineError)
        self._fail(failed.cause, known if is_ours else EngineDeadError)
        for rank in self._ranks:  # a rank may wait for ever for the one that failed
            if rank.process.poll() is None:
                rank.process.kill()

    def _fail(self, cause: str, kind: type[EngineError] = EngineDeadError, tell: bool = True) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = cause
            waiting = [question for rank in self._ranks for question in rank.owes]
            callback = self._callback
        for question in waiting:
            question.future.set_exception(kind(cause))
        if tell and callback is not None and not self._closed:
            callback(cause)


def _spawn(number: int, links: dict[int, Link]) -> _Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptors = [theirs.fileno(), *(link.descriptor for link in links.values())]
        process = subprocess.Popen(
            # -P: what lies in the current folder must not be taken for a module.
            [sys.executable, "-P", "-m", "mainspring.worker.proc", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
    return _Rank(number, process, Connection(ours.detach()))


def _deadline(timeout_s: float) -> float:
    return time.monotonic() + timeout_s


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
