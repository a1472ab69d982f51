"""Responses by the official client, either major: argv has the base URL and the key."""

import asyncio
import json
import sys
import time

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

BASE_URL, KEY = sys.argv[1:]
MODEL = "smol"
QUESTION = "What is the capital of Germany?"
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
ANSWER = "The capital of Germany is Berlin."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
NAMED = {"type": "function", "name": "get_weather"}


class City(BaseModel):
    capital: str


def texts(client: OpenAI) -> None:
    response = client.responses.create(input=QUESTION, **GREEDY)
    assert (response.status, response.output_text) == ("completed", ANSWER)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert client.responses.retrieve(response.id).output_text == ANSWER
    [item] = client.responses.input_items.list(response.id)
    assert item.content[0].text == QUESTION
    followed = client.responses.create(input="And now?", previous_response_id=response.id, **GREEDY)
    given = [
        item.content[0].text for item in client.responses.input_items.list(followed.id, order="asc", limit=2)
    ]
    assert given == [QUESTION, ANSWER, "And now?"]
    client.responses.delete(response.id)
    try:
        client.responses.retrieve(response.id)
        raise AssertionError("it was deleted")
    except openai.NotFoundError as gone:
        found = gone
    assert found.param == "response_id"
    cut = client.responses.create(input=QUESTION, **GREEDY | {"max_output_tokens": 3})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parsed = client.responses.parse(input=QUESTION, text_format=City, **GREEDY)
    assert isinstance(parsed.output_parsed, City)
    include = ["message.output_text.logprobs"]
    detailed = client.responses.create(input=QUESTION, include=include, top_logprobs=2, **GREEDY)
    assert detailed.output[0].content[0].logprobs[0].top_logprobs[0].token == "The"


def streams(client: OpenAI) -> None:
    with client.responses.stream(input=QUESTION, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(input=QUESTION, tools=[WEATHER], tool_choice=NAMED, **GREEDY) as stream:
        events = list(stream)
        [call] = stream.get_final_response().output
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == call.arguments
    assert call.parsed_arguments == json.loads(call.arguments)


def an_agent(client: OpenAI) -> None:
    """A tool is called, and its answer goes back: by the response's id, and with all items."""
    question = [{"role": "user", "content": "How is the weather in Paris?"}]
    first = client.responses.create(input=question, tools=[WEATHER], tool_choice="required", **GREEDY)
    call = first.output[0]
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments).keys() == {"city"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    second = client.responses.create(input=[output], previous_response_id=first.id, **GREEDY)
    again = client.responses.create(input=[*question, *first.output, output], store=False, **GREEDY)
    assert second.output_text == again.output_text != ""


def in_the_background(client: OpenAI) -> None:
    begun = client.responses.create(input=QUESTION, background=True, **GREEDY)
    while begun.status in ("queued", "in_progress"):
        time.sleep(0.05)
        begun = client.responses.retrieve(begun.id)
    assert begun.output_text == ANSWER
    long = client.responses.create(
        input="Tell a story.", background=True, model=MODEL, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(long.id).status == "cancelled"
    stream = client.responses.create(input=QUESTION, background=True, stream=True, **GREEDY)
    first = next(stream)
    stream.close()
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1].response.output_text == ANSWER


async def asynchronous() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as client:
        response, stream = await asyncio.gather(
            client.responses.create(input=QUESTION, **GREEDY),
            client.responses.create(input=QUESTION, stream=True, **GREEDY),
        )
        events = [event async for event in stream]
        assert response.output_text == events[-1].response.output_text == ANSWER


with OpenAI(base_url=BASE_URL, api_key=KEY) as client:
    texts(client)
    streams(client)
    an_agent(client)
    in_the_background(client)
asyncio.run(asynchronous())
