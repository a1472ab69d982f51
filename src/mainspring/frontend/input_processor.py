"""A prompt and what is wanted of it, to requests for the core. The last place where a caller's mistake is
the caller's.

Rules.
1. Everything a caller gives is judged here, before the core hears of it, and refused by name
   (`RequestError.param`). What `SamplingParams` can judge alone it has judged already, and judges again,
   for the object may have been changed.
2. A caller's objects are copied, never changed and never kept.
3. `max_tokens` is an upper bound: it is lowered to what `max_model_len` leaves. `min_tokens` is a demand:
   where there is no room for it, it is refused.
4. The result is complete: seed, limits, end tokens and bad words are resolved to numbers, so another core,
   later, does the same with it.
"""

from __future__ import annotations

import operator
import random
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mainspring.base.config import ModelFacts
from mainspring.base.errors import RequestError
from mainspring.base.messages import EngineCoreRequest
from mainspring.base.params import (
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    check_encodable,
)
from mainspring.base.protocols import Clock
from mainspring.frontend.detokenizer import special_texts
from mainspring.frontend.parallel_sampling import fan_out
from mainspring.frontend.pooling import as_core_params, cut, of_kinds, resolved

if TYPE_CHECKING:
    from mainspring.frontend.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; {"prompt": text}; or {"prompt_token_ids": ids}, to which "prompt" may add the text they
