"""`/v1/messages`: from what was sent to a chat. Pure.

    system                      the first message
    messages                    messages: neighbours of one role are one, as that API has them
        text                    its text; several in a row are joined by line ends
        thinking                the reasoning of an assistant's message; its signature says nothing here
        tool_use                a call in an assistant's message
        tool_result             a message of the tool, where it stands

A last message of the assistant is one that the answer goes on with. Everything that is no text and no tool of
the client is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn

import msgspec

from mainspring.server.errors import ApiError, PromptTooLong, shown
from mainspring.server.messages_types import CountTokensRequest, MessagesRequest, OutputFormat
from mainspring.server.requests import ChatRequest, JsonSchemaFormat, ResponseFormat

# What blocks a message of each role may have.
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
PARAGRAPH = "\n\n"  # between the texts of neighbouring messages that are one
# field -> what to say where it asks for something
REFUSED = {
    "mcp_servers": "the server runs no tools and asks no servers of tools; leave it out",
    "container": "the server runs no tools; leave it out",
    "context_management": "conversations are not edited here; send fewer messages",
}
# Fields that mean the same in a chat.
SHARED = (
    *("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt"),
    *("watermarking", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
)
# What a chat calls a field -> what it is called here.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def renamed(error: ApiError, body: CountTokensRequest) -> ApiError:
    """A chat's refusal, in the words of this API."""
    if isinstance(error, PromptTooLong):  # clients look for these words
        words = f"prompt is too long: {error.num_tokens} tokens > {error.max_num_tokens} maximum"
        return error.saying(words, error.param)
    names = dict(NAMES)
    if body.thinking is not None and body.thinking.type == "disabled":
        names["reasoning_effort"] = "thinking.type"
    if body.output_config is None or body.output_config.format is None:
        names["response_format"] = "output_format"
    # What has no `_` may be a word like others.
    meant = [name for name in names if "_" in name or name == error.param]
    words = re.sub(rf"\b({'|'.join(meant)})\b", lambda found: names[found[0]], error.message)
    if error.param == "tools":
        words = re.sub(r"^(tools\[\d+\] .*?: )parameters\b", r"\1input_schema", words)
    return error.saying(words, names.get(error.param or "", error.param))


# -- messages ------------------------------------------------------------------------------------------------


