"""An agent's loop by pydantic-ai, over chat and over responses: argv has the base URL and the key."""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE_URL, KEY = sys.argv[1:]
SETTINGS = {"temperature": 0, "max_tokens": 80, "parallel_tool_calls": False}
QUESTION = "How is the weather in Rome?"


class Report(BaseModel):
    """What is said at the end."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Berlin", "Rome"]
    sky: Literal["sun", "rain"]


provider = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
MODELS = (OpenAIChatModel("smol", provider=provider), OpenAIResponsesModel("smol", provider=provider))


def agent(model: object, output: object, **more: object) -> Agent:
    return Agent(model, output_type=output, model_settings=SETTINGS, retries=0, **more)


async def outputs(model: object) -> None:
    """An output that is a tool's call is forced; one that is native is a schema."""
    for output in (ToolOutput(Report, name="report"), NativeOutput(Report)):
        asking = agent(model, output)
        whole = await asking.run(QUESTION)
        assert isinstance(whole.output, Report)
        async with asking.run_stream(QUESTION) as stream:
            parts = [part async for part in stream.stream_output(debounce_by=None)]
            assert await stream.get_output() == parts[-1] == whole.output
        again = await asking.run("And now?", message_history=whole.all_messages())
        assert isinstance(again.output, Report)
        assert whole.usage.output_tokens > 0


async def a_loop(model: object) -> None:
    """While the tool has not been used, it must be; then it is not offered any more, and the report is."""
    used: list[tuple[str, int]] = []

    async def at_first(context: object, tool: object) -> object:
        return None if used else tool

    async def afterwards(context: object, tools: list) -> list:
        return tools if used else []

    asking = agent(model, ToolOutput(Report, name="report"), capabilities=[PrepareOutputTools(afterwards)])

    @asking.tool_plain(prepare=at_first)
    def get_weather(city: Literal["Berlin", "Rome"], days: Literal[1, 2, 3]) -> str:
        """The weather of a city."""
        used.append((city, days))
        return f"Sun in {city}, for {days} days."

    for way in (asking.run, streamed(asking)):
        used.clear()
        done = await way(QUESTION)
        parts = [part for message in done.all_messages() for part in message.parts]
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        assert [call.tool_name for call in calls] == ["get_weather", "report"]
        results = {part.tool_call_id for part in parts if isinstance(part, ToolReturnPart)}
        assert {call.tool_call_id for call in calls} == results
        assert isinstance(done.output, Report)


def streamed(asking: Agent) -> object:
    async def run(question: str) -> object:
        async with asking.iter(question) as steps:
            async for step in steps:
                if Agent.is_model_request_node(step):
                    async with step.stream(steps.ctx) as events:
                        assert [event async for event in events]
        return steps.result

    return run


async def main() -> None:
    for model in MODELS:
        await outputs(model)
        await a_loop(model)


asyncio.run(main())
print("pydantic-ai", version("pydantic-ai-slim"))
