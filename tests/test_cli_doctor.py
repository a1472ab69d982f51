"""`mainspring doctor`: what it says of a machine and of a model, and that an engine then does just that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mainspring.base import cores
from mainspring.base.config import EngineArgs
from mainspring.cli import doctor, forecast, main
from mainspring.engine.build import build_engine
from mainspring.frontend.llm_engine import prepare
from mainspring.kernels.native import library

GIB = 2**30
CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
NUMBERS = 96 * 32 + 3 * (32 + 2 * 16 * 32 + 2 * 16 * 32 + 32 * 32 + 32 + 3 * 32 * 48) + 32


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, forecast):
        monkeypatch.setattr(module, "free_memory_bytes", lambda: 4 * GIB)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """Settings of a model of which nothing is on this disk but its shape."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return {"model": str(path), "load_format": "dummy", "skip_tokenizer_init": True, "kernels": "numpy"}


def flags(settings: dict[str, Any]) -> list[str]:
    words = {"--" + name.replace("_", "-"): value for name, value in settings.items()}
    return [
        word for flag, value in words.items() for word in ([flag] if value is True else [flag, str(value)])
    ]


# --- the machine --------------------------------------------------------------------------------------------


def test_the_machine(smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cores, "cpu_quota", lambda *roots: 0.5)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 0.5)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] in ("numpy", "native")
    assert found["free_memory_bytes"] == 4 * GIB
    assert (found["num_usable_cores"], found["cpu_quota"]) == (1, 0.5)
    assert 1 <= found["num_allowed_cores"] <= found["num_cores"]
    assert found["cached_models"]["smollm2-135m"] == str(smollm2)
    assert found["model"]["name"] == "smollm2-135m"
    if found["kernels"] == "native":
        assert found["speed"]["num_threads"] == 1
        assert found["variant"] in found["variants_gops"]
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "4.0 GiB free" in said
    assert "time of 0.5 by the control group's quota" in said
    assert "smollm2-135m: llama, 135 million parameters" in said


def test_processors_are_read(tmp_path: Path):
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor : 0\nmodel name\t: A CPU: v2\nflags\t: fpu avx2 avx512_vnni sse avxtra\n\nmodel name: B\n"
    )
    assert doctor.read_processor(path) == ("A CPU: v2", ["avx2", "avx512_vnni", "avxtra"])
    path.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm sve2\n")
    assert doctor.read_processor(path) == (None, ["asimd", "asimddp", "i8mm", "sve2"])
    assert doctor.read_processor(tmp_path / "none") == (None, [])


def test_a_machine_without_native_kernels(monkeypatch, capsys: pytest.CaptureFixture[str], tiny):
    monkeypatch.setattr("mainspring.kernels.native.library", lambda: None)
    monkeypatch.setattr("mainspring.kernels.native.why_not", lambda: "none are installed")
    assert main(["doctor", *flags(tiny)]) == 0
    assert "kernels      numpy: none are installed" in capsys.readouterr().out


