"""Whole engines that start in milliseconds, and a witness of what they draw.

Everything is real (intake, core, executor, worker, kernels, output) but the weights, which are few and
random, and the tokenizer, whose tokens are two letters each. With `Injected` in the place of the model
nothing is rounded either, so answers must be equal to the last bit.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from mainspring import LLM, EngineArgs, RequestOutput, SamplingParams
from mainspring.base.config import ModelFacts, resolve
from mainspring.base.messages import KVCacheConfig, KVCacheSpec
from mainspring.engine.client import EngineCoreClient
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.kernels.ops import Batch
from mainspring.worker import sampler
from mainspring.worker.sampling_rules import _multiply, edit_logits, gumbel, noise_bits, surviving_ids
from mainspring.worker.sampling_state import SamplingState

NUM_TOKENS = 122  # of the tokenizer; the model's head has a few rows more
EOS, END = NUM_TOKENS - 2, NUM_TOKENS - 1
MODEL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOWED = MODEL | {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
NARROW = MODEL | {"sliding_window": 20, "layer_types": ["sliding_attention", "sliding_attention"]}
FACTS = ModelFacts(
    path=json.dumps(MODEL),
    architecture="llama",
    max_position_embeddings=512,
    vocab_size=128,
    eos_token_ids=(EOS, END),
)
SETTINGS = {
    "load_format": "dummy",
    "kernels": "numpy",
    "block_size": 16,
    "num_gpu_blocks_override": 65,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
TIE = 1e-3  # where the two best scores are nearer than this, either may win


class TwoLetters:
    """Token i is two letters; the last two tokens are <eos> and <end>."""

    vocab_size = NUM_TOKENS
    bos_token_id = None
    eos_token_id = EOS
    eos_token_ids = (EOS, END)
    special_ids = frozenset({EOS, END})
    chat_template = None
    adds_space = False

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= NUM_TOKENS:
            return b""
        special = {EOS: b"<eos>", END: b"<end>"}
        return special.get(token_id) or bytes([ord("a") + token_id // 16, ord("k") + token_id % 16])

    def id_to_token(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Of letters in pairs; a space is no token."""
        letters = text.replace(" ", "").encode()
        pairs = zip(letters[::2], letters[1::2], strict=True)
        return [16 * (a - ord("a")) + b - ord("k") for a, b in pairs]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i not in self.special_ids).decode()


TOKENIZER = TwoLetters()


def text(length: int, seed: int) -> list[int]:
    """A fixed list of ordinary tokens; a shorter one of the same seed is its beginning."""
    return np.random.default_rng(seed).integers(0, EOS, length).tolist()


def make_engine(model: dict = MODEL, **settings) -> LLMEngine:
    args = EngineArgs(**SETTINGS | settings)
    config = resolve(args, replace(FACTS, path=json.dumps(model)))
    client = EngineCoreClient.make_client(config, in_process=True)
    inputs = InputProcessor(FACTS, client.max_model_len, TOKENIZER, max_logprobs=-1, seed=args.seed)
    return LLMEngine(client, inputs, OutputProcessor(TOKENIZER), TOKENIZER)


@contextmanager
def tiny_llm(**settings) -> Iterator[LLM]:
    """Nothing is left in it at the end, whatever was done with it."""
    with LLM.from_engine(make_engine(**settings)) as llm:
        yield llm
        drain(llm)
        assert not llm.llm_engine.has_unfinished_requests()
        assert not llm._calls
        stats = llm.get_stats()
        assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
        assert stats.kv_cache_usage == 0.0
        llm.llm_engine.client._core.check()


def drain(llm: LLM) -> None:
    """Book the steps that were sent ahead for requests that have ended."""
    for _ in range(4):
        if llm.llm_engine.client._core.has_work():
            llm.llm_engine.step()
    assert not llm.llm_engine.client._core.has_work()


def ask(llm: LLM, prompts: Sequence[Sequence[int]], params) -> list[RequestOutput]:
    return llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)


def said(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def reference(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], model: dict = MODEL
) -> list[RequestOutput]:
    """Each request alone: one row, the whole prompt in a step, no cache."""
    with tiny_llm(model=model, enable_prefix_caching=False, max_num_batched_tokens=512) as llm:
        return [ask(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]


class Injected:
    """Logits are a hash of the last token and its position."""

    vocab_size = FACTS.vocab_size

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [KVCacheSpec(num_kv_heads=1, head_size=1)]

    def initialize_kv(self, config: KVCacheConfig) -> None: ...

    def forward(self, batch: Batch) -> np.ndarray:
        return np.stack([batch.token_ids, batch.positions], axis=1).astype(np.float32)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        rows = [
            np.random.default_rng([int(token), int(position)]).standard_normal(self.vocab_size)
            for token, position in hidden
        ]
        return np.array(rows, dtype=np.float32)


class Witness:
    """How far ahead the winner of each draw was, by seed and tokens so far; the first to be seen counts.

    Rounding differs with the shape of a batch. So two runs may part where that margin is below `TIE`, and
    nowhere else. Requests that are compared must differ in seed or prompt.
    """

    def __init__(self) -> None:
        self._margins: dict[tuple[int, tuple[int, ...]], float] = {}
        self._draw = sampler.sample_row
        self._lock = threading.Lock()
        self.num_compared = self.num_parted = 0

    @classmethod
    @contextmanager
    def watching(cls) -> Iterator[Witness]:
        witness = cls()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "sample_row", witness.sample_row)
            yield witness

    def sample_row(self, logits, state: SamplingState, mask=None):
        sampled = self._draw(logits, state, mask)
        with self._lock:
            key = (state.seed, tuple(state.token_ids))
            if key not in self._margins:
                self._margins[key] = margin(logits, state, sampled.token_id)
        return sampled

    def compare(self, seed: int, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
        """`theirs` are `ours`, up to the first step that was a tie."""
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            assert len(ours) == len(theirs)
            self.num_compared += len(ours)
            return
        ahead = self._margins[seed, (*prompt, *ours[:at])]
        assert ahead < TIE, f"token {at} is {theirs[at]} instead of {ours[at]}, which was {ahead:.3g} ahead"
        self.num_compared += at
        self.num_parted += 1


def margin(logits: np.ndarray, state: SamplingState, winner: int) -> float:
    """Of the best score over the second, scores being logits after everything that is done to them, with the
    noise added. `winner` must be the best."""
    row = logits.copy()
    edit_logits(row, state, has_grammar=False)
    ids = np.arange(len(row))
    scores = row.astype(np.float64)
    if state.temperature > 0.0:
        row /= np.float32(state.temperature)
        kept = surviving_ids(row, float(row.max()), state.top_k, state.top_p, state.min_p)
        ids = ids if kept is None else kept
        scores = row[ids] + gumbel(noise_bits(_multiply(ids), state.seed, state.position))
    assert ids[scores.argmax()] == winner
    if len(scores) == 1:
        return math.inf
    second, first = np.partition(scores, -2)[-2:]
    return float(first - second)
