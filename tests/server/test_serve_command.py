"""`mainspring serve`: flags, the file, the environment; and the program as a process, with the real model."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_toys import HELLO, PATIENCE_S, Address, wait_until

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.cli import main, serve
from mainspring.frontend.llm_engine import prepare
from mainspring.server.settings import ServerSettings

SRC = Path(__file__).parents[2] / "src"


def given(*argv: str):
    """What the command would serve with."""
    parser = serve._parser(argv)
    namespace = parser.read(argv)
    return (
        EngineArgs.from_mapping(serve._engine_arguments(namespace)),
        serve.server_settings(namespace),
        namespace,
    )


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("API_KEY", "SERVER_DEV_MODE"):
        for prefix in ("MAINSPRING", "VLLM"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)


# -- flags ---------------------------------------------------------------------------------------------------


def test_flags_of_both_kinds():
    args, settings, _ = given(
        *(
            "some.gguf",
            "--max-model-len",
            "2k",
            "--port=9000",
            "--api_key",
            "a",
            "b",
            "--served-model-name",
            "x",
        ),
        *("--no-enable-prefix-caching", "--shutdown-timeout", "30", "--allow-credentials"),
        *("--override-generation-config", '{"temperature": 0.5}', "--allowed-origins", '["https://a"]'),
    )
    assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("some.gguf", 2000, False)
    assert args.disable_log_stats is False
    assert (settings.port, settings.api_key, settings.served_model_name) == (9000, ["a", "b"], ["x"])
    assert (settings.shutdown_timeout, settings.allow_credentials) == (30.0, True)
    assert settings.sampling_defaults == {"temperature": 0.5}
    assert settings.allowed_origins == ["https://a"]
    assert given("--model", "m.gguf")[0].model == "m.gguf"
    assert given()[0].model == EngineArgs().model


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--prot", "5"], "unknown flag --prot; did you mean --port?"),
        (["--api-keys", "5"], "unknown flag --api-keys; did you mean --api-key?"),
        (["--tool-server", "x"], "--tool-server: tools are described in requests here"),
        (["--tool-call-parser", "x"], "tool_call_parser 'x' is not known; there are hermes, qwen, "),
        (["--enable-lora"], "--enable-lora: adapters .LoRA. are not supported yet; leave it out"),
        (["--reasoning-parser", "x"], "reasoning_parser 'x' is not known; there are deepseek_r1, qwen3"),
        (["--port", "x"], "--port: expected a whole number"),
        (["--port", "99999"], "port 99999 must be from 0 to 65535"),
        (["a.gguf", "--model", "b.gguf"], "MODEL 'a.gguf' and --model 'b.gguf' differ; give one"),
        (["--config"], "--config needs a file"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: No such file or directory"),
        (["--allowed-origins", "[1]"], "--allowed-origins must be words, or a JSON list of texts"),
        (["--override-generation-config", "[]"], "--override-generation-config: expected a JSON object"),
    ],
)
def test_flags_that_are_refused(argv, line, capsys):
    assert main(["serve", *argv]) == 2
    assert re.search(line, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--data-parallel-size", "1000000"], "data_parallel_size 1000000 must be from 1 to 64"),
        (["-tp", "1" + "0" * 30], "tensor_parallel_size must be a 64-bit integer, not one of 31 digits"),
        (["--watermark", "3e38"], "watermark 3e+38 must be in [0, 1)"),
        (
            ["-tp", "2", "--executor", "uniproc"],
            "executor uniproc is one process, and 2 x 1 ranks need one each",
        ),
    ],
)
def test_settings_that_are_refused_before_anybody_can_connect(argv, line, capsys):
    """Whatever the model is, also one that is not here."""
    assert main(["serve", "no-such-model", "--port", "0", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mainspring: {line}")
    assert said.count("\n") == 1


def test_flags_without_effect_are_taken_and_told(capsys):
    _, _, namespace = given("--swap-space", "4", "--disable-log-requests", "--no-enable-sleep-mode", "m.gguf")
    flags = ["--swap-space", "--disable-log-requests", "--no-enable-sleep-mode"]
    assert capsys.readouterr().err == "".join(f"{flag} has no effect here\n" for flag in flags)
    assert namespace.model_tag == "m.gguf"


def test_every_flag_has_help(capsys):
    assert main(["serve", "--help"]) == 0
    everyday = capsys.readouterr().out
    assert "--api-key" in everyday
    assert "--ssl-keyfile" not in everyday
    assert main(["serve", "--help=all"]) == 0
    every = capsys.readouterr().out
    for name in ("ssl-keyfile", "max-num-seqs", "chat-template", "otlp-traces-endpoint", "server-dev-mode"):
        assert f"--{name}" in every
    assert "--swap-space" not in every


def test_the_file(tmp_path):
    """Flags from a file; the command line goes before it, also for lists and switches."""
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: m.gguf\nport: 8080\napi_key: [a, b]\nenable-prefix-caching: false\nmax-model-len: 1k\n"
        "override_generation_config: {temperature: 0.5}\nenable_force_include_usage: true\nhost:\n"
    )
    args, settings, _ = given("--config", str(path))
    assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("m.gguf", 1000, False)
    assert (settings.port, settings.api_key, settings.host) == (8080, ["a", "b"], None)
    assert settings.enable_force_include_usage
    assert settings.sampling_defaults == {"temperature": 0.5}
    args, settings, _ = given(
        f"--config={path}",
        "--port",
        "9",
        "--api-key",
        "c",
        "--enable_prefix_caching",
        "--no-enable-force-include-usage",
    )
    assert (settings.port, settings.api_key, args.enable_prefix_caching) == (9, ["c"], True)
    assert not settings.enable_force_include_usage


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prot: 5", "unknown flag --prot; did you mean --port"),
        ("[1, 2]", "must have lines such as 'port: 8080'"),
        ("a: [", "is not YAML"),
        ("1: 2", "must have lines such as"),
        ("port: x", "expected a whole number"),
        ("port: [1, 2]", r"server.yaml: port takes one value, got \[1, 2\]"),
        ("host: true", "host takes one value, got True"),
        ("enable_prefix_caching: maybe", "enable_prefix_caching must be true or false, got 'maybe'"),
        ("config: other.yaml", "config has no place in a file"),
        ("help: true", "help has no place in a file"),
        ("port: 1\nhost: a\nport: 2", "port is on line 1 and again on line 3; say it once"),
        ("max_model_len: 1k\nmax-model-len: 2k", "max-model-len is on line 1 and again on line 2"),
        ("{port: 1, port: 2}", "port is on line 1 and again on line 1"),
        ("override_generation_config: {top_k: 1, top_k: 2}", "top_k is on line 1 and again on line 1"),
    ],
)
def test_files_that_are_refused(tmp_path, text, line):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=line):
        given("--config", str(path))
    path.write_text("")
    given("--config", str(path))


def test_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert given()[1].api_key == ["theirs"]
    assert "MAINSPRING_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("MAINSPRING_API_KEY", "ours")
    assert given()[1].api_key == ["ours"]
    assert given("--api-key", "typed")[1].api_key == ["typed"]
    monkeypatch.setenv("MAINSPRING_SERVER_DEV_MODE", "1")
    assert given()[1].server_dev_mode


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve"]) == 2
    assert (
        capsys.readouterr().err == "mainspring: mainspring serve needs more packages: pip install uvicorn\n"
    )


def test_the_configuration_is_shown_with_reasons(smollm2):
    args, settings = (
        EngineArgs(model=str(smollm2), max_num_batched_tokens=64),
        ServerSettings(api_key=["a", "b"]),
    )
    lines = {line.split()[0]: line for line in serve.describe(args, settings, prepare(args).config)}
    assert "8192, the model's" in lines["max_model_len"]
    assert "64, for no more than max_num_batched_tokens can run in a step" in lines["max_num_seqs"]
    assert lines["enable_prefix_caching"].endswith(" on")
    assert lines["api_key"].endswith(" 2 of them"), "their number alone"


def test_an_import_loads_no_server():
    """The flags alone are cheap: `--help` must not wait for a web framework."""
    show = (
        "from mainspring.cli import main; import sys; main(['serve', '--help']); print('got:', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", show],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=60,
    )
    loaded = done.stdout.partition("got: ")[2].split()
    assert "mainspring.cli.serve" in loaded
    assert not {"uvicorn", "starlette", "numpy", "tokenizers", "llguidance"} & set(loaded)


# -- the program ---------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


class Program(Address):
    """`mainspring serve` as users start it, on a free port."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mainspring", "serve", *argv, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.said: list[str] = []
        first = self.process.stderr.readline()
        found = re.search(r"listening on http://127.0.0.1:(\d+)", first)
        assert found, first + self.process.stderr.read()
        super().__init__(int(found[1]))

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.get("/readyz").status == 200, "readiness")

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        try:
            _, rest = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # it writes where its threads are
            raise AssertionError(f"it does not end: {self.process.communicate()[1][-4000:]}") from None
        return self.process.returncode, rest

    def children(self) -> list[int]:
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]


