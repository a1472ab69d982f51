"""The one thing all endpoints share: where the server stands, and the engine once there is one.

    LOADING ──> READY ──> DRAINING
       └──────────┴──> a dead engine is seen by asking it, in any phase

Health. `check_answering` starts a round trip through the engine core and judges by the oldest that has not
come back, so the answer is at once, also from a core that is stuck; it turns well when the core moves again
(case B004).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from mainspring import __version__
from mainspring.base.errors import innermost
from mainspring.base.log import get_logger
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.chat_template import ChatTemplate
from mainspring.frontend.detokenizer import TokenBytes, special_texts
from mainspring.server.errors import LOADING_RETRY_AFTER_S, ApiError
from mainspring.server.metrics import ServerMetrics
from mainspring.server.prompts import Chats
from mainspring.server.responses_store import ResponseStore
from mainspring.server.settings import ServerSettings

logger = get_logger(__name__)


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Service:
    """Everything in it happens on the server's event loop."""

    def __init__(self, settings: ServerSettings, model: str) -> None:
        """`model` names what is served, where the settings have no name for it."""
        self.settings = settings
        self.model_names = settings.served_model_name or [model]
        self.model_root = model
        self.sampling_defaults = settings.sampling_defaults
        self.created = int(time.time())
        self.fingerprint = f"mainspring-{__version__}-{_digest(model)}"
        self.phase = Phase.LOADING
        self.num_live = 0  # requests that are being answered
        self.idle = asyncio.Event()
        self.idle.set()
        self._llm: AsyncLLM | None = None
        self._chats: Chats | None = None
        self._round_trip: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._ailment: str | None = None  # what the last round trip found
        self._warned: set[str] = set()
        self.metrics = ServerMetrics(settings.metrics_prefix)
        self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
        self.describe: Callable[[], dict[str, Any]] = dict  # the API's document: see `openapi.py`

    # --- phases ---------------------------------------------------------------------------------------------

    def set_ready(self, llm: AsyncLLM, template: ChatTemplate | None) -> None:
        self._llm = llm
        self.sampling_defaults = {**llm.sampling_defaults, **self.settings.sampling_defaults}
        tokenizer = llm.tokenizer
        told = (
            ()
            if tokenizer is None
            else (
                frozenset(special_texts(tokenizer)),
                TokenBytes(tokenizer, skip_special_tokens=False).__getitem__,
            )
        )
        self._chats = Chats(
            tokenizer,
            template,
            self.settings.default_chat_template_kwargs,
            self.settings.trust_request_chat_template,
            self.settings.tool_call_parser,
            self.settings.reasoning_parser,
            self.settings.enable_auto_tool_choice,
            *told,
        )
        self.metrics.attach(llm, self.model_names[0])
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def set_draining(self) -> None:
        self.phase = Phase.DRAINING

    @property
    def status(self) -> str:
        """loading, ready, draining or dead."""
        return "dead" if self._llm is not None and self._llm.errored else self.phase.value

    @property
    def llm(self) -> AsyncLLM:
        """Raises `ApiError` (503) where there is none to ask."""
        if self.phase is Phase.DRAINING:
            raise ApiError(503, "the server is shutting down", retry_after_s=LOADING_RETRY_AFTER_S)
        if self._llm is None:
            raise ApiError(503, "the model is still loading", retry_after_s=LOADING_RETRY_AFTER_S)
        if (dead := self._llm.dead_error) is not None:
            raise dead
        return self._llm

    @property
    def chats(self) -> Chats:
        """What chats need; after `llm`, which says why there is none."""
        assert self._chats is not None
        return self._chats

    # --- health ---------------------------------------------------------------------------------------------

    async def check_answering(self) -> None:
        """Raises `ApiError` (503) if the engine core did not answer within `health_timeout`."""
        if self._llm is None:
            raise ApiError(503, "the model is still loading", retry_after_s=LOADING_RETRY_AFTER_S)
        if (dead := self._llm.dead_error) is not None:
            raise ApiError(503, f"the engine is dead: {dead}")
        if self._round_trip is None or self._round_trip.done():
            self._asked_s = time.monotonic()
            self._round_trip = asyncio.create_task(self._ask(self._llm))
        waited_s = time.monotonic() - self._asked_s
        if waited_s > self.settings.health_timeout:
            raise ApiError(503, f"the engine has not answered for {waited_s:.0f} s")
        if self._ailment is not None:
            raise ApiError(503, self._ailment)

    async def _ask(self, llm: AsyncLLM) -> None:
        """Any failure counts: a health check has nobody else to tell."""
        try:
            await llm.check_health()
            self._ailment = None
        except Exception as error:
            if self._ailment is None:
                logger.error("the engine is not healthy: %s", innermost(error))
            self._ailment = str(error)

    async def close(self) -> None:
        await self.responses.close()
        if self._round_trip is not None:
            self._round_trip.cancel()
            await asyncio.gather(self._round_trip, return_exceptions=True)

    # --- requests -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A request came that will be answered: `end` must follow."""
        self.num_live += 1
        self.idle.clear()

    def end(self) -> None:
        self.num_live -= 1
        if not self.num_live:
            self.idle.set()

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `ApiError` (404) for a model that is not served."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"The model `{name[:100]}` does not exist. Valid aliases: {', '.join(self.model_names)}.",
                "model",
            )
        return name

    def warn_of_unknown(self, names: Mapping[str, Any] | set[str]) -> None:
        """Fields that nobody reads: each is told once, and not endlessly many of them."""
        for name in sorted(names):
            if name not in self._warned and len(self._warned) < 100:
                self._warned.add(name)
                logger.warning("the field %r of a request is not known and was ignored", name[:60])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
