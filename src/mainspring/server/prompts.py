"""From what was sent to token ids: texts, ids, chats; truncation. Pure but for the tokenizer, and slow for
long texts, so the endpoints call it off the loop when there is much to read (`is_long`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mainspring.base.errors import CheckpointError
from mainspring.base.params import MAX_N
from mainspring.frontend.chat_template import ChatTemplate
from mainspring.frontend.manner import AUTO, Manner, manner_of
from mainspring.frontend.tokenizer import Tokenizer
from mainspring.server.errors import ApiError, PromptTooLong
from mainspring.server.requests import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest

T = TypeVar("T")
MAX_PROMPTS = 1024  # of a request
TAKEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
LONG_CHARACTERS = 4096  # what takes more than a millisecond or two


class TokenPrompt(NamedTuple):
    text: str | None  # None where ids were given
    token_ids: list[int]
    token_type_ids: list[int] | None = None  # of a pair of texts: 0 for the first, 1 for the second

    def as_prompt(self) -> dict[str, Any]:
        """As the engine takes it."""
        kinds = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids}
        return {"prompt": self.text, "prompt_token_ids": self.token_ids, **kinds}


class Chats(NamedTuple):
    """What the server was told of chats."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None  # None where the model has none
    template_kwargs: Mapping[str, Any]
    trust_request_template: bool
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    allows_auto_calls: bool = True
    specials: frozenset[str] = frozenset()  # texts of the special tokens
    token_bytes: Callable[[int], bytes] = bytes  # of any token

    def manner(self, request_template: str | None = None) -> Manner:
        """How the model writes its answers."""
        source = request_template or ("" if self.template is None else self.template.source)
        return manner_of(source, self.tool_call_parser, self.reasoning_parser)


async def off_loop_if(is_slow: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_slow else work()


def is_long(value: Any) -> bool:
    """Whether the strings in `value`, nested lists and mappings, are long together."""
    total = 0
    for text in _strings(value):
        total += len(text)
        if total > LONG_CHARACTERS:
            return True
    return False


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):
        for item in value:
            yield from _strings(item)


# -- completions ---------------------------------------------------------------------------------------------


def completion_prompts(
    body: CompletionRequest, tokenizer: Tokenizer | None, max_model_len: int
) -> list[TokenPrompt]:
    """Raises `ApiError` or `RequestError`."""
    separate = _separate(body.prompt)
    each = max(body.n or 1, body.best_of or 1)
    if len(separate) * each > MAX_N:
        raise ApiError(400, f"{len(separate)} prompts with {each} answers each are more than {MAX_N}", "n")
    return [
        truncated(_token_prompt(given, tokenizer, body, max_model_len), body, max_model_len)
        for given in separate
    ]


def _separate(given: Any) -> list[Any]:
    """Each prompt: text, or a list of ids."""
    if given is None or given == "" or given == []:
        raise ApiError(400, "prompt must be a text, a list of texts, token ids or a list of these", "prompt")
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise ApiError(400, f"prompt has {len(given)} prompts; at most {MAX_PROMPTS}", "prompt")
    return list(given)


def _token_prompt(
    given: Any, tokenizer: Tokenizer | None, body: CompletionRequest, max_model_len: int
) -> TokenPrompt:
    if isinstance(given, int):
        raise ApiError(400, "prompt mixes token ids with other prompts", "prompt")
    if isinstance(given, list):
        if not all(type(token) is int for token in given):
            raise ApiError(
                400, "prompt must be a text, a list of texts, token ids or a list of these", "prompt"
            )
        return TokenPrompt(None, given)
    tokenizer = needed(tokenizer)
    _refuse_far_too_long(given, tokenizer, body, max_model_len)
    return TokenPrompt(given, tokenizer.encode(given, body.add_special_tokens is not False))


