"""mainspring beside vLLM's CPU build, llama.cpp and OpenVINO GenAI: the same model, prompts and minutes.

    python benchmarks/peers.py                           # everything; the first time installs 5 GB of peers
    python benchmarks/peers.py --workloads one-stream,batch-8 --peers llama-cpp-python --rounds 3
    python benchmarks/peers.py --kernels native --busy   # settings of mainspring; a busy neighbour

1. Each peer gets an environment of its own under the cache directory (`peers/engines.py`), and the model in
   the form it wants (`peers/weights.py`): the GGUF file, for vLLM its weights in bfloat16.
2. Each engine runs in a process of its own environment (`peers/runners/`), with all cores and its best
   documented settings, which are printed. All stay loaded and take turns, A B C D A B C D ...; a first round
   is not counted. Answers are greedy and of exact length, which is checked.
3. A figure is the median over the rounds; a ratio is taken within each round (`peers/report.py`).

Table and settings go to standard output, progress to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError, EngineError
from mainspring.bench.throughput import TOKEN_RANGE
from mainspring.checkpoint.catalog import resolve_model
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_engine_flags, add_flag, engine_arguments
from mainspring.frontend.tokenizer import Tokenizer
from peers import report, workloads
from peers.engines import PEERS, Engine, EngineFailed, Peer, Recipe, installed, ours, start_s, theirs
from peers.report import Ceilings, Facts
from peers.weights import gguf_16_bit, hf_folder
from peers.workloads import OURS, OURS_16_BIT, WORKLOADS, Workload

DEFAULT_CACHE = Path("~/.cache/mainspring/peers")
MAX_LEN = 2048  # of a prompt and its answer, for engines that must know; the longest here has 1,080 tokens
IDLE_LOAD = 0.3  # a load average above it: somebody else is at work
SAME_MODEL_PROMPT, SAME_MODEL_TOKENS = "The capital of France is", 8
MEASURE_CEILINGS = """
import json, mainspring_native as native
from mainspring.kernels.native import choose_variant
print(json.dumps(native.measure_ceilings(choose_variant("auto"), native.num_usable_cpus())[-1]))
"""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Comparison:
    """Who takes part, what they run, and what was found. Whoever fails is left out, and why is kept."""

    def __init__(self, rounds: int, model: Path) -> None:
        self.failed: dict[str, str] = {}
        self.engines: dict[str, dict[str, Any]] = {}  # version and settings
        self.same_model: dict[str, dict[str, Any]] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self._rounds = rounds
        self._model = model
        self._recipes: dict[str, Recipe] = {}
        self._loaded: dict[str, Engine] = {}

    def add(self, name: str, recipe: Callable[[], Recipe]) -> None:
        with self._leaves_out(name):
            self._recipes[name] = recipe()

    @contextmanager
    def _leaves_out(self, name: str) -> Iterator[None]:
        """Whoever fails inside takes no further part. Ours may not fail: then there is nothing to compare."""
        try:
            yield
        except EngineFailed as error:
            if name in (OURS, OURS_16_BIT):
                raise
            say(f"{name} takes no further part: {error}")
            self.failed[name] = str(error)
            self._recipes.pop(name, None)
            if engine := self._loaded.pop(name, None):
                engine.close()

    # --- starting -------------------------------------------------------------------------------------------

    def measure_starts(self) -> None:
        """Nothing else is loaded meanwhile. Round 0, which fills all caches, is not counted."""
        seconds: dict[str, list[float]] = {name: [] for name in self._recipes if name != OURS_16_BIT}
        prompt = list(TOKEN_RANGE[: workloads.START_PROMPT_TOKENS])
        for number in range(self._rounds + 1):
            for name in self._taking_part(seconds):
                with self._leaves_out(name):
                    took_s = start_s(self._recipes[name], prompt)
                    say(f"{workloads.START} round {number}: {name} {took_s:.2f} s")
                    seconds[name] += [took_s] if number else []
        self._book(workloads.START, report.START_TITLE, seconds, None)

    # --- loaded ---------------------------------------------------------------------------------------------

    def load(self) -> None:
        with GGUFFile(self._model) as file:
            tokenizer = Tokenizer.from_gguf(file)
        prompt = tokenizer.encode(SAME_MODEL_PROMPT)
        for name in list(self._recipes):
            with self._leaves_out(name):
                say(f"loading {name}")
                engine = self._loaded[name] = Engine(self._recipes[name])
                self.engines[name] = {
                    "version": engine.version,
                    "settings": engine.settings,
                    "ready_s": round(engine.ready_s, 2),
                }
                tokens = engine.run([prompt], SAME_MODEL_TOKENS).outputs[0]
                engine.pause()
                self.same_model[name] = {"tokens": tokens, "text": tokenizer.decode(tokens)}
                said = f"{SAME_MODEL_PROMPT!r} -> {tokenizer.decode(tokens)!r} {tokens}"
                say(f"  ready in {engine.ready_s:.2f} s; {said}")

    def measure(self, workload: Workload) -> None:
        """All rounds of one workload. Round 0 warms up and is not counted."""
        names = workloads.contenders(workload, [name for name in self._loaded if name in PEERS])
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self._rounds + 1):
            prompts = workload.prompts(number)
            for name in self._taking_part(seconds):
                with self._leaves_out(name):
                    engine = self._loaded[name]
                    done = engine.run(prompts, workload.num_output_tokens, workload.num_common_tokens)
                    engine.pause()
                    took_s = done.seconds
                    rate = workload.num_counted_tokens / took_s
                    say(f"{workload.name} round {number}: {name} {rate:.1f} tokens/s")
                    seconds[name] += [took_s] if number else []
        self._book(workload.name, workload.title, seconds, workload.num_counted_tokens)

    def _taking_part(self, seconds: dict[str, list[float]]) -> list[str]:
        return [name for name in seconds if name not in self.failed]

    def _book(self, name: str, title: str, seconds: dict[str, list[float]], num_tokens: int | None) -> None:
        whole = {engine: values for engine, values in seconds.items() if len(values) == self._rounds}
        self.found[name] = {"title": title, **report.figures(whole, num_tokens)}

    def close(self) -> None:
        for engine in self._loaded.values():
            engine.close()


# ---- the machine and the model -----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = about.get("flags", "").split()
    return {
        "cpu": about.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c"))],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def facts_of(model: Path) -> Facts:
    """The head of a model whose embedding has no second matrix beside it is that embedding."""
    with GGUFFile(model) as file:
        infos = [file.info(name) for name in file.tensor_names]
    size = {info.name: info.shape[0] * info.shape[1] for info in infos if len(info.shape) == 2}
    tied = "output.weight" not in size
    return Facts(
        weight_bytes=sum(info.num_bytes for info in infos if tied or info.name != "token_embd.weight"),
        layer_macs=sum(macs for name, macs in size.items() if name.startswith("blk.")),
        head_macs=size["token_embd.weight" if tied else "output.weight"],
    )


def measure_ceilings() -> Ceilings | str:
    """What the machine can do, or why that is not known. In a process of its own: its threads end with it."""
    command = [sys.executable, "-c", MEASURE_CEILINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the native library does not tell ({done.stderr.strip().splitlines()[-1]})"
    measured = json.loads(done.stdout)
    return Ceilings(*(float(measured[name]) for name in Ceilings._fields))


@contextmanager
def busy_neighbour(wanted: bool) -> Iterator[None]:
    """Another process that keeps one core busy."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            yield
        finally:
            neighbour.kill()


