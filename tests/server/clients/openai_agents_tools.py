"""An agent's loop by openai-agents, over chat and over responses: argv has the base URL and the key."""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

BASE_URL, KEY = sys.argv[1:]
QUESTION = "How is the weather in Rome?"
CAPITAL = "What is the capital of Germany?"  # a small model ends its answer to this
set_tracing_disabled(True)
used: list[tuple[str, int]] = []


@function_tool
def get_weather(city: Literal["Berlin", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    used.append((city, days))
    return f"Sun in {city}, for {days} days."


class Report(BaseModel):
    city: Literal["Berlin", "Rome"]
    sky: Literal["sun", "rain"]


def agent(model: object, choice: str | None, **more: object) -> Agent:
    settings = ModelSettings(
        tool_choice=choice, temperature=0, max_tokens=400, parallel_tool_calls=False if choice else None
    )
    return Agent(name="reporter", model=model, model_settings=settings, **more)


async def loops(model: object) -> None:
    """A forced call, its result back, then words: the choice is made free after the first call."""
    for choice in ("required", "get_weather"):
        asking = agent(model, choice, tools=[get_weather])
        used.clear()
        done = await Runner.run(asking, QUESTION, max_turns=3)
        assert isinstance(done.final_output, str)
        assert done.final_output
        streamed = Runner.run_streamed(asking, QUESTION, max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
        assert streamed.final_output == done.final_output
        assert len(used) == 2
        for run in (done, streamed):
            items = [item.type for item in run.new_items]
            assert items == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        again = await Runner.run(
            agent(model, None), [*done.to_input_list(), {"role": "user", "content": CAPITAL}]
        )
        assert again.final_output
    stopped = await Runner.run(
        agent(model, "required", tools=[get_weather], tool_use_behavior="stop_on_first_tool"), QUESTION
    )
    assert stopped.final_output.startswith("Sun in ")


async def structured(model: object) -> None:
    done = await Runner.run(agent(model, None, output_type=Report), QUESTION)
    assert isinstance(done.final_output, Report)


async def main() -> None:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    for model in (OpenAIChatCompletionsModel("smol", client), OpenAIResponsesModel("smol", client)):
        await loops(model)
        await structured(model)
    await client.close()


asyncio.run(main())
print("openai-agents", version("openai-agents"))
