"""How a front end reaches an engine core, wherever that runs: one contract, and `make_client` picks who keeps
it.

`InprocClient` holds the core itself: nothing runs but in `get_output`, which makes one step. `SyncMPClient`
and `AsyncMPClient` (`mp_client.py`) talk to a core in a process of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from mainspring.base.config import EngineConfig
from mainspring.base.messages import Command, CommandResult, EngineCoreOutputs, EngineCoreRequest
from mainspring.engine.build import Built, build_engine

if TYPE_CHECKING:
    from mainspring.engine.launch import ConfigSource
    from mainspring.engine.mp_client import AsyncMPClient


class CacheFacts(NamedTuple):
    """What a core has made of its KV memory."""

    num_gpu_blocks: int  # the null block counted
    block_size: int  # tokens
    enable_prefix_caching: bool


class EngineCoreClient(ABC):
    """The same for every kind. After `shutdown`, or once the core has died, every method but `shutdown`
    raises `EngineDeadError`."""

    max_model_len: int  # as fitted to the memory
    cache_facts: CacheFacts

    @staticmethod
    def make_client(
        config: ConfigSource, *, in_process: bool = False, shutdown_timeout_s: float = 0.0
    ) -> EngineCoreClient:
        """A core for a caller that waits: here, or in a process of its own. Returns once it can serve."""
        if in_process:
            return InprocClient(build_engine(config() if callable(config) else config))
        from mainspring.engine.mp_client import SyncMPClient

        return SyncMPClient(config, shutdown_timeout_s)

    @staticmethod
    async def make_async_client(config: EngineConfig, *, shutdown_timeout_s: float = 0.0) -> AsyncMPClient:
        """A core in a process of its own, for an event loop."""
        from mainspring.engine.mp_client import AsyncMPClient

        return await AsyncMPClient.launch(config, shutdown_timeout_s)

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None: ...

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None: ...

    @abstractmethod
    def call(self, command: Command, timeout_s: float | None = None) -> CommandResult:
        """Raises what the command raised, and `TimeoutError` if there is no answer within `timeout_s`: by
        default an answer is waited for as long as the core lives, which may be in a long step, or stopped. In
        process there is nothing to wait for, and no limit."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """What is new. In process this makes a step, which may have nothing to say; else it waits for news,
        but not while no request is live."""

    @abstractmethod
    def shutdown(self) -> None:
        """Idempotent."""


class InprocClient(EngineCoreClient):
    """The core in this process, driven by `get_output`."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.max_model_len = built.max_model_len
        layout = built.kv_config
        self.cache_facts = CacheFacts(layout.num_blocks, layout.block_size, built.enable_prefix_caching)
        self._core = built.core
        self._early: deque[EngineCoreOutputs] = deque()  # said while a command was waited for

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)

    def call(self, command: Command, timeout_s: float | None = None) -> CommandResult:
        answer = self._core.call(command)
        if not isinstance(answer, Future):
            return answer
        while True:  # it is given when nothing runs any more
            self._core.settle_if_idle()
            if answer.done():
                return answer.result()
            self._early.append(self._step())

    def get_output(self) -> EngineCoreOutputs:
        return self._early.popleft() if self._early else self._step()

    def _step(self) -> EngineCoreOutputs:
        return self._core.step().get(0) or EngineCoreOutputs()

    def shutdown(self) -> None:
        self._core.shutdown()
