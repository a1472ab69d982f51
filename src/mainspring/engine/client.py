"""How a front end reaches an engine core, wherever that runs: one contract, and `make_client` picks who keeps
it.

`InprocClient` holds the core itself: nothing runs but in `get_output`, which makes one step. The clients of a
core in a process of its own come with *The engine in its own process*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mainspring.base.config import EngineConfig
from mainspring.base.messages import Command, CommandResult, EngineCoreOutputs, EngineCoreRequest
from mainspring.engine.build import Built, build_engine


class EngineCoreClient(ABC):
    """The same for every kind. After `shutdown`, or once the core has died, every method but `shutdown`
    raises `EngineDeadError`."""

    max_model_len: int  # as fitted to the memory

    @staticmethod
    def make_client(config: EngineConfig) -> EngineCoreClient:
        """Build an engine and return once it can serve."""
        return InprocClient(build_engine(config))

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None: ...

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    def call(self, command: Command) -> CommandResult:
        """Raises what the command raised."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """What is new; empty if a step had nothing to say."""

    @abstractmethod
    def has_work(self) -> bool: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Idempotent."""


class InprocClient(EngineCoreClient):
    """The core in this process, driven by `get_output`."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.max_model_len = built.max_model_len
        self._core = built.core

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)

    def call(self, command: Command) -> CommandResult:
        return self._core.call(command)

    def get_output(self) -> EngineCoreOutputs:
        return self._core.step().get(0) or EngineCoreOutputs()

    def has_work(self) -> bool:
        return self._core.has_work()

    def shutdown(self) -> None:
        self._core.shutdown()