# --- a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"kv_cache_memory_bytes": 1 << 20},
        {"num_gpu_blocks_override": 40, "block_size": 32},
        {"kv_cache_memory_bytes": 60_000, "max_model_len": "auto"},
        {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 100},
    ],
    ids=str,
)
def test_an_engine_does_what_was_forecast(tiny, more):
    """Case B176: the blocks, and the length that they hold, are known before anything is loaded."""
    args = EngineArgs(**tiny | more)
    told = forecast.forecast(args)
    assert told.problems == told.warnings == []
    assert (told.num_parameters, told.weights_bytes, told.weights_form) == (NUMBERS, 4 * NUMBERS, "float32")
    built = build_engine(prepare(args).config)
    assert (told.num_kv_blocks, told.max_model_len) == (built.kv_config.num_blocks, built.max_model_len)
    assert told.kv_pool_bytes == built.kv_config.num_blocks * built.kv_config.bytes_per_block
    assert told.kv_bytes_per_token * args.block_size == built.kv_config.bytes_per_block
    assert told.max_concurrency >= 1.0
    built.core.shutdown()


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("quantization", [None, "q8"])
def test_a_real_file_is_forecast(smollm2: Path, quantization):
    args = EngineArgs(model=str(smollm2), quantization=quantization, kv_cache_memory_bytes=1 << 28)
    told = forecast.forecast(args)
    assert told.kernels == "native"
    assert told.num_parameters == 134_515_008
    assert told.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    config = msgspec.structs.replace(prepare(args).config, num_threads=1)
    built = build_engine(config)
    assert told.num_kv_blocks == built.kv_config.num_blocks
    assert told.max_model_len == built.max_model_len == 8192
    built.core.shutdown()
    bits = 8 * told.weights_bytes / told.num_parameters
    assert (4 < bits < 6) if quantization is None else (8 < bits < 9)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_model_len": 513}, "max_model_len 513 must be from 2 to 512"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 must be at least 1"),
        ({"quantization": "q8"}, "quantization q8 needs native kernels, and kernels is numpy"),
        ({"kv_cache_memory_bytes": 10}, "10 bytes for the KV cache hold 0 blocks"),
        ({"kv_cache_memory_bytes": 60_000}, "set max_model_len to "),
    ],
)
def test_what_would_be_refused_is_said_before(tiny, more, words, capsys: pytest.CaptureFixture[str]):
    """Case B176: too little memory is told with the numbers, and with what would fit."""
    assert main(["doctor", *flags(tiny | more), "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)["model"]
    assert words in found["problems"][0]
    assert found["problems"][0] in err
    assert err.count("\n") == 1
    assert found["num_parameters"] == NUMBERS, "the rest is told all the same"
    with pytest.raises(ValueError, match=words):
        build_engine(prepare(EngineArgs(**tiny | more)).config)


SPEED = doctor.Speed(num_threads=1, byte_products=4e9, float_products=1e9, model_reads=1e9, memory_reads=1e8)


def words_of(config: dict[str, Any], tmp_path: Path, **more: Any) -> list[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    args = EngineArgs(model=str(path), load_format="dummy", skip_tokenizer_init=True, **more)
    return doctor.model_words(forecast.forecast(args), SPEED)


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
def test_ceilings_of_experts_are_of_those_that_a_token_uses(tmp_path: Path):
    """Two of sixteen; the table is looked up, and the head is for the last token of a prompt alone."""
    experts = {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
    config = CONFIG | experts | {"tie_word_embeddings": False, "hidden_size": 64}
    expert, attention, router, head = 3 * 64 * 48, 6 * 16 * 64, 16 * 64, 96 * 64
    used = 3 * (2 * expert + attention + router)
    first, *_, best = words_of(config, tmp_path)
    assert first.endswith(f"million parameters, of which a token uses {(used + head) / 1e6:.0f}")
    num_bytes = 2 * (used + head + 3 * router)  # which chooses, and stays in 32 bits
    assert best == (
        f"at best: {1e9 / num_bytes:,.0f} tokens/s written by one request, "
        f"{1e9 / (2 * used):,.0f} tokens/s of prompts read"
    )


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
def test_ceilings_of_weights_in_8_bits(tmp_path: Path):
    products = 3 * (6 * 16 * 32 + 3 * 32 * 64)
    *_, best = words_of(CONFIG | {"intermediate_size": 64}, tmp_path, quantization="q8")
    assert best.endswith(f" {4e9 / (2 * products):,.0f} tokens/s of prompts read")


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
def test_an_encoder_has_no_ceiling_of_writing(tmp_path: Path):
    """And what it reads is multiplied in the type that its weights have, without the tables."""
    config = {"model_type": "bert", "vocab_size": 9000, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    config |= {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
    *_, causal, best = words_of(config, tmp_path)
    assert causal == "chunked prefill and prefix caching are off: it has layers that are not causal"
    assert best == f"at best: {1e9 / (2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)):,.0f} tokens/s of texts read"


def test_chunks_that_were_turned_off_say_nothing_of_the_model(tmp_path: Path):
    found = words_of(CONFIG, tmp_path, enable_chunked_prefill=False)
    assert not [line for line in found if "causal" in line]


def test_too_large_for_the_memory(smollm2: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(forecast, "free_memory_bytes", lambda: 2**26)
    assert (
        main(
            [
                "doctor",
                str(smollm2),
                "--kernels",
                "numpy",
                "--max-model-len",
                "64",
                "--num-gpu-blocks-override",
                "9",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "weights: 94 MiB, as they are in the file" in said
    assert "warning: weights are dequantised again in every step, which is slow" in said
    assert "warning: the weights are larger than the memory that is free" in said


def test_nothing_is_fetched(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """A model that was asked for must be here; the default need not be."""
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path))
    assert main(["doctor"]) == 0
    assert "smollm2-135m is not in the cache" in capsys.readouterr().out
    assert main(["doctor", "smollm2-135m"]) == 2
    assert "smollm2-135m is not in the cache" in capsys.readouterr().err
    assert main(["doctor", "--model", "./nowhere.gguf", "--json"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith("mainspring: ./nowhere.gguf: no such file")) == ("", True)
    assert list(tmp_path.iterdir()) == []
