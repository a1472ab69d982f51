"""What ranks do together: sums, gathers, and rows sent on. A rank is a worker of a model that several share.

Theory of operation.
- Every rank of a group calls the same collective in the same order: they run the same plans. So no call
  needs a name, and nobody negotiates.
- Everyone must get the same bits, because every rank of a head samples for itself from what it got. Sums are
  therefore made in one place, in order of rank.
- `PipeCollectives` is for the processes of one machine: a socket pair between each two of them, handed out by
  whoever starts them. Large arrays fill a pipe, so nobody sends while its peer may be sending to it: in a
  group all talk with its first rank, in order. A peer that is gone is an error at once, not a time limit;
  one that is silent is an error after a time limit, where nobody else watches the ranks.
- `TorchCollectives` is `torch.distributed`: gloo between processes or machines, NCCL between GPUs. It is the
  only thing here that imports torch, and only when it is made.

Invariant: an array that is given is complete float32 rows; those of all ranks have equally many rows.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from mainspring.base.config import EXECUTE_TIMEOUT
from mainspring.base.errors import ConfigError, EngineDeadError, EngineError, PeerGoneError
from mainspring.kernels.ops import Floats

PATIENCE = 1.25  # of all but the first rank, as a multiple


class Collectives(Protocol):
    """The ranks of one group (those that share layers), and other ranks by number."""

    def all_reduce(self, x: Floats) -> None:
        """x = the sum of the group's x, in order of rank; the same bits everywhere."""

    def all_gather(self, x: Floats) -> list[Floats]:
        """The group's x in order of rank; widths may differ."""

    def all_gather_rows(self, x: Floats) -> list[Floats]:
        """The group's x in order of rank; numbers of rows may differ."""

    def reduce_rows(self, parts: list[Floats]) -> Floats:
        """parts: a summand for the rows of each rank; the sum, in order of rank, for this rank's own."""

    def send(self, x: Floats, rank: int) -> None: ...

    def recv(self, x: Floats, rank: int) -> None:
        """Fill x with what `rank` sent."""

    def close(self) -> None: ...


