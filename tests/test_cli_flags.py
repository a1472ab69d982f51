"""What may be typed: the dialect of vLLM's users, help that fits a screen, mistakes answered in a line."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.cli import bench, main, program, serve, vllm_flags
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import (
    LOG_VARIABLES,
    add_common_flags,
    add_engine_flags,
    add_flag,
    engine_arguments,
    log_level,
)
from mainspring.server.settings import ServerSettings

SCREEN = 40  # lines


def parser(*argv: str) -> Parser:
    made = Parser("test", "", (), argv)
    add_flag(made.add_argument_group("objects"), "kwargs", dict[str, Any], "an object")
    add_engine_flags(made)
    add_common_flags(made)
    return made


def read(*argv: str) -> Any:
    return parser(*argv).read(argv)


# --- objects ------------------------------------------------------------------------------------------------


def test_dots_reach_into_objects():
    given = read("--kwargs.a_b", "1", "--kwargs.c.d=true", "--kwargs.c.e", "some text", "--kwargs.f={}")
    assert given.kwargs == {"a_b": 1, "c": {"d": True, "e": "some text"}, "f": {}}


def test_objects_given_in_pieces_are_one():
    given = read("--kwargs", '{"a": {"x": 1}, "b": 2}', "--kwargs.a.y", "3", "--kwargs.b", "4")
    assert given.kwargs == {"a": {"x": 1, "y": 3}, "b": 4}


def test_a_dot_means_nothing_elsewhere():
    assert read("--model", "a.b").model == "a.b"
    with pytest.raises(ConfigError, match=r"unknown flag --seed\.x"):
        read("--seed.x", "1")
    with pytest.raises(ConfigError, match=r"--kwargs\.x: expected one argument"):
        read("--kwargs.x")


# --- the file, for every command that has an engine ---------------------------------------------------------


def test_a_file_of_flags(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("max_model_len: 1k\nseed: 3\nkwargs: {a: {x: 1}}\n")
    given = read("--config", str(path), "--seed", "4", "--kwargs.a.y", "2")
    assert engine_arguments(given) == {"max_model_len": 1000, "seed": 4}
    assert given.kwargs == {"a": {"x": 1, "y": 2}}


def test_a_file_that_goes_in_circles_is_no_trouble(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("kwargs: &a\n  b: [*a]\n")
    with pytest.raises(ConfigError, match="kwargs has something that is no JSON"):
        read("--config", str(path))


# --- vLLM's other flags -------------------------------------------------------------------------------------


def test_what_asks_for_nothing_else_is_taken(capsys: pytest.CaptureFixture[str]):
    argv = ["--convert", "none", "--tokenizer_mode=auto", "--nnodes", "1", "-q", "q8", "-tp", "1"]
    argv += ["--structured-outputs-config.backend", "guidance", "--guided-decoding-backend", "auto"]
    assert engine_arguments(read(*argv)) == {"quantization": "q8", "tensor_parallel_size": 1}
    assert capsys.readouterr().err == ""
    read("--swap-space", "4", "--disable-log-requests", "-O3")
    said = "".join(
        f"{flag} has no effect here\n" for flag in ("--swap-space", "--disable-log-requests", "-O")
    )
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--convert", "embed"], "--convert embed is not supported yet; give auto or none"),
        (
            ["--logprobs-mode=raw_logits"],
            "--logprobs-mode raw_logits is not supported yet; give raw_logprobs",
        ),
        (["--speculative-config", "{}"], "--speculative-config: draft tokens (speculative decoding) are not"),
        (["-sc", "{}"], "-sc: draft tokens (speculative decoding) are not supported yet; leave it out"),
        (
            ["--kv-transfer-config", "{}"],
            "--kv-transfer-config: KV transfer between machines is not supported",
        ),
        (["--max-loras=2"], "--max-loras: adapters (LoRA) are not supported yet; leave it out"),
        (
            ["--headless"],
            "--headless: engines without a server are not supported yet; see --data-parallel-hybrid-lb",
        ),
        (["--structured-outputs-config.backend", "outlines"], "--structured-outputs-config.backend"),
        (["--structured-outputs-config.back", "auto"], "--structured-outputs-config.back is not known"),
        (["--kv-transfer-config.kv_role", "x"], "--kv-transfer-config.kv_role: KV transfer between machines"),
        (["--rope-scaling", "{}"], "--rope-scaling is not supported yet; leave it out"),
    ],
)
def test_what_cannot_be_had_is_said_by_name(argv: list[str], line: str):
    with pytest.raises(ConfigError) as refusal:
        read(*argv)
    assert str(refusal.value).startswith(line)


def test_what_is_a_setting_has_no_row():
    """The table is for flags that set nothing: a row goes when its setting comes."""
    settings = {f.name.replace("_", "-") for f in (*fields(EngineArgs), *fields(ServerSettings))}
    rows = {flag.name for flag in vllm_flags.foreign_flags()} | vllm_flags.REFUSED.keys()
    assert not (rows | vllm_flags.FITTING_OBJECTS.keys()) & settings


# What users of vLLM pass to a server, with a value where it takes one.
VLLM = """
--model=a --served-model-name=a --tokenizer=a --tokenizer-mode=auto --revision=a --tokenizer-revision=a
--trust-remote-code --dtype=auto --quantization=q8 -q=q8 --load-format=auto --download-dir=a --hf-token=a
--hf-overrides={} --max-model-len=auto --seed=0 --max-logprobs=5 --logprobs-mode=raw_logprobs
--generation-config=auto --override-generation-config={} --skip-tokenizer-init --enforce-eager --runner=auto
--convert=auto --pooler-config={} --block-size=16 --gpu-memory-utilization=0.9 --kv-cache-memory-bytes=1g
--num-gpu-blocks-override=9 --kv-cache-dtype=auto --enable-prefix-caching --no-enable-prefix-caching
--prefix-caching-hash-algo=sha256 --max-num-seqs=4 --max-num-batched-tokens=2k --enable-chunked-prefill
--long-prefill-token-threshold=4 --scheduling-policy=fcfs --async-scheduling --stream-interval=1
--max-num-queued-reqs=5 --max-num-queued-tokens=5 -tp=1 -pp=1 -dp=1 --data-parallel-size-local=1
--data-parallel-address=a --data-parallel-rpc-port=1 --data-parallel-start-rank=0 --data-parallel-backend=mp
--distributed-executor-backend=mp --nnodes=1 --node-rank=0 --master-addr=a --master-port=1 --headless
--api-server-count=1 --structured-outputs-config={} --structured-outputs-config.backend=guidance
--reasoning-parser=a --speculative-config={} -sc={} --spec-method=a --spec-model=a --spec-tokens=1
--host=a --port=1 --uds=a --root-path=a --api-key=a --allowed-origins=["a"] --allowed-methods=["a"]
--allowed-headers=["a"] --allow-credentials --ssl-keyfile=a --ssl-certfile=a --ssl-ca-certs=a
--ssl-cert-reqs=0
--chat-template=a --chat-template-content-format=auto --default-chat-template-kwargs={}
--default-chat-template-kwargs.a=1 --trust-request-chat-template --response-role=a --enable-auto-tool-choice
--tool-call-parser=a --enable-request-id-headers --enable-force-include-usage --enable-prompt-tokens-details
--enable-server-load-tracking --enable-tokenizer-info-endpoint --enable-per-request-metrics
--sse-keep-alive-interval=1 --return-tokens-as-token-ids --disable-fastapi-docs --uvicorn-log-level=info
--disable-uvicorn-access-log --disable-access-log-for-endpoints=/a --enable-log-requests --max-log-len=5
--disable-log-stats --log-level=info --log-config-file=a --otlp-traces-endpoint=a
--collect-detailed-traces=all
--shutdown-timeout=1 --middleware=a --use-tqdm-on-load --fingerprint-mode=a
--disable-custom-all-reduce --enable-expert-parallel --compilation-config={} -O=3 --optimization-level=2
--cudagraph-capture-sizes=1 --attention-backend=a --swap-space=4 --disable-log-requests --enable-sleep-mode
--cpu-offload-gb=1 --numa-bind --performance-mode=a --model-impl=auto
--enable-lora --max-loras=1 --lora-modules=a --limit-mm-per-prompt={} --mm-processor-kwargs={}
--mamba-cache-dtype=a --enable-eplb --eplb-config={} --kv-transfer-config={} --weight-transfer-config={}
"""


@pytest.mark.parametrize("word", VLLM.split())
def test_no_flag_of_vllm_is_a_stranger(word: str):
    """Each sets something, or is taken with a word, or is refused by its name."""
    flag, _, value = word.partition("=")
    words = [flag, value] if value else [flag]
    refused = None
    try:
        serve._parser(words).read(words)
    except ConfigError as refusal:
        refused = str(refusal)
    name = flag.partition(".")[0]
    assert refused is None or (refused.startswith(name) and "not supported yet" in refused)


@pytest.mark.parametrize(("word", "flag"), [("-p", "-pp"), ("-t", "-tp"), ("-d", "-dp")])
def test_the_beginning_of_a_short_flag_is_no_flag(word: str, flag: str):
    """What means something else in llama.cpp must not become a number of processes."""
    with pytest.raises(ConfigError, match=f"unknown flag {word};"):
        serve._parser([]).read([word, "2"])
    assert 2 in vars(serve._parser([]).read([flag, "2"])).values()
    serve._parser([]).read(["-O3"])  # a flag and its value


def test_how_much_is_logged(monkeypatch: pytest.MonkeyPatch):
    for name in LOG_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert log_level(read("--log-level", "DEBUG", "--verbose")) == "debug"
    assert log_level(read("--verbose")) == "info"
    assert log_level(read()) is None
    assert log_level(read(), "warning") == "warning"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert log_level(read(), "warning") == "error"
    monkeypatch.setenv("MAINSPRING_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="MAINSPRING_LOG_LEVEL 'loud' in the environment must be"):
        log_level(read())


# --- help ---------------------------------------------------------------------------------------------------

COMMANDS = [[name] for name in program.COMMANDS if name != "bench"] + [
    ["bench", name] for name in bench.BENCHES
]


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_a_screen(command: list[str], monkeypatch, capsys: pytest.CaptureFixture[str]):
    """The everyday help does, and of all flags each group."""
    monkeypatch.setenv("COLUMNS", "100")
    everyday = shown(capsys, *command, "--help").splitlines()
    assert len(everyday) <= SCREEN + 10, "with the examples"
    assert max(map(len, everyday)) <= 110
    groups = json.loads(shown(capsys, *command, "--help=json"))["groups"]
    for group in groups:
        lines = shown(capsys, *command, f"--help={group['title']}").splitlines()
        assert lines[0] == f"{group['title']}:"
        assert len(lines) <= SCREEN, group["title"]
        assert max(map(len, lines)) <= 100
        assert all(flag["help"] for flag in group["flags"])


def test_help_of_a_word(capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, "generate", "--help=batched_tokens").splitlines()
    assert lines[0] == "scheduling:"
    assert re.match(" *--max-num-batched-tokens N ", lines[1])
    assert len(lines) == 2
    assert shown(capsys, "generate", "--help=--seed").splitlines()[1].startswith("  --seed N")
    assert main(["generate", "--help=nonsense"]) == 2
    assert "the groups are the text, choosing tokens" in capsys.readouterr().err


def test_help_for_programs(capsys: pytest.CaptureFixture[str]):
    assert json.loads(shown(capsys, "--help=json"))["commands"].keys() == program.COMMANDS.keys()
    found = json.loads(shown(capsys, "serve", "--help=json"))
    flags = {name: flag for group in found["groups"] for flag in group["flags"] for name in flag["names"]}
    assert found["command"] == "serve"
    assert flags["--kernels"]["choices"] == ["auto", "native", "numpy"]
    assert flags["--port"]["takes"] == "N"
    assert flags["--enable-prefix-caching"] == flags["--no-enable-prefix-caching"]
    assert flags["--enable-prefix-caching"]["takes"] is None
    assert "--swap-space" not in flags


def test_the_document_of_flags_is_current():
    script = Path(__file__).parents[1] / "docs" / "make_flags.py"
    made = runpy.run_path(str(script))
    current = made["DOCUMENT"].read_text() == made["document"]()
    assert current, "run python docs/make_flags.py"


# --- mistakes -----------------------------------------------------------------------------------------------

WRONG = {
    "generat": "did you mean generate?",
    "sevre": "did you mean serve?",
    "bench thruput": "did you mean throughput?",
    "generate --promt hello": "did you mean --prompt?",
    "generate --prompt a --max_token 5": "did you mean --max-tokens?",
    "generate --prompt a --tempreature 0": "did you mean --temperature?",
    "generate --prompt a -max-tokens 5": "did you mean --max-tokens?",
    "generate --prompt a --kernels=natve": "did you mean native?",
    "generate --prompt a --max-tokens many": "expected a whole number such as 512",
    "generate --prompt a --temperature warm": "expected a number such as 0.7",
    "generate --prompt a --no-temperature": "did you mean --temperature?",
    "generate --prompt a --logit-bias 5": "expected a JSON object",
    "generate --prompt": "--prompt: expected one argument",
    "generate hello": "'hello' belongs to no flag",
    "chat --sytem x": "did you mean --system?",
    "chat --prompt a --kv-cache-dtype flaot16": "did you mean float16?",
    "serve --prot 80": "did you mean --port?",
    "serve --max-models-len 5": "did you mean --max-model-len?",
    "serve --tensor-paralel-size 2": "did you mean --tensor-parallel-size?",
    "serve --api_keys a": "did you mean --api-key?",
    "serve --scheduling-policy fifo": "there are fcfs, priority",
    "serve --enable-lora": "adapters (LoRA) are not supported yet",
    "pull smollm-135m": "did you mean smollm2-135m?",
    "doctor --modle x": "did you mean --model?",
    "cache --claer": "did you mean --clear?",
    "bench throughput --repeat 3": "did you mean --repeats?",
    "bench serve --num-prompt 3": "did you mean --num-prompts?",
    "bench latency --batchsize 3": "did you mean --batch-size?",
    "bench throughput --num-prompts 0": "num_prompts 0 must be at least 1",
    "run-batch --input x": "did you mean --input-file?",
    "run-batsh -i x": "did you mean run-batch?",
    "complete --quik hello": "did you mean --quick?",
    "models remvoe smollm2-135m": "did you mean remove?",
    "bench startup --repeats 0": "--repeats 0 must be at least 1",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_answered_in_a_line(line: str, capsys: pytest.CaptureFixture[str]):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mainspring: ")
    assert err.count("\n") == 1
    assert WRONG[line] in err
