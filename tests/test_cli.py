"""The command line: its dialect, its one-line errors, its exit statuses, and what it prints for programs."""

from __future__ import annotations

import io
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mainspring import LLM, EngineArgs
from mainspring.base.errors import ConfigError, EngineDeadError, EngineError
from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.base.params import SamplingParams
from mainspring.cli import bench, chat, generate, main, program, session
from mainspring.cli.dialect import Parser, nearest, one_spelling
from mainspring.cli.flags import add_engine_flags, engine_arguments
from mainspring.cli.sampling import HELP, add_sampling_flags, sampling_params
from mainspring.cli.values import human_int
from mainspring.frontend.reasoning import Opening

# --- the dialect --------------------------------------------------------------------------------------------


def parser() -> Parser:
    parser = Parser("test", "", ())
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def engine_flags(*argv: str) -> dict[str, Any]:
    return engine_arguments(parser().read(argv))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("512", 512),
        ("1k", 1000),
        ("1K", 1024),
        ("1.5k", 1500),
        ("2M", 2 << 20),
        ("3g", 3 * 10**9),
        ("-1", -1),
    ],
)
def test_human_whole_numbers(text: str, number: int):
    assert human_int(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "ten", "infk", "nank", "1e3"])
def test_what_is_no_whole_number(text: str):
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: expected a whole number such as 512"):
        engine_flags(f"--max-num-seqs={text}")


def test_underscore_and_hyphen_mean_the_same():
    assert engine_flags("--max_num_seqs", "4") == engine_flags("--max-num-seqs=4") == {"max_num_seqs": 4}
    # values, and whatever follows `--`, are not names
    assert one_spelling(["--stop=a_b", "c_d", "--", "--e_f"]) == ["--stop=a_b", "c_d", "--", "--e_f"]


def test_booleans_have_a_no():
    assert engine_flags("--no-enable-prefix-caching") == {"enable_prefix_caching": False}
    assert engine_flags("--enable_prefix_caching") == {"enable_prefix_caching": True}


def test_only_what_was_given_reaches_the_engine():
    assert engine_flags() == {}
    assert engine_flags("--max-model-len", "auto") == {"max_model_len": -1}


def test_sampling_flags():
    argv = ["--temperature", "0", "--stop", "a", "--stop", "b", "--stop-token-ids", "1, 2", "--max-tokens=1k"]
    given = parser().read([*argv, "--logit-bias", '{"7": -100}', "--no-skip-special-tokens"])
    params = sampling_params(given)
    assert (params.temperature, params.stop, params.stop_token_ids) == (0.0, ["a", "b"], [1, 2])
    assert (params.logit_bias, params.max_tokens) == ({7: -100.0}, 1000)
    assert not params.skip_special_tokens


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--tempreture", "0"], "unknown flag --tempreture; did you mean --temperature?"),
        (["--max-tok=3"], "unknown flag --max-tok; did you mean --max-tokens?"),
        (
            ["--quantization", "awq"],
            "--quantization: no such choice 'awq'; there are f16, bf16, q8, q4",
        ),
        (["--no-enable-lora"], "--no-enable-lora: adapters (LoRA) are not supported yet; leave it out"),
        (["--zzz"], "unknown flag --zzz; mainspring test --help lists the flags"),
        (["word"], "'word' belongs to no flag; mainspring test --help lists the flags"),
        (["--top-p", "much"], "--top-p: expected a number such as 0.7, got 'much'"),
        (["--stop-token-ids", "a"], "--stop-token-ids: expected token ids such as 1,2,3, got 'a'"),
        (["--stop-token-ids", "1,,2"], "--stop-token-ids: expected token ids such as 1,2,3, got '1,,2'"),
        (["--stop-token-ids", "[1,2"], "--stop-token-ids: expected token ids such as 1,2,3, got '[1,2'"),
        (["--logit-bias", "[1]"], "--logit-bias: expected a JSON object such as '{\"5\": -100}', got '[1]'"),
        (["--temperature"], "--temperature: expected one argument"),
    ],
)
def test_flags_that_are_refused(argv: list[str], line: str):
    with pytest.raises(ConfigError) as refusal:
        parser().read(argv)
    assert str(refusal.value) == line


