from __future__ import annotations

import json

import pytest
from frontend_toys import ScriptedClient, make_engine, run

from mainspring.base.config import EngineArgs
from mainspring.base.errors import EngineDeadError, RequestError
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.frontend.llm_engine import LLMEngine


def echo(request):
    """Says the prompt backwards."""
    return request.prompt_token_ids[::-1]


def params(**given) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "output_kind": RequestOutputKind.FINAL_ONLY, **given})


def test_same_id_twice():
    """Case B017: both are answered, each with its own output; nobody waits."""
    engine = make_engine(ScriptedClient(echo))
    engine.add_request("a", list(b"abc"), params())
    engine.add_request("a", list(b"xyz"), params())
    assert sorted(output.outputs[0].text for output in run(engine)) == ["cba", "zyx"]


def test_same_id_again_and_again():
    """Case B140."""
    engine = make_engine(ScriptedClient(echo))
    for i in range(100):
        engine.add_request("a", [i + 1, 65], params(max_tokens=2))
        assert [output.outputs[0].token_ids for output in run(engine)] == [[65, i + 1]]


def test_abort_by_one_or_several_ids():
    client = ScriptedClient(echo)
    engine = make_engine(client)
    for name in "abc":
        engine.add_request(name, "hello", params())
    engine.abort_request("a")
    engine.abort_request(["b", "unknown"])
    assert [output.request_id for output in run(engine)] == ["c"]
    assert len(client.aborted) == 2
    engine.abort_request("c")
    assert len(client.aborted) == 2, "it has ended; the core need not hear of it"


def test_refused_request_leaves_nothing():
    client = ScriptedClient(echo)
    engine = make_engine(client)
    with pytest.raises(RequestError):
        engine.add_request("a", [], params())
    assert not engine.has_unfinished_requests()
    assert not client.seen
    engine.add_request("a", "hello", params())
    assert len(run(engine)) == 1


def test_core_that_refuses_a_child_leaves_nothing():
    client = ScriptedClient(echo)
    engine = make_engine(client)
    accept = client.add_request

    def add(request):
        if request.request_id.startswith("2_"):
            raise RuntimeError("full")
        accept(request)

    client.add_request = add
    with pytest.raises(RuntimeError, match="full"):
        engine.add_request("a", "hello", params(n=3))
    assert not engine.has_unfinished_requests()
    assert not client.live


def test_dead_core():
    """Every live request is forgotten, the cause is told, now and to whoever asks later; nobody waits."""
    client = ScriptedClient(echo)
    engine = make_engine(client)
    engine.add_request("a", "hello", params())
    try:
        raise KeyError("inner")
    except KeyError as inner:
        client.fail_with = RuntimeError("outer")
        client.fail_with.__cause__ = inner
    with pytest.raises(EngineDeadError, match=r"KeyError: 'inner' \(test_llm_engine.py:"):
        engine.step()
    assert not engine.has_unfinished_requests()
    client.fail_with = None
    for call in (engine.step, engine.reset_prefix_cache, lambda: engine.add_request("b", "hello", params())):
        with pytest.raises(EngineDeadError, match="inner"):
            call()
    engine.abort_request("a")
    engine.shutdown()
    assert client.is_shut_down


def test_core_that_says_it_is_dead():
    client = ScriptedClient(echo)
    engine = make_engine(client)
    engine.add_request("a", "hello", params())
    client.fail_with = EngineDeadError("the cause")
    with pytest.raises(EngineDeadError) as caught:
        engine.step()
    assert caught.value is client.fail_with
    assert not engine.has_unfinished_requests()


def test_defaults_and_counts():
    client = ScriptedClient(echo)
    with make_engine(client) as engine:
        engine.add_request("a", "hello")
        engine.add_request("b", "hello", params(n=2), priority=-1, cache_salt="s")
        assert engine.get_num_unfinished_requests() == 3
        assert client.seen[0].sampling_params.max_tokens == SamplingParams().max_tokens
        assert [(r.priority, r.cache_salt) for r in client.seen[1:]] == [(-1, "s")] * 2
        assert engine.max_model_len == client.max_model_len
        assert engine.reset_prefix_cache() is False
        run(engine)
        assert engine.reset_prefix_cache() is True
    assert client.is_shut_down
    assert not engine.has_unfinished_requests()


CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [0, 1],
}


@pytest.mark.parametrize("in_process", [True, False])
def test_random_weights_from_a_config_alone(tmp_path, in_process):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    said = []
    for model in (str(file), json.dumps(CONFIG)):
        args = EngineArgs(model=model, load_format="dummy", skip_tokenizer_init=True, in_process=in_process)
        with LLMEngine.from_engine_args(args) as engine:
            engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
            while engine.has_unfinished_requests():
                last = engine.step()
            said.append(last[0].outputs[0].token_ids)
    assert said[0] == said[1]
    assert len(said[0]) == 5


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {}, "a config has no tokenizer"),
        ({"vocab_size": None}, {"skip_tokenizer_init": True}, "vocab_size is None"),
        ({"model_type": "other"}, {"skip_tokenizer_init": True}, "other"),
    ],
)
def test_a_config_that_will_not_do(change, settings, message):
    args = EngineArgs(model=json.dumps(CONFIG | change), load_format="dummy", in_process=True, **settings)
    with pytest.raises(ValueError, match=message):
        LLMEngine.from_engine_args(args)
