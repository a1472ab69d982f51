"""`mainspring chat --url` against servers that say what they are told to say."""

from __future__ import annotations

import io
import json
import signal
import socket
import sys
import threading

import pytest
from server_toys import TOY, is_idle, scripted, text_script, wait_until

from mainspring.cli import chat, main
from mainspring.cli.session import DIM, UNDIM

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}{{ '\n' }}{% endfor %}"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def at(server) -> list[str]:
    return ["chat", "--url", f"http://127.0.0.1:{server.port}"]


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A person at a terminal, who types these lines and then Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def prompts(server) -> list[str]:
    return [TOY.decode(request.prompt_token_ids) for request in server.core.inner.seen]


def test_one_question(capsys: pytest.CaptureFixture[str]):
    with scripted(text_script("good day")) as server:
        assert main([*at(server), "--prompt", "hello", "--temperature", "0", "--seed", "3"]) == 0
        assert capsys.readouterr() == ("good day\n", "")
        params = server.core.inner.seen[-1].sampling_params
        assert (params.temperature, params.seed, params.max_tokens) == (0, 3, 256)
        assert main([*at(server), "--prompt", "hello", "--json", "--max-tokens", "3"]) == 0
        num_prompt = len(TOY.encode("user: hello\n"))
        reported = json.loads(capsys.readouterr().out)
        usage = reported.pop("usage")
        assert reported == {"text": "goo", "finish_reason": "length"}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 3)


def test_a_conversation(monkeypatch, capsys: pytest.CaptureFixture[str]):
    with scripted(text_script("day")) as server:
        type_lines(monkeypatch, "hello", "again", "/clear", "anew", "/what", "/exit", "never read")
        assert main([*at(server), "--system", "be brief"]) == 0
        out, err = capsys.readouterr()
        assert out == "day\n" * 3
        assert "no command /what" in err
        assert prompts(server) == [
            "system: be brief\nuser: hello\n",
            "system: be brief\nuser: hello\nassistant: day\nuser: again\n",
            "system: be brief\nuser: anew\n",
        ]


def test_reasoning(monkeypatch, capsys: pytest.CaptureFixture[str]):
    with scripted(text_script("<think>\nHm.\n</think>\n\nYes."), template=TEMPLATE) as server:
        assert main([*at(server), "--prompt", "hello"]) == 0
        assert capsys.readouterr().out == "Yes.\n"
        assert main([*at(server), "--prompt", "hello", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["reasoning"] == "Hm."
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert main([*at(server), "--prompt", "hello"]) == 0
        shown = capsys.readouterr().out
        assert shown.replace(UNDIM + DIM, "") == f"{DIM}Hm.{UNDIM}\n\nYes.\n"


def test_failures_end_a_turn_and_not_the_conversation(monkeypatch, capsys: pytest.CaptureFixture[str]):
    with scripted(text_script("day")) as server:
        type_lines(monkeypatch, "hello", "x" * 600, "again")
        assert main(at(server)) == 0
        out, err = capsys.readouterr()
        assert out == "day\nday\n\n"
        assert "mainspring: the server answers 400: " in err
        assert prompts(server)[-1] == "user: hello\nassistant: day\nuser: again\n"


def test_stopping_an_answer_stops_the_server(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def stop(delta):
        signal.raise_signal(signal.SIGINT)
        return []

    with scripted(text_script("a", end=False)) as server:
        type_lines(monkeypatch, "hello")
        monkeypatch.setattr(chat, "_said", stop)
        assert main([*at(server), "--max-tokens", "400"]) == 0
        assert "stopped; this turn" in capsys.readouterr().err
        wait_until(lambda: is_idle(server))


def test_names_and_keys(monkeypatch, capsys: pytest.CaptureFixture[str]):
    with scripted(text_script("day"), api_key=["k"], served_model_name=["one", "two"]) as server:
        assert main([*at(server), "--prompt", "hello"]) == 2
        assert capsys.readouterr().err.startswith("mainspring: the server answers 401: a key is needed")
        assert main([*at(server), "--prompt", "hello", "--api-key", "k", "--model", "two"]) == 0
        assert main([*at(server), "--prompt", "hello", "--api-key", "k", "--model", "three"]) == 2
        assert "`three` does not exist" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert main([*at(server), "--prompt", "hello"]) == 0


def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str]):
    with scripted(text_script("day")) as server:
        assert main([*at(server), "--prompt", "hello", "--kernels", "numpy"]) == 2
        assert capsys.readouterr().err == (
            "mainspring: --kernels is for an engine that is opened here; leave it out, or --url\n"
        )
        where = at(server)
    assert main([*where, "--prompt", "hello"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "`mainspring serve` starts a server" in err


def test_a_server_that_goes_away_in_the_middle(capsys: pytest.CaptureFixture[str]):
    chunk = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head + b"%x\r\n%b\r\n" % (len(chunk), chunk))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        assert main(["chat", "--url", url, "--model", "m", "--prompt", "hello"]) == 1
        thread.join()
    out, err = capsys.readouterr()
    assert out == "a\n"
    assert "the connection ended in the middle of an answer" in err
