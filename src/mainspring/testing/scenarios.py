"""Made-up scenarios: small pools, small limits and few families of prompts, so that requests meet each other.

Every choice is an integer that some `Dice` gives: of a seed, or of hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mainspring.base.messages import EngineCoreRequest, LoRARef
from mainspring.base.params import SamplingParams, StructuredOutputsParams
from mainspring.testing.fake_kv_source import RemotePrefix
from mainspring.testing.simulation import VOCAB_SIZE, Guest, Scenario, Structure

NUM_CLIENTS = 2
T = TypeVar("T")


class Dice:
    """Where choices come from: `integer(low, high)`, both included, is all a subclass has to give."""

    def integer(self, low: int, high: int) -> int:
        raise NotImplementedError

    def chance(self, percent: int) -> bool:
        return self.integer(1, 100) > 100 - percent

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def maybe(self, percent: int, make: Callable[[], T]) -> T | None:
        return make() if self.chance(percent) else None


class SeededDice(Dice):
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def make_scenario(dice: Dice) -> Scenario:
    max_model_len = dice.integer(12, 72)
    block_size = dice.pick([1, 2, 4, 8, 16])
    max_num_seqs = dice.integer(1, 6)
    chunked = dice.chance(80)
    least = max_num_seqs if chunked else max_model_len
    window, other = dice.integer(1, 20), dice.integer(1, 20)
    scenario = Scenario(
        guests=(),
        windows=dice.pick(
            [
                (None,),
                (None,),
                (None,),
                (None, window),
                (window,),
                (window, None, None),
                (window, None, other),
            ]
        ),
        block_size=block_size,
        spare_blocks=dice.pick([0, 0, 1, 3, 8, 20, 100]),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=least + dice.pick([0, 1, 7, 30, 200]),
        chunked=chunked,
        threshold=dice.pick([0, 0, 1, 3, 10]) if chunked else 0,
        policy=dice.pick(["fcfs", "priority"]),
        caching=dice.chance(85),
        watermark=dice.pick([0.0, 0.0, 0.1]),
        depth=dice.integer(1, 3),
        when=dice.pick(["when collected", "at random", "at once"]),
        seed=dice.integer(0, 10_000),
        num_stages=dice.pick([1, 1, 2, 3]),
    )
    guests = tuple(make_guest(dice, scenario, i) for i in range(dice.integer(1, 10)))
    return replace(
        scenario,
        guests=guests,
        crashes=tuple(dice.integer(0, 40) for _ in range(dice.pick([0, 0, 0, 1, 2]))),
        resets=tuple((dice.integer(0, 40), dice.chance(50)) for _ in range(dice.pick([0, 0, 1, 3]))),
    )


def make_guest(dice: Dice, scenario: Scenario, index: int) -> Guest:
    prompt = make_prompt(dice, scenario)
    structure = dice.maybe(
        20, lambda: Structure(dice.integer(1, 12), dice.pick([0, 0, 1, 5, 20]), dice.chance(10))
    )
    arrives_at = dice.pick([0, 0, 0, dice.integer(0, 30)])
    eos = dice.maybe(70, lambda: dice.integer(0, VOCAB_SIZE - 1))
    message = EngineCoreRequest(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        sampling_params=make_params(dice, structured=structure is not None),
        eos_token_id=eos,
        stop_token_ids=[]
        if structure
        else sorted({dice.integer(0, 63) for _ in range(dice.pick([0, 0, 3]))} - {eos}),
        bad_words_token_ids=[] if structure else dice.pick([[], [], [[5], [7, 8]]]),
        arrival_time_s=float(arrives_at),
        priority=dice.pick([0, 0, 1, -1]),
        client_index=dice.integer(0, NUM_CLIENTS - 1),
        cache_salt=dice.pick([None, None, None, "a", "b", ""]),
        lora=dice.pick([None, None, None, LoRARef("a", 1), LoRARef("a", 2)]),
        structured_outputs=StructuredOutputsParams(regex="fake") if structure else None,
    )
    elsewhere = [
        RemotePrefix(dice.integer(1, len(prompt) + 4), dice.pick([0, 1, 2, 9]), dice.chance(35))
        for _ in range(dice.pick([0, 0, 0, 1, 2]))
    ]
    aborted_at = dice.maybe(25, lambda: arrives_at + dice.pick([0, 1, 3, 8, dice.integer(0, 40)]))
    return Guest(message, arrives_at, aborted_at, dice.chance(40), structure, tuple(elsewhere))


def make_prompt(dice: Dice, scenario: Scenario) -> list[int]:
    """A beginning that it shares with its family, and often an end of its own."""
    length = dice.integer(1, scenario.max_model_len - 1)
    family = random.Random(dice.integer(0, 2))
    text = [family.randrange(VOCAB_SIZE) for _ in range(length)]
    own = dice.pick([0, 0, 1, dice.integer(0, length)])
    if own:
        end = random.Random(dice.integer(0, 1000))
        text[length - min(own, length) :] = [end.randrange(VOCAB_SIZE) for _ in range(min(own, length))]
    return text


def make_params(dice: Dice, structured: bool) -> SamplingParams:
    """Stages that could forbid what a grammar needs are left out of structured requests."""
    max_tokens = dice.pick([None, 1, 2, dice.integer(1, 30), dice.integer(1, 30)])
    plain: dict[str, Any] = {}
    if not structured:
        plain = {
            "min_tokens": dice.pick([0, 0, dice.integer(0, max_tokens or 10)]),
            "allowed_token_ids": dice.pick([None, None, None, list(range(20, 50))]),
            "top_k": dice.pick([0, 0, 5]),
            "top_p": dice.pick([1.0, 1.0, 0.7]),
            "min_p": dice.pick([0.0, 0.0, 0.1]),
        }
    return SamplingParams(
        temperature=dice.pick([0.0, 0.0, 1.0, 2.5]),
        seed=dice.integer(0, 100),
        max_tokens=max_tokens,
        presence_penalty=dice.pick([0.0, 0.0, 1.5]),
        frequency_penalty=dice.pick([0.0, 0.0, 1.0]),
        repetition_penalty=dice.pick([1.0, 1.0, 1.8]),
        logit_bias=dice.pick([None, None, None, {3: 2.0, 9: -100.0}]),
        logprobs=dice.pick([None, None, None, 0, 3, -1]),
        skip_reading_prefix_cache=dice.pick([None, None, None, None, True]),
        prompt_logprobs=dice.pick([None, None, None, None, 2]),
        **plain,
    )
