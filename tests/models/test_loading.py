"""From what a file says to weights in their places: what is understood, and what is refused by name."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from model_toys import TINY, engine_config, kv_config, logits_of, tiny

from mainspring.base.errors import CheckpointError
from mainspring.kernels.ops import Floats, LazyWeight, Recorder
from mainspring.kernels.ref import RefOps
from mainspring.kernels.threads import set_blas_threads
from mainspring.models.decoder import Decoder
from mainspring.models.families import from_gguf
from mainspring.models.loader import load_model
from mainspring.models.weights import load_weights, rope_handle, tensors_of

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1000.0,
}


def tensors() -> dict[str, Floats]:
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (256, 64), "output_norm": (64,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (64,),
            f"blk.{i}.attn_q": (64, 64),
            f"blk.{i}.attn_k": (32, 64),
            f"blk.{i}.attn_v": (32, 64),
            f"blk.{i}.attn_output": (64, 64),
            f"blk.{i}.ffn_norm": (64,),
            f"blk.{i}.ffn_gate": (96, 64),
            f"blk.{i}.ffn_up": (96, 64),
            f"blk.{i}.ffn_down": (64, 96),
        }
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32) / 8 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Info:
    shape: tuple[int, ...]
    type: str = "F32"


@dataclass
class FakeSource:
    """Tensors from memory."""

    values: dict[str, Floats] = field(default_factory=tensors)
    read: list[str] = field(default_factory=list)
    dropped: bool = False

    @property
    def tensor_names(self) -> list[str]:
        return list(self.values)

    def info(self, name: str) -> Info:
        return Info(self.values[name].shape)

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        self.read.append(name)
        if out is None:
            out = np.empty(self.values[name].shape, np.float32)
        out[...] = self.values[name]
        return out

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        return self.values[name][begin:end]

    def drop_pages(self) -> None:
        self.dropped = True


def loaded(
    source: FakeSource, metadata: dict[str, Any] = METADATA, memory_bytes: int | None = None
) -> Decoder:
    model = from_gguf(metadata, source)
    tensors_of(model, source)
    decoder = Decoder(model.spec, RefOps())
    decoder.weights_form = load_weights(model, source, decoder.ops, memory_bytes=memory_bytes)
    decoder.initialize_kv(kv_config(decoder))
    return decoder


def test_every_tensor_reaches_its_place() -> None:
    source = FakeSource()
    decoder = loaded(source)
    spec, weights = decoder.spec, decoder.ops._weights
    assert (spec.vocab_size, spec.hidden_size, spec.max_position_embeddings, len(spec.layers)) == (
        256,
        64,
        128,
        2,
    )
    assert spec.tied_embeddings
    attn = spec.layers[0].attn
    assert (attn.num_heads, attn.num_kv_heads, attn.head_size) == (4, 2, 16)
    assert (attn.rope.theta, attn.rope.rotary_dim, attn.rope.interleaved) == (1000.0, 16, True)
    parts = [source.values[f"blk.1.attn_{part}.weight"] for part in "qkv"]
    np.testing.assert_array_equal(weights["layers.1.wqkv"], np.concatenate(parts))
    np.testing.assert_array_equal(weights["layers.0.w_down"], source.values["blk.0.ffn_down.weight"])
    assert sorted(source.read) == sorted(source.values), "each once"
    assert source.dropped


def test_an_output_tensor_unties_the_head() -> None:
    """Case B152: a head that is in the file is used; without one it is the embedding."""
    source = FakeSource()
    (tied,) = logits_of(loaded(source), [6], [[6]])
    source.values["output.weight"] = source.values["token_embd.weight"] * np.float32(2.0)
    decoder = loaded(source)
    assert not decoder.spec.tied_embeddings
    np.testing.assert_allclose(logits_of(decoder, [6], [[6]])[0], 2 * tied, rtol=1e-5, atol=1e-6)


def test_q_and_k_are_turned_in_neighbouring_pairs() -> None:
    """The file's order of rows: taken apart into halves, with the half-split form, says the same."""
    source = FakeSource()
    (expected,) = logits_of(loaded(source), [9], [[9]])
    for name, value in source.values.items():
        if "attn_q" in name or "attn_k" in name:
            heads = value.reshape(-1, 8, 2, 64)
            source.values[name] = heads.swapaxes(1, 2).reshape(value.shape)
    (unlike,) = logits_of(loaded(source), [9], [[9]])
    assert not np.allclose(unlike, expected, atol=1e-2), "the order matters"
    model = from_gguf(METADATA, source)
    halves = []
    for layer in model.spec.layers:
        rope = type(layer.attn.rope)(layer.attn.rope.rotary_dim, layer.attn.rope.theta, interleaved=False)
        attn = type(layer.attn)(4, 2, 16, rope)
        halves.append(type(layer)(attn, layer.mlp))
    spec = replace(model.spec, layers=tuple(halves))
    decoder = Decoder(spec, RefOps())
    load_weights(replace(model, spec=spec), source, decoder.ops)
    decoder.initialize_kv(kv_config(decoder))
    np.testing.assert_allclose(logits_of(decoder, [9], [[9]])[0], expected, rtol=1e-4, atol=1e-5)


