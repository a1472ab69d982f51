"""The front end with the real tokenizer, and through `LLM` with the real core and model."""

from __future__ import annotations

import pytest

from mainspring import LLM, EngineArgs, RequestOutputKind, SamplingParams
from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.checkpoint.description import gguf_facts
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.detokenizer import Detokenizer, TokenBytes
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.tokenizer import Tokenizer

WORLD = "👩‍👩‍👧‍👦 नमस्ते 你好 ďábel שלום 🇨🇭 e\u0301\n\n  1. The end<|im_end|>"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SETTINGS = {
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "kernels": "numpy",
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def file(smollm2):
    with GGUFFile(smollm2) as file:
        yield file


@pytest.fixture(scope="module")
def tokenizer(file):
    return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, **SETTINGS) as llm:
        yield llm
        assert not llm.llm_engine.has_unfinished_requests()
        assert is_idle(llm)


def is_idle(llm) -> bool:
    stats = llm.get_stats()
    return not (stats.num_running or stats.num_waiting or stats.num_parked or stats.kv_cache_usage)


def greedy(**params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **params})


def force(token: int, **params) -> SamplingParams:
    """The model says `token` wherever nothing forbids it."""
    return greedy(logit_bias={token: 100}, **params)


def ask(llm, prompt, params):
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_gguf_facts(file, tokenizer):
    facts = gguf_facts(file)
    assert (facts.architecture, facts.max_position_embeddings, facts.vocab_size) == ("llama", 8192, 49152)
    assert facts.eos_token_ids == tokenizer.eos_token_ids
    assert facts.bos_token_id == tokenizer.bos_token_id


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_stream_of_real_tokens(tokenizer, size, skip):
    """Case B086."""
    ids = tokenizer.encode(WORLD)
    table = TokenBytes(tokenizer, skip)
    for end in range(len(ids) + 1):
        it = Detokenizer(table, tokenizer.encode("Hello "), SamplingParams())
        pieces = []
        for i in range(0, end, size):
            it.update(ids[i : min(i + size, end)])
            pieces.append(it.take())
        it.flush()
        assert "".join(pieces) + it.take() == tokenizer.decode(ids[:end], skip_special_tokens=skip)
        assert "\ufffd" not in "".join(pieces)


def test_chat_streams_what_it_says(llm):
    """Case B070: deltas are the text; a stop string ends both alike."""
    whole = llm.chat(QUESTION, greedy(), use_tqdm=False)[0].outputs[0]
    assert whole.text == "The capital of France is Paris."
    assert (whole.finish_reason, whole.stop_reason, whole.token_ids[-1]) == ("stop", None, 2)
    pieces = [output.outputs[0] for output in llm.generate_stream(llm.chat_prompt(QUESTION), greedy())]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
    stopped = llm.chat(QUESTION, greedy(stop=["ance is"]), use_tqdm=False)[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("The capital of Fr", "ance is")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_special_token_as_stop_string(llm, ignore_eos):
    """Case B080, through the core."""
    end = ask(llm, "Hello", force(2, stop=["<|im_end|>"], ignore_eos=ignore_eos)).outputs[0]
    assert (end.text, end.token_ids, end.stop_reason) == ("", [2], "<|im_end|>")


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_min_tokens_then_eos(llm, min_tokens):
    """Case B076: exactly so many others, then EOS."""
    answer = ask(llm, "Hello", force(2, min_tokens=min_tokens)).outputs[0]
    assert len(answer.token_ids) == min_tokens + 1
    assert answer.token_ids.index(2) == min_tokens


def test_bad_word_in_neither_form(llm, tokenizer):
    """Case B107: the model is pushed towards the word in both forms and says neither."""
    forms = [tokenizer.encode("Paris", add_special_tokens=False), tokenizer.encode(" Paris", False)]
    bias = {form[0]: 100 for form in forms if len(form) == 1}
    assert bias
    said = ask(llm, "I like", greedy(logit_bias=bias, max_tokens=3)).outputs[0].text
    assert "Paris" in said
    unsaid = ask(llm, "I like", greedy(logit_bias=bias, bad_words=["Paris"], max_tokens=3)).outputs[0].text
    assert "Paris" not in unsaid


@pytest.mark.parametrize("length", [16, 33])
def test_prompt_logprobs_with_a_warm_cache(llm, length):
    """Case B091: one entry per token, and the same whether or not the prefix is cached."""
    prompt = list(range(1000, 1000 + length))
    llm.reset_prefix_cache()
    cold = ask(llm, prompt, greedy(prompt_logprobs=1, max_tokens=1))
    ask(llm, prompt, greedy(max_tokens=1))
    warm = ask(llm, prompt, greedy(prompt_logprobs=1, max_tokens=1))
    longer = ask(llm, [*prompt, 7, 8], greedy(prompt_logprobs=1, max_tokens=1))
    assert cold.prompt_logprobs[0] is None
    assert len(cold.prompt_logprobs) == length
    for other in (warm, longer):
        for ours, theirs in zip(cold.prompt_logprobs[1:], other.prompt_logprobs[1:length], strict=True):
            assert list(ours) == list(theirs)
            assert all(abs(ours[i].logprob - theirs[i].logprob) < 1e-3 for i in ours)


def test_abort_of_several_answers(llm):
    """Case B019: closing the stream ends all children, and the core is idle."""
    stream = llm.generate_stream("Hello", SamplingParams(n=4, ignore_eos=True, max_tokens=400, seed=1))
    for _ in range(3):
        next(stream)
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests()
    assert is_idle(llm)
    assert llm.reset_prefix_cache()


def test_seeded_answers(llm):
    """Case B100: child i is the request with seed + i alone; at temperature 0 all are equal."""
    together = ask(llm, "Once", SamplingParams(n=3, seed=5, max_tokens=3)).outputs
    assert [answer.index for answer in together] == [0, 1, 2]
    alone = ask(llm, "Once", SamplingParams(seed=7, max_tokens=3)).outputs[0]
    assert together[2].token_ids == alone.token_ids
    equal = ask(llm, "Once", greedy(n=2, max_tokens=2)).outputs
    assert equal[0].token_ids == equal[1].token_ids


def test_request_at_the_length_limit(llm):
    """Cases B062, B068: it ends with length; others after it are as ever."""
    before = ask(llm, "Hello", greedy(max_tokens=3)).outputs[0].token_ids
    full = ask(llm, [5] * 95, greedy(ignore_eos=True, max_tokens=None)).outputs[0]
    assert (len(full.token_ids), full.finish_reason) == (1, "length")
    with pytest.raises(ValueError, match="max_model_len 96"):
        ask(llm, [5] * 96, greedy())
    assert ask(llm, "Hello", greedy(max_tokens=3)).outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("", {}),
        ([49152], {}),
        ([1] * 600, {}),
        ("x", {"logit_bias": {49152: 1}}),
        ("x", {"allowed_token_ids": [5], "bad_words": ["\x00"], "logprobs": 999}),
        ("x", {"structured_outputs": StructuredOutputsParams(json='{"not": {}}')}),
    ],
)
def test_refusals_leave_the_engine_alone(llm, prompt, params):
    with pytest.raises(RequestError):
        ask(llm, prompt, greedy(**params))
    assert is_idle(llm)


def test_ids_in_ids_out(smollm2):
    """Case B082: without a tokenizer, from settings to an answer."""
    args = EngineArgs(model=str(smollm2), skip_tokenizer_init=True, **SETTINGS)
    with LLMEngine.from_engine_args(args) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request("a", [1, 2, 3], params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[0].outputs[0].token_ids) == 3
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            engine.add_request("b", "text", params)
