"""Many workers as one: a process per rank, every plan sent to all of them.

Theory of operation.
- A plan is encoded once and the same bytes go to every rank. They are a few kilobytes, so they go through
  the socket that each worker has anyway; a ring of shared memory would save a copy and leave segments behind
  when a process is killed (docs/design.md has the figures). A worker reads its socket at any time, so sending
  waits for no step.
- Of a step one rank answers, the first of the last stage; of everything else all do. Answers of a rank come
  in the order of what it was asked, so they need no numbers.
- One thread listens to all ranks, and sees their ends: a socket that closes, whatever closed it. The first
  failure ends all workers; whoever waits gets its cause, and the callback is called, once. A rank whose peer
  has gone says so too, but it is the peer that knows why; so causes are gathered for a moment. A command that
  a rank refuses is no failure, and hurts only who gave it.
- A step that takes longer than `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` counts as a failure: a worker may be
  stopped, and its peers wait for it.

Workers are started like any program, not by multiprocessing's spawn (see `engine/launch.py`), each in a
session of its own: Ctrl-C in a terminal is for whoever started us. They end when their socket does, so they
outlive neither `close` nor our own end; and the system kills even one that is stopped, if the thread that
started it was the main one and so ends only with our process.
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
from pathlib import Path
from typing import Any, NamedTuple

from mainspring.base.children import python_path
from mainspring.base.config import EXECUTE_TIMEOUT, EngineConfig, execute_timeout_s
from mainspring.base.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineError,
    PeerGoneError,
    innermost,
)
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
    TIED,
    Answer,
    Call,
    Done,
    Execute,
    Failed,
    GetMemory,
    GetSpecs,
    Initialize,
    Load,
    Order,
    Refused,
    Sample,
    decode_answer,
    decode_result,
    encode,
    result_rank,
)

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
LOOK_S = 0.25  # how often deadlines are looked at
GATHER_S = 0.5  # for the causes of others, after the first failure
# For workers to end by themselves, which takes them at most `END_GRACE_S`; then after SIGTERM. Together less
# than a core's process is given to end (`engine/launch.py`), or a stopped worker would outlive it.
END_S, TERM_S = 2.5, 1.0
USERS_MISTAKES: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (ConfigError, CheckpointError)
}


class _Question(NamedTuple):
    """What a rank owes an answer to."""

    future: Future[Any]
    kind: Any  # of the answer
    timeout_s: float
    deadline_s: float


class _Failure(NamedTuple):
    """What ended the workers: for the futures that wait, and in words."""

    kind: type[Exception]
    cause: str


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

    @property
    def name(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})"

    def how_it_ended(self) -> str:
        try:
            status = self.process.wait(GATHER_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} has closed its socket"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}"

    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger, where the system tells."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state in "Tt"


class MultiprocExecutor:
    """The `Executor` protocol over one process per rank."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the workers and waits until all have the model. Raises what they raise.

        `executor_args["worker"]`, as `module:function`, is called in the place of `Worker`: for who watches
        workers, or breaks them.
        """
        self._config = config
        self._execute_timeout_s = execute_timeout_s()
        self._closed = False
        self._failure: str | None = None
        self._lock = threading.Lock()  # around what ranks owe, and the failure
        self._callback: Callable[[str], None] | None = None
        self._ranks: list[_Rank] = []
        self._listener: threading.Thread | None = None
        try:
            self._start()
        except BaseException:
            self._kill()  # there is nothing that they should end in order
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
        """Raises `EngineError` if a rank refuses it; others may have done it."""
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
        self._fail(_Failure(EngineDeadError, "the executor is closed"), tell=False)
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
            question = self._question(future, ModelRunnerOutput | None) if rank.number == answers else None
            self._send(rank, body, question)
        if not non_block:
            future.exception()  # waits; who reads the result gets the exception
        return future

    def _ask_all(self, order: Order, kind: Any) -> list[Any]:
        asked = [self._ask(rank, order, kind) for rank in self._ranks]
        return [future.result() for future in asked]

    def _ask(self, rank: _Rank, order: Order, kind: Any, timeout_s: float | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        self._send(rank, encode(order), self._question(future, kind, timeout_s))
        return future

    def _question(self, future: Future[Any], kind: Any, timeout_s: float | None = None) -> _Question:
        timeout_s = self._execute_timeout_s if timeout_s is None else timeout_s
        return _Question(future, kind, timeout_s, time.monotonic() + timeout_s)

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
        try:
            failure = self._first_failure()
        except Exception as error:  # nobody else would tell those who wait
            failure = _Failure(EngineDeadError, f"what workers say cannot be read: {innermost(error)}")
        if failure is not None:
            self._fail(failure)
            self._kill()  # a rank may wait for ever for the one that failed

    def _first_failure(self) -> _Failure | None:
        """None once the executor is closed."""
        by_socket = {rank.orders: rank for rank in self._ranks}
        while not self._closed:
            for orders in wait(list(by_socket), LOOK_S):
                rank = by_socket[orders]  # type: ignore[index]
                answer = _hear(rank)
                if answer is None or isinstance(answer, Failed):
                    return None if self._closed else self._cause_among_all(rank, answer)
                self._take(rank, answer)
            if (failure := self._who_is_late()) is not None:
                return failure
        return None

    def _take(self, rank: _Rank, answer: Done | Refused) -> None:
        with self._lock:
            if not rank.owes:
                return  # given up meanwhile
            question = rank.owes.popleft()
        try:
            if isinstance(answer, Refused):
                raise EngineError(f"worker {rank.number}: {answer.cause}")
            result = decode_result(answer.result, question.kind)
        except Exception as error:
            question.future.set_exception(error)
        else:
            question.future.set_result(result)

    def _cause_among_all(self, first: _Rank, answer: Failed | None) -> _Failure:
        """What ended the first of them: who only lost a peer is passed over, if another knows more."""
        last_words: dict[_Rank, Failed | None] = {first: answer}  # None: it ended without a word
        deadline_s = time.monotonic() + GATHER_S
        while not any(map(_is_cause, last_words.values())):
            silent = {rank.orders: rank for rank in self._ranks if rank not in last_words}
            left_s = deadline_s - time.monotonic()
            if not silent or left_s <= 0:
                break
            for orders in wait(list(silent), left_s):
                rank = silent[orders]  # type: ignore[index]
                said = _hear(rank)
                if said is None or isinstance(said, Failed):
                    last_words[rank] = said
        causes = [item for item in last_words.items() if _is_cause(item[1])]
        silent_ends = [item for item in last_words.items() if item[1] is None]
        return _as_failure(*[*causes, *silent_ends, (first, answer)][0])

    def _who_is_late(self) -> _Failure | None:
        now_s = time.monotonic()
        with self._lock:
            late = [(rank, rank.owes[0]) for rank in self._ranks if rank.owes]
            late = [(rank, question) for rank, question in late if question.deadline_s < now_s]
        if not late:
            return None
        rank, question = late[0]
        setting = "" if question.timeout_s == LOAD_TIMEOUT_S else f" ({EXECUTE_TIMEOUT})"
        cause = f"{rank.name} did not answer within {question.timeout_s:g} s{setting}"
        stopped = [f"; {other.name} is stopped" for other in self._ranks if other.is_stopped()]
        return _Failure(EngineDeadError, cause + "".join(stopped))

    def _fail(self, failure: _Failure, tell: bool = True) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure.cause
            waiting = [question for rank in self._ranks for question in rank.owes]
            for rank in self._ranks:
                rank.owes.clear()
            callback = self._callback
        for question in waiting:
            question.future.set_exception(failure.kind(failure.cause))
        if tell and callback is not None and not self._closed:
            callback(failure.cause)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()


def _hear(rank: _Rank) -> Answer | None:
    """What it says next; None if it has ended."""
    try:
        body = rank.orders.recv_bytes()
    except (EOFError, OSError):
        return None
    return decode_answer(body)


def _is_cause(last_words: Failed | None) -> bool:
    return last_words is not None and last_words.kind != PeerGoneError.__name__


def _as_failure(rank: _Rank, last_words: Failed | None) -> _Failure:
    """A user's mistakes are as where there is one worker only; else it is said who had the failure."""
    if last_words is None:
        return _Failure(EngineDeadError, rank.how_it_ended())
    kind, cause = last_words.kind, last_words.cause
    if kind.endswith("MemoryError"):  # numpy has one of its own
        return _Failure(MemoryError, cause)
    if kind in USERS_MISTAKES:
        return _Failure(USERS_MISTAKES[kind], cause)
    return _Failure(EngineDeadError, f"worker {rank.number}: {cause}")


def _spawn(number: int, links: dict[int, Link]) -> _Rank:
    """To be called in the thread that is to see the worker's whole life, where that is the main one."""
    ours, theirs = socket.socketpair()
    tied = [TIED] if threading.current_thread() is threading.main_thread() else []
    with ours, theirs:
        descriptors = [theirs.fileno(), *(link.descriptor for link in links.values())]
        process = subprocess.Popen(
            # -P: what lies in the current folder must not be taken for a module.
            [sys.executable, "-P", "-m", "mainspring.worker.proc", str(theirs.fileno()), *tied],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        return _Rank(number, process, Connection(ours.detach()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
