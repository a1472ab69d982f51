"""What a client receives, as types. Keys and nulls are those that clients of vLLM are used to.

`MISSING` keys (msgspec's `UNSET`) are left out; the others are always there.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None
    created_cache_tokens: int | None = 0  # nothing is stored beyond the engine's own cache
    multimodal_tokens: int | UnsetType | None = None


class CompletionTokens(msgspec.Struct):
    reasoning_tokens: int  # of the completion's, those that are no answer


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType | None = None
    completion_tokens_details: CompletionTokens | UnsetType | None = None  # of models that reason


# -- log-probabilities ---------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChosenLogprob] | None


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]  # characters from the beginning of the choice's text
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobsReply = list[dict[str, PromptLogprob] | None]  # by token id; the first is null

# -- chats ---------------------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON text, as the model wrote it


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None  # null beside calls of its own accord and reasoning, where there is none
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET  # the same, under its older name


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None = None


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: Usage
    prompt_logprobs: PromptLogprobsReply | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None
    warnings: list[str] | UnsetType = UNSET  # what a lenient constraint does not enforce


class CalledFunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET  # once, in the call's first
    arguments: str | UnsetType = UNSET  # what is new


class ToolCallDelta(msgspec.Struct, kw_only=True):
    id: str | UnsetType = UNSET  # with the name
    type: Literal["function"] | UnsetType = UNSET  # likewise
    index: int
    function: CalledFunctionDelta


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET  # null beside calls
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same, under its older name


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # with the finish reason
    token_ids: list[int] | UnsetType | None = UNSET  # not beside the role


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = (
        UNSET  # in the last, and with each finish reason if no usage follows
    )
    prompt_token_ids: list[int] | UnsetType | None = UNSET  # in the first
    prompt_text: str | UnsetType | None = UNSET  # likewise
    warnings: list[str] | UnsetType = UNSET  # likewise: what a lenient constraint does not enforce


# -- completions ---------------------------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobsReply | None
    prompt_token_ids: list[int] | None
    routed_experts: None = None


class CompletionReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: Usage
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None
    warnings: list[str] | UnsetType = UNSET  # what a lenient constraint does not enforce


class CompletionChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None  # in a choice's first, if asked for or with echo
    token_ids: list[int] | None


class CompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET  # in the last: what a lenient constraint does not enforce


# -- texts that are read and not continued -------------------------------------------------------------------


class EmbeddingData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str  # or its bytes, base64


class PooledData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class ClassData(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ScoreData(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ListReply(msgspec.Struct, kw_only=True):
    """What the four have in common."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class EmbeddingReply(ListReply, kw_only=True):
    data: list[EmbeddingData]


class PoolingReply(ListReply, kw_only=True):
    data: list[PooledData]


class ClassifyReply(ListReply, kw_only=True):
    data: list[ClassData]


class ScoreReply(ListReply, kw_only=True):
    data: list[ScoreData]


class RerankUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankText(msgspec.Struct, kw_only=True):
    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    document: RerankText | UnsetType = UNSET
    relevance_score: float


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


# -- the rest ------------------------------------------------------------------------------------------------


class ModelPermission(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mainspring"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    status: str  # loading, ready, draining or dead


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int  # requests that are being answered


class Document(msgspec.Struct):
    """The API's description, in the parts that are always there."""

    openapi: str