# ---- the command -------------------------------------------------------------------------------------------


def read_arguments(argv: Sequence[str]) -> Namespace:
    parser = Parser("peers", "Compare mainspring with other engines on this machine.", (), argv)
    parser.prog, parser.usage = "benchmarks/peers.py", "python %(prog)s [flags]"
    parser.epilog = None
    group = parser.add_argument_group("the comparison")
    add_flag(group, "rounds", int, "counted rounds (default: 5)", default=5)
    add_flag(group, "workloads", str, f"of {','.join(workloads.NAMES)} (default: all)", default=None)
    add_flag(group, "peers", str, f"of {','.join(PEERS)} (default: all)", default=None)
    add_flag(group, "busy", bool, "keep one core busy meanwhile", default=False)
    add_flag(group, "cache_dir", str, f"where the peers live (default: {DEFAULT_CACHE})", default=None)
    add_flag(group, "json", str, "write everything to this file", default=None)
    add_flag(group, "table", str, "write the Markdown table to this file", default=None)
    add_flag(group, "plot", str, "write an SVG to this file", default=None)
    add_engine_flags(parser)
    parser.add_argument_group("and").add_argument("--help", "-h", action="help", help="this")
    return parser.read(argv)


def compare(given: Namespace) -> dict[str, Any]:
    if given.rounds < 1:
        raise ConfigError(f"--rounds {given.rounds} must be at least 1")
    wanted = workloads.chosen(given.workloads, workloads.NAMES, "workload")
    peers = workloads.chosen(given.peers, list(PEERS), "peer")
    settings = engine_arguments(given)
    name = settings.pop("model", EngineArgs().model)
    model = resolve_model(name, fetch=True)
    cache_dir = Path(given.cache_dir or DEFAULT_CACHE).expanduser()
    to_run = [workload for workload in WORKLOADS if workload.name in wanted]
    comparison = Comparison(given.rounds, model)
    add_engines(comparison, to_run, peers, settings, model, cache_dir)

    load_before = os.getloadavg()[0]
    if load_before > IDLE_LOAD:
        say(f"warning: the load average is {load_before:.2f}: this machine is not idle, figures will be low")
    ceilings = measure_ceilings()
    with ExitStack() as stack:
        stack.callback(comparison.close)
        stack.enter_context(busy_neighbour(given.busy))
        if workloads.START in wanted:
            comparison.measure_starts()
        if to_run:
            comparison.load()
        for workload in to_run:
            comparison.measure(workload)
    load_after = os.getloadavg()[0]
    if isinstance(ceilings, Ceilings):
        # A neighbour may have taken part of the first measurement, or of the second.
        ceilings = report.highest(ceilings, measure_ceilings())
        facts = facts_of(model)
        for workload in to_run:
            found = comparison.found[workload.name]
            found["of_ceiling"] = report.of_ceiling(workload, found["median_s"], facts, ceilings)
    titles = {OURS: "mainspring", OURS_16_BIT: "mainspring, 16-bit weights"}
    return {
        "model": name,
        "rounds": given.rounds,
        "busy": given.busy,
        "machine": machine(),
        "load_average": {"start": round(load_before, 2), "end": round(load_after, 2)},
        "ceilings": None if isinstance(ceilings, str) else ceilings._asdict(),
        "no_ceilings": ceilings if isinstance(ceilings, str) else None,
        "ours": list(titles),
        "titles": titles | {peer: PEERS[peer].title for peer in peers if peer not in comparison.failed},
        "engines": comparison.engines,
        "failed": comparison.failed,
        "same_model": {"prompt": SAME_MODEL_PROMPT, "answers": comparison.same_model},
        "workloads": comparison.found,
    }


