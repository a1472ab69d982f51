"""An agent's loop by the official client, either major, over chat: argv has the base URL and the key."""

import asyncio
import json
import sys
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

BASE_URL, KEY = sys.argv[1:]
GIVEN = {"model": "smol", "temperature": 0, "max_tokens": 60}
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Berlin", "Rome"]
    days: Literal[1, 2, 3] = 1


def weather(city: str, days: int) -> str:
    return f"Sun in {city}, for {days} days."


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# of a named call the text is its arguments and no more, so its end is that of any text
REASONS = {"required": "tool_calls", "named": "stop"}


def an_agent(client: OpenAI) -> None:
    """Calls as they come whole, by `parse`, in chunks and by the helper; then their results go back."""
    chat = client.chat.completions
    for way, choice in {"required": "required", "named": NAMED}.items():
        asked = {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice, **GIVEN}
        whole = chat.create(parallel_tool_calls=False, **asked)
        parsed = chat.parse(parallel_tool_calls=False, **asked)
        with chat.stream(parallel_tool_calls=False, **asked) as stream:
            events = list(stream)
            streamed = stream.get_final_completion()
        for completion in (whole, parsed, streamed):
            [choice_] = completion.choices
            assert choice_.finish_reason == REASONS[way], choice_
            [call] = choice_.message.tool_calls
            assert (call.type, call.function.name) == ("function", "get_weather")
            GetWeather.model_validate_json(call.function.arguments, strict=True)
        for completion in (parsed, streamed):
            arguments = completion.choices[0].message.tool_calls[0].function.parsed_arguments
            assert isinstance(arguments, GetWeather)
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert len(deltas) > 1
        assert "".join(event.arguments_delta for event in deltas) == done.arguments
        answered(client, whole)
        answered(client, streamed)


def answered(client: OpenAI, completion: ChatCompletion) -> None:
    """The message with its calls goes back as the client gives it."""
    message = completion.choices[0].message
    [call] = message.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": weather(**json.loads(call.function.arguments)),
    }
    messages = [*QUESTION, message, result]
    last = client.chat.completions.create(messages=messages, tools=[TOOL], tool_choice="none", **GIVEN)
    assert last.choices[0].finish_reason in ("stop", "length")
    assert last.choices[0].message.content
    assert last.choices[0].message.tool_calls is None


def several_calls(client: OpenAI) -> None:
    """Whatever their number, each has an id and an index of its own, and arguments that fit its tool."""
    other = openai.pydantic_function_tool(GetWeather, name="get_forecast", description="Of days to come.")
    asked = {"messages": QUESTION, "tools": [TOOL, other], "tool_choice": "required", **GIVEN}
    calls: dict[int, dict[str, str]] = {}
    for chunk in client.chat.completions.create(stream=True, **asked | {"max_tokens": 400}):
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert list(calls) == list(range(len(calls)))
    assert calls
    assert len({call["id"] for call in calls.values()}) == len(calls)
    assert {call["name"] for call in calls.values()} <= {"get_weather", "get_forecast"}
    if reason == "tool_calls":
        for call in calls.values():
            GetWeather.model_validate_json(call["arguments"], strict=True)
    else:
        assert reason == "length"


def structured(client: OpenAI) -> None:
    asked = {"messages": QUESTION, "response_format": GetWeather, **GIVEN}
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, GetWeather)
    with client.chat.completions.stream(**asked) as stream:
        [done] = [event for event in stream if event.type == "content.done"]
    assert isinstance(done.parsed, GetWeather)
    try:
        client.chat.completions.parse(**asked | {"max_tokens": 3})
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("half an answer was parsed")


async def asynchronous() -> None:
    asked = {"messages": QUESTION, "tools": [TOOL], "tool_choice": NAMED, **GIVEN}
    async with AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:

        async def stream() -> ChatCompletion:
            async with client.chat.completions.stream(**asked) as stream:
                return await stream.get_final_completion()

        answers = await asyncio.gather(stream(), client.chat.completions.create(**asked), stream())
    calls = [answer.choices[0].message.tool_calls[0] for answer in answers]
    assert len({call.function.arguments for call in calls}) == 1
    assert len({call.id for call in calls}) == 3


with OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as client:
    an_agent(client)
    several_calls(client)
    structured(client)
asyncio.run(asynchronous())
print("openai", openai.__version__)
