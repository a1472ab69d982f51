"""`mainspring run-batch`: files of requests, through the server's own routes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from server_toys import FACTS, PATIENCE_S, TOY, AsyncScriptedClient, ScriptedClient, echo, wait_until

from mainspring.base.errors import EngineDeadError, RequestError
from mainspring.cli import main
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.server.batch import Batch, Tally, answered_ids
from mainspring.server.service import Service
from mainspring.server.settings import ServerSettings

SRC = Path(__file__).parents[2] / "src"


def line(custom_id: Any, url: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    body = {"model": "toy", "prompt": "hello", "max_tokens": 5} | more.pop("body", {})
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more


def answered(
    lines: Iterable[Any], *, fail_after: int | None = None, skip: Iterable[str] = (), num_at_once: int = 4
) -> tuple[list[dict[str, Any]], Tally]:
    """What is written for these lines (bytes as they are), by an engine that says prompts backwards."""
    written: list[bytes] = []
    core = ScriptedClient(echo)

    def write(text: bytes) -> None:
        assert text.endswith(b"\n")
        written.append(text)
        if len(written) == fail_after:
            core.fail_with = EngineDeadError("the core is gone")

    async def run() -> Tally:
        inputs = InputProcessor(FACTS, core.max_model_len, TOY)
        client = AsyncScriptedClient(core)
        async with AsyncLLM(lambda: client, inputs, OutputProcessor(TOY), TOY) as llm:
            service = Service(ServerSettings(disable_uvicorn_access_log=True), "toy")
            service.set_ready(llm, None)
            raw = [text if isinstance(text, bytes) else json.dumps(text).encode() for text in lines]
            return await Batch(service, write, skip).run(raw, num_at_once)

    try:
        tally = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    except EngineDeadError as error:
        tally = error
    return [json.loads(text) for text in written], tally


def test_answers_are_those_of_the_server():
    found, tally = answered([line("a"), b"  ", line("b", body={"prompt": "good day", "n": 2})])
    by_id = {answer["custom_id"]: answer for answer in found}
    assert tally == Tally(2, 0, 0)
    assert by_id.keys() == {"a", "b"}
    assert all(a.keys() == {"id", "custom_id", "response", "error"} and a["error"] is None for a in found)
    response = by_id["a"]["response"]
    assert response.keys() == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    assert response["body"]["object"] == "text_completion"
    assert response["body"]["id"] == f"cmpl-{response['request_id']}"
    assert response["body"]["choices"][0]["text"].startswith("hello")
    assert len(by_id["b"]["response"]["body"]["choices"]) == 2
    assert len({answer["id"] for answer in found}) == 2


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        (b"{", 400, "line 2: no JSON"),
        (b"\xff", 400, "line 2: no JSON"),
        (b"[" * 9000, 400, "line 2: "),
        ({"custom_id": "x"}, 400, "line 2: Object missing required field `url`"),
        (line(5), 400, "line 2: Expected `str`, got `int`"),
        (line("x", method="GET"), 400, "line 2: method must be POST, got 'GET'"),
        (line("x", url="/v1/models"), 400, "line 2: url '/v1/models' must be one of "),
        (line("a"), 400, "line 2: custom_id 'a' is that of line 1 too"),
        (line("x", body={"stream": True}), 400, "line 2: a batch has no streams; leave stream out"),
        (line("x", body={"model": "gpt-9"}), 404, "The model `gpt-9` does not exist"),
        (line("x", body={"temperature": -1}), 400, "temperature"),
        (line("x", body={"max_tokens": "5"}), 400, "max_tokens"),
        ({"custom_id": "x", "url": "/v1/completions", "body": 5}, 400, "Expected `object`"),
        (line("x", url="/v1/chat/completions", body={"messages": []}), 400, "messages is empty"),
    ],
)
def test_a_wrong_line_is_answered_and_the_others_too(wrong, status, words):
    found, tally = answered([line("a"), wrong, line("z")], num_at_once=1)
    assert tally == Tally(3, 1, 0)
    assert [answer["response"]["status_code"] for answer in found] == [200, status, 200]
    refused = found[1]
    assert refused["error"] == refused["response"]["body"]["error"]
    assert refused["error"]["message"].startswith(words) or words in refused["error"]["message"]
    assert refused["error"]["code"] == status
    if isinstance(wrong, bytes):
        assert refused["custom_id"] is None


def test_what_was_answered_is_left_out():
    found, tally = answered([line("a"), line("b"), line("c")], skip=["a", "c"])
    assert [answer["custom_id"] for answer in found] == ["b"]
    assert tally == Tally(1, 0, 2)


def test_a_dead_engine_ends_the_run_and_refuses_nobody():
    found, ending = answered([line(str(i)) for i in range(40)], fail_after=3)
    assert isinstance(ending, EngineDeadError)
    assert 3 <= len(found) < 40
    assert all(answer["error"] is None for answer in found)


def test_many_more_lines_than_are_asked_at_once():
    found, tally = answered([line(str(i)) for i in range(100)], num_at_once=3)
    assert sorted(int(answer["custom_id"]) for answer in found) == list(range(100))
    assert tally.num_answered == 100


def test_the_file_of_an_earlier_run():
    found, _ = answered([line("a"), b"{"])
    assert answered_ids(json.dumps(answer).encode() for answer in found) == {"a"}
    with pytest.raises(RequestError, match="line 2 is no answer of a batch"):
        answered_ids([json.dumps(found[0]).encode(), b'{"custom_id": "a"}'])


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give -i FILE, or -i - for a standard stream"),
        (["-i", "in.jsonl"], "give -o FILE"),
        (["-i", "nowhere.jsonl", "-o", "o"], "nowhere.jsonl: No such file or directory"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], "in.jsonl is the input file too"),
        (["-i", "in.jsonl", "-o", "no/where"], "no/where: No such file or directory"),
        (["-i", "in.jsonl", "-o", "-", "--resume"], "--resume needs a file: give -o FILE"),
        (["-i", "in.jsonl", "-o", "-", "--json"], "--json needs a file: give -o FILE"),
        (["-i", "in.jsonl", "-o", "other.txt", "--resume"], "other.txt: line 1 is no answer of a batch"),
        (["--input-flie", "x"], "did you mean --input-file?"),
    ],
)
def test_what_cannot_begin(argv, words, tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """And nothing is lost by it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("{}\n")
    (tmp_path / "other.txt").write_text("a letter\n")
    assert main(["run-batch", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert (tmp_path / "in.jsonl").read_text() == "{}\n"
    assert (tmp_path / "other.txt").read_text() == "a letter\n"


def question(number: int, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": f"What is {number} + 1?"}], "max_tokens": 4} | more
    return json.dumps(line(f"q{number}", "/v1/chat/completions") | {"body": body})


def test_with_a_real_model(smollm2, tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """From a file; resumed, where the last line was cut off; from standard input to standard output."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join([question(1), "{broken", question(2, temperature=0)]) + "\n")
    argv = ["run-batch", "-i", str(requests), "-o", str(answers), "--model", str(smollm2), "--json"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        **{"num_requests": 3, "num_answered": 3, "num_refused": 1, "num_skipped": 0},
        "output_file": str(answers),
    }
    assert err == "(3 answered, 1 of them with an error: line 2)\n"
    found = [json.loads(text) for text in answers.read_text().splitlines()]
    assert {answer["custom_id"] for answer in found} == {"q1", None, "q2"}
    (second,) = [answer for answer in found if answer["custom_id"] == "q2"]
    assert second["response"]["body"]["choices"][0]["message"]["content"]

    answers.write_text(json.dumps(second) + "\n" + '{"id": "cut of')
    assert main([*argv, "--resume"]) == 0
    assert (
        capsys.readouterr().err == "(2 answered, 1 of them with an error: line 2, 1 were answered before)\n"
    )
    resumed = [json.loads(text) for text in answers.read_text().splitlines()]
    assert resumed[0] == second
    assert {answer["custom_id"] for answer in resumed} == {"q1", None, "q2"}

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(question(7).encode())))
    assert main(["run-batch", "-i", "-", "-o", "-", "--model", str(smollm2)]) == 0
    assert json.loads(capsys.readouterr().out)["custom_id"] == "q7"


def test_failed_requests_are_named_and_count_when_asked(
    smollm2, tmp_path, capsys: pytest.CaptureFixture[str]
):
    """The file is done either way; `--strict` makes a failure of one request a failure of the run."""
    requests = tmp_path / "in.jsonl"
    argv = ["run-batch", "-i", str(requests), "-o", str(tmp_path / "out.jsonl"), "--model", str(smollm2)]
    requests.write_text("\n".join([question(0), *(question(i, max_tokens=-1) for i in range(1, 6))]))
    assert main([*argv, "--strict", "--max-model-len", "64"]) == 1
    err = capsys.readouterr().err
    told = re.search(
        r"\(6 answered, 5 of them with an error: ('q[1-5]'), ('q[1-5]'), ('q[1-5]'), \.\.\.\)", err
    )
    assert told is not None, err
    assert len(set(told.groups())) == 3
    requests.write_text(question(0))
    assert main([*argv, "--strict", "--max-model-len", "64"]) == 0
    assert "(1 answered)" in capsys.readouterr().err


def test_interrupted(smollm2, tmp_path):
    """Ctrl-C: what was answered stays, and it is said how to go on."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        question(0, max_tokens=1),
        *(question(i, max_tokens=100, ignore_eos=True) for i in range(1, 500)),
    ]
    requests.write_text("\n".join(lines))
    argv = [
        "run-batch",
        "-i",
        str(requests),
        "-o",
        str(answers),
        "--model",
        str(smollm2),
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "mainspring", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SRC), "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        wait_until(lambda: answers.exists() and answers.stat().st_size, "the first answer")
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert time.monotonic() - begun_s < 10.0
    number = len(answered_ids(answers.read_bytes().splitlines()))
    first = err.splitlines()[0]
    assert first == f"(ended early: {number} answered of 500; --resume goes on with the rest)"
