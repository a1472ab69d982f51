"""An agent's loop by smolagents: argv has the base URL and the key."""

import json
import sys
from importlib.metadata import version

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole, agglomerate_stream_deltas
from smolagents.monitoring import LogLevel

BASE_URL, KEY = sys.argv[1:]
QUESTION = "How is the weather in Rome?"
used: list[str] = []


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    used.append(city)
    return f"Sun in {city}."


get_weather.inputs["city"]["enum"] = ["Berlin", "Rome"]


def model(choice: object = "required") -> OpenAIModel:
    return OpenAIModel(
        *("smol", BASE_URL, KEY),
        client_kwargs={"max_retries": 0},
        temperature=0,
        max_tokens=60,
        tool_choice=choice,
        parallel_tool_calls=False,
    )


def named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def a_call() -> None:
    """The library demands a call of itself; whole and streamed say the same."""
    question = [ChatMessage(MessageRole.USER, [{"type": "text", "text": QUESTION}])]
    whole = model().generate(question, tools_to_call_from=[get_weather])
    deltas = list(model().generate_stream(question, tools_to_call_from=[get_weather]))
    for message in (whole, agglomerate_stream_deltas(deltas)):
        [call] = message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Berlin", "Rome")
        assert message.token_usage.output_tokens > 0


def a_loop(stream: bool) -> None:
    """First the tool is called, then the final answer is, which is a tool too. The library refuses arguments
    that the tool does not have."""
    used.clear()
    asked = model(named("get_weather"))

    def onwards(step: object) -> None:
        asked.kwargs["tool_choice"] = named("final_answer")

    agent = ToolCallingAgent(
        *([get_weather], asked),
        max_steps=2,
        stream_outputs=stream,
        verbosity_level=LogLevel.OFF,
        step_callbacks=[onwards],
    )
    agent.prompt_templates["system_prompt"] = "Call tools."
    agent.tools["final_answer"].inputs = {
        "answer": {"type": "string", "description": "What is said.", "enum": ["sun", "rain"]}
    }
    assert agent.run(QUESTION) in ("sun", "rain")
    assert len(used) == 1
    steps = agent.memory.get_full_steps()
    assert not [step["error"] for step in steps if step.get("error")], steps


a_call()
a_loop(stream=False)
a_loop(stream=True)
print("smolagents", version("smolagents"))
