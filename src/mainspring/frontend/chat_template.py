"""From messages to the text that a model was trained to see, and to its token ids.

A template is a jinja2 program that comes with the model, so it runs in a sandbox and its failures are
refusals of the request. What users wrote goes through it as text that can never become a special token:
before rendering, every special token's text inside a message is marked with a character that occurs nowhere
in the request, the rendered text is split only at unmarked specials, and the marks are taken out of the rest.
The mark is chosen for each request among characters that the request does not have, so nobody can forge one.
(A template that writes a part of a special token, with a message's text in it, means the whole to be one:
`'<|' + role + '|>'`.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mainspring.base.errors import CheckpointError, ConfigError, RequestError
from mainspring.base.params import check_encodable
from mainspring.frontend.template_sandbox import MeteredEnvironment, metered
from mainspring.frontend.tokenizer import Tokenizer

Message = Mapping[str, Any]

_MARKS = range(0xF0000, 0xFFFFE)  # characters for private use, of which texts have none or a few
# What a template may make in all its steps: generous, for some build their text message by message.
BASE_CHARACTERS = 1 << 26
CHARACTERS_PER_CHARACTER = 64  # of the request
MAX_QUOTED = 300  # characters of a template's own words in a refusal
INVALID_JSON = "INVALID_JSON"  # what the arguments of a call are called that are no object of JSON


class ChatTemplate:
    """A compiled template. Raises `CheckpointError` if `source` is no template."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        try:
            with metered(BASE_CHARACTERS):
                self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is wrong in line {error.lineno}: {error.message}"
            ) from None
        except (RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"the chat template cannot be compiled: {type(error).__name__}; expected a smaller one"
            ) from None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The template of the tokenizer's file, or `source` instead of it."""
        source = source if source is not None else tokenizer.chat_template
        if source is None:
            raise RequestError("the model's file has no chat template: set chat_template, or send a prompt")
        bos, eos = (
            None if i is None else tokenizer.id_to_token(i)
            for i in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        return cls(source, bos, eos)

    def render(
        self,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> str:
        """The chat as text. `continue_final_message` ends it inside the last message, for the model to go on.

        Raises `RequestError` for messages that are no messages, and for what the template refuses.
        """
        given = {**chat_template_kwargs, "messages": _normalised(messages)}
        return self._render(given, _unused_mark(given), add_generation_prompt, continue_final_message)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """The chat as token ids: `render`, encoded so that no text of the messages is a special token."""
        given = {**chat_template_kwargs, "messages": _normalised(messages)}
        mark = _unused_mark(given)
        marked = _map_strings(given, lambda text: tokenizer.mark_specials(text, mark))
        return tokenizer.encode_chat(
            self._render(marked, mark, add_generation_prompt, continue_final_message), mark
        )

    def _render(
        self, given: dict[str, Any], mark: str, add_generation_prompt: bool, continue_final: bool
    ) -> str:
        if continue_final and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=False",
                "continue_final_message",
            )
        # Where the last message ends. The space shows whether the template strips its messages.
        end = f"{mark}{mark} "
        if continue_final:
            *before, last = given["messages"]
            given = {**given, "messages": [*before, {**last, "content": last["content"] + end}]}
        values = {"tools": None, "documents": None, **self._tokens, **given}
        limit = BASE_CHARACTERS + CHARACTERS_PER_CHARACTER * _num_characters(given)
        pieces = []
        try:
            with metered(limit) as meter:
                for piece in self._template.generate(values, add_generation_prompt=add_generation_prompt):
                    meter.spend(len(piece))
                    pieces.append(piece)
        except TemplateError as error:
            raise _refused(str(error.message)) from error
        except Exception as error:  # the template is the model's code and may raise anything
            raise _refused(f"{type(error).__name__}: {error}") from error
        rendered = "".join(pieces)
        if not continue_final:
            return rendered
        head, found, tail = rendered.rpartition(end.rstrip())
        if not found:
            raise RequestError(
                "the chat template does not show the last message as it is, so it cannot be continued",
                "continue_final_message",
            )
        return head if tail.startswith(" ") else head.rstrip()


def template_text(source: str) -> str:
    """`source` itself, or the contents of the file it names. What has no brace says nothing as a template."""
    if not isinstance(source, str) or not source:
        raise ConfigError(f"chat_template must be a template or its file, got {source!r}")
    if "{" in source or "\n" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"chat_template {source!r} is neither a template nor a file of one: {why}"
        ) from None


def _refused(what: str) -> RequestError:
    shown = " ".join(what.split())
    if len(shown) > MAX_QUOTED:
        shown = shown[: MAX_QUOTED - 3] + "..."
    return RequestError(f"the chat template refuses these messages: {shown}", "messages")


# ---- messages ----------------------------------------------------------------------------------------------


def _normalised(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the template expects them: contents are text."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list of messages, got a {type(messages).__name__}", "messages"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one", "messages")
    found = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{place} must have a role and content, got a {type(message).__name__}", "messages"
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"{place} must have a role, such as 'user'; got {message.get('role')!r}", "messages"
            )
        if "content" not in message and not message.get("tool_calls"):
            raise RequestError(f"{place} has no content", "messages")
        found.append(
            {
                **message,
                **_reasoning(message),
                **_calls(message, place),
                "content": _text(message.get("content"), place),
            }
        )
    return found


def _reasoning(message: Message) -> dict[str, Any]:
    """What the model thought, under both names that templates and clients have for it."""
    text = message.get("reasoning") or message.get("reasoning_content")
    return {"reasoning": text, "reasoning_content": text} if isinstance(text, str) else {}


def _calls(message: Message, place: str) -> dict[str, Any]:
    """Calls of tools. Arguments travel as JSON text, and templates write them as they want: an object."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{place}.tool_calls must be a list, got a {type(calls).__name__}", "messages")
    return {"tool_calls": [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]}


def _call(call: object, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{place} must have a function, with a name and arguments", "messages")
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{place}.function has no name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object(arguments)
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _object(text: str) -> dict[str, Any]:
    """Arguments as a template wants them. A call may have been cut in them, or the model erred: that is a
    part of the conversation too, and the model is shown what it wrote."""
    try:
        found = json.loads(text) if text.strip() else {}
        # An escape may stand for half a character.
        check_encodable("messages", json.dumps(found, ensure_ascii=False))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: text}


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{place}.content must be text or a list of parts, got a {type(content).__name__}",
            "messages",
        )
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{place}.content[{index}] is of type {kind!r}, which is not supported; "
                "supported: {'type': 'text', 'text': '...'}",
                "messages",
            )
    return "\n".join(texts)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and mappings in which every string, keys too, is changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _num_characters(given: dict[str, Any]) -> int:
    count = 0

    def see(text: str) -> str:
        nonlocal count
        count += len(text)
        return text

    _map_strings(given, see)
    return count


def _unused_mark(given: dict[str, Any]) -> str:
    characters: set[str] = set()

    def see(text: str) -> str:
        characters.update(text)
        return text

    _map_strings(given, see)
    mark = next((chr(code) for code in _MARKS if chr(code) not in characters), None)
    if mark is None:
        raise RequestError("the messages use every character for private use; leave one out", "messages")
    return mark


# ---- the language ------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}`, `{% endgeneration %}`: around what is trained on; the text is shown as it is."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own escapes what HTML would mistake; models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
