"""The endpoints of texts that are read and not continued: vectors, classes, scores, rankings.

A request becomes prompts and `PoolingParams`, the engine is asked, and what comes back is written in the
shape that the endpoint promises. How a model pools, and what it can do at all, its files say
(`frontend/pooling.py`).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mainspring.base.errors import RequestError
from mainspring.base.outputs import Floats, RequestOutput
from mainspring.base.params import PoolingParams
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.pooling import cosine, cut, pair_prompt, pair_room, vector_of
from mainspring.server.answering import whole_outputs
from mainspring.server.errors import ApiError
from mainspring.server.generating import make_question
from mainspring.server.http import JSONReply, while_connected
from mainspring.server.prompts import TokenPrompt, chat_prompt, is_long, needed, off_loop_if
from mainspring.server.reading import answer_id, read
from mainspring.server.refused import refuse_unsupported
from mainspring.server.replies import (
    ClassData,
    ClassifyReply,
    EmbeddingData,
    EmbeddingReply,
    PooledData,
    PoolingReply,
    RerankReply,
    RerankResult,
    RerankText,
    RerankUsage,
    ScoreData,
    ScoreReply,
    Usage,
)
from mainspring.server.requests import (
    ClassifyRequest,
    EmbeddingRequest,
    InputRequest,
    PoolingRequest,
    ReadingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    VectorRequest,
)
from mainspring.server.service import Service

MAX_INPUTS = 2048  # of a request, as OpenAI has it
INPUT_FORMS = "input must be a text, a list of texts, token ids or a list of these"
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
DTYPES = {"float32": "f4", "float16": "f2"}
BYTE_ORDERS = {"native": "=", "little": "<", "big": ">"}


async def create_embeddings(service: Service, request: Request) -> Response:
    """A vector for each input."""
    body = await read(service, request, EmbeddingRequest)
    head, outputs = await _pooled(service, request, body, "embed", "embd")
    data = [
        EmbeddingData(index=i, embedding=_written(vector_of(output), body))
        for i, output in enumerate(outputs)
    ]
    return JSONReply(EmbeddingReply(**head, data=data, usage=_usage(outputs)))


async def create_pooled(service: Service, request: Request) -> Response:
    """What the task gives for each input: a vector, one for each of its tokens, or scores of labels."""
    body = await read(service, request, PoolingRequest)
    head, outputs = await _pooled(service, request, body, body.task, "pool")
    data = [PooledData(index=i, data=_written(vector_of(output), body)) for i, output in enumerate(outputs)]
    return JSONReply(PoolingReply(**head, data=data, usage=_usage(outputs)))


async def create_classes(service: Service, request: Request) -> Response:
    """Probabilities of the model's labels for each input."""
    body = await read(service, request, ClassifyRequest)
    labels = service.llm.facts.pooling.labels
    head, outputs = await _pooled(service, request, body, "classify", "classify")
    data = [
        ClassData(index=i, label=labels[int(probs.argmax())], probs=probs.tolist(), num_classes=len(probs))
        for i, probs in enumerate(map(vector_of, outputs))
    ]
    return JSONReply(ClassifyReply(**head, data=data, usage=_usage(outputs)))


async def create_scores(service: Service, request: Request) -> Response:
    """How well texts go together: one with one, one with each of several, or each with its own."""
    body = await read(service, request, ScoreRequest)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    names = next((pair for pair in PAIRS if getattr(body, pair[0]) and getattr(body, pair[1])), None)
    if names is None:
        raise ApiError(400, f"give one pair of {', '.join(map(' and '.join, PAIRS))}, not empty", PAIRS[0][0])
    firsts, seconds = (_texts(getattr(body, name)) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise ApiError(
            400,
            f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}; give one, or as many",
            names[0],
        )
    _check_number(len(seconds), names[1])
    found = f"score-{answer_id(request, body.request_id)}"
    scores, outputs = await _scores(service, request, body, found, firsts, seconds)
    return JSONReply(
        ScoreReply(
            id=found,
            created=int(time.time()),
            model=model,
            data=[ScoreData(index=i, score=score) for i, score in enumerate(scores)],
            usage=_usage(outputs),
        )
    )


async def create_ranking(service: Service, request: Request) -> Response:
    """Documents in the order in which they answer a query."""
    body = await read(service, request, RerankRequest)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    given = [body.documents] if isinstance(body.documents, str) else body.documents
    documents = [one if isinstance(one, str) else one.text for one in given]
    if not documents:
        raise ApiError(400, "documents is empty; give at least one", "documents")
    _check_number(len(documents), "documents")
    if (body.top_n or 0) < 0:
        raise ApiError(400, "top_n must be 0 (all) or more", "top_n")
    found = f"rerank-{answer_id(request, body.request_id)}"
    scores, outputs = await _scores(service, request, body, found, [body.query], documents)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results = [RerankResult(index=i, relevance_score=scores[i]) for i in order]
    if body.return_documents is not False:
        for result in results:
            result.document = RerankText(text=documents[result.index])
    usage = _usage(outputs)
    return JSONReply(
        RerankReply(
            id=found,
            model=model,
            usage=RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens),
            results=results,
        )
    )


# -- asking --------------------------------------------------------------------------------------------------