@contextmanager
def program(*argv: str) -> Iterator[Program]:
    started = Program(*argv)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_from_beginning_to_end(smollm2):
    """The port is open before the model is there; answers are the model's; SIGTERM ends all, status 0."""
    with program(str(smollm2), "--served-model-name", "smol", "--max-model-len", "512") as server:
        assert server.get("/livez").status == 200
        assert server.get("/readyz").status == 503
        server.wait_until_ready()
        children = server.children()
        assert children
        question = [{"role": "user", "content": "What is the capital of Germany?"}]
        body = server.chat(question, temperature=0, max_tokens=8, model="smol").json
        assert body["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
        server.process.send_signal(signal.SIGTERM)
        status, said = server.end()
        assert (status, said.splitlines()[-1]) == (0, "ended")
        assert re.search(r"max_model_len +512\n", said)
        assert re.search(r"ready after [\d.]+ s: http://127.0.0.1:\d+/v1\n", said)
        assert all(map(is_gone, children))


@pytest.mark.parametrize(
    ("flags", "ranks", "labels"),
    [
        (["--data-parallel-hybrid-lb", "-dpl", "2", "-dpr", "5"], range(5, 7), ["engine 5", "engine 6"]),
        (["--data-parallel-rank", "6", "-pp", "2"], range(6, 7), ["engine 6 worker 0", "engine 6 worker 1"]),
    ],
)
def test_some_of_the_engines_of_several_servers(smollm2, flags, ranks, labels):
    """Requests, metrics and the log know them by their ranks among all."""
    with program(str(smollm2), "-dp", "8", *flags, "--max-model-len", "128") as server:
        server.wait_until_ready()
        assert len(server.children()) == len(ranks)
        for rank in range(4, 8):
            body = {"messages": HELLO, "max_tokens": 2}
            reply = server.post("/v1/chat/completions", body, **{"x-data-parallel-rank": str(rank)})
            assert reply.status == (200 if rank in ranks else 400)
        assert re.search("data_parallel_rank 7 must be (from 5 to 6|6: there is one)", reply.error["message"])
        page = server.get("/metrics").body.decode()
        engines = re.findall(r'num_requests_running{.*engine="(\d+)"', page)
        assert {*map(int, engines)} == {*ranks}
        server.process.send_signal(signal.SIGTERM)
        status, said = server.end()
        assert status == 0
        pools = re.findall(r"\[(.+?)\] INFO .* KV cache: [\d.]+ GiB, one of 2 equal shares of", said)
        assert sorted(pools) == labels


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["-tp", "2"], "tensor_parallel_size 2 does not divide this model"),
        (["-pp", "31"], "pipeline_parallel_size 31 must be at most 30, the layers of the model"),
    ],
)
def test_what_the_model_does_not_allow_is_said_and_nothing_else(smollm2, flags, line):
    with program(str(smollm2), *flags, "--quiet") as server:
        status, said = server.end()
    assert status == 2
    assert said.startswith(f"mainspring: {line}")
    assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "reason"), [("30", "length"), ("0", "abort")])
