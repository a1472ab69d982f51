"""Seeded sampling says the same whatever happens around it, with real weights and real rounding.

Each request is first run alone, while a `Witness` notes how far ahead the winner of every draw was. Then the
same requests run in other ways: beside others, preempted, in chunks, from a warm cache, continued from the
journal. The tokens are the same until a draw was a tie, that is, until the two best scores (logits after
penalties, filters and temperature, with the noise added) were within `TIE`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from tiny_engine import FACTS, SETTINGS, Witness, text

from mainspring import EngineArgs, SamplingParams
from mainspring.base.config import EngineConfig, ModelFacts, resolve
from mainspring.base.messages import EngineCoreRequest, GetStats
from mainspring.checkpoint.description import gguf_facts
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.engine.client import EngineCoreClient
from mainspring.frontend.input_processor import InputProcessor
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model
from mainspring.worker import worker

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m_greedy.json").read_text())

WISHES = [  # seeds are given with the prompts
    {"temperature": 0.7},
    {"top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05, "top_p": 0.95, "logprobs": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 0.9, "min_tokens": 4},
    {"temperature": 1.5, "top_k": 5, "logit_bias": {11: 2.0, 28: -3.0}},
    {"temperature": 0.5, "top_p": 0.6, "frequency_penalty": -0.4},
]
CUTS = (1, 4, 1000)  # tokens of a journal, at most all but one


@dataclass
class Bench:
    """A model, what was asked of it, and what it said to each request alone."""

    facts: ModelFacts
    load: Callable[[EngineConfig], Decoder]
    settings: dict
    requests: list[EngineCoreRequest]
    witness: Witness
    said: list[list[int]]

    def run(self, requests: Sequence[EngineCoreRequest], **settings) -> list[list[int]]:
        """What each says, all of them in one engine."""
        with self.client(**settings) as client:
            return run(client, requests)

    @contextmanager
    def client(self, **settings) -> Iterator[EngineCoreClient]:
        config = resolve(EngineArgs(**self.settings | settings), self.facts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "load_model", self.load)
            client = EngineCoreClient.make_client(config, in_process=True)
        try:
            yield client
            assert not client._core.has_work()
        finally:
            client.shutdown()

    def neighbours(self) -> list[EngineCoreRequest]:
        """Others for the batch: a greedy one, and one whose seed is drawn."""
        inputs = InputProcessor(self.facts, 64, None)
        params = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            SamplingParams(max_tokens=12),
        ]
        return [
            named(inputs.process("n", text(n, n), params[n % 2], 0).requests[0], f"n{n}") for n in (3, 18)
        ]

    def compare(self, said: Sequence[Sequence[int]]) -> None:
        for request, ours, theirs in zip(self.requests, self.said, said, strict=True):
            seed = request.sampling_params.seed
            assert seed is not None
            self.witness.compare(seed, request.prompt_token_ids, ours, theirs)


def named(request: EngineCoreRequest, name: str) -> EngineCoreRequest:
    return msgspec.structs.replace(request, request_id=name)


def run(client: EngineCoreClient, requests: Sequence[EngineCoreRequest]) -> list[list[int]]:
    said: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        client.add_request(request)
    while client._core.has_work():
        for output in client.get_output().outputs:
            assert output.error is None
            said[output.request_id] += output.new_token_ids
    return list(said.values())


def make_bench(
    facts: ModelFacts,
    load: Callable[[EngineConfig], Decoder],
    settings: dict,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> Bench:
    inputs = InputProcessor(facts, settings["max_model_len"], None, max_logprobs=20)
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(seed=100 + i, max_tokens=max_tokens, **WISHES[i % len(WISHES)])
        requests.append(named(inputs.process("r", list(prompt), params).requests[0], str(i)))
    with Witness.watching() as witness:
        bench = Bench(facts, load, settings, requests, witness, [])
        with bench.client(enable_prefix_caching=False) as client:
            bench.said = [run(client, [request])[0] for request in requests]
    return bench


@pytest.fixture(scope="module")
def tiny() -> Bench:
    prompts = [text(5 + 3 * i, i) for i in range(16)]
    settings = SETTINGS | {"max_model_len": 96}
    return make_bench(FACTS, load_model, settings, prompts, max_tokens=30)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Bench:
    return make_real(smollm2, [GOLDEN["chat"][0], *GOLDEN["raw"][:3]], max_tokens=9)


def make_real(path: Path, cases: Sequence[dict], max_tokens: int) -> Bench:
    """One copy of the weights serves all engines, one after the other."""
    with GGUFFile(path) as file:
        facts = gguf_facts(file)
    settings = SETTINGS | {"kernels": "numpy", "load_format": "auto", "max_model_len": 64 + max_tokens}
    decoder = load_model(resolve(EngineArgs(**settings), facts))
    return make_bench(
        facts,
        lambda config, *rest: decoder,
        settings,
        [case["prompt_ids"] for case in cases],
        max_tokens,
    )


@pytest.fixture(params=["tiny", "tiny, run-ahead", "real"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Ties must be rare in what a test compares."""
    name, _, ahead = request.param.partition(", ")
    made: Bench = request.getfixturevalue(name)
    before = made.witness.num_compared
    yield replace(made, settings=made.settings | {"async_scheduling": bool(ahead)})
    assert made.witness.num_compared - before > 0.9 * sum(map(len, made.said))


def test_in_a_mixed_batch(bench: Bench):
    first, second = bench.neighbours()
    half = len(bench.requests) // 2
    requests = [first, *bench.requests[:half], second, *bench.requests[half:]]
    said = dict(zip((request.request_id for request in requests), bench.run(requests), strict=True))
    bench.compare([said[request.request_id] for request in bench.requests])


def test_after_preemption(bench: Bench):
    """A pool of one sequence."""
    num_blocks = 1 + -(-bench.settings["max_model_len"] // 16)
    with bench.client(num_gpu_blocks_override=num_blocks, enable_prefix_caching=False) as client:
        bench.compare(run(client, bench.requests))
        assert client.call(GetStats()).num_preemptions > 0


def test_in_chunks(bench: Bench):
    bench.compare(bench.run(bench.requests, max_num_batched_tokens=16))


def test_from_a_warm_cache(bench: Bench):
    with bench.client() as client:
        for _ in range(2):
            bench.compare(run(client, bench.requests))
        assert client.call(GetStats()).prefix_cache_hits > 0


def test_from_the_journal(bench: Bench):
    """Another core goes on from what the front end has received."""
    with bench.client() as client:
        for cut in CUTS:
            journals = [tokens[: min(cut, len(tokens) - 1)] for tokens in bench.said]
            requests = [
                msgspec.structs.replace(request, output_token_ids=journal)
                for request, journal in zip(bench.requests, journals, strict=True)
            ]
            rest = run(client, requests)
            bench.compare([journal + tokens for journal, tokens in zip(journals, rest, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [16, 33, 64])
@pytest.mark.parametrize("scarce", [False, True])
def test_every_prompt(wide: Bench, async_scheduling: bool, budget: int, scarce: bool):
    blocks = 1 + -(-wide.settings["max_model_len"] // 16) if scarce else 65
    said = wide.run(
        wide.requests,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=blocks,
    )
    before = wide.witness.num_compared
    wide.compare(said)
    assert wide.witness.num_compared - before > 0.9 * sum(map(len, wide.said))


@pytest.fixture(scope="module")
def wide(smollm2: Path) -> Bench:
    return make_real(smollm2, GOLDEN["chat"] + GOLDEN["raw"], max_tokens=32)
