"""Public faults of end tokens, from the file to the request. Numbers are those of `tests/CASES.md`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from frontend_toys import TOY, ScriptedClient, run

from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.checkpoint.description import gguf_facts
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.output_processor import OutputProcessor

METADATA = {"general.architecture": "llama", "llama.context_length": 512}


def file_with(**ends: int | None) -> Any:
    """What `gguf_facts` reads of a file whose end tokens are these."""
    keys = {f"tokenizer.ggml.{name}_token_id": value for name, value in ends.items()}
    info = SimpleNamespace(shape=(TOY.vocab_size, 8))
    return SimpleNamespace(path="model.gguf", metadata=METADATA | keys, info=lambda name: info)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({}, ()),
        ({"eos": 5}, (5,)),
        ({"eos": None, "eot": 7}, (7,)),
        ({"eos": 5, "eot": 7}, (5, 7)),
        ({"eos": 5, "eot": 5, "eom": 9}, (5, 9)),
        ({"eom": 9, "eot": 7}, (7, 9)),
    ],
)
def test_end_tokens_of_a_file(ends: dict[str, int | None], expected: tuple[int, ...]):
    """Case B079: all that the file names, once each; a file that names none works."""
    assert gguf_facts(file_with(**ends)).eos_token_ids == expected


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.6}, {"stop_token_ids": [1]}, {"stop": ["xyz"]}])
def test_settings_of_a_request_do_not_drop_end_tokens(which: int, setting: dict[str, Any]):
    """Case B079: whatever else is set, each of the list still ends the answer."""
    ids = (TOY.eos_token_id, TOY.id("STOP"), ord("!"))
    facts = gguf_facts(file_with(eos=ids[0], eot=ids[1], eom=ids[2]))
    client = ScriptedClient([ord("a"), ids[which], ord("b")])
    engine = LLMEngine(client, InputProcessor(facts, 512, TOY), OutputProcessor(TOY), TOY)
    params = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY, **setting)
    engine.add_request("a", "hello", params)
    (output,) = run(engine)
    assert output.outputs[0].token_ids == [ord("a"), ids[which]]
    assert output.outputs[0].text == "a"
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == (None if which == 0 else ids[which])


def test_a_file_without_end_tokens_runs_to_the_length():
    """Case B079."""
    facts = gguf_facts(file_with())
    client = ScriptedClient([TOY.eos_token_id] * 9)
    engine = LLMEngine(client, InputProcessor(facts, 512, TOY), OutputProcessor(TOY), TOY)
    engine.add_request("a", "hello", SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY))
    (output,) = run(engine)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")