def truncated(prompt: TokenPrompt, body: GenerationRequest, max_model_len: int) -> TokenPrompt:
    """The last `truncate_prompt_tokens` tokens (or the first, by `truncation_side`); -1: what fits. Raises
    `ApiError` for what is too long."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        if len(prompt.token_ids) >= max_model_len:
            raise PromptTooLong(_name(body), len(prompt.token_ids), max_model_len)
        return prompt
    most = max_model_len - 1  # room for a token of answer
    keep = most if keep == -1 else keep
    if not 1 <= keep <= most:
        raise ApiError(
            400,
            f"truncate_prompt_tokens must be -1 or from 1 to {most}, got {keep}",
            "truncate_prompt_tokens",
        )
    if body.truncation_side not in (None, "left", "right"):
        raise ApiError(400, "truncation_side must be left or right", "truncation_side")
    if len(prompt.token_ids) <= keep:
        return prompt
    kept = prompt.token_ids[:keep] if body.truncation_side == "right" else prompt.token_ids[-keep:]
    return TokenPrompt(None, kept)


def _refuse_far_too_long(
    text: str, tokenizer: Tokenizer, body: GenerationRequest, max_model_len: int
) -> None:
    """What is too long whatever its tokens are need not be cut into them. Raises `ApiError`."""
    fewest = 0 if body.truncate_prompt_tokens is not None else tokenizer.fewest_tokens(text)
    if fewest >= max_model_len:
        raise PromptTooLong(_name(body), fewest, max_model_len, is_exact=False)


def _name(body: GenerationRequest) -> str:
    return "messages" if isinstance(body, ChatRequest) else "prompt"


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ApiError(
            400, "the server has no tokenizer (--skip-tokenizer-init); send token ids to /v1/completions"
        )
    return tokenizer


# -- chats ---------------------------------------------------------------------------------------------------


def chat_prompt(
    body: ChatRequest | TokenizeRequest, chats: Chats, max_model_len: int | None = None
) -> TokenPrompt:
    """`max_model_len`: of an answer that is to follow. Raises `ApiError` or `RequestError`."""
    tokenizer = needed(chats.tokenizer)
    template = _template(body.chat_template, chats)
    kwargs = dict(body.chat_template_kwargs or {})
    if taken := TAKEN & kwargs.keys():
        raise ApiError(
            400,
            f"chat_template_kwargs has {', '.join(sorted(taken))}, which are fields of their own",
            "chat_template_kwargs",
        )
    if isinstance(body, ChatRequest) and body.documents is not None:
        kwargs["documents"] = body.documents
    goes_on = bool(body.continue_final_message)
    # `add_generation_prompt` is on unless something else is asked for
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    effort = _effort(body.reasoning_effort, template.source) if isinstance(body, ChatRequest) else {}
    options = {**chats.template_kwargs, **effort, **kwargs}
    if body.tools:
        options["tools"] = body.tools
    messages: Sequence[Mapping[str, Any]] = body.messages or []
    text = template.render(messages, begins, goes_on, **options)
    if max_model_len is not None and isinstance(body, ChatRequest):
        _refuse_far_too_long(text, tokenizer, body, max_model_len)
    # BOS comes once, from the template or from the tokenizer, whatever `add_special_tokens` says (case B149).
    return TokenPrompt(text, template.encode(tokenizer, messages, begins, goes_on, **options))


def _effort(effort: str | None, template: str) -> dict[str, Any]:
    """As templates want to hear it: how much to reason, and whether at all."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise ApiError(
            400, f"reasoning_effort must be {', '.join(EFFORTS)}, got {effort[:40]!r}", "reasoning_effort"
        )
    reasons = effort != "none"
    words = {"enable_thinking": reasons, "thinking": reasons, "reasoning_effort": effort}
    known = {name: value for name, value in words.items() if re.search(rf"\b{name}\b", template)}
    if not known and (reasons or manner_of(template).reasoning_format is not None):
        raise ApiError(
            400,
            "reasoning_effort: the model's chat template cannot say how much to reason; leave it out"
            + ("" if reasons else ", or set thinking_token_budget to 0"),
            "reasoning_effort",
        )
    return known


def _template(given: str | None, chats: Chats) -> ChatTemplate:
    if given is not None:
        if not chats.trust_request_template:
            raise ApiError(
                400,
                "a request may bring its own chat_template only where the server was started with "
                "--trust-request-chat-template",
                "chat_template",
            )
        try:
            return ChatTemplate.from_tokenizer(needed(chats.tokenizer), given)
        except CheckpointError as error:
            raise ApiError(400, str(error), "chat_template") from None
    if chats.template is None:
        raise ApiError(
            400,
            "the model has no chat template: start the server with --chat-template, or use /v1/completions",
        )
    return chats.template