def messages_of(
    system: str | list[dict[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A chat's. Raises `ApiError`."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    if system:
        found.append({"role": "system", "content": _text(_blocks(system, "system", ("text",)))})
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        if role not in BLOCKS:
            _refuse(f"{place}.role must be {', '.join(BLOCKS)}; got {shown(role)}")
        blocks = _blocks(message.get("content"), f"{place}.content", BLOCKS[role])
        if role == "assistant":
            _add(found, _assistant(blocks, f"{place}.content", names))
        elif role == "system" or not blocks:
            _add(found, {"role": role, "content": _text(blocks)})
        else:
            for each in _user(blocks, f"{place}.content", names):
                _add(found, each)
    return found


def _user(blocks: list[dict[str, Any]], place: str, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for kind, group in groupby(blocks, key=lambda block: block["type"]):
        if kind == "text":
            yield {"role": "user", "content": _text(group)}
            continue
        for block in group:
            call_id = _string(block, "tool_use_id", place)
            if call_id not in names:
                _refuse(f"{place}: no tool_use before it has the id {shown(call_id)} of a tool_result")
            content = block.get("content")
            said = _text(_blocks("" if content is None else content, f"{place}.tool_result", ("text",)))
            if block.get("is_error") and not said:
                said = "error"  # which nothing else would say
            yield {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": said}


def _assistant(blocks: list[dict[str, Any]], place: str, names: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    texts = [block for block in blocks if block["type"] == "text"]
    if texts:
        message["content"] = _text(texts)
    thoughts = [_string(block, "thinking", place) for block in blocks if block["type"] == "thinking"]
    if any(thoughts):
        message["reasoning"] = "\n".join(thoughts)
    calls = [_call(block, place) for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = calls
        names.update((call["id"], call["function"]["name"]) for call in calls)
    return message


def _call(block: dict[str, Any], place: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        _refuse(f"{place}: the input of a tool_use must be an object, got {shown(given)}")
    name, call_id = _string(block, "name", place), _string(block, "id", place)
    function = {"name": name, "arguments": msgspec.json.encode(given).decode()}
    return {"id": call_id, "type": "function", "function": function}


def _add(found: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = found[-1] if found else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        found.append(message)
        return
    for name in ("content", "reasoning"):
        if texts := [text for text in (last.get(name), message.get(name)) if text]:
            last[name] = PARAGRAPH.join(texts)
    if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
        last["tool_calls"] = calls


def _blocks(given: object, place: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Text is a block of text. Raises `ApiError` for a block of another kind than these."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list):
        _refuse(f"{place} must be text or a list of blocks, got {shown(given)}")
    for index, block in enumerate(given):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "redacted_thinking":
            _refuse(f"{place}[{index}] is {kind} of another server and cannot be read; leave it out")
        if kind not in kinds:
            _refuse(
                f"{place}[{index}] is of type {shown(kind)}, which is not supported; "
                f"supported: {', '.join(kinds)}"
            )
        if kind == "text":
            _string(block, "text", f"{place}[{index}]", empty=True)
    return given


def _text(blocks: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> str:
    return "\n".join(block["text"] for block in blocks)


def _string(block: Mapping[str, Any], name: str, place: str, *, empty: bool = False) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not (value or empty or name == "thinking"):
        _refuse(f"{place}: the {name} of a {block['type']} must be text, got {shown(value)}")
    return value


def _refuse(words: str, param: str = "messages") -> NoReturn:
    raise ApiError(400, words, param)


# -- a chat --------------------------------------------------------------------------------------------------


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """The same question, asked of `/v1/chat/completions`. Raises `ApiError`."""
    for name, words in REFUSED.items():
        if _asks(getattr(body, name)):
            _refuse(f"{name}: {words}", name)
    messages = messages_of(body.system, body.messages)
    goes_on = bool(messages) and messages[-1]["role"] == "assistant"
    if goes_on and messages[-1].get("tool_calls"):
        _refuse("the last message calls tools; their results must follow, each as a tool_result")
    tools, choice = _tools(body)
    chat = ChatRequest(
        messages=messages,
        model=body.model,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        continue_final_message=goes_on or None,
        response_format=_response_format(body),
        **_reasoning(body),
    )
    if isinstance(body, MessagesRequest):
        chat.stop = body.stop_sequences or None
        for name in SHARED:
            setattr(chat, name, getattr(body, name))
    return chat


def _asks(value: Any) -> bool:
    """An object of nothing asks for nothing."""
    return any(map(_asks, value.values())) if isinstance(value, dict) else bool(value)


def _tools(body: CountTokensRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """Tools and the choice among them, as a chat has them."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])] or None
    choice = body.tool_choice
    if choice is None:
        return tools, None
    if choice.type == "tool":
        if not choice.name:
            _refuse("tool_choice of type tool needs a name", "tool_choice")
        return tools, {"type": "function", "function": {"name": choice.name}}
    if choice.type not in CHOICES:
        _refuse(f"tool_choice.type must be auto, any, tool or none, got {shown(choice.type)}", "tool_choice")
    if tools is None and choice.type == "any":
        _refuse("tool_choice needs tools; give some, or leave it out", "tool_choice")
    return tools, CHOICES[choice.type]


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        _refuse(
            f"{place} is of type {shown(kind)}, which is not supported: the server runs no tools and knows "
            "none; supported: tools of the client, with an input_schema",
            "tools",
        )
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        _refuse(f"{place} must have a name, got {shown(name)}", "tools")
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        _refuse(f"{place}.input_schema must be a JSON schema of type object, got {shown(schema)}", "tools")
    function = {"name": name, "parameters": {"type": "object", **schema}}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    form: OutputFormat | None = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
    if form is None:
        return None
    if form.type != "json_schema" or form.schema is None:
        _refuse("output_config.format must be of type json_schema, with a schema", "output_config.format")
    return ResponseFormat(type=form.type, json_schema=JsonSchemaFormat(schema=form.schema))


def _reasoning(body: CountTokensRequest) -> dict[str, Any]:
    """A chat's fields. A request that says nothing of thinking gets what the model does by itself."""
    kwargs = dict(body.chat_template_kwargs or {})
    found: dict[str, Any] = {"chat_template_kwargs": kwargs}
    if body.output_config is not None:
        found["reasoning_effort"] = body.output_config.effort
    thinking = body.thinking
    if thinking is None:
        return found
    if thinking.display not in (None, "summarized", "omitted"):
        _refuse(f"thinking.display must be summarized or omitted, got {shown(thinking.display)}", "thinking")
    found["include_reasoning"] = thinking.display != "omitted"
    match thinking.type:
        case "enabled" if thinking.budget_tokens is None:
            _refuse("thinking of type enabled needs budget_tokens", "thinking")
        case "enabled":
            found["thinking_token_budget"] = thinking.budget_tokens
            for name in ("enable_thinking", "thinking"):  # what templates call it
                kwargs.setdefault(name, True)
        case "disabled":
            found["reasoning_effort"] = "none"
        case "adaptive":
            pass
        case _:
            _refuse(
                f"thinking.type must be enabled, disabled or adaptive, got {shown(thinking.type)}", "thinking"
            )
    return found