class PipeCollectives:
    """Over connections to other ranks. `group`: the ranks that share layers, this one among them."""

    def __init__(
        self,
        rank: int,
        group: Sequence[int],
        links: Mapping[int, Connection],
        timeout_s: float | None = None,
    ) -> None:
        """timeout_s: of one that is silent; None: wait for ever."""
        self._rank = rank
        self._first, *self._others = sorted(group)
        self._links = links
        self._timeout_s = timeout_s
        if timeout_s is not None:
            # The first waits for all others, and they for it alone: it is the first to know who is silent.
            patience_s = timeout_s if rank == self._first else timeout_s * PATIENCE
            for link in links.values():
                _limit(link, patience_s)

    def all_reduce(self, x: Floats) -> None:
        if self._rank != self._first:
            self.send(x, self._first)
            self.recv(x, self._first)
            return
        part = np.empty_like(x)
        for rank in self._others:
            self.recv(part, rank)
            x += part
        for rank in self._others:
            self.send(x, rank)

    def all_gather(self, x: Floats) -> list[Floats]:
        if self._rank != self._first:
            self.send(x, self._first)
            return [self._recv_rows(len(x), self._first) for _ in range(1 + len(self._others))]
        parts = [x, *(self._recv_rows(len(x), rank) for rank in self._others)]
        for rank in self._others:
            for part in parts:
                self.send(part, rank)
        return parts

    def all_gather_rows(self, x: Floats) -> list[Floats]:
        width = x.shape[1]
        if self._rank != self._first:
            self.send(x, self._first)
            return [self._recv_width(width, self._first) for _ in range(1 + len(self._others))]
        parts = [x, *(self._recv_width(width, rank) for rank in self._others)]
        for rank in self._others:
            for part in parts:
                self.send(part, rank)
        return parts

    def reduce_rows(self, parts: list[Floats]) -> Floats:
        """All summands go to the first rank, which sends every rank its own sum."""
        ranks = [self._first, *self._others]
        if self._rank != self._first:
            for part in parts:
                self.send(part, self._first)
            own = np.empty_like(parts[ranks.index(self._rank)])
            self.recv(own, self._first)
            return own
        sums = [part.copy() for part in parts]
        for rank in self._others:
            for total in sums:
                total += self._recv_width(total.shape[1], rank)
        for rank, total in zip(self._others, sums[1:], strict=True):
            self.send(total, rank)
        return sums[0]

    def send(self, x: Floats, rank: int) -> None:
        try:
            self._links[rank].send_bytes(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise self._lost(rank, error) from None

    def recv(self, x: Floats, rank: int) -> None:
        received = self._recv_bytes(rank)
        if len(received) != x.nbytes:
            raise EngineError(f"rank {rank} sent {len(received)} bytes, expected {x.nbytes}")
        x[...] = np.frombuffer(received, np.float32).reshape(x.shape)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _recv_rows(self, num_rows: int, rank: int) -> Floats:
        return np.frombuffer(self._recv_bytes(rank), np.float32).reshape(num_rows, -1)

    def _recv_width(self, width: int, rank: int) -> Floats:
        return np.frombuffer(self._recv_bytes(rank), np.float32).reshape(-1, width)

    def _recv_bytes(self, rank: int) -> bytes:
        try:
            return self._links[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._lost(rank, error) from None

    def _lost(self, rank: int, error: Exception) -> EngineError:
        if isinstance(error, BlockingIOError):  # as the system calls the end of a time limit
            return EngineDeadError(
                f"rank {rank} has been silent for {self._timeout_s:g} s ({EXECUTE_TIMEOUT})"
            )
        return PeerGoneError(f"rank {rank} is gone ({type(error).__name__})")


def _limit(link: Connection, timeout_s: float) -> None:
    """Of the socket, not of this end's object: whoever reads or writes there gets `BlockingIOError`."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))  # a timeval
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)


class TorchCollectives:
    """`torch.distributed` with one process per rank; all ranks of the world make theirs at the same time.

    address: `tcp://host:port` of rank 0. Raises `ConfigError` where torch is not installed.

    Gloo's sends last until the other side receives. Ours do not, as with pipes: a stage that gives tokens
    back must not wait for one that reads them in a later step only.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        groups: Sequence[Sequence[int]],
        address: str,
        backend: str = "gloo",
    ) -> None:
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            raise ConfigError(
                f"collectives {backend} need torch ({error}); install mainspring[distributed], "
                "or use collectives pipes on one machine"
            ) from None
        self._torch: Any = torch
        self._distributed: Any = distributed
        distributed.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
        self._group: Any = None
        self._group_size = 1
        self._sending: deque[Any] = deque()  # in order; each holds what it sends
        self._widths: dict[int, list[int]] = {}  # of all the group's rows, by the width of one's own
        for ranks in groups:  # every rank makes every group
            group = distributed.new_group(list(ranks))
            if rank in ranks:
                self._group, self._group_size = group, len(ranks)

    def all_reduce(self, x: Floats) -> None:
        self._do("all_reduce", self._torch.from_numpy(x), group=self._group)

    def all_gather(self, x: Floats) -> list[Floats]:
        widths = self._widths.get(x.shape[1]) or self._learn_widths(x.shape[1])
        padded = np.zeros((len(x), max(widths)), np.float32)
        padded[:, : x.shape[1]] = x
        parts = [self._torch.empty(padded.shape) for _ in widths]
        self._do("all_gather", parts, self._torch.from_numpy(padded), group=self._group)
        return [part.numpy()[:, :width] for part, width in zip(parts, widths, strict=True)]

    def _learn_widths(self, width: int) -> list[int]:
        own = self._torch.tensor([width])
        all_widths = [self._torch.empty_like(own) for _ in range(self._group_size)]
        self._do("all_gather", all_widths, own, group=self._group)
        self._widths[width] = [int(each) for each in all_widths]
        return self._widths[width]

    def all_gather_rows(self, x: Floats) -> list[Floats]:
        own = self._torch.tensor([len(x)])
        counts = [self._torch.empty_like(own) for _ in range(self._group_size)]
        self._do("all_gather", counts, own, group=self._group)
        lengths = [int(count) for count in counts]
        padded = np.zeros((max(lengths), x.shape[1]), np.float32)
        padded[: len(x)] = x
        parts = [self._torch.empty(padded.shape) for _ in lengths]
        self._do("all_gather", parts, self._torch.from_numpy(padded), group=self._group)
        return [part.numpy()[:length] for part, length in zip(parts, lengths, strict=True)]

    def reduce_rows(self, parts: list[Floats]) -> Floats:
        whole = np.concatenate(parts)
        self._do("all_reduce", self._torch.from_numpy(whole), group=self._group)
        place = self._distributed.get_rank(self._group)
        begin = sum(len(part) for part in parts[:place])
        return whole[begin : begin + len(parts[place])]

    def send(self, x: Floats, rank: int) -> None:
        while self._sending and self._sending[0].is_completed():
            self._sending.popleft()
        self._sending.append(self._do("isend", self._torch.from_numpy(x.copy(order="C")), rank))

    def recv(self, x: Floats, rank: int) -> None:
        if x.flags.c_contiguous:
            self._do("recv", self._torch.from_numpy(x), rank)
            return
        received = np.empty(x.shape, np.float32)
        self._do("recv", self._torch.from_numpy(received), rank)
        x[...] = received

    def close(self) -> None:
        self._distributed.destroy_process_group()

    def _do(self, name: str, *args: Any, **more: Any) -> Any:
        try:
            return getattr(self._distributed, name)(*args, **more)
        except RuntimeError as error:  # as it calls a connection that has closed
            raise PeerGoneError(f"a rank is gone ({name}: {str(error).splitlines()[0]})") from error
