"""10,000 calls that tools demand, by a model whose logits are random, at a temperature that helps nothing:
what comes to its end fits the tool's schema. The engine, the grammars and the tokenizer are the real ones,
the schemas 100 that people have published (see `test_schemastore.py`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from structured_toys import fault_of, judge
from test_schemastore import schemas

from mainspring.base.config import EngineArgs, Vocabulary, resolve
from mainspring.base.errors import RequestError
from mainspring.base.params import SamplingParams
from mainspring.engine.build import build_engine
from mainspring.engine.client import InprocClient
from mainspring.frontend.llm import LLM
from mainspring.frontend.llm_engine import LLMEngine, make_processors, prepare
from mainspring.frontend.parsing.constraints import demanded
from mainspring.frontend.parsing.events import CallArguments, CallBegins, joined
from mainspring.frontend.parsing.parser import AnswerParser
from mainspring.frontend.tokenizer import Tokenizer
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_model import FakeModel, Logits, Values, mix

pytestmark = pytest.mark.slow  # a minute and a half on one core

NUM_CALLS = 10_000
NUM_SCHEMAS = 100
AT_ONCE = 25  # answers
NUM_PLACES = 1 << 20  # in a table of random numbers
QUESTION = [{"role": "user", "content": "Do it."}]
NAMED = {"type": "function", "function": {"name": "do_it"}}
OTHER = {"type": "function", "function": {"name": "do_nothing"}}


class TableModel(FakeModel):
    """Numbers are read from two tables, at places that a hash names, and not made for each token: of all the
    time this took, three quarters went there. What is said depends on few tokens before it."""

    def __init__(self, vocab_size: int, bias: dict[int, float]) -> None:
        super().__init__(vocab_size, windows=(4,))
        dice = np.random.default_rng(0)
        self._logits = dice.random(NUM_PLACES + vocab_size, dtype=np.float32) * np.float32(8.0)
        self._noise = dice.gumbel(size=NUM_PLACES + vocab_size).astype(np.float32)
        self._bias = np.zeros(vocab_size, dtype=np.float32)
        self._bias[list(bias)] = list(bias.values())

    def logits(self, values: Sequence[Values], num_tokens: int) -> Logits:
        at = int(values[0][-1]) % NUM_PLACES
        return self._logits[at : at + self.vocab_size] + self._bias

    def noise(self, params: SamplingParams, position: int) -> Logits:
        at = mix(params.seed or 0, position) % NUM_PLACES
        return self._noise[at : at + self.vocab_size]


@pytest.fixture(scope="module")
def llm(smollm2):
    args = EngineArgs(
        model=str(smollm2), max_model_len=1024, max_num_seqs=AT_ONCE, num_gpu_blocks_override=2000
    )
    facts = prepare(args).facts
    from mainspring.checkpoint.opening import open_checkpoint

    with open_checkpoint(facts.path) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    vocabulary = Vocabulary(
        tokenizer.all_token_bytes(), sorted(tokenizer.special_ids), list(facts.eos_token_ids)
    )
    config = structs.replace(resolve(args, facts), vocabulary=vocabulary)
    executor = FakeExecutor(
        TableModel(facts.vocab_size, closing(tokenizer)),
        num_blocks=config.num_gpu_blocks_override,
        block_size=config.block_size,
    )
    client = InprocClient(build_engine(config, executor))
    engine = LLMEngine(client, *make_processors(args, facts, tokenizer, client.max_model_len), tokenizer)
    with LLM.from_engine(engine) as llm:
        yield llm


def tools() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of the schemas that can be a tool's parameters and be enforced."""
    for key, schema in schemas():
        tool = {"type": "function", "function": {"name": "do_it", "parameters": schema}}
        try:
            demanded([tool, OTHER], "required", True, None)
            demanded([tool, OTHER], NAMED, True, None)
        except RequestError:
            continue
        yield key, tool


def closing(tokenizer: Tokenizer) -> dict[int, float]:
    """A random model would never end what it has begun: tokens that can do so are likelier."""
    return {
        token_id: 12.0
        for token_id, text in enumerate(tokenizer.all_token_bytes())
        if text and not text.strip(b'"}],: \n')
    } | {token_id: 14.0 for token_id in tokenizer.eos_token_ids}


def calls_of(text: str, choice: Any) -> list[tuple[str, str]]:
    """Names and arguments, as a client gets them."""
    parser = AnswerParser(demanded([dict(NAMED), OTHER], choice, True, None).tool_format, None)
    found: list[list[str]] = []
    for event in joined(parser.feed(text) + parser.finish()):
        match event:
            case CallBegins(_, name):
                found.append([name, ""])
            case CallArguments(_, arguments):
                found[-1][1] += arguments
    return [(name, arguments) for name, arguments in found]


def test_what_is_called_fits(llm):
    known = dict(itertools.islice(tools(), NUM_SCHEMAS))
    assert len(known) == NUM_SCHEMAS
    judges = {key: judge(tool["function"]["parameters"]) for key, tool in known.items()}
    nothing = judge({"type": "object", "maxProperties": 0})
    seed, num_calls, num_cut, used = 0, 0, 0, set()
    while num_calls < NUM_CALLS:
        for (key, tool), choice in itertools.product(known.items(), (NAMED, "required")):
            seed += 1
            params = SamplingParams(n=AT_ONCE, temperature=1.5, seed=seed, max_tokens=400)
            [output] = llm.chat(QUESTION, params, use_tqdm=False, tools=[tool, OTHER], tool_choice=choice)
            for answer in output.outputs:
                if answer.finish_reason == "length":
                    num_cut += 1
                    continue
                assert answer.finish_reason == "stop", answer.error
                for name, arguments in calls_of(answer.text, choice):
                    validator = judges[key] if name == "do_it" else nothing
                    assert isinstance(json.loads(arguments), dict)
                    assert (fault := fault_of(validator, arguments)) is None, (key, arguments, fault)
                    num_calls += 1
                    used.add(key)
            if num_calls >= NUM_CALLS:
                break
    print(f"{num_calls} calls, {num_cut} answers cut, of {len(used)} schemas")
    assert num_cut < num_calls
    assert len(used) > NUM_SCHEMAS * 0.9
