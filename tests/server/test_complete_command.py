"""`mainspring complete` against a server that says prompts backwards."""

from __future__ import annotations

import io
import json
import sys

import pytest
from server_toys import scripted, text_script

from mainspring.cli import main


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def url(server) -> list[str]:
    return ["complete", "--url", f"http://127.0.0.1:{server.port}/v1"]


def test_one_text(capsys: pytest.CaptureFixture[str]):
    with scripted(lambda request: text_script("good day")) as server:
        assert main([*url(server), "-q", "hello"]) == 0
        assert capsys.readouterr() == ("good day\n", "")
        assert main([*url(server), "-q", "hello", "--json", "--max-tokens", "3"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["object"], answer["usage"]["completion_tokens"]) == ("text_completion", 3)


def test_a_line_each(monkeypatch, capsys: pytest.CaptureFixture[str]):
    with scripted(lambda request: text_script("day")) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\ngood\n"))
        assert main(url(server)) == 0
        assert capsys.readouterr() == ("day\nday\n", "")


def test_a_key_of_the_environment(monkeypatch, capsys: pytest.CaptureFixture[str]):
    with scripted(lambda request: text_script("day"), api_key=["secret"]) as server:
        assert main([*url(server), "-q", "hello"]) == 2
        assert capsys.readouterr().err.startswith("mainspring: the server answers 401: a key is needed")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert main([*url(server), "-q", "hello"]) == 0


def test_what_a_server_refuses_is_said_in_its_words(capsys: pytest.CaptureFixture[str]):
    with scripted() as server:
        assert main([*url(server), "-q", "hello", "--model-name", "gpt-9"]) == 2
        out, err = capsys.readouterr()
        assert (out, err) == (
            "",
            "mainspring: the server answers 404: The model `gpt-9` does not exist. Valid aliases: toy.\n",
        )
        port = server.port
    assert main(["complete", "--url", f"http://127.0.0.1:{port}/v1", "-q", "hello"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "`mainspring serve` starts a server" in err
    assert main(["complete", "--url", "127.0.0.1", "-q", "hello"]) == 2
    assert "must be like http://127.0.0.1:8000" in capsys.readouterr().err