def add_engines(
    comparison: Comparison,
    to_run: Sequence[Workload],
    peers: Sequence[str],
    settings: dict[str, Any],
    model: Path,
    cache_dir: Path,
) -> None:
    models = cache_dir / "models"
    load = {
        "num_threads": len(os.sched_getaffinity(0)),
        "max_requests": max(workload.num_requests for workload in WORKLOADS),
        "max_len": MAX_LEN,
        "num_kv_tokens": max(workload.num_requests * workload.max_len for workload in WORKLOADS),
    }
    comparison.add(OURS, lambda: ours(OURS, model, settings, load, cache_dir))
    if any(workload.in_16_bit for workload in to_run):
        comparison.add(
            OURS_16_BIT,
            lambda: ours(OURS_16_BIT, gguf_16_bit(model, models), settings, load, cache_dir),
        )
    for name in peers:
        peer = PEERS[name]

        def recipe(peer: Peer = peer) -> Recipe:
            python = installed(peer, cache_dir, say)
            theirs_model = hf_folder(model, models) if peer.reads_folder else model
            return theirs(peer, python, theirs_model, load, cache_dir)

        comparison.add(name, recipe)


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines are ended, too
    try:
        given = read_arguments(argv)
        result = compare(given)
    except (EngineError, EngineFailed) as error:
        say(f"error: {error}")
        return 2
    table = f"{report.table(result)}\n\n{report.description(result)}\n"
    print(f"{table}\n{report.verdicts(result)}")
    for file, text in (
        (given.json, json.dumps(result, indent=1) + "\n"),
        (given.table, table),
        (given.plot, report.plot(result)),
    ):
        if file:
            Path(file).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
