"""`/v1/messages`: what a client may send and what it receives, as types. The rules are those of `requests.py`
and `replies.py`; names are Anthropic's, with vLLM's extensions.

Messages and tools are judged in `messages_input.py`: what a block may have depends on its type, and on the
role of its message. A `cache_control` may stand anywhere and has no effect: prefixes are shared anyway.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

# -- requests ------------------------------------------------------------------------------------------------


class Thinking(msgspec.Struct, kw_only=True):
    type: str  # enabled, disabled, adaptive: as the model does without being told
    budget_tokens: int | None = None  # most tokens of it
    display: str | None = None  # omitted: it is left out of the answer


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str  # auto, any, tool, none
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the former place of `output_config.format`
    chat_template_kwargs: dict[str, Any] | None = None
    # without effect on an answer
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    # refused unless they ask for nothing
    mcp_servers: list[dict[str, Any]] | None = None
    container: str | dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    # how to choose
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    # the engine
    cache_salt: str | None = None
    # without effect on an answer
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    return_mm_kwargs: bool | None = None
    mm_payload: str | None = None
    # refused unless they ask for nothing
    watermarking: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


# -- what an answer is made of -------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""  # clients send back what has one; nobody checks it here


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw  # an object, as the model wrote it


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTokens(msgspec.Struct):
    thinking_tokens: int  # with the tags around it


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int  # of the prompt, without those of the next two
    output_tokens: int
    cache_creation_input_tokens: int = 0  # nothing is stored beyond the engine's own cache
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputTokens | UnsetType = UNSET  # where something was thought


class Message(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[Block] = msgspec.field(default_factory=list)
    model: str
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


# -- events --------------------------------------------------------------------------------------------------


class MessageEvent(msgspec.Struct):
    """Its type is its name."""


class MessageStart(MessageEvent, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(MessageEvent, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(MessageEvent, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(MessageEvent, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(MessageEvent, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(MessageEvent, tag_field="type", tag="message_stop"): ...


class Ping(MessageEvent, tag_field="type", tag="ping"): ...