def test_choices_are_named():
    with pytest.raises(
        ConfigError, match=r"--kernels: no such choice 'nativ'; did you mean native\? there are"
    ):
        parser().read(["--kernels", "nativ"])


def test_nearest():
    assert nearest("temp", ["temperature", "top"]) == "temperature"
    assert nearest("xyz", ["temperature", "top"]) is None


def test_every_setting_has_a_flag_and_a_word_of_help(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--help=all"]) == 0
    everything = capsys.readouterr().out
    for name in [*(f.name for f in fields(EngineArgs)), *HELP]:
        assert re.search(rf"--{name.replace('_', '-')}\b.*\S", everything), name
    assert main(["generate", "--help"]) == 0
    everyday = capsys.readouterr().out
    assert "--temperature" in everyday
    assert "--long-prefill-token-threshold" not in everyday
    assert len(everyday.splitlines()) < 50  # a screen


@pytest.mark.parametrize("command", program.COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: mainspring {command}")


@pytest.mark.parametrize(("columns", "widest"), [(70, 70), (80, 80), (200, 100)])
def test_help_is_as_wide_as_the_terminal(
    columns: int, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["generate", "--help=all"]) == 0
    flags = capsys.readouterr().out.split("for example:")[0].splitlines()
    assert 0.8 * widest < max(map(len, flags)) <= widest


def test_help_promises_what_there_is(capsys: pytest.CaptureFixture[str]):
    for command, all_of_engine in [("pull", False), ("cache", False), ("chat", True)]:
        assert main([command, "--help"]) == 0
        assert ("--help=all" in capsys.readouterr().out) == all_of_engine, command
    assert main(["--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  bench")]
    assert all(name in line for name in bench.BENCHES)


def test_help_loads_no_engine():
    """Of no command: whoever asks how to type something does not wait for arrays."""
    names = [*program.COMMANDS, *(f"bench {name}" for name in bench.BENCHES)]
    code = f"""
from mainspring.cli import main; import sys
for name in {names}: main([*name.split(), '--help'])
print(*sys.modules)"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(shown.stdout.splitlines()[-1].split())
    assert {"mainspring.cli.doctor", "mainspring.cli.bench"} <= loaded
    assert not {"numpy", "tokenizers", "tqdm", "yaml", "starlette", "mainspring.frontend.llm"} & loaded


# --- exit statuses ------------------------------------------------------------------------------------------


def fail_with(error: BaseException) -> Callable[[list[str]], int]:
    def run(argv: list[str]) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("one\ntwo"), 2, "mainspring: one; two\n"),
        (
            EngineDeadError("ValueError: no such row (runner.py:7)"),
            1,
            "mainspring: ValueError: no such row (runner.py:7)\n",
        ),
        (EngineError("the grammar failed"), 1, "mainspring: the grammar failed\n"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            2,
            f"mainspring: not enough memory (Unable to allocate 9 TiB): {program.NO_MEMORY}\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_status(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(generate, "run", fail_with(error))
    assert main(["generate"]) == status
    assert capsys.readouterr() == ("", said)


def test_a_reader_who_left_is_no_error():
    command = [sys.executable, "-m", "mainspring", "generate", "--help=all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


CLI = f"exec {sys.executable} -m mainspring"


def run_in_shell(command: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("chat <&-", 2, "mainspring: standard input is closed; open it, or give --prompt TEXT\n"),
        (
            "generate --prompt - <&-",
            2,
            "mainspring: standard input is closed; open it, or give --prompt TEXT\n",
        ),
        ("--help >&-", 2, "mainspring: standard output is closed; open it, or send it to a file\n"),
        ("generate --bad 2>&-", 2, ""),
    ],
)
def test_closed_streams(command: str, status: int, said: str):
    assert run_in_shell(f"{CLI} {command}") == (status, "", said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disks(unbuffered: str):
    full = "mainspring: standard output cannot be written: No space left on device\n"
    assert run_in_shell(f"{CLI} --help >/dev/full", PYTHONUNBUFFERED=unbuffered) == (1, "", full)
    status, out, _ = run_in_shell(f"{CLI} generate --bad 2>/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (status != 0, out) == (True, "")


def test_a_file_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(generate, "run", fail_with(PermissionError(13, "Permission denied", "a.gguf")))
    assert main(["generate"]) == 1
    assert re.fullmatch(
        r"mainspring: PermissionError: .*Permission denied: 'a.gguf' \(test_cli.py:\d+\)\n",
        capsys.readouterr().err,
    )


def test_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main(["generat"]) == 2
    assert capsys.readouterr().err == "mainspring: unknown command 'generat'; did you mean generate?\n"
    assert main(["bench", "sched"]) == 2
    assert "did you mean scheduler?" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"mainspring \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main([]) == 0
    assert "mainspring chat" in capsys.readouterr().out


# --- models and machine -------------------------------------------------------------------------------------


def test_pull_lists_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path))
    assert main(["pull"]) == 0
    assert "smollm2-135m  SmolLM2" in (listed := capsys.readouterr().out)
    assert "98 MB to fetch" in listed
    assert main(["pull", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries.keys() == {"smollm2-135m", "gemma3-270m", "all-minilm-l6-v2"}
    assert entries["smollm2-135m"]["path"] is None
    assert "ai.google.dev/gemma/terms" in entries["gemma3-270m"]["terms"]
    assert main(["pull", "smolm2-135m"]) == 2
    assert capsys.readouterr().err.startswith(
        "mainspring: no model 'smolm2-135m' in the catalogue (did you mean"
    )


def test_pull_says_where_a_model_is(smollm2: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr() == (f"smollm2-135m: {smollm2}\n", "")
    assert main(["pull", "smollm2-135m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "smollm2-135m", "path": str(smollm2)}


# --- the conversation, with a model that costs nothing ------------------------------------------------------


class EchoLLM:
    """Answers with the last question in capitals, a word at a time. A message is as many tokens as it has
    words.
    """

    max_model_len = 20

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": messages, "prompt_token_ids": " ".join(m["content"] for m in messages).split()}

    def chat_opening(self, prompt: dict[str, Any]) -> Opening:
        return Opening(None)

    def generate_stream(self, prompt: dict[str, Any], params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append(prompt["messages"])
        *words, last = prompt["messages"][-1]["content"].upper().split()
        for i, word in enumerate([*words, last]):
            if word == "INTERRUPT":
                raise KeyboardInterrupt
            if word == "FAIL":
                raise EngineError("it failed")
            finish_reason = "stop" if i == len(words) else None
            piece = CompletionOutput(0, ("" if i == 0 else " ") + word, [i], finish_reason=finish_reason)
            yield RequestOutput(
                "0", None, prompt["prompt_token_ids"], [piece], finished=finish_reason is not None
            )


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> EchoLLM:
    llm = EchoLLM()
    monkeypatch.setattr(chat, "open_model", lambda given: llm)
    return llm


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    """A person at a terminal, who types these lines and then Ctrl-D."""
    typed = iter([*lines, EOFError()])

    def read(prompt: str = "") -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def test_a_conversation_is_remembered(
    echo: EchoLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    type_lines(monkeypatch, "good day", "", "again", "/clear", "anew", "/exit", "never read")
    assert main(["chat", "--system", "be brief", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "GOOD DAY\nAGAIN\nANEW\n"
    roles = [[message["role"] for message in messages] for messages in echo.asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]


def test_interrupts_and_failures_end_a_turn_and_not_the_program(
    echo: EchoLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    type_lines(
        monkeypatch, "stop at interrupt now", "then fail", KeyboardInterrupt(), "/what", "/help", "go on"
    )
    assert main(["chat", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert "STOP AT\n" in out
    assert out.endswith("GO ON\n\n")
    assert "stopped" in err
    assert "mainspring: it failed" in err
    assert "Ctrl-D or /exit leaves" in err
    assert "no command /what" in err
    assert [len(messages) for messages in echo.asked] == [1, 1, 1]  # unfinished turns are forgotten


def test_turns_that_no_longer_fit_are_left_out_and_that_is_said(
    echo: EchoLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    type_lines(monkeypatch, "one two three four", "five six seven eight", "nine")
    assert main(["chat", "--max-tokens", "8"]) == 0  # leaves 12 of 20 tokens for the prompt
    assert [len(messages) for messages in echo.asked] == [1, 3, 3]
    assert echo.asked[-1][0]["content"] == "five six seven eight"
    assert "the oldest turn left out" in capsys.readouterr().err


def test_a_program_may_chat_line_by_line(
    echo: EchoLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("good day\n\nagain\n"))
    assert main(["chat", "--json", "--max-tokens", "5"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["text"] for answer in answers] == ["GOOD DAY", "AGAIN"]
    assert [len(messages) for messages in echo.asked] == [1, 3]


def test_a_program_that_writes_no_utf8_is_told(
    echo: EchoLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main(["chat"]) == 2
    assert capsys.readouterr().err == "mainspring: standard input is not UTF-8 text: byte 3 is 0xe9\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (session.Answer("", [], [1], "stop"), "empty answer: the model ended at once"),
        (session.Answer(" \n", [1, 2], [1], "length"), "empty answer: 2 tokens, none of which shows"),
        (session.Answer("\n", [1], [1], "length"), "empty answer: 1 token, which does not show"),
        (session.Answer("", [], [1], "abort"), "empty answer: it ended with abort"),
        (session.Answer("some", [1, 2], [1], "length"), "cut after 2 tokens"),
        (session.Answer("some", [1], [1], "stop"), ""),
    ],
)
def test_what_an_answer_cannot_say_itself(
    answer: session.Answer, words: str, capsys: pytest.CaptureFixture[str]
):
    session.say_if_odd(answer, unasked_limit=2)
    assert capsys.readouterr().err[1 : len(words) + 1] == words


# --- the real model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), kernels="numpy", max_model_len=256, kv_cache_memory_bytes=2**26) as llm:
        yield llm


@pytest.fixture
def opened(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands find this model open already."""
    for module in (generate, chat):
        monkeypatch.setattr(module, "open_model", lambda given: llm)
    return llm


QUICK = ["--temperature", "0", "--max-tokens", "3"]


@pytest.mark.usefixtures("opened")
class TestRealModel:
    def test_generate_for_programs(self, capsys: pytest.CaptureFixture[str]):
        assert main(["generate", "--prompt", "The capital of France is", *QUICK, "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == {
            "text": " Paris.\n",
            "token_ids": [7042, 30, 198],
            "prompt_token_ids": [504, 3575, 282, 4649, 314],
            "finish_reason": "length",
            "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
        }
        assert err == ""

    def test_generate_for_people(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The capital of France is")))
        assert main(["generate", "--prompt", "-", *QUICK, "--stop", "."]) == 0
        assert capsys.readouterr() == (" Paris\n", "")

    def test_generate_from_ids(self, capsys: pytest.CaptureFixture[str]):
        argv = ["--prompt-token-ids", "504 3575 282 4649 314", *QUICK]
        assert main(["generate", *argv]) == 0
        assert capsys.readouterr().out == " Paris.\n"

    def test_chat_applies_the_template(self, capsys: pytest.CaptureFixture[str]):
        question = ["--prompt", "What is the capital of Germany?", "--temperature", "0", "--max-tokens", "7"]
        assert main(["chat", *question, "--json"]) == 0
        chatted = json.loads(capsys.readouterr().out)
        assert chatted["text"] == "The capital of Germany is Berlin."
        assert main(["generate", "--chat", *question[:-1], "1", "--json"]) == 0
        generated = json.loads(capsys.readouterr().out)
        assert generated["prompt_token_ids"] == chatted["prompt_token_ids"]
        assert generated["text"] == "The"

    def test_an_empty_answer_is_said_in_words(self, capsys: pytest.CaptureFixture[str]):
        argv = ["--prompt", "The capital of France is", *QUICK, "--stop-token-ids", "7042"]
        assert main(["generate", *argv]) == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("(empty answer: ")

    @pytest.mark.parametrize(
        ("argv", "line"),
        [
            (["--prompt", "word " * 300], r"mainspring: .*30\d tokens.*max_model_len.*256"),
            (["--prompt", ""], r"mainspring: .*prompt.*(no tokens|empty)"),
            (["--prompt", "x", "--max-tokens", "0"], r"mainspring: max_tokens must be .* at least 1, got 0"),
            (
                ["--prompt", "x", "--max-tokens", "-3"],
                r"mainspring: max_tokens must be .* at least 1, got -3",
            ),
            (
                ["--prompt", "x", "--temperature", "nan"],
                r"mainspring: temperature must be a finite .* got nan",
            ),
            (
                ["--prompt", "x", "--temprature", "1"],
                r"mainspring: unknown flag .* did you mean --temperature",
            ),
            (
                ["--prompt-token-ids", "1,999999"],
                r"mainspring: .*999999, which is no token: ids go from 0 to 49151",
            ),
            (
                ["--prompt", "x", "--stop-token-ids", "999999"],
                r"mainspring: .*999999, which is no token: ids go from 0 to 49151",
            ),
            ([], r"mainspring: give --prompt TEXT"),
            (["--prompt", "x", "--prompt-token-ids", "1"], r"mainspring: give .*, not both"),
            (
                ["--prompt-token-ids", "1", "--skip-tokenizer-init"],
                r"mainspring: --skip-tokenizer-init .* give --json too",
            ),
            (["--chat", "--prompt-token-ids", "1"], r"mainspring: --chat needs text"),
        ],
    )
    def test_a_wrong_request_is_one_line_and_the_next_one_is_served(
        self, argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
    ):
        assert main(["generate", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.match(line, err), err
        assert err.count("\n") == 1
        assert main(["generate", "--prompt", "The capital of France is", *QUICK]) == 0
        assert capsys.readouterr().out == " Paris.\n"


def missing(model: Path, folder: Path) -> list[str]:
    return ["--model", str(folder / "nowhere.gguf")]


def truncated(model: Path, folder: Path) -> list[str]:
    path = folder / "truncated.gguf"
    with open(model, "rb") as file:
        path.write_bytes(file.read(20_000_000))
    return ["--model", str(path)]


def of_another_family(model: Path, folder: Path) -> list[str]:
    """The same file, which says that it is something else."""
    path = folder / "another.gguf"
    shutil.copyfile(model, path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 1 << 22) as bytes_:
        head = bytes_[:]
        bytes_[:] = head.replace(b"llama", b"zebra")
    return ["--model", str(path)]


def unknown_name(model: Path, folder: Path) -> list[str]:
    return ["--model", "smolm2-135m"]


def small_pool(model: Path, folder: Path) -> list[str]:
    return ["--model", str(model), "--num-gpu-blocks-override", "3"]


def no_executor(model: Path, folder: Path) -> list[str]:
    return ["--model", str(model), "--executor", "os:path"]


def wrong_settings(model: Path, folder: Path) -> list[str]:
    return ["--model", str(model), "--block-size", "17", "--watermark", "2"]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (missing, r"mainspring: \S*nowhere\.gguf: no such file; give a GGUF file"),
        (truncated, r"mainspring: \S*truncated\.gguf.*(truncated|end|short)"),
        (of_another_family, r"mainspring: .*zebra.*llama"),
        (unknown_name, r"mainspring: no model 'smolm2-135m' \(did you mean smollm2-135m\?\)"),
        (small_pool, r"mainspring: .*KV cache has 2 usable blocks.*max_model_len"),
        (no_executor, r"mainspring: executor 'os:path' cannot be called"),
        (wrong_settings, r"mainspring: block_size 17 must be .*; watermark 2.0 must be"),
    ],
)
def test_a_model_that_cannot_be_opened_is_one_line(
    make: Callable[[Path, Path], list[str]],
    line: str,
    smollm2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    assert main(["generate", "--prompt", "x", *make(smollm2, tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(line, err), err
    assert err.count("\n") == 1


INTERRUPTED_IMPORT = """
import os, signal, sys
from mainspring.cli import main

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.exit(main(["generate", "--model", "none"]))
"""


@pytest.mark.parametrize(
    "module", ["mainspring.cli.program", "mainspring.base.errors", "mainspring.cli.generate", "argparse"]
)
def test_ctrl_c_while_the_program_is_still_being_imported(module: str):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
