"""From a request's fields to `SamplingParams`: defaults, and the rules in which the two endpoints differ.

Precedence: the request, then the server's defaults (`--override-generation-config`), then the API's. A field
that is null or absent is not set; one that is set wins, also where it is set to the default.

Values are judged by `SamplingParams` and the engine, with one exception: what is right for the engine and
wrong for the API (a temperature above 2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mainspring.base.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
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
    if body.best_of is not None and body.best_of != (body.n or 1):
        _judge_best_of(body)
    return SamplingParams(**given)


def _judge_best_of(body: GenerationRequest) -> None:
    raise ApiError(400, "best_of is not supported; ask for n answers and choose among them", "best_of")


def _judge_stream(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400, "prompt_logprobs cannot be streamed; leave it out, or set stream=false", "prompt_logprobs"
        )


# -- what the text must be -----------------------------------------------------------------------------------


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The one constraint that is asked for, in whichever field. Raises `ApiError` for two, and for what is
    none."""
    found: list[tuple[str, dict[str, Any]]] = []
    if body.response_format is not None and (given := _of_format(body.response_format)):
        found.append(("response_format", given))
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _of_extension(body)))
    if given := _of_old_fields(body):
        found.append((f"guided_{next(iter(given))}", given))
    if not found:
        return None
    if len(found) > 1:
        raise ApiError(
            400, f"{found[0][0]} and {found[1][0]} both say what the text must be; give one", found[1][0]
        )
    [(field, given)] = found
    if len(given) != 1:
        what = f"{', '.join(given)} at once" if given else "none of them"
        raise ApiError(
            400,
            f"{field} must have exactly one of json, regex, choice, grammar, json_object and structural_tag; "
            f"it has {what}",
            field,
        )
    return StructuredOutputsParams(**given)


def _of_format(wanted: ResponseFormat) -> dict[str, Any]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                raise ApiError(
                    400, "response_format of type json_schema needs json_schema.schema", "response_format"
                )
            return {"json": _text(wanted.json_schema.schema)}
        case "structural_tag":
            if wanted.format is None and wanted.structures is None:
                raise ApiError(
                    400, "a structural_tag needs format, or structures and triggers", "response_format"
                )
            parts = {"format": wanted.format, "structures": wanted.structures, "triggers": wanted.triggers}
            return {"structural_tag": _text({"type": "structural_tag"} | _set(parts))}
    raise ApiError(
        400,
        f"response_format.type {wanted.type[:40]!r} must be text, json_object, json_schema or structural_tag",
        "response_format",
    )


def _of_extension(body: GenerationRequest) -> dict[str, Any]:
    given = body.structured_outputs
    assert given is not None
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "lenient"):
        if getattr(given, name):
            raise ApiError(
                400, f"structured_outputs.{name} is not supported yet; leave it out", "structured_outputs"
            )
    return _kinds(
        given.json, given.regex, given.choice, given.grammar, given.json_object, given.structural_tag
    )


def _of_old_fields(body: GenerationRequest) -> dict[str, Any]:
    """vLLM's former names for the same; they are mapped, for without effect they would be a trap."""
    if body.guided_whitespace_pattern is not None:
        raise ApiError(
            400, "guided_whitespace_pattern is not supported; leave it out", "guided_whitespace_pattern"
        )
    return _kinds(
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
        body.guided_json_object,
        None,
    )


def _kinds(
    schema: Any,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool | None,
    structural_tag: Any,
) -> dict[str, Any]:
    return _set(
        {
            "json": None if schema is None else _text(schema),
            "regex": regex,
            "choice": None if choice is None else tuple(choice),
            "grammar": grammar,
            "json_object": json_object or None,
            "structural_tag": None if structural_tag is None else _text(structural_tag),
        }
    )


def _set(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parts.items() if value is not None}


def _text(value: Any) -> str:
    """JSON that came as JSON, or already as text."""
    return value if isinstance(value, str) else json.dumps(value)