def test_rope_factors_divide_the_frequencies() -> None:
    """Case B178: the helper tensor of converters is no stranger, and it does change the mathematics."""
    source = FakeSource()
    source.values["rope_freqs.weight"] = np.arange(1, 9, dtype=np.float32)
    decoder = loaded(source)
    frequencies = decoder.ops._weights[rope_handle(decoder.spec.layers[0].attn.rope)]
    np.testing.assert_allclose(frequencies, 1000.0 ** (-np.arange(8) / 8) / np.arange(1, 9), rtol=1e-7)
    assert frequencies.dtype == np.float64


def test_rope_factors_that_nothing_can_be_divided_by() -> None:
    source = FakeSource()
    source.values["rope_freqs.weight"] = np.arange(8, dtype=np.float32)
    with pytest.raises(CheckpointError, match="frequency factors are not all positive"):
        loaded(source)


def test_weights_that_do_not_fit_stay_quantised(caplog: pytest.LogCaptureFixture) -> None:
    """Slow, said so, and the same answer."""
    (expected,) = logits_of(loaded(FakeSource()), [9], [[9]])
    decoder = loaded(FakeSource(), memory_bytes=1000)
    assert decoder.weights_form == "by layer"
    assert "slow" in caplog.text
    assert isinstance(decoder.ops._weights["layers.0.wqkv"], LazyWeight)
    np.testing.assert_allclose(logits_of(decoder, [9], [[9]])[0], expected, rtol=1e-5, atol=1e-5)


