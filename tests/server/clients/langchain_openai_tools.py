"""An agent's loop by langchain-openai: argv has the base URL and the key."""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

BASE_URL, KEY = sys.argv[1:]
QUESTION = HumanMessage("How is the weather in Rome?")


@tool
def get_weather(city: Literal["Berlin", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"Sun in {city}, for {days} days."


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # or a small model invents more
    name: Literal["Berlin", "Rome"]
    is_capital: bool


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(
        model="smol", base_url=BASE_URL, api_key=KEY, temperature=0, max_tokens=60, max_retries=0, **more
    )


def an_agent(llm: ChatOpenAI) -> None:
    """Calls that come whole and in chunks; their results go back, and words come."""
    for choice in ("any", "get_weather"):
        forced = llm.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        whole = forced.invoke([QUESTION])
        chunks = list(forced.stream([QUESTION]))
        streamed = sum(chunks[1:], chunks[0])
        assert isinstance(streamed, AIMessageChunk)
        assert len([piece for chunk in chunks for piece in chunk.tool_call_chunks]) > 1
        for message in (whole, streamed):
            assert not message.invalid_tool_calls
            [call] = message.tool_calls
            assert call["name"] == "get_weather"
            result = get_weather.invoke(call)  # checks the arguments
            assert (result.tool_call_id, result.status) == (call["id"], "success")
            last = llm.bind_tools([get_weather], tool_choice="none").invoke([QUESTION, message, result])
            assert isinstance(last, AIMessage)
            assert last.text
            assert not last.tool_calls
        assert whole.usage_metadata["output_tokens"] > 0


def structured(llm: ChatOpenAI) -> None:
    ways = [
        ("json_schema", True),
        ("json_schema", None),
        ("function_calling", True),
        ("function_calling", None),
    ]
    for method, strict in ways:
        asked = llm.with_structured_output(City, method=method, strict=strict, include_raw=True)
        found = asked.invoke([QUESTION])
        assert found["parsing_error"] is None, found
        assert isinstance(found["parsed"], City)
    parts = list(
        llm.with_structured_output(City.model_json_schema(), method="json_schema").stream([QUESTION])
    )
    City.model_validate(parts[-1], strict=True)


async def asynchronous(llm: ChatOpenAI) -> None:
    forced = llm.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    answers = await asyncio.gather(*(forced.ainvoke([QUESTION]) for _ in range(3)))
    assert {answer.tool_calls[0]["name"] for answer in answers} == {"get_weather"}
    chunks = [chunk async for chunk in forced.astream([QUESTION])]
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == answers[0].tool_calls[0]["args"]


chat, responses = model(), model(use_responses_api=True)
an_agent(chat)
structured(chat)
asyncio.run(asynchronous(model()))
an_agent(responses)
print("langchain-openai", version("langchain-openai"))
