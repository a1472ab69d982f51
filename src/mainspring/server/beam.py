"""Beam search (`use_beam_search`), made of plain requests: each step asks the engine for the likeliest next
tokens of every beam, one token each, and keeps the best `width` beams. The prefix cache makes that cheap.

A beam's score is its log-probability divided by its length to the power of `length_penalty`, as in vLLM. A
beam that the model ends is put aside; the search is over when there are `max_tokens` tokens, or no beam goes
on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import NamedTuple

from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.server.answering import Question
from mainspring.server.errors import ApiError
from mainspring.server.prompts import TokenPrompt, needed
from mainspring.server.requests import GenerationRequest

# What a beam has no place for: it is not sampled, and its text is known at the end.
REFUSED = (
    *("stream", "stop", "stop_token_ids", "min_tokens", "logprobs", "prompt_logprobs", "best_of"),
    *("logit_bias", "allowed_token_ids", "bad_words", "echo"),
    *("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_json_object", "tools", "thinking_token_budget"),
)


class Beam(NamedTuple):
    token_ids: tuple[int, ...]  # of the answer
    logprob: float
    has_ended: bool = False

    def score(self, length_penalty: float) -> float:
        return self.logprob / math.pow(max(len(self.token_ids), 1), length_penalty)


class Search(NamedTuple):
    width: int
    max_tokens: int
    length_penalty: float
    ends: frozenset[int]  # tokens that end an answer


def make_search(body: GenerationRequest, params: SamplingParams, llm: AsyncLLM) -> Search:
    """Raises `ApiError` for what cannot be asked for besides."""
    for name in REFUSED:
        if getattr(body, name, None):
            raise ApiError(400, f"{name} cannot be had with use_beam_search; leave out one of them", name)
    assert params.max_tokens is not None or body.max_tokens is None
    ends = frozenset() if params.ignore_eos else frozenset(needed(llm.tokenizer).eos_token_ids)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Search(params.n, params.max_tokens or llm.max_model_len, penalty, ends)


async def search_all(llm: AsyncLLM, question: Question, search: Search) -> list[RequestOutput]:
    """An output for each prompt, with the best `width` answers, the best first."""
    return list(await asyncio.gather(*(_search(llm, question, p, search) for p in question.prompts)))


async def _search(llm: AsyncLLM, question: Question, prompt: TokenPrompt, search: Search) -> RequestOutput:
    beams, ended = [Beam((), 0.0)], list[Beam]()
    room = min(search.max_tokens, llm.max_model_len - len(prompt.token_ids))
    for _ in range(max(room, 1)):  # once at least: the engine refuses a prompt that leaves no room
        grown = await asyncio.gather(*(_grow(llm, question, prompt, beam, search) for beam in beams))
        best = _best([beam for some in grown for beam in some], search, 2 * search.width)
        ended += [beam for beam in best if beam.has_ended]
        beams = [beam for beam in best if not beam.has_ended][: search.width]
        if not beams:
            break
    tokenizer = needed(llm.tokenizer)
    answers = [
        CompletionOutput(
            index,
            tokenizer.decode(beam.token_ids),
            list(beam.token_ids),
            beam.logprob,
            finish_reason="stop" if beam.has_ended else "length",
        )
        for index, beam in enumerate(_best([*ended, *beams], search, search.width))
    ]
    return RequestOutput(question.id, prompt.text, list(prompt.token_ids), answers, finished=True)


async def _grow(
    llm: AsyncLLM, question: Question, prompt: TokenPrompt, beam: Beam, search: Search
) -> list[Beam]:
    """`beam` with each of its likeliest next tokens."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=2 * search.width,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    given = {"prompt_token_ids": [*prompt.token_ids, *beam.token_ids]}
    async with await llm.add_request(
        question.id,
        given,
        params,
        priority=question.priority,
        cache_salt=question.cache_salt,
        data_parallel_rank=question.data_parallel_rank,
    ) as stream:
        output = await anext(stream)
    [answer] = output.outputs
    if answer.finish_reason in ("abort", "error"):
        raise ApiError(503 if answer.error is None else 500, answer.error or "the search was aborted")
    [candidates] = answer.logprobs or [{}]
    return [
        Beam((*beam.token_ids, token_id), beam.logprob + entry.logprob, token_id in search.ends)
        for token_id, entry in candidates.items()
    ]


def _best(beams: Sequence[Beam], search: Search, count: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: beam.score(search.length_penalty), reverse=True)[:count]
