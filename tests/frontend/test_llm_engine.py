from __future__ import annotations

import pytest
from frontend_toys import ScriptedClient, make_engine, run

from mainspring.base.errors import EngineDeadError, RequestError
from mainspring.base.params import RequestOutputKind, SamplingParams


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
