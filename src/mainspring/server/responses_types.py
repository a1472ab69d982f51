"""`/v1/responses`: what a client may send and what it receives, as types. The rules are those of
`requests.py` and `replies.py`; names are OpenAI's, with vLLM's extensions.

Items of an input are judged in `responses_items.py`: what an item may have depends on its type, and on the
role of its message.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from mainspring.server.replies import ChosenLogprob
from mainspring.server.requests import StreamOptions, StructuredOutputs

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Item = dict[str, Any]  # of an input, judged; or of an output, as JSON has it

# -- requests ------------------------------------------------------------------------------------------------


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the former name


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    # how it is answered
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None  # yes, unless it is false
    include: list[str] | None = None
    include_reasoning: bool | None = None
    top_logprobs: int | None = None
    # how to choose
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # when to stop
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    # what the text must be
    text: TextConfig | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    skip_special_tokens: bool | None = None
    # the prompt
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # the engine
    priority: int | None = None
    cache_salt: str | None = None
    # without effect on an answer
    max_tool_calls: int | None = None  # it counts tools of the server, which has none
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    session_id: str | None = None
    request_id: str | None = None  # an answer's id opens what is stored of it, so it is always ours
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    # refused unless they ask for nothing
    prompt: dict[str, Any] | None = None
    conversation: str | dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
    enable_response_messages: bool | None = None
    previous_input_messages: list[dict[str, Any]] | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


# -- what an answer is made of -------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    annotations: list[None] = msgspec.field(default_factory=list)
    text: str
    logprobs: list[ChosenLogprob] | None = None


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    phase: None = None


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[None] = msgspec.field(default_factory=list)  # nobody sums it up: `content` is all of it
    content: list[ReasoningText]
    encrypted_content: None = None
    status: ItemStatus


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = ReasoningItem | OutputMessage | FunctionCall
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0  # nothing is stored beyond the engine's own cache
    input_tokens_per_turn: list[int] = msgspec.field(default_factory=list)
    cached_tokens_per_turn: list[int] = msgspec.field(default_factory=list)


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0
    tool_output_tokens: int = 0
    output_tokens_per_turn: list[int] = msgspec.field(default_factory=list)
    tool_output_tokens_per_turn: list[int] = msgspec.field(default_factory=list)


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponsesReply(msgspec.Struct, kw_only=True):
    """A response, at whatever stage."""

    id: str
    created_at: int
    error: ResponseError | UnsetType = UNSET  # of one that failed
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    metadata: dict[str, Any] | None
    model: str
    object: Literal["response"] = "response"
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: str | None
    prompt: None = None
    reasoning: ReasoningConfig | None
    service_tier: str = "auto"
    status: Status
    text: TextConfig | None
    top_logprobs: int | None
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    input_messages: None = None
    output_messages: None = None
    warnings: list[str] | UnsetType = UNSET  # what a lenient constraint does not enforce


class InputItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


# -- events --------------------------------------------------------------------------------------------------


class ResponseEvent(msgspec.Struct, kw_only=True):
    """What all of them have, beside the type that is their name."""

    sequence_number: int


class _Stage(ResponseEvent, kw_only=True, tag_field="type", tag="response"):
    response: ResponsesReply


class Created(_Stage, kw_only=True, tag="response.created"): ...


class InProgress(_Stage, kw_only=True, tag="response.in_progress"): ...


class Completed(_Stage, kw_only=True, tag="response.completed"): ...


class Incomplete(_Stage, kw_only=True, tag="response.incomplete"): ...


class Failed(_Stage, kw_only=True, tag="response.failed"): ...


class ItemAdded(ResponseEvent, kw_only=True, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, kw_only=True, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(ResponseEvent, kw_only=True, tag_field="type", tag="response.item"):
    output_index: int
    item_id: str


class PartAdded(_OfItem, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: Part


class PartDone(_OfItem, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: Part


class TextDelta(_OfItem, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: list[ChosenLogprob]


class TextDone(_OfItem, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: list[ChosenLogprob]


class ReasoningDelta(_OfItem, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningDone(_OfItem, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class ArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


def name_of(event: ResponseEvent) -> str:
    """What stands beside `event:` on the wire."""
    return _name_of(type(event))


@cache
def _name_of(kind: type[ResponseEvent]) -> str:
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
