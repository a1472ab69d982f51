"""Public faults as cases for the engine as a whole, with one step in flight and with two.

Numbers are those of `tests/CASES.md`. What a request must say is what it says alone on a fresh engine, its
prompt in one piece and nothing cached. The model is tiny; where its rounding could tell, a `Witness` knows.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from tiny_engine import (
    END,
    EOS,
    FACTS,
    NUM_TOKENS,
    TOKENIZER,
    Injected,
    Witness,
    ask,
    drain,
    make_engine,
    reference,
    said,
    text,
    tiny_llm,
)

from mainspring import LLM, RequestOutput, RequestOutputKind, SamplingParams
from mainspring.base.errors import ConfigError
from mainspring.models.decoder import Decoder
from mainspring.worker import worker

Prompts = Sequence[Sequence[int]]


@pytest.fixture(params=[False, True], ids=["one step", "run-ahead"])
def ahead(request: pytest.FixtureRequest) -> dict[str, bool]:
    """The setting that decides how many steps are in flight."""
    return {"async_scheduling": request.param}


@pytest.fixture
def witness() -> Iterator[Witness]:
    """Whatever it compared, ties were rare."""
    with Witness.watching() as witness:
        yield witness
    assert witness.num_parted <= 1 + witness.num_compared // 100


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without rounding."""
    monkeypatch.setattr(worker, "load_model", lambda config, *rest: Injected())


def greedy(max_tokens: int = 8, **more) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "seed": 0, "max_tokens": max_tokens, "ignore_eos": True} | more
    )


def seeded(seed: int, max_tokens: int = 8, **more) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": max_tokens, "ignore_eos": True} | more)


def compare(witness: Witness, prompts: Prompts, params: Sequence[SamplingParams], ours, theirs) -> None:
    for prompt, one, mine, other in zip(prompts, params, said(ours), said(theirs), strict=True):
        witness.compare(one.seed, prompt, mine, other)