def test_blas_threads_can_be_set() -> None:
    """With numpy's own wheels, which is what is installed here."""
    assert set_blas_threads(1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported yet; supported: bert, "),
        ({"general.architecture": None}, "key 'general.architecture' is missing"),
        ({"general.architecture": ["llama"]}, "architecture ['llama'] is not supported yet"),
        ({"llama.rope.scaling.type": "dynamic"}, "llama.rope.scaling.type is 'dynamic'"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor is 4.0"),
        ({"llama.attention.sliding_window": -1}, "llama.attention.sliding_window is -1"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
        ({"llama.something_new": [1, 2]}, "llama.something_new is"),
        ({"llama.attention.head_count": 5}, "llama.attention.head_count is 5; expected a divisor"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count is"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count_kv is 3; expected a divisor"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8; expected key_length, 16"),
        ({"llama.rope.dimension_count": 15}, "llama.rope.dimension_count is 15; expected an even"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan; expected a positive"),
        ({"llama.vocab_size": 300}, "llama.vocab_size is 300; expected 256"),
        (
            {"llama.block_count": 3},
            "llama.block_count is 3; expected at most 2, the layers that have tensors",
        ),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count is 2147483647; expected at most 2"),
        (
            {"llama.embedding_length": 2**30},
            "'token_embd.weight' has shape [256, 64]; expected [256, 1073741824]",
        ),
        ({"llama.feed_forward_length": 2**31 - 1}, "'blk.0.ffn_gate.weight' has shape"),
        ({"llama.attention.key_length": 2**30}, "'blk.0.attn_q.weight' has shape"),
        ({"llama." + "k" * 100_000: "v" * 100_000}, "kkk'"),
        ({"general.architecture": "a" * 100_000}, "aaa' is not supported yet"),
        ({"llama.block_count": 0}, "llama.block_count is 0; expected a positive integer"),
    ],
)
def test_metadata_that_is_not_understood_is_refused_by_name(change: dict[str, Any], expected: str) -> None:
    """Case B155: a model that would answer wrongly does not load."""
    metadata = {key: value for key, value in (METADATA | change).items() if value is not None}
    with pytest.raises(CheckpointError) as refusal:
        loaded(FakeSource(), metadata)
    assert expected in str(refusal.value)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


def test_values_that_change_nothing_are_accepted() -> None:
    loaded(FakeSource(), METADATA | {"llama.expert_count": 0, "llama.rope.scaling.type": "none"})


def test_a_missing_key_is_named() -> None:
    metadata = {key: value for key, value in METADATA.items() if "feed" not in key}
    with pytest.raises(
        CheckpointError, match=r"llama\.feed_forward_length is missing; expected a positive integer"
    ):
        loaded(FakeSource(), metadata)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("blk.1.ffn_up.weight", None, "tensor 'blk.1.ffn_up.weight' is missing; expected shape [96, 64]"),
        ("token_embd.weight", None, "tensor 'token_embd.weight' is missing"),
        ("token_embd.weight", np.zeros(4), "tensor 'token_embd.weight' has shape [4], expected two"),
        (
            "blk.0.attn_k.weight",
            np.zeros((64, 64)),
            "tensor 'blk.0.attn_k.weight' has shape [64, 64]; expected [32, 64]",
        ),
        (
            "blk.0.attn_q_norm.weight",
            np.zeros(16),
            "tensor 'blk.0.attn_q_norm.weight' is in the file; llama has no place for it",
        ),
        ("blk.1." + "x" * 100_000, np.zeros(4), "xxx' is in the file"),
        ("blk.7.attn_q.weight", np.zeros((64, 64)), "'blk.7.attn_q.weight' is in the file"),
        (
            "blk.1.ffn_norm.weight",
            np.full(64, np.nan),
            "tensor 'blk.1.ffn_norm.weight' holds NaN or infinity",
        ),
        (
            "blk.1.attn_v.weight",
            np.full((32, 64), np.inf),
            "tensor 'blk.1.attn_v.weight' holds NaN or infinity",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, value: Any, expected: str) -> None:
    source = FakeSource()
    if value is None:
        del source.values[name]
    else:
        source.values[name] = value.astype(np.float32)
    with pytest.raises(CheckpointError) as refusal:
        loaded(source)
    assert expected in str(refusal.value)
    assert len(str(refusal.value)) < 400
    if "NaN" not in expected:
        assert source.read == [], "shapes are judged before any data is read"


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, value in tensors().items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_gives_what_its_tensors_give(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, METADATA)
    decoder = load_model(engine_config(str(path), load_format="auto"))
    decoder.initialize_kv(kv_config(decoder))
    (expected,) = logits_of(loaded(FakeSource()), [9], [[9]])
    np.testing.assert_allclose(logits_of(decoder, [9], [[9]])[0], expected, rtol=1e-4, atol=1e-5)
    dummy = load_model(engine_config(str(path)))
    assert dummy.spec == decoder.spec


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    write_gguf(path, METADATA | {"llama.expert_count": 8})
    with pytest.raises(CheckpointError, match=r"experts\.gguf: llama\.expert_used_count is missing"):
        load_model(engine_config(str(path), load_format="auto"))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("key", ["block_count", "feed_forward_length", "attention.key_length"])
def test_absurd_counts_make_nothing_large(tmp_path: Path, load_format: str, key: str) -> None:
    """Counts are held against the file's tensors before layers, names or arrays are made of them."""
    path = tmp_path / "absurd.gguf"
    write_gguf(path, METADATA | {f"llama.{key}": 2**30})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"absurd\.gguf: .*expected"):
            load_model(engine_config(str(path), load_format=load_format))
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647; expected at most 10000"),
        ({"vocab_size": 2**40}, "would take .* GiB of memory are free; use a smaller config"),
    ],
)
def test_random_weights_that_no_memory_holds(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        tiny(TINY | change)


def test_a_recorder_takes_weights_as_shapes() -> None:
    source = FakeSource()
    model = from_gguf(METADATA, source)
    recorder = Recorder()
    load_weights(model, source, recorder)
    assert recorder.weights["layers.0.wqkv"] == (128, 64)
