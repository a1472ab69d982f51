"""An agent's loop by llama-index-llms-openai-like: argv has the base URL and the key."""

import asyncio
import sys
from importlib.metadata import version
from typing import Literal

from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

BASE_URL, KEY = sys.argv[1:]
QUESTION = "How is the weather in Rome?"


def get_weather(city: Literal["Berlin", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather of a city."""
    return f"Sun in {city}, for {days} days."


class Report(BaseModel):
    """What is said at the end."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Berlin", "Rome"]
    sky: Literal["sun", "rain"]


TOOL = FunctionTool.from_defaults(get_weather)


def model(**more: object) -> OpenAILike:
    return OpenAILike(
        model="smol",
        api_base=BASE_URL,
        api_key=KEY,
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=60,
        max_retries=0,
        **more,
    )


def an_agent(llm: OpenAILike) -> None:
    """Calls that come whole and in chunks; their results go back, and words come, which are streamed too."""
    for choice in ({"tool_required": True}, {"tool_choice": "get_weather"}):
        whole = llm.chat_with_tools([TOOL], user_msg=QUESTION, **choice)
        *_, streamed = llm.stream_chat_with_tools([TOOL], user_msg=QUESTION, **choice)
        for answer in (whole, streamed):
            [call] = llm.get_tool_calls_from_response(answer)
            assert call.tool_name == "get_weather"
            found = TOOL.call(**call.tool_kwargs).raw_output
            assert found.startswith("Sun in ")
            result = ChatMessage(
                content=found, role=MessageRole.TOOL, additional_kwargs={"tool_call_id": call.tool_id}
            )
            history = [ChatMessage(QUESTION), answer.message, result]
            last = llm.chat_with_tools([TOOL], chat_history=history, tool_choice="none")
            assert last.message.content
            assert not llm.get_tool_calls_from_response(last, error_on_no_tool_call=False)
            *_, spoken = llm.stream_chat(history)
            assert spoken.message.content


def structured() -> None:
    """By a forced call, and by the format of the response."""
    for llm in (model(), model(should_use_structured_outputs=True)):
        asked = llm.as_structured_llm(Report)
        assert isinstance(asked.chat([ChatMessage(QUESTION)]).raw, Report)
    # streamed by calls the library leaves the choice to the model, so only the format is tried
    *_, last = asked.stream_chat([ChatMessage(QUESTION)])
    assert isinstance(last.raw, Report), last


async def asynchronous(llm: OpenAILike) -> None:
    answers = await asyncio.gather(
        *(llm.achat_with_tools([TOOL], user_msg=QUESTION, tool_required=True) for _ in range(3))
    )
    calls = [llm.get_tool_calls_from_response(answer)[0] for answer in answers]
    assert {call.tool_name for call in calls} == {"get_weather"}


an_agent(model())
structured()
asyncio.run(asynchronous(model()))
print("llama-index-llms-openai-like", version("llama-index-llms-openai-like"))
