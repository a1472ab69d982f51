"""Structured outputs of the real model: from a chat to text that fits."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from mainspring import LLM, RequestError, SamplingParams, StructuredOutputsParams
from mainspring.frontend.bounds import after_reasoning
from mainspring.frontend.parsing.formats import REASONING_FORMATS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "北京"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, kernels="numpy", in_process=True, max_model_len=512, num_gpu_blocks_override=65) as llm:
        yield llm


def ask(llm: LLM, **given):
    given = {"max_tokens": 250, "temperature": 1.0, "seed": 7} | given
    kinds = {
        name: given.pop(name) for name in list(given) if name in StructuredOutputsParams.__struct_fields__
    }
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**kinds) if kinds else None, **given)
    return llm.chat([QUESTION], params, use_tqdm=False)[0]


@pytest.mark.parametrize("pushed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_document(llm, pushed):
    """Case B125: also where the model is pushed towards white space."""
    encode = llm.get_tokenizer().encode
    spaces = {encode(text, add_special_tokens=False)[0]: 20.0 for text in (" ", "\n")}
    answer = ask(llm, json=SCHEMA, logit_bias=spaces if pushed else None).outputs[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_a_pattern_and_a_choice(llm):
    """Case B131."""
    answer = ask(llm, regex="[一-龥]{2}, [A-Z][a-z]{3}!").outputs[0]
    assert re.fullmatch("[一-龥]{2}, [A-Z][a-z]{3}!", answer.text)
    assert ask(llm, choice=["Zürich 😀", "北京"], temperature=0.0).outputs[0].text in ("Zürich 😀", "北京")


@pytest.mark.parametrize("budget", [0, 6])
def test_reasoning_has_a_budget_and_binds_nothing(llm, budget):
    """What is bound begins after it, and it ends in time, whatever the model would say."""
    form = REASONING_FORMATS["qwen3"]
    bound = after_reasoning(StructuredOutputsParams(regex="[0-9]{3}"), form, is_open=True, max_tokens=budget)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, structured_outputs=bound)
    [output] = llm.chat([QUESTION], params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    thought, end, rest = answer.text.partition(form.end)
    assert end
    assert re.fullmatch(r"[ \n]{0,4}[0-9]{3}", rest)
    assert len(llm.get_tokenizer().encode(thought, add_special_tokens=False)) <= budget
    assert bool(thought) is bool(budget)


def test_lenient_is_reported(llm):
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        ask(llm, json=schema)
    assert caught.value.param == "structured_outputs"
    output = ask(llm, json=schema, lenient=True)
    assert "uniqueItems" in output.warnings[0]
    assert isinstance(json.loads(output.outputs[0].text), list)
    assert ask(llm, choice=["a"]).warnings is None


def test_masks_that_leave_nothing(llm):
    """Case B109: a choice and an allow list that exclude each other end their own request in words; so does a
    client that asks for the impossible beside one that does not."""
    prompt = llm.chat_prompt(QUESTION)
    no = llm.get_tokenizer().encode("no", add_special_tokens=False)
    choice = StructuredOutputsParams(choice=["yes"])
    params = [
        SamplingParams(max_tokens=5, allowed_token_ids=no, structured_outputs=choice),
        SamplingParams(max_tokens=5, structured_outputs=choice),
    ]
    wrong, right = (output.outputs[0] for output in llm.generate([prompt, prompt], params, use_tqdm=False))
    assert (wrong.finish_reason, wrong.text) == ("error", "")
    assert "no token is allowed here" in wrong.error
    assert (right.finish_reason, right.text) == ("stop", "yes")