async def _pooled(
    service: Service, request: Request, body: InputRequest, task: str | None, prefix: str
) -> tuple[dict[str, Any], list[RequestOutput]]:
    """What a reply begins with, and an output for each input."""
    llm = service.llm
    model = service.check_model(body.model)
    refuse_unsupported(body)
    if isinstance(body, VectorRequest):
        _check_writing(body)
    params = _params(body, task)
    prompts = await off_loop_if(is_long(body.input or body.messages), partial(_prompts, service, body))
    found = f"{prefix}-{answer_id(request, body.request_id)}"
    outputs = await _ask(llm, request, body, found, prompts, params)
    return {"id": found, "created": int(time.time()), "model": model}, outputs


async def _scores(
    service: Service,
    request: Request,
    body: ReadingRequest,
    found: str,
    firsts: list[str],
    seconds: list[str],
) -> tuple[list[float], list[RequestOutput]]:
    """Of each pair, and the outputs it took. A model that was made for pairs reads both texts at once."""
    llm, tokenizer = service.llm, needed(service.chats.tokenizer)
    repeated = firsts * (len(seconds) // len(firsts))
    if not llm.facts.pooling.labels:

        def encode() -> list[TokenPrompt]:
            return [TokenPrompt(text, tokenizer.encode(text)) for text in firsts + seconds]

        prompts = await off_loop_if(is_long(firsts + seconds), encode)
        outputs = await _ask(llm, request, body, found, prompts, _params(body, "embed"))
        vectors = [vector_of(output) for output in outputs]
        ones, others = vectors[: len(firsts)], vectors[len(firsts) :]
        ones = ones * (len(seconds) // len(firsts))
        return [cosine(one, other) for one, other in zip(ones, others, strict=True)], outputs
    params = _params(body, "score")
    keep = pair_room(params, None, llm.max_model_len)

    def pair() -> list[TokenPrompt]:
        made = [pair_prompt(*texts, tokenizer, keep) for texts in zip(repeated, seconds, strict=True)]
        return [TokenPrompt(None, one["prompt_token_ids"], one["token_type_ids"]) for one in made]

    prompts = await off_loop_if(is_long(repeated + seconds), pair)
    outputs = await _ask(llm, request, body, found, prompts, params)
    return [float(vector_of(output)[0]) for output in outputs], outputs


async def _ask(
    llm: AsyncLLM,
    request: Request,
    body: ReadingRequest,
    found: str,
    prompts: list[TokenPrompt],
    params: PoolingParams,
) -> list[RequestOutput]:
    def cut_to_fit() -> list[TokenPrompt]:  # which reads their texts once more
        most, tokenizer = llm.max_model_len, llm.tokenizer
        return [
            each._replace(token_ids=cut(each.token_ids, each.text, params, most, tokenizer))
            for each in prompts
        ]

    try:
        prompts = await off_loop_if(is_long([each.text for each in prompts]), cut_to_fit)
        question = make_question(request, found, prompts, params, body.priority, body.cache_salt)
        return await while_connected(request.receive, whole_outputs(llm, question))
    except RequestError as error:
        if error.param == "prompt" and isinstance(body, InputRequest):
            raise ApiError(400, str(error), "input") from None
        raise


def _params(body: ReadingRequest, task: str | None) -> PoolingParams:
    """Values are judged where the object is made, and by the engine."""
    side: Any = body.truncation_side
    wanted: Any = task
    return PoolingParams(
        task=wanted,
        dimensions=body.dimensions if isinstance(body, VectorRequest) else None,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=side,
    )


# -- prompts -------------------------------------------------------------------------------------------------


def _prompts(service: Service, body: InputRequest) -> list[TokenPrompt]:
    if body.messages:
        chat = TokenizeRequest(
            messages=body.messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return [chat_prompt(chat, service.chats)]
    if not body.input:
        raise ApiError(400, INPUT_FORMS, "input")
    given = body.input
    one = isinstance(given, str) or isinstance(given[0], int)
    separate: Sequence[Any] = [given] if one else given
    _check_number(len(separate), "input")
    return [_prompt(each, service, body.add_special_tokens is not False) for each in separate]


def _prompt(given: Any, service: Service, add_special_tokens: bool) -> TokenPrompt:
    if isinstance(given, str):
        return TokenPrompt(given, needed(service.chats.tokenizer).encode(given, add_special_tokens))
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise ApiError(400, INPUT_FORMS, "input")
    return TokenPrompt(None, given)


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _check_number(number: int, name: str) -> None:
    if number > MAX_INPUTS:
        raise ApiError(400, f"{name} has {number} texts; at most {MAX_INPUTS}", name)


# -- writing -------------------------------------------------------------------------------------------------


def _check_writing(body: VectorRequest) -> None:
    for name, known in (
        ("encoding_format", ("float", "base64")),
        ("embed_dtype", tuple(DTYPES)),
        ("endianness", tuple(BYTE_ORDERS)),
    ):
        value = getattr(body, name)
        if value is not None and value not in known:
            raise ApiError(400, f"{name} must be one of {', '.join(known)}, got {value[:40]!r}", name)


def _written(values: Floats, body: VectorRequest) -> Any:
    if body.encoding_format != "base64":
        return values.tolist()
    dtype = BYTE_ORDERS[body.endianness or "native"] + DTYPES[body.embed_dtype or "float32"]
    return base64.b64encode(np.ascontiguousarray(values.astype(dtype)).tobytes()).decode()


def _usage(outputs: list[RequestOutput]) -> Usage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Usage(prompt_tokens=num_tokens, total_tokens=num_tokens, completion_tokens=0)
