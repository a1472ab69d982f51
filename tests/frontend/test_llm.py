from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from functools import partial

import pytest
from frontend_toys import TOY, ScriptedClient, make_engine
from tqdm import tqdm

from mainspring.base.errors import ConfigError, EngineDeadError, EngineError, RequestError
from mainspring.base.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from mainspring.frontend.llm import LLM, _Turns


def echo(request):
    return request.prompt_token_ids


def make(script=echo, **client) -> tuple[LLM, ScriptedClient]:
    client = ScriptedClient(script, **client)
    return LLM.from_engine(make_engine(client)), client


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def assert_idle(llm: LLM, client: ScriptedClient) -> None:
    assert not client.live
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm._calls


def test_prompts_and_order():
    llm, client = make(lambda request: [*request.prompt_token_ids, TOY.eos_token_id])
    prompts = ["one", list(b"three"), {"prompt": "x"}, {"prompt_token_ids": list(b"yy")}]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert texts(outputs) == ["one", "three", "x", "yy"], "in the order of the prompts, not of their ends"
    assert [output.prompt for output in outputs] == ["one", None, "x", None]
    assert all(output.finished for output in outputs)
    for single in ("one", list(b"one"), {"prompt": "one"}):
        assert texts(llm.generate(single, use_tqdm=False)) == ["one"]
    assert llm.generate([], use_tqdm=False) == []
    assert_idle(llm, client)


def test_parameters_for_all_or_for_each():
    llm, client = make()
    both = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert texts(llm.generate(["xyz", "xyz"], both, use_tqdm=False, priority=[3, 4])) == ["x", "xy"]
    assert [request.priority for request in client.seen] == [3, 4]
    assert texts(llm.generate(["xyz", "xyz"], both[1], use_tqdm=False)) == ["xy", "xy"]
    assert both[0].output_kind == RequestOutputKind.CUMULATIVE, "the caller's object is not changed"
    with pytest.raises(ValueError, match=r"there are 3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], both, use_tqdm=False)
    with pytest.raises(ValueError, match=r"there are 1 prompts and 2 priority"):
        llm.generate("a", priority=[1, 2], use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ([], None),
        ("x", {"max_tokens": 1}),
        ([10**9], None),
        ("x", SamplingParams(logprobs=99)),
    ],
)
def test_one_wrong_prompt_refuses_the_call(prompt, given):
    llm, client = make()
    with pytest.raises(RequestError):
        llm.generate(["good", prompt], [SamplingParams(), given] if given else None, use_tqdm=False)
    assert_idle(llm, client)
    assert texts(llm.generate("next", SamplingParams(max_tokens=4), use_tqdm=False)) == ["next"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_calls_after_an_interrupted_one(monkeypatch, error):
    """Case B148: nothing is left of a call that was broken off; later calls have their own results, in
    order."""
    llm, client = make()
    prompts = [f"prompt {i}" for i in range(5)]
    params = SamplingParams(max_tokens=8)
    assert texts(llm.generate(prompts, params, use_tqdm=False)) == prompts
    step, calls = llm.llm_engine.step, iter(range(100))

    def break_off():
        if next(calls) == 3:
            raise error
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", break_off)
        with pytest.raises(error):
            llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm, client)
    assert texts(llm.generate(prompts[::-1], params, use_tqdm=False)) == prompts[::-1]


def test_ctrl_c_waits_for_the_end_of_the_step(monkeypatch):
    """Case B148: the core is not cut in the middle of a step; afterwards it serves on."""
    llm, client = make()
    steps, whole = llm.llm_engine.step, []

    def interrupted_step():
        os.kill(os.getpid(), signal.SIGINT)
        whole.append(steps())
        return whole[-1]

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", use_tqdm=False)
    assert len(whole) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm, client)
    assert texts(llm.generate("xyz", SamplingParams(max_tokens=3), use_tqdm=False)) == ["xyz"]


def test_second_ctrl_c_does_not_wait(monkeypatch):
    llm, client = make()

    def hang():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on after two interrupts")

    monkeypatch.setattr(llm.llm_engine, "step", hang)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", use_tqdm=False)
    assert_idle(llm, client)


def test_threads_share_the_engine():
    """Case B016: each consumer gets its own tokens, in order, however it dawdles; one that stops reading
    delays nobody."""
    llm, client = make(lambda request: request.prompt_token_ids * 3)
    stalled = llm.generate_stream("stalled", SamplingParams(max_tokens=300))
    next(stalled)
    results: dict[int, str] = {}

    def consume(number: int) -> None:
        pause = random.Random(number)
        prompt = f"consumer {number} "
        for output in llm.generate_stream(prompt, SamplingParams(max_tokens=3 * len(TOY.encode(prompt)))):
            results[number] = results.get(number, "") + output.outputs[0].text
            time.sleep(pause.random() / 500)

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {i: f"consumer {i} " * 3 for i in range(8)}
    assert len(client.live) <= 1
    stalled.close()
    assert_idle(llm, client)


