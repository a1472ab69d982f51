"""A conversation by Anthropic's client: argv has the base URL and the key."""

import asyncio
import sys

import anthropic
from anthropic import Anthropic, AsyncAnthropic

BASE_URL, KEY = sys.argv[1:]
BASE_URL = BASE_URL.removesuffix("/v1")
MODEL = "smol"
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
GREEDY = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
ANSWER = "The capital of Germany is Berlin."
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Berlin", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def texts(client: Anthropic) -> None:
    answer = client.messages.create(messages=QUESTION, **GREEDY)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == ANSWER
    assert (answer.role, answer.stop_reason, answer.usage.output_tokens) == ("assistant", "end_turn", 8)
    assert answer._request_id
    assert answer.id.startswith("msg_")
    cut = client.messages.create(
        messages=QUESTION,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["zz"],
        extra_body={"top_k": 5, "top_p": 0.9},
        metadata={"user_id": "me"},
        model=MODEL,
        max_tokens=2,
    )
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(messages=QUESTION, stop_sequences=["Germany"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Germany")
    again = client.messages.create(messages=QUESTION, **GREEDY)
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == count.input_tokens
    beta = client.beta.messages.create(messages=QUESTION, betas=["some-thing-2026-01-01"], **GREEDY)
    assert beta.content[0].text == ANSWER


def streams(client: Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(messages=QUESTION, stream=True, **GREEDY)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(messages=QUESTION, **GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (ANSWER, "end_turn", 8)


def agent(client: Anthropic) -> None:
    """A loop with a tool, streamed and whole; calls are forced, so that a small model suffices."""
    given = GREEDY | {"max_tokens": 60}
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather"},
    ):
        asked = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, **given}
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (answer, streamed):
            [call] = [block for block in message.content if block.type == "tool_use"]
            assert (call.name, message.stop_reason) == ("get_weather", "tool_use")
            assert call.input["city"] in ("Berlin", "Rome")
        [call] = [block for block in answer.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun.", "is_error": False}
        messages = [
            *QUESTION,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        last = client.messages.create(
            messages=messages, tools=[WEATHER], tool_choice={"type": "none"}, **given
        )
        assert last.stop_reason in ("end_turn", "max_tokens")
        assert last.content[0].text


def errors(client: Anthropic) -> None:
    def refused(kind: type, client: Anthropic = client, **wrong: object) -> anthropic.APIStatusError:
        try:
            client.messages.create(**{"messages": QUESTION, **GREEDY, **wrong})
        except kind as error:
            return error
        raise AssertionError(f"no {kind.__name__}")

    assert refused(anthropic.NotFoundError, model="zz").body["error"]["type"] == "not_found_error"
    wrong = refused(anthropic.BadRequestError, max_tokens=-1)
    assert wrong.body["error"]["type"] == "invalid_request_error"
    assert wrong.request_id == wrong.body["request_id"]
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    refused(anthropic.BadRequestError, messages=[{"role": "user", "content": [image]}])
    stranger = Anthropic(base_url=BASE_URL, api_key="wrong")
    wrong = refused(anthropic.AuthenticationError, stranger)
    assert wrong.body["error"]["type"] == "authentication_error"


async def asynchronous(client: AsyncAnthropic) -> None:
    answers = await asyncio.gather(*(client.messages.create(messages=QUESTION, **GREEDY) for _ in range(4)))
    assert {answer.content[0].text for answer in answers} == {ANSWER}
    async with client.messages.stream(messages=QUESTION, model=MODEL, max_tokens=400) as stream:
        async for _ in stream:
            break  # it leaves early
    await client.close()


for given in (
    Anthropic(base_url=BASE_URL, api_key=KEY, max_retries=0),  # x-api-key
    Anthropic(base_url=BASE_URL, auth_token=KEY, max_retries=0),  # Authorization
):
    texts(given)
    streams(given)
    agent(given)
    errors(given)
asyncio.run(asynchronous(AsyncAnthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)))
print("anthropic", anthropic.__version__)
