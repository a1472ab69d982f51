"""`/v1/responses`: from what was sent to a chat. Pure.

Items are judged once, when they come in, and get an id and one form; what was said before (`history`) is such
items too. Then they become messages:

    message                  a message; `developer` is `system`, and what either says first is one message
    reasoning                opens a message of the assistant
    function_call            joins the assistant's message before it, or opens one
    function_call_output     a message of the tool
    item_reference           the item of that id, from the history or from what is stored

Everything that is no text or function of the client is refused by name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from mainspring.server.errors import ApiError
from mainspring.server.requests import ChatRequest, JsonSchemaFormat, ResponseFormat
from mainspring.server.responses_types import Item, ResponsesRequest, TextFormat

ROLES = ("user", "assistant", "system", "developer")
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
SUPPORTED = "message, function_call, function_call_output, reasoning, item_reference"
MAX_SHOWN = 60  # characters of what was sent, in a refusal
# Fields that mean the same in a chat.
SHARED = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("structured_outputs", "parallel_tool_calls", "include_reasoning", "skip_special_tokens"),
    *("chat_template_kwargs", "priority", "cache_salt"),
    *("watermarking", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
)
# What a chat calls a field -> what it is called here.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
FindItem = Callable[[str], Item | None]


def renamed(error: ApiError) -> ApiError:
    """A chat's refusal, in the words of this API."""
    param, words = error.param or "", error.message
    for name in {param, "response_format"} & NAMES.keys():
        words = words.replace(name, NAMES[name])
    return error.saying(words, NAMES.get(param, error.param))


# -- items ---------------------------------------------------------------------------------------------------


