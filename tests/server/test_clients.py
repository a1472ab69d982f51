"""Clients that people use, each in an environment of its own below the cache folder, against a server with
the real model. The first run installs them."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from server_toys import echo, is_idle, running, scripted, wait_until

from mainspring.base.config import EngineArgs
from mainspring.checkpoint.catalog import default_cache_dir
from mainspring.frontend.async_llm import AsyncLLM

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "clients"
KEY = "k1"


def environment(name: str, package: str) -> Path:
    """The folder of programs of an environment that has `package`."""
    folder = default_cache_dir() / "clients" / name
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "--quiet", package], check=True)
        (folder / "installed").touch()
    return folder / "bin"


@pytest.fixture(scope="module")
def server(smollm2):
    # Agents need answers that end: which do must not depend on how a processor's kernels round.
    args = EngineArgs(model=str(smollm2), max_model_len=2048, disable_log_stats=False, activations="int16")
    settings = {"served_model_name": ["smol"], "api_key": [KEY], "enable_tokenizer_info_endpoint": True}
    with running(partial(AsyncLLM.from_engine_args, args), **settings) as found:
        found.headers = {"authorization": f"Bearer {KEY}"}
        yield found
        wait_until(lambda: is_idle(found))


@pytest.mark.parametrize(
    ("name", "package", "script"),
    [
        ("openai2", "openai>=2,<3", "openai_conversation.py"),
        ("openai3", "openai>=3,<4", "openai_conversation.py"),
        ("openai2", "openai>=2,<3", "openai_responses.py"),
        ("openai3", "openai>=3,<4", "openai_responses.py"),
        ("openai2", "openai>=2,<3", "openai_tools.py"),
        ("openai3", "openai>=3,<4", "openai_tools.py"),
        ("langchain-openai", "langchain-openai>=1,<2", "langchain_openai_tools.py"),
        ("instructor", "instructor>=1.10,<2", "instructor_tools.py"),
        ("pydantic-ai", "pydantic-ai-slim[openai]>=2.68,<3", "pydantic_ai_tools.py"),
        ("openai-agents", "openai-agents>=0.4,<1", "openai_agents_tools.py"),
        ("smolagents", "smolagents[openai]>=1.20,<2", "smolagents_tools.py"),
        ("llama-index", "llama-index-llms-openai-like>=0.5,<1", "llama_index_tools.py"),
        ("anthropic", "anthropic>=2,<3", "anthropic_conversation.py"),
        ("litellm", "litellm>=1.80,<2", "litellm_conversation.py"),
        ("litellm", "litellm>=1.80,<2", "litellm_tools.py"),
    ],
)
def test_a_conversation(server, name, package, script):
    python = environment(name, package) / "python"
    base_url = f"http://127.0.0.1:{server.port}/v1"
    done = subprocess.run(
        [str(python), str(SCRIPTS / script), base_url, KEY],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_as_an_evaluation_asks(server):
    """What lm-eval's local-completions sends: token ids of context and continuation together, echo, one
    log-probability, one token more; and the remote tokenizer it makes them with."""
    info = server.get("/tokenizer_info").json
    assert info["eos_token"] == "<|im_end|>"

    def ids(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return server.post("/tokenize", body).json["tokens"]

    context = ids("The capital of France is")
    continuations = [ids(" Paris"), ids(" Rome")]
    prompts = [context + continuation for continuation in continuations]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "model": "smol"}
    choices = server.post("/v1/completions", {"prompt": prompts} | fields).json["choices"]
    scores = []
    for choice, continuation in zip(choices, continuations, strict=True):
        start, end = len(context), len(context) + len(continuation)
        logprobs = choice["logprobs"]["token_logprobs"][start:-1]
        assert len(logprobs) == end - start
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        is_greedy = [max(top, key=top.get) for top in tops] == choice["logprobs"]["tokens"][start:-1]
        scores.append((sum(logprobs), is_greedy))
    (paris, paris_is_greedy), (rome, rome_is_greedy) = scores
    assert paris > rome
    assert (paris_is_greedy, rome_is_greedy) == (True, False)
    assert all(math.isfinite(score) for score, _ in scores)
    until = {"prompt": ["Count: 1, 2,"], "stop": ["7"], "max_tokens": 40, "temperature": 0, "model": "smol"}
    assert "7" not in server.post("/v1/completions", until).json["choices"][0]["text"]


def test_a_fuzzer(tmp_path):
    """From the API's own document: no failure of ours, no status and no body that the document does not have;
    afterwards the server answers and remembers nothing."""
    program = environment("schemathesis", "schemathesis>=4,<5") / "st"
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "unsupported_method"
    )
    with scripted(echo, api_key=[KEY], enable_tokenizer_info_endpoint=True) as server:
        done = subprocess.run(
            [
                *(str(program), "run", f"http://127.0.0.1:{server.port}/openapi.json"),
                *("-H", f"Authorization: Bearer {KEY}", "--max-examples", "60", "--checks", checks),
                *("--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--seed", "1"),
                *("--suppress-health-check", "all"),
            ],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        generated, passed = map(int, done.stdout.split("Test cases:")[1].replace(",", " ").split()[0:4:2])
        assert generated == passed >= 2000
        server.headers = {"x-api-key": KEY}
        assert server.chat().status == 200
        assert not server.core.inner.live
        wait_until(lambda: server.service.num_live == 0)
