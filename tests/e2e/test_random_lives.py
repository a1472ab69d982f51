"""Random lives of whole engines: what a request says, and how it ends, is what it says alone.

`core/test_property.py` does this to the core, with a fake worker that finds out every wrong block. Here
worker, kernels, windows and front end are the real ones, so what is between them is tried as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tiny_engine import MODEL, NARROW, TOKENIZER, WINDOWED, Witness, reference, text, tiny_llm

from mainspring import LLM, Logprob, RequestOutput, RequestOutputKind, SamplingParams

MAX_MODEL_LEN = 110


def any_params(dice: random.Random, seed: int) -> SamplingParams:
    max_tokens = dice.randint(1, 25)
    wishes = {
        "repetition_penalty": lambda: dice.choice([0.8, 1.3]),
        "frequency_penalty": lambda: dice.choice([-1.0, 0.7]),
        "top_k": lambda: dice.choice([1, 5, 50]),
        "top_p": lambda: dice.choice([0.1, 0.6, 0.95]),
        "logprobs": lambda: dice.choice([0, 3, -1]),
        "prompt_logprobs": lambda: dice.choice([0, 2]),
        "stop": lambda: [dice.choice("klmnopqrstuvwxyz") + dice.choice(["", "a", "bk"])],
        "min_tokens": lambda: dice.randint(0, max_tokens),
        "bad_words": lambda: [TOKENIZER.decode(text(2, dice.randint(0, 9)))],
        "ignore_eos": lambda: True,
    }
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=dice.choice([0, 0.7, 1.0, 1.5]),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{name: make() for name, make in wishes.items() if dice.random() < 0.25},
    )


def any_settings(dice: random.Random) -> dict:
    """Block tables of all groups of one sequence fit, and little more."""
    block_size = dice.choice([1, 2, 4, 8, 16])
    budget = dice.choice([8, 9, 16, 33, 64, 200])
    return {
        "async_scheduling": dice.random() < 0.6,
        "block_size": block_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": dice.choice([1, 2, 4, 8]),
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": budget < MAX_MODEL_LEN or dice.random() < 0.5,
        "enable_prefix_caching": dice.random() < 0.7,
        "scheduling_policy": dice.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": dice.choice([0, 0, 7]),
        "watermark": dice.choice([0.0, 0.0, 0.1]),
        "num_gpu_blocks_override": 1 + 2 * -(-MAX_MODEL_LEN // block_size) + dice.randint(0, 3),
    }


def live(
    llm: LLM, dice: random.Random, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> dict[int, RequestOutput]:
    """What those said who were not aborted. They come in any order and priority, and in between the cache is
    reset, also by force."""
    engine = llm.llm_engine
    waiting = dice.sample(range(len(prompts)), len(prompts))
    gone: set[int] = set()
    got: dict[int, RequestOutput] = {}
    for _ in range(2000):
        if not waiting and not engine.has_unfinished_requests():
            assert got.keys() | gone == set(range(len(prompts)))
            return got
        while waiting and dice.random() < 0.5:
            i = waiting.pop()
            engine.add_request(str(i), prompts[i], params[i], priority=dice.randint(0, 2))
        if dice.random() < 0.05:
            engine.reset_prefix_cache(reset_running_requests=dice.random() < 0.5)
        i = dice.randrange(len(prompts))
        if dice.random() < 0.03 and i not in waiting and i not in got:
            engine.abort_request(str(i))
            gone.add(i)
        for output in engine.step():
            assert int(output.request_id) not in gone | got.keys()
            got[int(output.request_id)] = output
        engine.client._core.check()
    raise AssertionError("a request never ends")


def play(seed: int) -> None:
    dice = random.Random(seed)
    model = dice.choice([MODEL, WINDOWED, NARROW])
    count = dice.randint(1, 14)
    prompts = [
        text(dice.randint(1, 70), dice.randint(0, 2)) + text(dice.randint(0, 3), i) for i in range(count)
    ]
    params = [any_params(dice, i) for i in range(count)]
    with Witness.watching() as witness:
        wanted = reference(prompts, params, model)
        with tiny_llm(model=model, **any_settings(dice)) as llm:
            got = live(llm, dice, prompts, params)
    for i, output in got.items():
        ours, theirs = wanted[i].outputs[0], output.outputs[0]
        witness.compare(i, prompts[i], ours.token_ids, theirs.token_ids)
        if ours.token_ids == theirs.token_ids:
            assert theirs.text == ours.text
            assert (theirs.finish_reason, theirs.stop_reason) == (ours.finish_reason, ours.stop_reason)
            assert scores(theirs.logprobs) == pytest.approx(scores(ours.logprobs), abs=1e-4)
        assert scores(output.prompt_logprobs) == pytest.approx(scores(wanted[i].prompt_logprobs), abs=1e-4)


def scores(positions: Sequence[dict[int, Logprob] | None] | None) -> list[float]:
    """Of the tokens that stand there, which are the first entries."""
    return [next(iter(entries.values())).logprob for entries in positions or () if entries]


@pytest.mark.parametrize("seed", range(25))
def test_random_lives(seed: int):
    """Cases B022, B034, B035, B037, B046, B053, B055, B058, B059, B113, B115 and the whole kind."""
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_random_lives():
    for seed in range(1000, 2000):
        play(seed)
