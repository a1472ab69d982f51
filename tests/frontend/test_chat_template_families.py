"""What the templates of model families are made of: our own templates with the constructs that theirs have,
rendered as the usual environment for chat templates renders them (jinja2's sandbox, blocks trimmed)."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mainspring.base.errors import RequestError
from mainspring.frontend.chat_template import ChatTemplate

DATA = Path(__file__).parents[1] / "data" / "chat_templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The "weather" <now> & then, für alle',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "Paris"]},
                    "days": {"type": ["integer", "null"], "default": 1},
                    "parts": {"type": "array", "items": {"type": "object", "properties": {}}},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
TALK = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "How is the <weather>?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nLet me look.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": 7}', "tool_call_id": "abc123def", "name": "weather"},
    {"role": "tool", "content": "and more"},
    {"role": "assistant", "content": "Cold. "},
    {"role": "user", "content": "Thanks — 谢谢 /no_think"},
]

TEMPLATES = {path.stem: path.read_text() for path in sorted(DATA.glob("*.jinja"))}


def usual(source: str, values: dict[str, Any]) -> str:
    """As applications render chat templates, but for the mark of what is trained on, which shows nothing."""
    source = source.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    return environment.from_string(source).render(**values)


@pytest.mark.parametrize(
    "options", [{}, {"tools": TOOLS}, {"enable_thinking": False, "documents": [{"text": "d"}]}]
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_as_usual(name: str, add_generation_prompt: bool, options: dict[str, Any]) -> None:
    source = TEMPLATES[name]
    values = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>", **options}
    values |= {"messages": TALK, "add_generation_prompt": add_generation_prompt}
    ours = ChatTemplate(source, "<s>", "</s>").render(TALK, add_generation_prompt, **options)
    assert ours == usual(source, values)
    assert "谢谢" in ours or name == "schema_as_type"


def test_what_a_template_refuses_is_said() -> None:
    template = ChatTemplate(TEMPLATES["alternating_turns"])
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        template.render(twice)
    with pytest.raises(RequestError, match="unknown role judge"):
        template.render([{"role": "user", "content": "a"}, {"role": "judge", "content": "b"}])