stand for. Both mappings may have a "cache_salt"."""

PROMPT_FORMS = 'a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
MAX_STOP_CHARS = 16_384  # of all stop strings together: the search keeps a state per character


class ProcessedInput(NamedTuple):
    prompt: str | None  # None where only ids were given
    requests: list[EngineCoreRequest]  # one for each of `n` answers


class InputProcessor:
    """Knows the model's facts and the engine's limits; its only state is where the next seed comes from."""

    def __init__(
        self,
        facts: ModelFacts,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        *,
        max_logprobs: int = 20,
        seed: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._facts = facts
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._max_logprobs = max_logprobs
        self._seeds = random.Random(seed)
        self._clock = clock
        self._special_texts = {} if tokenizer is None else special_texts(tokenizer)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._max_model_len

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ProcessedInput:
        """Raises `RequestError`, one line that names the parameter at fault and the way out."""
        arrival_time_s = self._clock()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {_shown(request_id)}", "request_id")
        check_encodable("request_id", request_id)
        if isinstance(params, PoolingParams):
            return self._pooled(request_id, prompt, params, priority, cache_salt, arrival_time_s)
        if not self._facts.can_generate:
            raise RequestError(
                f"this model ({self._facts.architecture}) reads texts and cannot generate: "
                f"{'use classify or score' if self._facts.pooling.labels else 'use embed'}, or another model"
            )
        params = self._copy(params)
        text, prompt_token_ids, salt = self._read_prompt(prompt)
        self._fit(params, len(prompt_token_ids))
        self._judge_text_params(params)
        self._judge_ids(params)
        self._judge_logprobs(params)
        structure, params.structured_outputs = params.structured_outputs, None  # workers need not carry it
        if structure is not None:
            self._judge_structure(structure)
        bad_words = self._bad_words(params.bad_words or [])
        eos_token_id, stop_token_ids = self._end_tokens(params)
        _refuse_contradictions(params, bad_words, {*stop_token_ids, eos_token_id})
        if params.seed is None:
            params.seed = self._seeds.getrandbits(63)
        request = EngineCoreRequest(
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            eos_token_id=eos_token_id,
            stop_token_ids=stop_token_ids,
            bad_words_token_ids=bad_words,
            arrival_time_s=arrival_time_s,
            priority=_priority(priority),
            cache_salt=_cache_salt(cache_salt if salt is None else salt),
            structured_outputs=structure,
        )
        requests = fan_out(request)
        for child in requests:
            _decide_cache_reading(child.sampling_params)
        return ProcessedInput(text, requests)

    def _pooled(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        priority: int,
        cache_salt: str | None,
        arrival_time_s: float,
    ) -> ProcessedInput:
        """A prompt that is read and not continued."""
        pooling = resolved(params, self._facts)
        kinds = None
        if isinstance(prompt, Mapping) and "token_type_ids" in prompt:
            kinds = prompt["token_type_ids"]
            prompt = {key: value for key, value in prompt.items() if key != "token_type_ids"}
        text, ids, salt = self._read_prompt(prompt, is_cut=params.truncate_prompt_tokens is not None)
        if kinds is not None:
            ids = of_kinds(ids, kinds, self._facts)
        ids = cut(ids, text, params, self._max_model_len, self._tokenizer)
        request = EngineCoreRequest(
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=ids,
            sampling_params=as_core_params(params, pooling),
            arrival_time_s=arrival_time_s,
            priority=_priority(priority),
            cache_salt=_cache_salt(cache_salt if salt is None else salt),
            pooling=pooling,
        )
        return ProcessedInput(text, [request])

    async def check_structure(self, params: SamplingParams | PoolingParams) -> None:
        """What `process` finds wrong with `structured_outputs`, found without blocking the event loop: to
        read a large schema takes a while. Then `process` knows the verdict."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            from mainspring.grammar.check import check_structured_outputs_async

            await check_structured_outputs_async(params.structured_outputs)

    def _judge_structure(self, structure: StructuredOutputsParams) -> None:
        from mainspring.grammar.check import check_structured_outputs  # the library is large

        if self._tokenizer is None or not self._facts.eos_token_ids:
            missing = (
                "a tokenizer, and the engine was started with skip_tokenizer_init"
                if self._tokenizer is None
                else "a token that ends a text, and the model names none"
            )
            raise RequestError(f"structured_outputs need {missing}; leave them out", "structured_outputs")
        check_structured_outputs(structure)

    def _copy(self, params: SamplingParams) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}", "sampling_params"
            )
        params = msgspec.structs.replace(params)
        if params.allowed_token_ids is not None:
            params.allowed_token_ids = list(params.allowed_token_ids)
        return params

    # --- the prompt ---------------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Prompt, is_cut: bool = False) -> tuple[str | None, list[int], str | None]:
        """Text if known, ids, and the salt if the prompt carries one. is_cut: it may have any length."""
        salt = None
        text: object = None
        ids: object = prompt
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in PROMPT_KEYS:
                    raise RequestError(
                        f"prompt has the key {_shown(key)}, which is not supported; give {PROMPT_FORMS}",
                        "prompt",
                    )
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt must be {PROMPT_FORMS}, got {type(text).__name__} as text", "prompt")
        if ids is None:
            if text is None:
                raise RequestError(f"prompt must be {PROMPT_FORMS}, got {_shown(prompt)}", "prompt")
            if not is_cut:
                self.judge_length(text)
            ids = self._encode(text)
        return text, self._judge_prompt_ids(ids), salt

    def judge_length(self, text: str) -> None:
        """Refuse a text that is too long whatever its tokens are: to read it to its end could take long.

        Raises `RequestError`.
        """
        fewest = 0 if self._tokenizer is None else self._tokenizer.fewest_tokens(text)
        if fewest > self._max_model_len:
            raise RequestError(
                f"prompt has {len(text)} characters, {fewest} tokens at the very least, and max_model_len is "
                f"{self._max_model_len}; shorten the prompt",
                "prompt",
            )

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "prompt is text, and the engine was started with skip_tokenizer_init; give prompt_token_ids",
                "prompt",
            )
        return self._tokenizer.encode(text)

    def _judge_prompt_ids(self, ids: object) -> list[int]:
        if not isinstance(ids, list | tuple):
            raise RequestError(f"prompt must be {PROMPT_FORMS}, got {_shown(ids)}", "prompt")
        if not ids:
            # Judged by ids, not by text: text of which no byte has a token is as empty as none.
            raise RequestError("prompt is empty: it has no token; give at least one", "prompt")
        if set(map(type, ids)) != {int}:
            ids = [_as_int(i) for i in ids]
        self._judge_range("prompt_token_ids", ids)
        return list(ids)

    def _fit(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise RequestError(
                f"prompt has {num_prompt_tokens} tokens, and max_model_len {self._max_model_len} leaves no "
                f"room for an answer; shorten the prompt or raise max_model_len",
                "prompt",
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens {params.min_tokens} do not fit: after {num_prompt_tokens} prompt tokens "
                f"max_model_len {self._max_model_len} leaves {room}; lower it, shorten the prompt or raise "
                f"max_model_len",
                "min_tokens",
            )
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)

    # --- parameters that need the vocabulary ----------------------------------------------------------------

    def _judge_text_params(self, params: SamplingParams) -> None:
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name} needs a tokenizer, and the engine was started with skip_tokenizer_init; "
                        f"leave it out",
                        name,
                    )
        if (num_chars := sum(map(len, params.stop or ()))) > MAX_STOP_CHARS:
            raise RequestError(f"stop has {num_chars} characters in all; at most {MAX_STOP_CHARS}", "stop")

    def _judge_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if ids := getattr(params, name):
                self._judge_range(name, ids)

    def _judge_range(self, name: str, ids: Iterable[int]) -> None:
        vocab_size = self._facts.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise RequestError(
                f"{name} has {wrong}, which is no token: ids go from 0 to {vocab_size - 1}", name
            )

    def _judge_logprobs(self, params: SamplingParams) -> None:
        limit = self._facts.vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            count = self._facts.vocab_size if asked == -1 else asked
            if count is not None and count > limit:
                shown = f"-1 (all {count})" if asked == -1 else str(asked)
                raise RequestError(
                    f"{name} {shown} is above max_logprobs {limit}; ask for fewer, or start the engine with "
                    f"max_logprobs={asked}",
                    name,
                )

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Every word as it is and as it stands after a space, for both are that word to a reader (case
        B107)."""
        banned: list[list[int]] = []
        for word in words:
            assert self._tokenizer is not None, "refused by _judge_text_params"
            plain = self._tokenizer.encode(word, add_special_tokens=False)
            if not plain:
                raise RequestError(
                    f"bad_words has {_shown(word)}, which has no token; leave it out", "bad_words"
                )
            spaced = self._tokenizer.encode(f" {word}", add_special_tokens=False)
            banned += [form for form in (plain, spaced) if form not in banned]
        self._judge_range("bad_words", [i for form in banned for i in form] or [0])
        return banned

    def _end_tokens(self, params: SamplingParams) -> tuple[int | None, list[int]]:
        """*The* EOS, and everything else that ends the answer.

        Special tokens are not in the text, so a stop string that is one ends the answer by its id (case
        B080).
        """
        eos = self._facts.eos_token_ids
        eos_token_id = eos[0] if eos and not params.ignore_eos else None
        ends = dict.fromkeys(params.stop_token_ids or ())
        if not params.ignore_eos:
            ends.update(dict.fromkeys(eos[1:]))
        ends.update(
            dict.fromkeys(self._special_texts[s] for s in params.stop or () if s in self._special_texts)
        )
        return eos_token_id, [i for i in ends if i != eos_token_id]


def _decide_cache_reading(params: SamplingParams) -> None:
    """A cached token has no logits any more: where each prompt token is judged, all are computed (B091)."""
    if params.skip_reading_prefix_cache is None:
        params.skip_reading_prefix_cache = params.prompt_logprobs is not None


def _refuse_contradictions(params: SamplingParams, bad_words: list[list[int]], ends: set[int | None]) -> None:
    """Two masks that together leave no token at all (case B109), as far as that can be known beforehand."""
    if params.allowed_token_ids is None:
        return
    allowed = set(params.allowed_token_ids)
    allowed -= {form[0] for form in bad_words if len(form) == 1}
    if not allowed:
        raise RequestError(
            "allowed_token_ids are all forbidden by bad_words, so no token could follow; relax one of them",
            "allowed_token_ids",
        )
    if params.min_tokens > 0 and allowed <= ends:
        raise RequestError(
            f"allowed_token_ids has only tokens that end the answer, which min_tokens {params.min_tokens} "
            f"forbids; allow others or leave min_tokens at 0",
            "allowed_token_ids",
        )


def _priority(priority: object) -> int:
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority must be an integer of 64 bits, got {_shown(priority)}", "priority")
    return priority


def _cache_salt(salt: object) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(
            f"cache_salt must be a string that is not empty, or None, got {_shown(salt)}", "cache_salt"
        )
    if salt is not None:
        check_encodable("cache_salt", salt)
    return salt


def _as_int(token_id: object) -> int:
    """Integers of other libraries, numpy's for one, are taken as what they are."""
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(f"prompt_token_ids must be integers, got {_shown(token_id)}", "prompt_token_ids")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
