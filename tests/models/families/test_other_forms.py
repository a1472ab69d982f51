"""Files of Gemma, Phi and GPT-2 in forms that other converters and older versions wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_fixtures
import numpy as np
import pytest
from family_files import write_folder, write_gguf
from model_toys import Requests, engine_config, kv_config
from safetensors.numpy import save_file

from mainspring.base.errors import CheckpointError
from mainspring.kernels.ops import Floats
from mainspring.models.decoder import Decoder
from mainspring.models.families import from_gguf
from mainspring.models.loader import load_model
from mainspring.models.spec import ModelSpec


def loaded(path: Path) -> Decoder:
    decoder = load_model(engine_config(str(path), load_format="auto", vocab_size=61, kernels="numpy"))
    decoder.initialize_kv(kv_config(decoder))
    return decoder


def check(decoder: Decoder, name: str) -> None:
    fixture = family_fixtures.load(name)
    ids = fixture.token_ids[0]
    requests = Requests([len(ids)], len(kv_config(decoder).groups))
    requests.tokens = [np.array(ids, np.int32)]
    logits = decoder.logits(decoder.forward(requests.batch([len(ids)])))
    np.testing.assert_allclose(logits, fixture.logits[0], rtol=0, atol=1e-4)


def test_gpt_2_as_first_published(tmp_path: Path) -> None:
    """Names without `transformer.`, and each layer's triangle of ones beside its weights."""
    write_folder(family_fixtures.load("gpt2"), tmp_path)
    tensors = family_fixtures.load("gpt2").tensors()
    tensors = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 128, 128), np.float32))
        tensors[f"h.{layer}.attn.masked_bias"] = np.array([-1e4], np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(loaded(tmp_path), "gpt2")


def test_gpt_2_with_the_embedding_twice(tmp_path: Path) -> None:
    """Case B152: a head that is in the file is used; here it is the same."""
    fixture = family_fixtures.load("gpt2")
    embedding = fixture.tensors()["transformer.wte.weight"]
    path = write_gguf(
        fixture,
        tmp_path / "model.gguf",
        change=lambda writer: writer.add_tensor("output.weight", embedding),
    )
    check(loaded(path), "gpt2")


@dataclass(frozen=True)
class Info:
    shape: tuple[int, ...]
    type: str = "F32"


class Shapes:
    """A source that is asked for names and shapes only."""

    def __init__(self, num_layers: int, *more: str) -> None:
        self.tensor_names = [f"blk.{layer}.attn_output.weight" for layer in range(num_layers)]
        self.tensor_names += ["token_embd.weight", *more]

    def info(self, name: str) -> Info:
        return Info((256, 64))

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        raise AssertionError("nothing is read")


def gguf_spec(arch: str, num_layers: int, **keys: Any) -> ModelSpec:
    metadata: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": 8192,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    named = {f"{arch}.{key}": value for key, value in metadata.items()}
    return from_gguf({"general.architecture": arch, **named}, Shapes(num_layers)).spec  # type: ignore[arg-type]


@pytest.mark.parametrize(("arch", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_is_known_by_its_layers(arch: str, num_layers: int) -> None:
    """Its scores are scaled by hidden size / heads (here 16), the others' by the head's size (8), and GGUF
    files do not say so."""
    window = {"attention__sliding_window": 4096}
    assert gguf_spec(arch, num_layers, **window).layers[0].attn.scale == pytest.approx(16**-0.5)
    assert gguf_spec(arch, 26, **window).layers[0].attn.scale == pytest.approx(8**-0.5)


def test_gemma_2_files_from_before_its_keys() -> None:
    attn = gguf_spec("gemma2", 4).layers[0].attn
    assert (attn.sliding_window, attn.soft_cap) == (4096, 50.0)


def windowed(spec: ModelSpec) -> list[bool]:
    return [layer.attn.sliding_window is not None for layer in spec.layers]


def test_gemma_3_with_a_pattern_of_its_own() -> None:
    window = {"attention__sliding_window": 512}
    every_third = gguf_spec("gemma3", 7, attention__sliding_window_pattern=3, **window)
    assert windowed(every_third) == [True, True, False, True, True, False, True]
    given = [False, True, True, False, False, True, True]
    assert windowed(gguf_spec("gemma3", 7, attention__sliding_window_pattern=given, **window)) == given
    with pytest.raises(CheckpointError, match=r"^gemma3\.attention\.sliding_window_pattern is"):
        gguf_spec("gemma3", 7, attention__sliding_window_pattern=[1] * 7, **window)


def test_gemma_3_with_a_theta_of_its_own_for_windows() -> None:
    spec = gguf_spec("gemma3", 6, attention__sliding_window=512, rope__freq_base=1e6, rope__freq_base_swa=2e4)
    assert [layer.attn.rope.theta for layer in spec.layers if layer.attn.rope] == [2e4] * 5 + [1e6]


def test_gemma_3_without_windows() -> None:
    """All layers see everything and turn as those that do."""
    spec = gguf_spec("gemma3", 7, rope__freq_base=1e6)
    assert not any(windowed(spec))
    assert {layer.attn.rope.theta for layer in spec.layers if layer.attn.rope} == {1e6}


def test_phi_3_from_before_its_keys() -> None:
    """The first files of Phi-3-mini-4k say neither a window nor a first context."""
    metadata = {
        "general.architecture": "phi3",
        "phi3.block_count": 1,
        "phi3.context_length": 4096,
        "phi3.embedding_length": 64,
        "phi3.feed_forward_length": 128,
        "phi3.attention.head_count": 8,
        "phi3.attention.head_count_kv": 4,
        "phi3.attention.layer_norm_rms_epsilon": 1e-5,
        "phi3.rope.dimension_count": 8,
    }
    source = Shapes(1, "blk.0.attn_qkv.weight", "blk.0.ffn_up.weight")
    source.info = lambda name: Info((128, 64) if "qkv" in name else (256, 64))  # type: ignore[method-assign]
    attn = from_gguf(metadata, source).spec.layers[0].attn  # type: ignore[arg-type]
    assert (attn.sliding_window, attn.rope is not None and attn.rope.has_factors) == (None, False)