def test_a_call_joins_while_another_runs(monkeypatch):
    """Case B016: a thread that steps without end lets the others in."""
    llm, client = make()
    answer = client.get_output
    monkeypatch.setattr(client, "get_output", lambda: time.sleep(0.0005) or answer())
    long = threading.Thread(
        target=lambda: llm.generate("long", SamplingParams(max_tokens=400), use_tqdm=False)
    )
    long.start()
    while not client.live:
        time.sleep(0.001)
    assert texts(llm.generate("xyz", SamplingParams(max_tokens=3), use_tqdm=False)) == ["xyz"]
    assert client.live, "the long call is still at work"
    long.join()
    assert_idle(llm, client)


def test_step_of_another_thread_is_enough():
    """Who gets its output while it waits for its turn does not step again."""
    llm, client = make()
    stream = llm.generate_stream("hello", SamplingParams(max_tokens=1))

    class Turn:
        def __enter__(self):
            if client.live:
                llm._step()  # as another thread would have done

        def __exit__(self, *_):
            pass

    llm._turn = Turn()
    assert next(stream).finished
    assert list(stream) == []


def test_interrupted_while_waiting_for_a_turn(monkeypatch):
    turn = _Turns()
    with turn, monkeypatch.context() as patch:
        patch.setattr(turn._changed, "wait", lambda timeout=None: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), turn:
            pytest.fail("two had the turn")
    with turn:
        pass
    assert not turn._queue


def test_stream():
    llm, client = make()
    outputs = list(llm.generate_stream("hello the", SamplingParams(max_tokens=3)))
    assert "".join(texts(outputs)) == "hello the."
    assert [output.finished for output in outputs] == [False, False, True]
    assert_idle(llm, client)
    with pytest.raises(RequestError):
        next(llm.generate_stream([]))
    assert_idle(llm, client)


def test_closing_a_stream_aborts():
    llm, client = make()
    stream = llm.generate_stream("hello", SamplingParams(max_tokens=100))
    assert next(stream).outputs[0].text == "hello"
    stream.close()
    assert client.aborted == [client.seen[0].request_id]
    assert_idle(llm, client)


def test_generate_inside_a_stream():
    """Case B016: outputs of another call are kept for it."""
    llm, _ = make(lambda request: list(b"abcdef"))
    params = SamplingParams(max_tokens=6)
    text = ""
    for output in llm.generate_stream("x", params):
        text += output.outputs[0].text
        assert texts(llm.generate("y", params, use_tqdm=False)) == ["abcdef"]
    assert text == "abcdef"


def test_chat():
    llm, client = make(lambda request: [ord("!"), TOY.eos_token_id])
    question = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(question, use_tqdm=False)
    assert output.prompt == "user: hi\n"
    assert output.prompt_token_ids == TOY.encode("user: hi\n")
    assert output.outputs[0].text == "!"
    assert len(llm.chat([question, question], use_tqdm=False)) == 2
    llm.chat(question, use_tqdm=False, chat_template="{{ word }}", chat_template_kwargs={"word": "hello"})
    assert client.seen[-1].prompt_token_ids == [TOY.id("hello")]
    with pytest.raises(ConfigError, match="neither a template nor a file"):
        llm.chat(question, chat_template="no-such-file.jinja")
    with pytest.raises(RequestError, match="messages"):
        llm.chat([])


def test_chat_with_tools():
    """They go to the template; a call that is demanded is bound, in each conversation."""
    f = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": 1}}}
    llm, client = make(lambda request: [ord("!"), TOY.eos_token_id])
    question, template = [{"role": "user", "content": "hi"}], "{{ tools | tojson }}{{ messages[0].content }}"
    given = {"use_tqdm": False, "tools": [f], "chat_template": template}
    assert llm.chat(question, **given)[0].prompt == json.dumps([f]) + "hi"
    assert client.seen[-1].structured_outputs is None
    named = {"type": "function", "function": {"name": "f"}}
    llm.chat([question, question], SamplingParams(max_tokens=3), tool_choice=named, **given)
    bounds = [request.structured_outputs.json for request in client.seen[-2:]]
    assert [json.loads(bound)["minProperties"] for bound in bounds] == [1, 1]
    llm.chat(question, tool_choice="required", **given)
    assert (
        '"f"'
        in json.loads(client.seen[-1].structured_outputs.structural_tag)["format"]["elements"][1]["tags"][0][
            "begin"
        ]
    )
    thinking = given | {"chat_template": template + "</think>"}
    llm.chat(question, tool_choice=named, **thinking)  # its prompts end the reasoning
    assert client.seen[-1].structured_outputs.json is not None
    thinking = given | {"chat_template": template + "{% if false %}</think>{% endif %}"}
    llm.chat(question, tool_choice=named, **thinking)
    assert "</think>" in client.seen[-1].structured_outputs.structural_tag
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for params, choice, tools in ((structured, named, [f]), (None, "required", None), (None, "x", [f])):
        with pytest.raises(RequestError) as caught:
            llm.chat(question, params, tool_choice=choice, **given | {"tools": tools})
        assert caught.value.param == "tool_choice"
    assert llm.chat(question, tools=[], use_tqdm=False)[0].prompt == llm.chat_prompt(question)["prompt"]


