"""One worker in a process of its own: rank k of those that share a model.

`python -m mainspring.worker.proc FD [tied]` is started by `MultiprocExecutor`. FD is a socket to it, on
which orders come and answers go; other descriptors, named in the first order, lead to the other ranks. Tied:
the system kills us when whoever started us ends.

Rules.
- Orders are carried out one by one, as they come. Every rank gets every order; of a step only the last
  stage's first rank gives the result. All answer everything else, and any tells its failure.
- A failure ends the process: its peers wait for it in a collective and would wait for ever. They see its
  links close, and report that as `PeerGoneError`, so that nobody takes it for the cause. A command is not
  carried out together, so one that fails is only refused.
- The executor's end is the end of the socket, however it came; a thread that reads it sees that also while a
  step runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import msgspec

from mainspring.base.arrays import decode_array, encode_array
from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineError, innermost
from mainspring.base.log import set_up_logging
from mainspring.base.messages import (
    Command,
    GrammarOutput,
    KVCacheConfig,
    SchedulerOutput,
)
from mainspring.kernels.collectives import Collectives, PipeCollectives, TorchCollectives
from mainspring.models.parallel import Place
from mainspring.worker.worker import Worker

logger = logging.getLogger(__name__)

END_GRACE_S = 1.5  # for a step that runs when the executor has gone
TIED = "tied"
_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # of prctl


# Orders, executor to worker.


class Load(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first: who you are, and how the others are reached. Answered with True once the model is there."""

    config: EngineConfig
    rank: int
    links: dict[int, int]  # rank -> descriptor; empty where torch makes its own
    address: str  # for torch, else empty
    log_level: str


class GetSpecs(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answered with a list of `KVCacheSpec`."""


class GetMemory(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answered with bytes."""


class Initialize(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answered with True."""

    kv: KVCacheConfig
    max_model_len: int


class Execute(msgspec.Struct, tag=True, array_like=True, frozen=True):
    plan: SchedulerOutput


class Sample(msgspec.Struct, tag=True, array_like=True, frozen=True):
    mask: GrammarOutput | None


class Call(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A command for every worker, answered with what it answers."""

    command: Command


Order = Load | GetSpecs | GetMemory | Initialize | Execute | Sample | Call


# Answers, worker to executor.


class Done(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """In the order of the orders that are answered."""

    result: msgspec.Raw


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The last thing a worker says."""

    kind: str  # the exception's class
    cause: str


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """In the place of `Done`: a command that failed. The worker goes on."""

    cause: str


Answer = Done | Refused | Failed

encode = msgspec.msgpack.Encoder(enc_hook=encode_array).encode
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=decode_array).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def decode_result(result: msgspec.Raw, kind: Any) -> Any:
    return msgspec.msgpack.decode(result, type=kind, dec_hook=decode_array)


def main() -> int:
    if sys.platform == "linux" and TIED in sys.argv[2:]:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    orders = _own(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started the executor
    received: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(orders, received), daemon=True).start()
    try:
        _serve(orders, received)
    except Exception as error:
        logger.debug("this worker has failed", exc_info=True)
        cause = str(error) if isinstance(error, EngineError) else innermost(error)
        with contextlib.suppress(OSError):  # nobody may be left to hear it
            orders.send_bytes(encode(Failed(type(error).__name__, cause)))
        return 1
    return 0


def _receive(orders: Connection, received: SimpleQueue[bytes | None]) -> None:
    """So that orders do not fill the socket while a step runs, and its end is seen meanwhile."""
    try:
        while True:
            received.put(orders.recv_bytes())
    except (EOFError, OSError):
        received.put(None)
    threading.Event().wait(END_GRACE_S)
    os._exit(1)


def _serve(orders: Connection, received: SimpleQueue[bytes | None]) -> None:
    first = received.get()
    if first is None:
        return
    load = decode_order(first)
    assert isinstance(load, Load)
    set_up_logging(load.log_level, f"{load.config.log_label} worker {load.rank}".strip())
    _name_process(load.rank)
    make_worker = _maker(load.config)
    place = Place(
        load.rank,
        load.config.tensor_parallel_size,
        load.config.pipeline_parallel_size,
        load.config.enable_expert_parallel,
    )
    collectives = _collectives(load, place)
    worker = make_worker(load.config, place, collectives)
    gives_results = place.rank == result_rank(load.config)
    _answer(orders, True)
    while (body := received.get()) is not None:
        order = decode_order(body)
        if isinstance(order, Call):
            _call(orders, worker, order.command)
            continue
        result = _carry_out(worker, order)
        if gives_results or not isinstance(order, Execute | Sample):
            _answer(orders, result)
    worker.close()


def _answer(orders: Connection, result: object) -> None:
    orders.send_bytes(encode(Done(msgspec.Raw(encode(result)))))


def _call(orders: Connection, worker: Worker, command: Command) -> None:
    try:
        result = worker.call(command)
    except Exception as error:
        orders.send_bytes(encode(Refused(innermost(error))))
    else:
        _answer(orders, result)


def _own(descriptor: int) -> Connection:
    """What was inherited goes no further: a copy elsewhere would hide our end from our peers."""
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def _name_process(rank: int) -> None:
    """What `ps -o comm` and `top` show, which is 15 letters at most."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, f"mainspring-w{rank}".encode(), 0, 0, 0)


def _maker(config: EngineConfig) -> Callable[[EngineConfig, Place, Collectives], Worker]:
    """What makes the worker: see `MultiprocExecutor`."""
    module_name, _, name = config.executor_args.get("worker", "").partition(":")
    if not module_name:
        return Worker
    make: Callable[[EngineConfig, Place, Collectives], Worker] = getattr(
        importlib.import_module(module_name), name
    )
    return make


def _collectives(load: Load, place: Place) -> Collectives:
    if load.address:
        groups = [
            range(first, first + place.tensor_parallel_size)
            for first in range(0, place.world_size, place.tensor_parallel_size)
        ]
        return TorchCollectives(place.rank, place.world_size, groups, load.address)
    links = {rank: _own(descriptor) for rank, descriptor in load.links.items()}
    return PipeCollectives(place.rank, place.group, links)


def result_rank(config: EngineConfig) -> int:
    """The first of the last stage: all of its ranks sample the same tokens."""
    return (config.pipeline_parallel_size - 1) * config.tensor_parallel_size


def _carry_out(worker: Worker, order: Order) -> object:
    match order:
        case GetSpecs():
            return worker.get_kv_cache_specs()
        case GetMemory():
            return worker.determine_available_memory()
        case Initialize(kv, max_model_len):
            worker.initialize(kv, max_model_len)
            return True
        case Execute(plan):
            return worker.execute_model(plan)
        case Sample(mask):
            return worker.sample_tokens(mask)
        case _:
            raise EngineError(f"{type(order).__name__} comes first, and once")


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # the thread that reads orders must not hold the end up
