"""From a request's fields to `SamplingParams`: defaults, and the rules in which the two endpoints differ.

Precedence: the request, then the server's defaults (`--override-generation-config`), then the model's
(`generation_config.json`), then the API's. A field that is null or absent is not set; one that is set wins,
also where it is set to the default.

Values are judged by `SamplingParams` and the engine, with one exception: what is right for the engine and
wrong for the API (a temperature above 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from mainspring.base.params import (
    STRUCTURE_KINDS,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.server.errors import ApiError
from mainspring.server.requests import ChatRequest, CompletionRequest, GenerationRequest, ResponseFormat

COMPLETION_MAX_TOKENS = 16  # OpenAI's
MAX_TEMPERATURE = 2.0
PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words"),
    *("min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "prompt_logprobs", "n"),
)
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")  # that may be set


def chat_params(body: ChatRequest, defaults: Mapping[str, Any], max_model_len: int) -> SamplingParams:
    """Raises `ApiError` or `RequestError`, both for what the sender can mend."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(body, limit_name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(
        body, defaults, _judged(limit_name, limit, max_model_len), defaults.get("max_tokens"), logprobs
    )


def completion_params(
    body: CompletionRequest, defaults: Mapping[str, Any], max_model_len: int
) -> SamplingParams:
    """`max_tokens` 0 is for echo alone, and becomes 1: see `CompletionWriter`. Raises as `chat_params`."""
    if body.thinking_token_budget is not None:
        raise ApiError(
            400, "thinking_token_budget: only chats have reasoning; leave it out", "thinking_token_budget"
        )
    limit = body.max_tokens
    if limit == 0 and body.echo:
        limit = 1
    default = min(defaults.get("max_tokens", COMPLETION_MAX_TOKENS), max_model_len)
    params = _params(body, defaults, _judged("max_tokens", limit, max_model_len), default, body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


def _judged(name: str, limit: int | None, max_model_len: int) -> int | None:
    """An answer may be cut by the model's length, but a limit that no answer can reach is a mistake."""
    if limit is not None and limit < 1:
        raise ApiError(400, f"{name} must be at least 1, got {limit}", name)
    if limit is not None and limit > max_model_len:
        raise ApiError(
            400, f"{name} {limit} is above {max_model_len}, the most tokens of prompt and answer", name
        )
    return limit


def _params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    _judge_stream(body)
    given = {name: defaults[name] for name in DEFAULTS if name in defaults}
    given |= {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    if given.get("temperature", 0.0) > MAX_TEMPERATURE:
        raise ApiError(400, f"temperature must be at most 2, got {given['temperature']:g}", "temperature")
    given["max_tokens"] = default_max_tokens if max_tokens is None else max_tokens
    given["logprobs"] = logprobs
    given["structured_outputs"] = structured_outputs(body)
    given["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    if chooses_best(body):
        _judge_best_of(body)
        given["n"] = body.best_of
        given["logprobs"] = 0 if logprobs is None else logprobs
    return SamplingParams(**given)


def chooses_best(body: GenerationRequest) -> bool:
    """Whether more answers are made than are shown."""
    return body.best_of is not None and body.best_of != (body.n or 1)


def _judge_best_of(body: GenerationRequest) -> None:
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise ApiError(400, f"best_of {body.best_of} must be at least n {body.n or 1}", "best_of")
    if body.stream:
        raise ApiError(400, "the best of several cannot be streamed; leave out best_of or stream", "best_of")


def _judge_stream(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400, "prompt_logprobs cannot be streamed; leave it out, or set stream=false", "prompt_logprobs"
        )


# -- what the text must be -----------------------------------------------------------------------------------


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The one constraint that is asked for, in whichever field. Raises `ApiError` or `RequestError` for two,
    and for what is none."""
    found: list[tuple[str, StructuredOutputsParams]] = []
    if body.response_format is not None and (wanted := _of_format(body.response_format)) is not None:
        found.append(("response_format", wanted))
    if body.structured_outputs is not None:
        found.append(("structured_outputs", StructuredOutputsParams(**_set(body.structured_outputs))))
    if (wanted := _of_old_fields(body)) is not None:
        found.append(("guided_...", wanted))
    if len(found) > 1:
        (first, _), (second, _), *_ = found
        raise ApiError(400, f"{first} and {second} both say what the text must be; give one", second)
    return found[0][1] if found else None


def named(error: ApiError, body: GenerationRequest) -> ApiError:
    """The engine has one field for what a text must be, and one kind where the model reasons before it: here
    a refusal gets the names that were sent."""
    given = body.structured_outputs
    asked = next((name for name in _ASKING if getattr(body, name) not in (None, False)), None)
    if error.param != "structured_outputs" or (given is not None and asked is not None):
        return error
    found = _OF_STRUCTURE.match(error.message)
    if found is None:
        return error.saying(error.message, asked or error.param)
    reason = error.message[found.end() :]
    if asked is not None:
        return error.saying(f"{asked}: {reason}", asked)
    kind = next((name for name in STRUCTURE_KINDS if getattr(given, name, None) is not None), None)
    if kind is not None and found["kind"]:
        return error.saying(f"structured_outputs: {kind}: {reason}", error.param)
    return error


_OF_STRUCTURE = re.compile(rf"structured_outputs: (?P<kind>({'|'.join(STRUCTURE_KINDS)}): )*")
_ASKING = ("response_format", *(f"guided_{kind}" for kind in STRUCTURE_KINDS if kind != "structural_tag"))


def _of_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema" if wanted.json_schema is not None and wanted.json_schema.schema is not None:
            return StructuredOutputsParams(json=wanted.json_schema.schema)
        case "json_schema":
            raise ApiError(
                400, "response_format of type json_schema needs json_schema.schema", "response_format"
            )
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=_set(wanted))
    raise ApiError(
        400,
        f"response_format.type {wanted.type[:40]!r} must be text, json_object, json_schema or structural_tag",
        "response_format",
    )


def _of_old_fields(body: GenerationRequest) -> StructuredOutputsParams | None:
    """vLLM's former names for the same; they are mapped, for without effect they would be a trap."""
    given: dict[str, Any] = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
        "json_object": body.guided_json_object or None,
        "whitespace_pattern": body.guided_whitespace_pattern,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return StructuredOutputsParams(**given) if given else None


def _set(fields: msgspec.Struct) -> dict[str, Any]:
    """Those that are not null."""
    return {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