def test_chat_template_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }}?")
    client = ScriptedClient(echo)
    llm = LLM.from_engine(make_engine(client), chat_template=str(path))
    assert llm.chat_prompt([{"role": "user", "content": "hi"}])["prompt"] == "hi?"


def test_dead_engine():
    llm, client = make()
    client.fail_with = RuntimeError("broken")
    with pytest.raises(EngineDeadError, match="RuntimeError: broken"):
        llm.generate(["a", "b"], use_tqdm=False)
    assert not llm._calls
    with pytest.raises(EngineDeadError, match="RuntimeError: broken"):
        llm.generate("a", use_tqdm=False)


def test_abort_from_elsewhere_does_not_hang():
    llm, _ = make()
    stream = llm.generate_stream("hello", SamplingParams(max_tokens=9))
    next(stream)
    llm.llm_engine.abort_request("0")
    with pytest.raises(EngineError, match="aborted from elsewhere"):
        next(stream)


def test_progress(capsys):
    llm, _ = make()
    llm.generate(["abc", "abc"], SamplingParams(max_tokens=3))
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown
    assert "output: " in shown
    bars = []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)

    llm.generate(["abc"] * 3, use_tqdm=partial(Bar, disable=False, file=open(os.devnull, "w")))  # noqa: SIM115
    assert [(bar.n, bar.total) for bar in bars] == [(3, 3)]
    bars[0].fp.close()
    assert capsys.readouterr().err == ""


def test_what_comes_later():
    llm, _ = make()
    with pytest.raises(RequestError, match="lora_request is not supported yet"):
        llm.generate("x", lora_request=object())


def test_a_sleeping_engine_refuses_calls_and_asks_to_be_woken():
    llm, client = make()
    llm.sleep()
    with pytest.raises(EngineError, match=r"the engine sleeps and would not answer; call wake_up\(\) first"):
        llm.generate("hello", use_tqdm=False)
    assert_idle(llm, client)
    llm.wake_up()
    assert not llm.is_sleeping()
    assert len(llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)) == 1


def test_a_core_that_is_found_dead_by_a_question_is_dead_for_all():
    llm, client = make()
    stream = llm.generate_stream("hello")
    next(stream)

    def die(command, timeout_s=None):
        raise EngineDeadError("it is gone")

    client.call = die
    with pytest.raises(EngineDeadError, match="it is gone"):
        llm.is_sleeping()
    with pytest.raises(EngineDeadError, match="it is gone"):
        list(stream)
    assert not llm.llm_engine.is_alive
    assert not llm._calls


def test_shutdown():
    llm, client = make()
    with llm:
        assert llm.max_model_len == client.max_model_len
        assert llm.reset_prefix_cache() is True
        assert llm.get_default_sampling_params() == SamplingParams()
    assert client.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("x", use_tqdm=False)
    llm.shutdown()


def test_without_a_tokenizer():
    """Case B082: ids in, ids out."""
    client = ScriptedClient(echo)
    llm = LLM.from_engine(make_engine(client, tokenizer=None))
    (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=3, logprobs=0), use_tqdm=False)
    assert output.outputs[0].token_ids == [1, 2, 3]
    assert (output.outputs[0].text, output.outputs[0].logprobs[0][1].decoded_token) == ("", None)
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.get_tokenizer()
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_unknown_engine_argument():
    with pytest.raises(ConfigError, match="max_modellen; did you mean max_model_len"):
        LLM("smollm2-135m", max_modellen=5)


def test_shutdown_during_a_stream_is_the_end_of_the_engine():
    llm, _ = make()
    stream = llm.generate_stream("hello")
    next(stream)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        for _ in stream:
            pass


def test_a_refusal_says_which_prompt_it_is_about():
    llm, client = make()
    with pytest.raises(RequestError, match="prompt 1 of 3: prompt is empty"):
        llm.generate(["hello", "", "hello"], use_tqdm=False)
    assert_idle(llm, client)


def test_a_bar_of_ones_own_needs_no_more_than_tqdms_methods():
    class Bar:
        def __init__(self, **options) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *error) -> None: ...
        def update(self, n: int) -> None: ...
        def set_postfix_str(self, text: str, refresh: bool = True) -> None: ...

    llm, _ = make()
    assert len(llm.generate(["hello", "hello"], use_tqdm=Bar)) == 2


@pytest.mark.parametrize("messages", [{"role": "user", "content": "a"}, "hello", 5])
def test_messages_are_a_list(messages):
    llm, _ = make()
    with pytest.raises(RequestError, match="messages must be a list"):
        llm.chat(messages)