def test_sigterm_under_64_streams(smollm2, timeout_s, reason):
    """Case B031: with time none is lost; without, each ends with a last chunk that says so."""
    num_tokens = 4 if reason == "length" else 400
    body = {"messages": HELLO, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with program(str(smollm2), "--max-model-len", "512", "--shutdown-timeout", timeout_s) as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(64) as clients:
            streams = [clients.submit(server.post, "/v1/chat/completions", body) for _ in range(64)]
            wait_until(lambda: server.get("/load").json == {"server_load": 64})
            server.process.send_signal(signal.SIGTERM)
            reasons = [s.result(60).events[-1]["choices"][0]["finish_reason"] for s in streams]
        assert reasons == [reason] * 64
        assert server.end()[0] == 0


def test_a_signal_to_all_processes_at_once(smollm2):
    """As a supervisor sends it to a group of processes: the core finishes what the server waits for."""
    body = {"messages": HELLO, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with program(str(smollm2), "--max-model-len", "512", "--shutdown-timeout", "30") as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(1) as client:
            stream = client.submit(server.post, "/v1/chat/completions", body)
            wait_until(lambda: server.get("/load").json == {"server_load": 1})
            for pid in (*server.children(), server.process.pid):
                os.kill(pid, signal.SIGTERM)
            assert stream.result(60).events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end()[0] == 0


def test_a_signal_while_loading_ends_all(smollm2):
    """Case B007: nothing is waited for, nobody stays."""
    with program(str(smollm2)) as server:
        wait_until(server.children)
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        begun_s = time.monotonic()
        status, said = server.end()
        assert status == 0
        assert time.monotonic() - begun_s < 5.0
        assert "told to end while the model was loading" in said or "ended" in said
        wait_until(lambda: all(map(is_gone, children)))


@pytest.mark.parametrize("phase", ["loading", "serving"])
def test_a_server_that_is_killed_takes_its_core_along(smollm2, phase):
    """Case B028."""
    with program(str(smollm2), "--max-model-len", "512") as server:
        if phase == "serving":
            server.wait_until_ready()
        [core] = wait_until(server.children)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: is_gone(core))


def test_a_second_signal_does_not_wait_and_leaves_nothing(smollm2):
    """Case B029: what is left is aborted at once, the end is orderly, however many signals come."""
    body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with program(str(smollm2), "--max-model-len", "512", "--shutdown-timeout", "60") as server:
        server.wait_until_ready()
        children = server.children()
        connection, response = server.send("POST", "/v1/chat/completions", body)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/livez").json == {"status": "draining"})
        for _ in range(3):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert b'"finish_reason":"abort"' in response.read()
        connection.close()
        status, said = server.end()
        assert (status, said.splitlines()[-1]) == (0, "ended")
        assert "Traceback" not in said
        assert all(map(is_gone, children))


def test_a_model_that_is_none_is_one_line(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"no model")
    with program(str(path)) as server:
        status, said = server.end()
    assert status == 2
    assert re.search(r"^mainspring: .*bad.gguf", said.splitlines()[-1])
    assert "Traceback" not in said


def test_a_core_that_is_killed_is_told(smollm2):
    """Case B001: the server says so, to everybody, until it is ended."""
    with program(str(smollm2), "--max-model-len", "512") as server:
        server.wait_until_ready()
        [core] = server.children()
        connection, response = server.send(
            "POST",
            "/v1/chat/completions",
            {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True},
        )
        os.kill(core, signal.SIGKILL)
        *_, error, done, _ = response.read().decode().split("\n\n")
        assert "killed by SIGKILL" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        connection.close()
        for _ in range(2):
            assert server.get("/health").status == 503
            assert server.get("/livez").status == 503
            assert "SIGKILL" in server.chat().error["message"]
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


@pytest.mark.slow
def test_tls(smollm2, tmp_path):
    """With a certificate of our own making, if there is a program that makes one."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=False,
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mainspring", "serve", str(smollm2), "--port", "0"),
            *("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        import ssl

        port = int(re.search(r"listening on https://127.0.0.1:(\d+)", process.stderr.readline())[1])
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=PATIENCE_S)
        connection.request("GET", "/livez")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
