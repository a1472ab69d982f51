"""The paths, what answers there, and what is said of it in the API's document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mainspring.server import generating, informing, messages, pooling, responses, steering
from mainspring.server.errors import ApiError, ErrorReply
from mainspring.server.messages_errors import MessagesErrorReply
from mainspring.server.messages_types import (
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from mainspring.server.replies import (
    ChatChunk,
    ChatReply,
    ClassifyReply,
    CompletionChunk,
    CompletionReply,
    DetokenizeReply,
    Document,
    EmbeddingReply,
    Health,
    Load,
    ModelCard,
    ModelList,
    PoolingReply,
    RerankReply,
    ScoreReply,
    TokenizeReply,
    Version,
)
from mainspring.server.requests import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from mainspring.server.responses_types import (
    Deleted,
    InputItemList,
    ResponseEvent,
    ResponsesReply,
    ResponsesRequest,
)
from mainspring.server.service import Service
from mainspring.server.settings import ServerSettings

MAX_SHOWN = 200  # characters of a path


class Entry(NamedTuple):
    """A path; one part of it may be a name in braces, which may have slashes."""

    method: str
    path: str
    endpoint: Callable[[Service, Request], Awaitable[Response]]
    takes: type[msgspec.Struct] | None = None  # the body
    gives: tuple[type[msgspec.Struct], ...] = ()  # the answer; then what a stream is made of
    gives_text: bool = False
    needs_key: bool = True
    is_work: bool = False  # counts as load, and is waited for at the end
    fails: tuple[int, ...] = ()  # statuses beside those that follow from the rest
    error: type[msgspec.Struct] = ErrorReply  # what it fails with


work = partial(Entry, is_work=True)
open_to_all = partial(Entry, needs_key=False)
RESPONSE = "/v1/responses/{response_id}"
steer = partial(Entry, fails=(400, 500, 503))

ENTRIES = [
    work(
        "POST", "/v1/chat/completions", generating.create_chat_completion, ChatRequest, (ChatReply, ChatChunk)
    ),
    work(
        "POST",
        "/v1/completions",
        generating.create_completion,
        CompletionRequest,
        (CompletionReply, CompletionChunk),
    ),
    work(
        "POST",
        "/v1/messages",
        messages.create_message,
        MessagesRequest,
        (Message, MessageEvent),
        error=MessagesErrorReply,
    ),
    work(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        CountTokensRequest,
        (TokenCount,),
        error=MessagesErrorReply,
    ),
    work("POST", "/v1/embeddings", pooling.create_embeddings, EmbeddingRequest, (EmbeddingReply,)),
    work(
        "POST",
        "/v1/responses",
        responses.create_response,
        ResponsesRequest,
        (ResponsesReply, ResponseEvent),
    ),
    Entry(
        "GET", RESPONSE, responses.retrieve_response, None, (ResponsesReply, ResponseEvent), fails=(400, 404)
    ),
    Entry("DELETE", RESPONSE, responses.delete_response, None, (Deleted,), fails=(404,)),
    Entry("POST", f"{RESPONSE}/cancel", responses.cancel_response, None, (ResponsesReply,), fails=(400, 404)),
    Entry(
        "GET", f"{RESPONSE}/input_items", responses.list_input_items, None, (InputItemList,), fails=(400, 404)
    ),
    *(
        work("POST", path, pooling.create_scores, ScoreRequest, (ScoreReply,))
        for path in ("/score", "/v1/score")
    ),
    *(
        work("POST", path, pooling.create_ranking, RerankRequest, (RerankReply,))
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    work("POST", "/classify", pooling.create_classes, ClassifyRequest, (ClassifyReply,)),
    work("POST", "/pooling", pooling.create_pooled, PoolingRequest, (PoolingReply,)),
    work("POST", "/tokenize", informing.tokenize, TokenizeRequest, (TokenizeReply,)),
    work("POST", "/detokenize", informing.detokenize, DetokenizeRequest, (DetokenizeReply,)),
    Entry("GET", "/v1/models", informing.list_models, None, (ModelList,), fails=(503,)),
    Entry("GET", "/v1/models/{model}", informing.retrieve_model, None, (ModelCard,), fails=(404, 503)),
    open_to_all("GET", "/health", informing.health, fails=(503,)),
    open_to_all("GET", "/ping", informing.health, fails=(503,)),
    open_to_all("GET", "/livez", informing.is_live, None, (Health,), fails=(503,)),
    open_to_all("GET", "/readyz", informing.is_ready, None, (Health,), fails=(503,)),
    open_to_all("GET", "/version", informing.version, None, (Version,)),
    open_to_all("GET", "/load", informing.load, None, (Load,)),
    open_to_all("GET", "/metrics", informing.metrics, gives_text=True),
]
OPENAPI = open_to_all("GET", "/openapi.json", informing.openapi, gives=(Document,))
TOKENIZER_INFO = Entry(
    "GET", "/tokenizer_info", steering.tokenizer_info, None, (steering.TokenizerInfo,), fails=(400, 503)
)
STEERING = [
    steer("POST", "/reset_prefix_cache", steering.reset_prefix_cache, None, (steering.Success,)),
    steer("POST", "/sleep", steering.sleep, None, (steering.Success,)),
    steer("POST", "/wake_up", steering.wake_up, None, (steering.Success,)),
    steer("GET", "/is_sleeping", steering.is_sleeping, None, (steering.IsSleeping,)),
    steer("POST", "/pause", steering.pause, None, (steering.Success,)),
    steer("POST", "/resume", steering.resume, None, (steering.Success,)),
    steer("GET", "/is_paused", steering.is_paused, None, (steering.IsPaused,)),
    steer("POST", "/abort_requests", steering.abort_requests, steering.AbortRequests, (steering.Success,)),
    steer("GET", "/server_info", steering.server_info, None, (steering.ServerInfo,)),
]


def entries(settings: ServerSettings) -> list[Entry]:
    """Those that the settings allow."""
    found = list(ENTRIES)
    if settings.enable_tokenizer_info_endpoint:
        found.append(TOKENIZER_INFO)
    if settings.server_dev_mode:
        found += STEERING
    return found if settings.disable_fastapi_docs else [*found, OPENAPI]


class Routes:
    """Finds the entry for a request."""

    def __init__(self, served: Iterable[Entry]) -> None:
        self._exact: dict[str, dict[str, Entry]] = {}  # by path, by method
        self._around: dict[tuple[str, str], dict[str, Entry]] = {}  # the same, by what stands around the name
        for entry in served:
            before, brace, rest = entry.path.partition("{")
            if brace:
                methods = self._around.setdefault((before, rest.partition("}")[2]), {})
            else:
                methods = self._exact.setdefault(entry.path, {})
            methods[entry.method] = entry
            if entry.method == "GET":
                methods["HEAD"] = entry
        # A path may fit two: the later one goes first, and then what stands after the name is no part of it.
        self._around = dict(sorted(self._around.items(), key=lambda pair: len(pair[0][1])))

    def find(self, method: str, path: str) -> tuple[Entry, dict[str, str]]:
        """And the name in the path, by its own name. Raises `ApiError` (404 or 405)."""
        methods, name = self._exact.get(path), None
        if methods is None:
            for (before, after), known in self._around.items():
                if path.startswith(before) and path.endswith(after) and len(path) > len(before + after):
                    methods, name = known, path.removeprefix(before).removesuffix(after)
        if methods is None:
            raise ApiError(404, f"there is nothing at {path[:MAX_SHOWN]}")
        entry = methods.get(method)
        if entry is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(
                405,
                f"{method} is not possible at {path[:MAX_SHOWN]}, only {allowed}",
                headers={"allow": allowed},
            )
        return entry, {} if name is None else {named_part(entry.path): name}


def named_part(path: str) -> str:
    """The name in braces."""
    return path.partition("{")[2].partition("}")[0]
