"""A conversation by the official client, either major: argv has the base URL and the key."""

import asyncio
import sys

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

BASE_URL, KEY = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
ANSWER = "The capital of Germany is Berlin."


class City(BaseModel):
    capital: str


def synchronous(client: OpenAI) -> None:
    models = client.models.list().data
    model = models[0].id
    assert client.models.retrieve(model).id == model
    ask = client.chat.completions.create
    answer = ask(model=model, messages=QUESTION, **GREEDY)
    assert answer.choices[0].message.content == ANSWER
    assert answer._request_id
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, extra_headers={"x-request-id": "mine"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id == "chatcmpl-mine"
    options = {"include_usage": True}
    chunks = list(ask(model=model, messages=QUESTION, stream=True, stream_options=options, **GREEDY))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == 8
    detailed = ask(model=model, messages=QUESTION, logprobs=True, top_logprobs=2, n=2, seed=5, **GREEDY)
    assert len(detailed.choices) == 2
    assert detailed.choices[0].logprobs.content[0].top_logprobs[0].token == "The"
    more = ask(model=model, messages=QUESTION, extra_body={"min_tokens": 8, "top_k": 5}, **GREEDY)
    assert more.usage.completion_tokens == 8
    with client.chat.completions.stream(model=model, messages=QUESTION, **GREEDY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def structured(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    parsed = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        extra_body={"structured_outputs": {"choice": ["Rome", "Berlin"]}},
        **GREEDY,
    )
    assert answer.choices[0].message.content == "Berlin"


def completions(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    done = client.completions.create(model=model, prompt="The capital of France is", **GREEDY)
    assert done.choices[0].text.startswith(" Paris.")
    scored = client.completions.create(
        model=model, prompt=[504, 3575, 282, 4649, 314], echo=True, logprobs=1, max_tokens=0
    )
    assert scored.choices[0].text == "The capital of France is"
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    pieces = client.completions.create(model=model, prompt=["A", "B"], stream=True, **GREEDY)
    assert {piece.choices[0].index for piece in pieces} == {0, 1}


def embeddings(client: OpenAI) -> None:
    """The client asks for base64, and reads it, unless floats are asked for."""
    model = client.models.list().data[0].id
    texts = ["The capital of France is Paris.", "Paris is France's capital.", "Bread needs yeast."]
    packed = client.embeddings.create(model=model, input=texts)
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    one, two, other = (each.embedding for each in packed.data)
    for mine, its in zip((one, two, other), plain.data, strict=True):
        assert max(abs(x - y) for x, y in zip(mine, its.embedding, strict=True)) < 1e-6
    assert abs(sum(x * x for x in one) - 1.0) < 1e-5
    assert sum(x * y for x, y in zip(one, two, strict=True)) > sum(
        x * y for x, y in zip(one, other, strict=True)
    )
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
    [short] = client.embeddings.create(model=model, input="Paris", dimensions=16).data
    assert len(short.embedding) == 16


def errors(client: OpenAI) -> None:
    def refused(kind: type, **wrong: object) -> openai.APIStatusError:
        try:
            client.chat.completions.create(**{"model": "", "messages": QUESTION, **GREEDY, **wrong})
        except kind as error:
            return error
        raise AssertionError(f"no {kind.__name__}")

    assert refused(openai.NotFoundError, model="zz").param == "model"
    assert refused(openai.BadRequestError, max_tokens=-1).param == "max_tokens"
    assert str(refused(openai.BadRequestError, max_tokens=-1).code) == "400"
    assert refused(openai.BadRequestError, messages=[]).type == "BadRequestError"
    try:
        OpenAI(base_url=BASE_URL, api_key="wrong").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")


async def asynchronous(client: AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    answers = await asyncio.gather(
        *(client.chat.completions.create(model=model, messages=QUESTION, **GREEDY) for _ in range(4))
    )
    assert {answer.choices[0].message.content for answer in answers} == {ANSWER}
    text = ""
    stream = await client.chat.completions.create(model=model, messages=QUESTION, stream=True, **GREEDY)
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert text == ANSWER
    stream = await client.chat.completions.create(
        model=model, messages=QUESTION, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await client.close()


given = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
synchronous(given)
structured(given)
completions(given)
embeddings(given)
errors(given)
asyncio.run(asynchronous(AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)))
print("openai", openai.__version__)