def check(
    witness: Witness, llm: LLM, prompts: Prompts, params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """All at once, they say what each says alone."""
    wanted = reference(prompts, params)
    got = ask(llm, prompts, params)
    compare(witness, prompts, params, wanted, got)
    return got


def begin(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, num_outputs: int
) -> Iterator[RequestOutput]:
    """A stream of which so much has been read."""
    stream = llm.generate_stream(list(prompt), params)
    for _ in range(num_outputs):
        next(stream)
    return stream


# -- sections 2 and 3: waiting, leaving ----------------------------------------------------------------------


def test_threads_get_their_own_answers(witness, ahead):
    """Case B016: eight consumers at their own pace, and one that has stopped reading."""
    prompts = [text(12 + i, i) for i in range(8)]
    params = [seeded(i, 12) for i in range(8)]
    wanted = said(reference(prompts, params))
    with tiny_llm(**ahead, max_num_seqs=5) as llm:
        stalled = begin(llm, text(9, 99), seeded(99, 400), 1)
        got: dict[int, list[int]] = {i: [] for i in range(8)}

        def consume(i: int) -> None:
            for output in llm.generate_stream(prompts[i], params[i]):
                got[i] += output.outputs[0].token_ids

        threads = [threading.Thread(target=consume, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        stalled.close()
    for i in range(8):
        witness.compare(i, prompts[i], wanted[i], got[i])


def test_one_name_for_two_requests(witness, ahead):
    """Case B017: both are answered, each with its own answer."""
    prompts, params = [text(8, 1), text(8, 2)], [greedy(9, seed=1), greedy(9, seed=2)]
    wanted = said(reference(prompts, params))
    with tiny_llm(**ahead) as llm:
        for prompt, one in zip(prompts, params, strict=True):
            one.output_kind = RequestOutputKind.FINAL_ONLY
            llm.llm_engine.add_request("a", prompt, one)
        got = []
        while llm.llm_engine.has_unfinished_requests():
            got += llm.llm_engine.step()
    assert [output.request_id for output in got] == ["a", "a"]
    for one, prompt, tokens in zip(params, prompts, wanted, strict=True):
        (answer,) = [output for output in got if output.prompt_token_ids == prompt]
        witness.compare(one.seed, prompt, tokens, answer.outputs[0].token_ids)


@pytest.mark.parametrize("num_ended", [0, 2])
def test_leaving_ends_all_answers(ahead, num_ended):
    """Case B019: four answers, of which two may have ended already; then nothing runs any more."""
    four = SamplingParams(n=4, seed=3, max_tokens=400, ignore_eos=True)
    with tiny_llm(**ahead) as llm:
        answers = ask(llm, [text(20, 1)], msgspec.structs.replace(four, max_tokens=6))[0].outputs
        four.stop_token_ids = [answers[0].token_ids[2], answers[1].token_ids[3]]
        stream = llm.generate_stream(text(20, 1), four)
        ended: set[int] = set()
        while len(ended) < num_ended:
            ended |= {answer.index for answer in next(stream).outputs if answer.finish_reason == "stop"}
        assert next(stream).finished is False
        stream.close()
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        drain(llm)


def test_a_cut_stream_does_not_hurt_the_next_turn(witness, ahead):
    """Case B025, and B026 where the same prompt is sent again."""
    first, second = text(120, 1), text(120, 1) + text(10, 2)
    params = greedy(20)
    wanted = reference([first, second], [params, params])
    with tiny_llm(**ahead) as llm:
        for _ in range(5):
            for prompt, output in zip((first, second), wanted, strict=True):
                begin(llm, first, greedy(100), 3).close()
                (got,) = ask(llm, [prompt], params)
                assert len(got.prompt_token_ids) == len(prompt)
                assert got.num_cached_tokens >= 112
                witness.compare(0, prompt, output.outputs[0].token_ids, got.outputs[0].token_ids)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_time(witness, ahead, seed):
    """Case B022: a crowd of one beginning, in and out at random; who stays says what he says alone."""
    dice = random.Random(seed)
    prompts = {f"r{i}": text(48, 0) + text(1 + i % 9, i) for i in range(24)}
    params = {name: seeded(i, 10, output_kind=RequestOutputKind.FINAL_ONLY) for i, name in enumerate(prompts)}
    wanted = dict(zip(prompts, said(reference([*prompts.values()], [*params.values()])), strict=True))
    waiting, gone, got = list(prompts), set(), {}
    with tiny_llm(**ahead, num_gpu_blocks_override=14, max_model_len=96) as llm:
        engine = llm.llm_engine
        while waiting or engine.has_unfinished_requests():
            if waiting:
                name = waiting.pop()
                engine.add_request(name, prompts[name], params[name])
            if dice.random() < 0.5:
                leaving = f"r{dice.randrange(24)}"
                if leaving not in waiting and leaving not in got:
                    engine.abort_request(leaving)
                    gone.add(leaving)
            for output in engine.step():
                got[output.request_id] = output.outputs[0].token_ids
            engine.client._core.check()
    assert got.keys() | gone == prompts.keys()
    assert not got.keys() & gone
    assert len(got) > 3
    for name, tokens in got.items():
        witness.compare(params[name].seed, prompts[name], wanted[name], tokens)


# -- sections 5 and 6: preemption, blocks --------------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_by_order(witness, ahead, budget, caching):
    """Cases B034, B035, B037, B041: all are thrown out in the middle and read again, in chunks or from what
    is still cached; what they say and report does not change."""
    prompts = [text(10, 1), text(33, 2), text(50, 3)]
    params = [seeded(1, 50), greedy(30, seed=2), seeded(3, 30, frequency_penalty=1.0, logprobs=2)]
    wanted = reference(prompts, params)
    with tiny_llm(**ahead, max_num_batched_tokens=budget, enable_prefix_caching=caching) as llm:
        engine = llm.llm_engine
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            one.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(i), prompt, one)
        got: dict[str, RequestOutput] = {}
        for step in itertools.count():
            if not engine.has_unfinished_requests():
                break
            if step in (12, 13, 25):
                assert engine.reset_prefix_cache(reset_running_requests=True)
            got |= {output.request_id: output for output in engine.step()}
        assert engine.get_stats().num_preemptions >= 3
    outputs = [got[str(i)] for i in range(3)]
    compare(witness, prompts, params, wanted, outputs)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert len(outputs[2].outputs[0].logprobs) == 30


@pytest.mark.parametrize("seed", range(3))
def test_families_under_pressure(witness, ahead, seed):
    """Cases B037, B038, B046: many of three families in a pool that holds hardly two of them."""
    dice = random.Random(seed)
    prompts = [text(dice.randint(40, 110), i % 3) + text(1, i) for i in range(20)]
    params = [greedy(20, seed=i) for i in range(20)]
    with tiny_llm(**ahead, num_gpu_blocks_override=17, max_model_len=160, max_num_batched_tokens=128) as llm:
        check(witness, llm, prompts, params)
        stats = llm.get_stats()
        assert stats.num_preemptions > 0
        assert stats.prefix_cache_hits > 0


def test_min_tokens_counts_through_chunks_and_preemption(ahead):
    """Case B076: exactly so many others, then EOS."""
    bias = {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    for min_tokens, length in itertools.product((0, 1, 4), (5, 100)):
        with tiny_llm(**ahead, max_num_batched_tokens=32, enable_prefix_caching=False) as llm:
            engine = llm.llm_engine
            engine.add_request("a", text(length, 1), greedy(32, min_tokens=min_tokens, **bias))
            outputs = []
            for step in itertools.count():
                if not engine.has_unfinished_requests():
                    break
                if step == 2:
                    assert engine.reset_prefix_cache(reset_running_requests=True)
                outputs += engine.step()
        (answer,) = outputs[-1].outputs
        assert len(answer.token_ids) == min_tokens + 1
        assert answer.token_ids.index(EOS) == min_tokens
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_pool_of_one_sequence_serves_it_to_its_end(witness, ahead, block_size):
    """Case B176: so many blocks, or the bytes of so many, are just enough; one less is refused with the
    numbers, and what fits is found where that is asked for."""
    num_blocks = 1 + 96 // block_size
    bytes_per_block = 2 * block_size * 2 * (2 * 8) * 4  # layers, tokens, K and V of two heads of 8, float32
    prompt, params = text(60, 1), greedy(None)
    (wanted,) = reference([prompt], [greedy(36)])
    for size in (
        {"num_gpu_blocks_override": num_blocks},
        {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": num_blocks * bytes_per_block},
    ):
        with tiny_llm(**ahead, block_size=block_size, max_model_len=96, **size) as llm:
            (got,) = ask(llm, [prompt], params)
        assert got.outputs[0].finish_reason == "length"
        compare(witness, [prompt], [params], [wanted], [got])
        less = {name: value and value - 1 for name, value in size.items()}
        with pytest.raises(ConfigError, match=rf"set max_model_len to {96 - block_size} or less"):
            make_engine(**ahead, block_size=block_size, max_model_len=96, **less)
        with tiny_llm(**ahead, block_size=block_size, max_model_len=-1, **less) as llm:
            assert llm.max_model_len == 96 - block_size


# -- section 7: the prefix cache -----------------------------------------------------------------------------


def test_salts_keep_texts_apart(ahead):
    """Case B047: each finds its own and nobody else's."""
    with tiny_llm(**ahead) as llm:
        hits = []
        for salt, _ in itertools.product((None, "X", "ab"), range(2)):
            prompt = {"prompt_token_ids": text(48, 1)} | ({"cache_salt": salt} if salt else {})
            hits.append(llm.generate(prompt, greedy(2), use_tqdm=False)[0].num_cached_tokens)
    assert hits == [0, 32] * 3


@pytest.mark.parametrize("count", [2, 4])
def test_equal_prompts_of_one_step(witness, ahead, count):
    """Case B053: they share what is written, and one of them may leave."""
    prompts, params = [text(200, 1)] * count, [seeded(i, 6) for i in range(count)]
    with tiny_llm(**ahead, long_prefill_token_threshold=48) as llm:
        check(witness, llm, prompts, params)
        llm.reset_prefix_cache()
        writer = begin(llm, text(200, 1), seeded(9), 0)
        wanted = reference(prompts[1:], params[1:])
        for i in range(1, count):
            llm.llm_engine.add_request(f"r{i}", prompts[i], params[i])
        llm.llm_engine.step()
        writer.close()
        llm.llm_engine.abort_request("r0")
        got = {}
        while llm.llm_engine.has_unfinished_requests():
            got |= {output.request_id: output for output in llm.llm_engine.step()}
        compare(witness, prompts[1:], params[1:], wanted, [got[f"r{i}"] for i in range(1, count)])


@pytest.mark.parametrize("cut", range(3, 19))
def test_warm_is_cold_after_a_stop_string(witness, ahead, cut):
    """Case B055: the text ends inside a block and inside a token, while the next step runs; a request that
    goes on from there says warm what it says cold."""
    start = text(21, 14)
    (told,) = said(reference([start], [greedy(24)]))
    assert max(told) < EOS, "every token is two letters"
    stop = TOKENIZER.decode(told[cut : cut + 2])[1:3]
    with tiny_llm(**ahead) as llm:
        (stopped,) = ask(llm, [start], greedy(24, stop=[stop]))
        answer = stopped.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert TOKENIZER.decode(told).startswith(answer.text + stop)
        more = [start + answer.token_ids + text(9, 9), start + answer.token_ids[:-1] + text(9, 8)]
        got = check(witness, llm, more, [greedy(10, seed=1), greedy(10, seed=2)])
        assert all(output.num_cached_tokens >= 16 for output in got)


def test_a_reset_says_what_it_did(witness, ahead):
    """Case B056: refused while a request runs, without harm to it; done when idle, then nothing is found."""
    prompt = text(48, 1)
    (wanted,) = said(reference([prompt], [greedy(9)]))
    with tiny_llm(**ahead) as llm:
        stream = begin(llm, prompt, greedy(9), 2)
        assert llm.reset_prefix_cache() is False
        rest = [token for output in stream for token in output.outputs[0].token_ids]
        witness.compare(0, prompt, wanted, wanted[:2] + rest)
        assert [ask(llm, [prompt], greedy(1))[0].num_cached_tokens for _ in range(2)] == [32, 32]
        assert llm.reset_prefix_cache() is True
        assert ask(llm, [prompt], greedy(1))[0].num_cached_tokens == 0


# -- sections 8 and 29: chunks, run-ahead --------------------------------------------------------------------


def test_chunks_leave_no_trace(witness, ahead):
    """Case B058: prompts around one and two steps long, with everything that counts tokens."""
    prompts = [text(n, n) for n in (63, 64, 65, 127, 128, 129)]
    params = [seeded(1, 3, presence_penalty=1.5, min_tokens=2, repetition_penalty=1.3) for _ in prompts]
    with tiny_llm(**ahead) as llm:
        for prompt, one in zip(prompts, params, strict=True):
            check(witness, llm, [prompt], [one])


def test_a_long_prompt_among_short_ones(witness, ahead):
    """Case B059: read in pieces of 32 while others come and go."""
    dice = random.Random(59)
    prompts = [text(300, 1), *(text(6, i) for i in range(12))]
    params = [greedy(10), *(seeded(i, dice.randint(1, 12)) for i in range(12))]
    with tiny_llm(**ahead, long_prefill_token_threshold=32, max_num_seqs=5) as llm:
        check(witness, llm, prompts, params)


def test_running_ahead_reads_nobody_elses_token(witness):
    """Case B179: two hundred short requests through four slots say the same with run-ahead and without."""
    dice = random.Random(179)
    prompts = [text(dice.randint(1, 3), i) for i in range(200)]
    params = [seeded(i, dice.randint(1, 5)) for i in range(200)]
    outputs = []
    for async_scheduling in (False, True):
        with tiny_llm(async_scheduling=async_scheduling, max_num_seqs=4) as llm:
            outputs.append(ask(llm, prompts, params))
    compare(witness, prompts, params, *outputs)


def test_what_needs_the_newest_token(witness):
    """Case B115: heavy penalties, a banned phrase and min_tokens, with run-ahead as without."""
    prompts = [text(20 + i, i) for i in range(6)]
    (plain,) = said(reference(prompts[:1], [greedy(12)]))
    phrase = TOKENIZER.decode(plain[3:5])
    params = [
        greedy(12, bad_words=[phrase]),
        greedy(12, seed=1, repetition_penalty=5.0),
        greedy(12, seed=2, frequency_penalty=2.0, presence_penalty=2.0),
        greedy(12, seed=3, min_tokens=6, ignore_eos=False, logit_bias={EOS: 9.0, END: 9.0}),
        seeded(4, 12, repetition_penalty=5.0, frequency_penalty=2.0),
        seeded(5, 12, top_p=0.5, repetition_penalty=0.5),
    ]
    wanted = reference(prompts, params)
    for async_scheduling in (False, True):
        with tiny_llm(async_scheduling=async_scheduling) as llm:
            got = ask(llm, prompts, params)
        compare(witness, prompts, params, wanted, got)
        assert phrase not in got[0].outputs[0].text
        assert len(set(said(got)[1])) == len(said(got)[1])
        assert len(said(got)[3]) == 7


def test_every_id_that_is_fed_exists(monkeypatch, ahead):
    """Case B158: nothing that stands for a token which is not known yet gets to the embedding."""
    fed = []
    forward = Decoder.forward

    def watched(self, batch):
        fed.append((int(batch.token_ids.min()), int(batch.token_ids.max())))
        return forward(self, batch)

    monkeypatch.setattr(Decoder, "forward", watched)
    prompts = [text(5 + 20 * (i % 4), i) for i in range(12)]
    with tiny_llm(**ahead, num_gpu_blocks_override=14, max_model_len=96, max_num_batched_tokens=24) as llm:
        ask(llm, prompts, [seeded(i, 5 + i) for i in range(12)])
    assert len(fed) > 20
    assert all(low >= 0 and high < FACTS.vocab_size for low, high in fed)


# -- sections 10 to 12: ends, text, log-probabilities --------------------------------------------------------


@pytest.mark.parametrize("end", [EOS, END])
def test_every_end_token_of_the_model_ends(ahead, end):
    """Case B079: the first of the list is no reason of its own, the others are."""
    with tiny_llm(**ahead) as llm:
        (output,) = ask(llm, [text(9, 1)], greedy(9, ignore_eos=False, logit_bias={end: 100.0}))
        answer = output.outputs[0]
        assert answer.token_ids == [end]
        assert answer.text == ""
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None if end == EOS else end)


@pytest.mark.parametrize("kind", ["stop string", "stop token", "eos"])
@pytest.mark.usefixtures("injected")
def test_no_end_before_min_tokens(ahead, kind):
    """Case B074: the same by each way to end, when what ends comes early and again later."""
    start = text(9, 1)
    with tiny_llm(**ahead) as llm:
        (free,) = said(ask(llm, [start], greedy(30)))
        enders = {
            "stop string": {"stop": [TOKENIZER.decode(free[2:3])]},
            "stop token": {"stop_token_ids": [free[2]]},
            "eos": {"ignore_eos": False, "logit_bias": {EOS: 100.0}},
        }
        (early,) = said(ask(llm, [start], greedy(30, **enders[kind])))
        assert len(early) == (1 if kind == "eos" else 3)
        (late,) = said(ask(llm, [start], greedy(30, min_tokens=10, **enders[kind])))
        assert len(late) > 10


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_logprobs_belong_to_their_rows(ahead, order):
    """Case B061: a chunk in the middle, a decode, a last chunk and one without, in any order."""
    prompts = [text(150, 1), text(3, 2), text(70, 3), text(20, 4)]
    params = [
        greedy(4, logprobs=1, prompt_logprobs=1),
        greedy(12, logprobs=2),
        greedy(4, logprobs=5),
        greedy(9),
    ]
    wanted = reference(prompts, params)
    with tiny_llm(**ahead) as llm:
        got = ask(llm, [prompts[i] for i in order], [params[i] for i in order])
    for i, output in zip(order, got, strict=True):
        same_logprobs(wanted[i].outputs[0].logprobs, output.outputs[0].logprobs)
        same_logprobs(wanted[i].prompt_logprobs, output.prompt_logprobs)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 100])
def test_prompt_logprobs_with_a_warm_cache(ahead, length):
    """Case B091: one entry per token and the values of a cold run, whatever is cached."""
    prompt, longer = text(length, 1), text(length, 1) + text(9, 2)
    params = greedy(2, prompt_logprobs=1)
    wanted = [output.prompt_logprobs for output in reference([prompt, longer], [params, params])]
    with tiny_llm(**ahead) as llm:
        ask(llm, [prompt], greedy(2))
        for _ in range(2):
            got = [output.prompt_logprobs for output in ask(llm, [prompt, longer], params)]
            for ours, theirs in zip(wanted, got, strict=True):
                assert theirs[0] is None
                same_logprobs(ours, theirs)


def test_prompt_logprobs_in_any_order():
    """Case B092: four overlapping prompts, each order twice over the same pool."""
    prompts = [text(30, 1)[: 12 + 6 * i] for i in range(4)]
    params = greedy(1, prompt_logprobs=2)
    wanted = [output.prompt_logprobs for output in reference(prompts, [params] * 4)]
    with tiny_llm(max_num_batched_tokens=16) as llm:
        for order in itertools.permutations(range(4)):
            for i, output in zip(order, ask(llm, [prompts[i] for i in order], params), strict=True):
                same_logprobs(wanted[i], output.prompt_logprobs)


def same_logprobs(ours, theirs) -> None:
    """The same tokens at the same ranks; values but for rounding."""
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert [(i, entry.rank) for i, entry in mine.items()] == [(i, e.rank) for i, e in other.items()]
            expected = [entry.logprob for entry in mine.values()]
            assert [entry.logprob for entry in other.values()] == pytest.approx(expected, abs=1e-4)


# -- sections 13 to 15: seeds, rows, ids ---------------------------------------------------------------------


@pytest.mark.usefixtures("injected")
def test_neighbours_do_not_touch_the_noise(ahead):
    """Case B101: beside an unseeded and a seeded one, in either row, alone, and joined in the middle."""
    me, other = text(8, 1), text(8, 2)
    mine = seeded(42, 20)
    (wanted,) = said(reference([me], [mine]))
    with tiny_llm(**ahead) as llm:
        for neighbour in [SamplingParams(max_tokens=30, ignore_eos=True)] * 5 + [seeded(7, 30)]:
            assert said(ask(llm, [me, other], [mine, neighbour]))[0] == wanted
            assert said(ask(llm, [other, me], [neighbour, mine]))[1] == wanted
        stream = llm.generate_stream(me, mine)
        joined = [next(stream).outputs[0].token_ids[0] for _ in range(5)]
        ask(llm, [other], seeded(7, 3))
        assert joined + [token for output in stream for token in output.outputs[0].token_ids] == wanted


@pytest.mark.usefixtures("injected")
def test_the_order_of_prompts_does_not_matter(ahead):
    """Cases B103, B112, B113: every kind of row changes places with every other, through three slots."""
    prompts = [text(5 + i, i) for i in range(8)]
    params = [
        greedy(9, allowed_token_ids=[3, 5, 8, 13]),
        seeded(1, 12),
        greedy(7, repetition_penalty=2.0),
        seeded(99, 9, top_k=1),
        seeded(3, 11, frequency_penalty=1.0, presence_penalty=0.5),
        seeded(4, 5, temperature=2.0, min_p=0.1, logit_bias={7: 3.0}),
        greedy(10, bad_words=[TOKENIZER.decode([7])], logit_bias={7: 100.0}),
        seeded(6, 10, top_p=0.7, logprobs=3),
    ]
    wanted = said(reference(prompts, params))
    dice = random.Random(103)
    with tiny_llm(**ahead, max_num_seqs=3) as llm:
        for _ in range(10):
            order = dice.sample(range(8), 8)
            got = said(ask(llm, [prompts[i] for i in order], [params[i] for i in order]))
            assert got == [wanted[i] for i in order]
    assert set(wanted[0]) <= {3, 5, 8, 13}
    assert 7 not in wanted[6]


def test_the_order_of_prompts_does_not_matter_to_a_model(witness, ahead):
    """Case B103: greedy, in float32, in ten orders."""
    prompts, params = [text(5 + i, i) for i in range(8)], [greedy(9, seed=i) for i in range(8)]
    wanted = reference(prompts, params)
    dice = random.Random(103)
    with tiny_llm(**ahead, max_num_seqs=3) as llm:
        for _ in range(10):
            order = dice.sample(range(8), 8)
            got = ask(llm, [prompts[i] for i in order], [params[i] for i in order])
            compare(
                witness,
                [prompts[i] for i in order],
                [params[i] for i in order],
                [wanted[i] for i in order],
                got,
            )


def test_a_token_the_tokenizer_does_not_have(ahead):
    """Case B106: it has no text, and what was said can be sent again."""
    unknown = NUM_TOKENS + 3
    with tiny_llm(**ahead) as llm:
        (output,) = ask(llm, [text(9, 1)], greedy(4, logit_bias={unknown: 100.0}, logprobs=0))
        assert (said([output]), output.outputs[0].text) == ([[unknown] * 4], "")
        (again,) = ask(llm, [text(9, 1) + said([output])[0]], greedy(2))
        assert len(said([again])[0]) == 2
        (wild,) = ask(llm, [text(9, 1)], seeded(1, 400, temperature=5.0))
        assert len(said([wild])[0]) == 400
        assert max(said([wild])[0]) >= NUM_TOKENS
        assert wild.outputs[0].text == TOKENIZER.decode(i for i in said([wild])[0] if i < NUM_TOKENS)


def test_masks_that_leave_nothing_later_on(witness, ahead):
    """Case B109: the allowed token may not follow itself. That request ends in an error, its neighbour goes
    on."""
    start = text(9, 1)
    stuck = greedy(9, allowed_token_ids=[7], bad_words=[TOKENIZER.decode([7, 7])])
    (wanted,) = said(reference([start], [greedy(9, seed=1)]))
    with tiny_llm(**ahead) as llm:
        failed, fine = ask(llm, [text(8, 2), start], [stuck, greedy(9, seed=1)])
        assert (said([failed]), failed.outputs[0].finish_reason) == ([[7]], "error")
        assert "no token is allowed" in failed.outputs[0].error
        witness.compare(1, start, wanted, said([fine])[0])


def test_calls_after_an_interrupted_one(monkeypatch, witness, ahead):
    """Case B148: three calls, one of them broken off in the middle; each has its own outputs in order."""
    prompts, params = [text(9 + i, i) for i in range(5)], [greedy(6, seed=i) for i in range(5)]
    with tiny_llm(**ahead) as llm:
        check(witness, llm, prompts, params)
        step, steps = llm.llm_engine.step, itertools.count()

        def break_off():
            if next(steps) == 3:
                raise KeyboardInterrupt
            return step()

        with monkeypatch.context() as patch:
            patch.setattr(llm.llm_engine, "step", break_off)
            with pytest.raises(KeyboardInterrupt):
                ask(llm, prompts, params)
        check(witness, llm, prompts[::-1], params[::-1])


def test_the_injected_model_is_its_own_witness():
    """What is exact here is so because rows know nothing of each other."""
    model = Injected()
    rows = np.array([[3, 1], [4, 2], [3, 1]], dtype=np.float32)
    logits = model.logits(rows)
    assert (logits[0] == logits[2]).all()
    assert (logits[0] != logits[1]).any()
