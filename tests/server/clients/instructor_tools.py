"""What instructor asks, by its two ways, and an agent's loop with it: argv has the base URL and the key."""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

BASE_URL, KEY = sys.argv[1:]
GIVEN = {"model": "smol", "temperature": 0, "max_tokens": 80, "max_retries": 0}
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # or a small model invents fields, which fit the schema too
    city: Literal["Berlin", "Rome"]
    days: Literal[1, 2, 3]


class Report(BaseModel):
    """What is said at the end."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["sun", "rain"]


def an_agent(mode: instructor.Mode) -> None:
    """The first answer is the call's arguments, which come whole and bit by bit; the result goes back."""
    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), mode=mode)
    call, raw = client.create_with_completion(messages=QUESTION, response_model=GetWeather, **GIVEN)
    assert isinstance(call, GetWeather)
    bits = list(client.create_partial(messages=QUESTION, response_model=GetWeather, **GIVEN))
    assert len(bits) > 1
    assert (bits[-1].city, bits[-1].days) == (call.city, call.days)
    result = f"Sun in {call.city}, for {call.days} days."
    message = raw.choices[0].message
    if message.tool_calls:
        results = [
            {"role": "tool", "tool_call_id": each.id, "content": result} for each in message.tool_calls
        ]
    else:
        results = [{"role": "user", "content": result}]
    messages = [*QUESTION, message.model_dump(), *results]
    assert isinstance(client.create(messages=messages, response_model=Report, **GIVEN), Report)


async def asynchronous(mode: instructor.Mode) -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), mode=mode)
    one, two = await asyncio.gather(
        client.create(messages=QUESTION, response_model=GetWeather, **GIVEN),
        client.create(messages=QUESTION, response_model=Report, **GIVEN),
    )
    assert isinstance(one, GetWeather)
    assert isinstance(two, Report)


for way in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    an_agent(way)
    asyncio.run(asynchronous(way))
print("instructor", version("instructor"))
