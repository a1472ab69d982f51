"""An agent's loop by litellm: argv has the base URL and the key."""

import asyncio
import json
import os
import sys
from importlib.metadata import version
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel, ConfigDict

BASE_URL, KEY = sys.argv[1:]
GIVEN = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0, "max_tokens": 60, "num_retries": 0}
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # hosted_vllm leaves this out; so it asks less than is checked
    city: Literal["Berlin", "Rome"]
    days: Literal[1, 2, 3]


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": GetWeather.model_json_schema()},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def an_agent(model: str) -> None:
    for choice in ("required", NAMED):
        asked = {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        whole = litellm.completion(model=model, **asked, **GIVEN)
        chunks = list(litellm.completion(model=model, stream=True, **asked, **GIVEN))
        streamed = litellm.stream_chunk_builder(chunks, messages=QUESTION)
        for answer in (whole, streamed):
            message = answer.choices[0].message
            [call] = message.tool_calls
            assert call.function.name == "get_weather"
            found = GetWeather.model_validate_json(call.function.arguments, strict=True)
            result = {"role": "tool", "tool_call_id": call.id, "content": f"Sun in {found.city}."}
            messages = [*QUESTION, message.model_dump(), result]
            last = litellm.completion(
                model=model, messages=messages, tools=[TOOL], tool_choice="none", **GIVEN
            )
            assert last.choices[0].message.content
            assert not last.choices[0].message.tool_calls
    answer = litellm.completion(model=model, messages=QUESTION, response_format=GetWeather, **GIVEN)
    GetWeather.model_validate_json(answer.choices[0].message.content, strict=True)


def responses() -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": GetWeather.model_json_schema()}
    given = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0, "max_output_tokens": 60}
    answer = litellm.responses(
        model="openai/smol",
        input=QUESTION,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        **given,
    )
    [call] = answer.output
    GetWeather.model_validate_json(call.arguments, strict=True)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
    last = litellm.responses(model="openai/smol", input=[result], previous_response_id=answer.id, **given)
    assert last.output[0].content[0].text


def messages() -> None:
    """Anthropic's API by its provider."""
    given = GIVEN | {"api_base": BASE_URL.removesuffix("/v1")}
    asked = {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}
    answer = litellm.completion(model="anthropic/smol", parallel_tool_calls=False, **asked, **given)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Berlin", "Rome")
    assert answer.choices[0].finish_reason == "tool_calls"


async def asynchronous() -> None:
    asked = {"messages": QUESTION, "tools": [TOOL], "tool_choice": NAMED}
    answers = await asyncio.gather(
        *(litellm.acompletion(model="hosted_vllm/smol", **asked, **GIVEN) for _ in range(3))
    )
    assert len({answer.choices[0].message.tool_calls[0].function.arguments for answer in answers}) == 1


for provider in ("hosted_vllm", "openai"):
    an_agent(f"{provider}/smol")
responses()
messages()
asyncio.run(asynchronous())
print("litellm", version("litellm"))