def judged_items(given: str | list[dict[str, Any]], find: FindItem) -> list[Item]:
    """What was sent, in the one form that is stored and shown. Raises `ApiError`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise ApiError(400, "input is empty; give a text, or at least one item", "input")
    return [_judged(item, f"input[{index}]", find) for index, item in enumerate(given)]


def _judged(item: dict[str, Any], place: str, find: FindItem) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            body = _message(item, place)
        case "function_call":
            names = ("call_id", "name", "arguments")
            body = {name: _text(item, name, place) for name in names} | {"status": "completed"}
        case "function_call_output":
            output = _parts(item.get("output"), ("input_text", "text"), f"{place}.output")
            body = {"call_id": _text(item, "call_id", place), "output": output, "status": "completed"}
        case "reasoning":
            body = _reasoning(item, place)
        case "item_reference":
            return _referred(_text(item, "id", place), place, find)
        case _:
            _refuse(f"{place} is of type {_shown(kind)}, which is not supported; supported: {SUPPORTED}")
    return {"id": _id_of(item, kind, place), "type": kind, **body}


def _message(item: dict[str, Any], place: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        _refuse(f"{place}.role must be {', '.join(ROLES)}; got {_shown(role)}")
    kind = "output_text" if role == "assistant" else "input_text"
    parts = item.get("content")
    if isinstance(parts, str):
        parts = [{"type": kind, "text": parts}]
    texts = _parts(parts, ("input_text", "output_text", "text", "refusal"), f"{place}.content")
    form: Item = {"type": kind} | ({"annotations": []} if role == "assistant" else {})
    return {"role": role, "content": [part | form for part in texts], "status": "completed"}


def _reasoning(item: dict[str, Any], place: str) -> Item:
    content = _parts(item.get("content") or [], ("reasoning_text", "text"), f"{place}.content")
    summary = _parts(item.get("summary") or [], ("summary_text",), f"{place}.summary")
    if item.get("encrypted_content") and not content:
        _refuse(f"{place}.encrypted_content is of another server and cannot be read; leave the item out")
    return {"summary": summary, "content": content, "status": "completed"}


def _parts(given: object, kinds: Sequence[str], place: str) -> Any:
    """Parts that are text, as they are without what else they have; or the text that was given for them."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        _refuse(f"{place} must be text or a list of parts, got {_shown(given)}")
    found = []
    for index, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            _refuse(
                f"{place}[{index}] is of type {_shown(kind)}, which is not supported; "
                f"supported: {', '.join(kinds)}"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            _refuse(f"{place}[{index}] must have a text, got {_shown(text)}")
        found.append({"type": kind, "text": text})
    return found


def _referred(item_id: str, place: str, find: FindItem) -> Item:
    item = find(item_id)
    if item is None:
        raise ApiError(
            404, f"{place} refers to {_shown(item_id)}, and no such item is stored; send the item", "input"
        )
    return item


def _text(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (name != "arguments" and not value):
        _refuse(f"{place}.{name} must be text, got {_shown(value)}")
    return value


def _id_of(item: dict[str, Any], kind: str, place: str) -> str:
    if item.get("id") is None:
        return f"{PREFIXES[kind]}_{uuid.uuid4().hex[:24]}"
    return _text(item, "id", place)


def _refuse(words: str) -> NoReturn:
    raise ApiError(400, words, "input")


def _shown(value: object) -> str:
    text = " ".join(repr(value)[: MAX_SHOWN * 2].split())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# -- messages ------------------------------------------------------------------------------------------------


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """A chat's messages. Raises `ApiError` for the output of a call that was never made."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the functions that were called, by the call's id
    if instructions:
        found.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                _add_message(found, item)
            case "reasoning":
                text = _joined(item["content"]) or _joined(item["summary"])
                if text:
                    found.append({"role": "assistant", "reasoning": text})
            case "function_call":
                names[item["call_id"]] = item["name"]
                _add_call(found, item)
            case "function_call_output":
                name = names.get(item["call_id"])
                if name is None:
                    _refuse(f"no function_call has the call_id {_shown(item['call_id'])} of an output")
                output = {"role": "tool", "tool_call_id": item["call_id"], "name": name}
                found.append(output | {"content": _joined(item["output"])})
    for message in found:
        message.setdefault("content", "")
    return found


def _add_message(found: list[dict[str, Any]], item: Item) -> None:
    role = "system" if item["role"] == "developer" else item["role"]
    text = _joined(item["content"])
    last = found[-1] if found else {}
    if role == "system" and last.get("role") == "system" and len(found) == 1:
        last["content"] += "\n\n" + text
    elif role == "assistant" and last.get("role") == "assistant" and last.keys() == {"role", "reasoning"}:
        last["content"] = text
    else:
        found.append({"role": role, "content": text})


def _add_call(found: list[dict[str, Any]], item: Item) -> None:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant"})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    found[-1].setdefault("tool_calls", []).append(call)


def _joined(parts: Any) -> str:
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)


# -- a chat --------------------------------------------------------------------------------------------------


def as_chat(body: ResponsesRequest, items: Iterable[Item], max_model_len: int) -> ChatRequest:
    """The same question, asked of `/v1/chat/completions`. Raises `ApiError`."""
    tools, choice = _tools(body)
    shared = {name: getattr(body, name) for name in SHARED}
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    return ChatRequest(
        messages=messages_of(body.instructions, items),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        logprobs=wants_logprobs or None,
        top_logprobs=body.top_logprobs or None,
        truncate_prompt_tokens=_truncation(body, max_model_len),
        **shared,
    )


def _tools(body: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """Tools and the choice among them, as a chat has them."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    match body.tool_choice:
        case {"type": "function", "name": str(name)}:
            return tools or None, {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            return _allowed(tools, allowed), mode
        case None | "auto" | "none" if not tools:
            return None, None
        case None | str():
            return tools or None, body.tool_choice
        case {"type": kind} if kind not in ("function", "allowed_tools"):
            raise ApiError(
                400,
                f"tool_choice of type {_shown(kind)} is not supported: tools are functions of the client",
                "tool_choice",
            )
    raise ApiError(
        400,
        "tool_choice must be none, auto, required, {'type': 'function', 'name': ...} or "
        f"{{'type': 'allowed_tools', 'mode': ..., 'tools': [...]}}, got {_shown(body.tool_choice)}",
        "tool_choice",
    )


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise ApiError(
            400,
            f"{place} is of type {_shown(kind)}, which is not supported: the server runs no tools; "
            "supported: function, which the client runs",
            "tools",
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _allowed(tools: list[dict[str, Any]], allowed: list[Any]) -> list[dict[str, Any]]:
    """Those that may be called; the model is not told of the others."""
    names = [each.get("name") for each in allowed if isinstance(each, dict)]
    known = {tool["function"].get("name"): tool for tool in tools}
    for name in names:
        if name not in known:
            raise ApiError(400, f"tool_choice allows {_shown(name)}, and no tool is called so", "tool_choice")
    if not names:
        raise ApiError(400, "tool_choice allows no tool; name at least one", "tool_choice")
    return [known[name] for name in dict.fromkeys(names)]


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type not in ("text", "json_object", "json_schema"):
        raise ApiError(
            400,
            f"text.format.type {_shown(form.type)} must be text, json_object or json_schema",
            "text.format",
        )
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    return ResponseFormat(type=form.type, json_schema=_json_schema(form))


def _json_schema(form: TextFormat) -> JsonSchemaFormat:
    if form.schema is None:
        raise ApiError(400, "text.format of type json_schema needs a schema", "text.format")
    return JsonSchemaFormat(
        name=form.name, description=form.description, schema=form.schema, strict=form.strict
    )


def _truncation(body: ResponsesRequest, max_model_len: int) -> int | None:
    """How much of the end of the prompt is kept; None: it must fit."""
    if body.truncation in (None, "disabled"):
        return None
    if body.truncation != "auto":
        raise ApiError(
            400, f"truncation must be auto or disabled, got {_shown(body.truncation)}", "truncation"
        )
    return min(max(max_model_len - (body.max_output_tokens or 1), 1), max_model_len - 1)
