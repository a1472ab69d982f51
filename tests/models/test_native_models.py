"""Whole small models on the native kernels: any shape and any mix of tensor types gives what numpy gives.

What is compared are logits of requests of several lengths, cut into steps in two ways. The native ones must
be the same bits for both, and near numpy's: `NEAR` is a bound on the root mean square of the difference, of
logits that have unit size. With int16 activations and a float32 cache hardly more than the order of additions
differs; int8 ones round each value to a 127th of the largest of 32.
"""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from model_toys import TINY, Requests, engine_config

from mainspring.base.config import SchedulerConfig
from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.base.messages import KVCacheConfig, KVCacheGroup
from mainspring.checkpoint.images import list_images
from mainspring.kernels.native import NativeOps, PackedWeight, library, why_not
from mainspring.kernels.ops import Batch, Floats
from mainspring.kernels.ref import RefOps
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model
from mainspring.worker.sampler import greedy_rows
from mainspring.worker.sampling_rules import NONE_ALLOWED

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

VARIANTS = library().runnable_variants()  # type: ignore[union-attr]
BLOCK_SIZE = 16
NEAR = {"int16": 0.0003, "int8": 0.05}
LENGTHS = [37, 1, 300, 16]
CUTS = [
    [[30, 1, 1, 0], [7, 0, 63, 0], [0, 0, 64, 0], [0, 0, 64, 16], [0, 0, 108, 0]],
    [[37, 1, 300, 16]],  # more rows than the settings announce: buffers grow
]


def shape(**changes: int) -> dict[str, int]:
    return {
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 16,
        "mlp": 96,
        "vocab": 130,
    } | changes


def write_model(
    path: Path, s: dict[str, int], types: list[str], change: dict[str, Any] | None = None
) -> Path:
    """A model of random weights, its matrices of these types in turn; F16 where rows are no whole blocks."""
    rng = np.random.default_rng(3)
    writer = GGUFWriter(str(path), "llama")
    q, kv = s["heads"] * s["head_size"], s["kv_heads"] * s["head_size"]
    for key, value in {
        "block_count": s["layers"],
        "context_length": 512,
        "embedding_length": s["hidden"],
        "feed_forward_length": s["mlp"],
        "attention.head_count": s["heads"],
        "attention.head_count_kv": s["kv_heads"],
        "attention.key_length": s["head_size"],
        "attention.value_length": s["head_size"],
        "rope.dimension_count": s["head_size"],
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1000.0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (s["vocab"], s["hidden"]),
        "output_norm": (s["hidden"],),
    }
    for i in range(s["layers"]):
        shapes |= {
            f"blk.{i}.attn_norm": (s["hidden"],),
            f"blk.{i}.attn_q": (q, s["hidden"]),
            f"blk.{i}.attn_k": (kv, s["hidden"]),
            f"blk.{i}.attn_v": (kv, s["hidden"]),
            f"blk.{i}.attn_output": (s["hidden"], q),
            f"blk.{i}.ffn_norm": (s["hidden"],),
            f"blk.{i}.ffn_gate": (s["mlp"], s["hidden"]),
            f"blk.{i}.ffn_up": (s["mlp"], s["hidden"]),
            f"blk.{i}.ffn_down": (s["hidden"], s["mlp"]),
        }
    kinds = itertools.cycle(types)
    for name, lengths in shapes.items():
        values = rng.standard_normal(lengths).astype(np.float32) * np.float32(lengths[-1] ** -0.5)
        if len(lengths) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
            continue
        kind = next(kinds)
        if kind in ("Q4_1", "Q8_0") and lengths[1] % 32:
            kind = "F16"
        raw = quants.quantize(values, GGMLQuantizationType[kind])
        if change is not None and name in change:
            change[name](raw)
        given = {} if kind in ("F32", "F16") else {"raw_dtype": GGMLQuantizationType[kind]}
        writer.add_tensor(f"{name}.weight", raw, **given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))


def loaded(model: Path | str, load_format: str = "auto", **settings: Any) -> Decoder:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
    config = engine_config(
        str(model), load_format=load_format, scheduler=scheduler, block_size=BLOCK_SIZE, **settings
    )
    return with_kv(load_model(config))


def with_kv(decoder: Decoder) -> Decoder:
    """A group for each kind of layer."""
    specs = decoder.kv_cache_specs()
    groups = [
        KVCacheGroup(tuple(layer for layer, spec in enumerate(specs) if spec == kind), kind)
        for kind in dict.fromkeys(specs)
    ]
    decoder.initialize_kv(KVCacheConfig(100, BLOCK_SIZE, tuple(groups)))
    return decoder


class Pages(Requests):
    """Requests in blocks of 16 tokens and in a vocabulary of any size."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(LENGTHS, 0)
        self.tokens = [tokens % decoder.vocab_size for tokens in self.tokens]
        free = iter(np.random.default_rng(0).permutation(np.arange(1, 100)).tolist())
        self.blocks = [
            [[next(free) for _ in range(-(-length // BLOCK_SIZE))] for length in LENGTHS]
            for _ in set(decoder.kv_cache_specs())
        ]

    def batch(self, counts: list[int]) -> Batch:
        batch = super().batch(counts)
        rows = [r for r, count in enumerate(counts) if count]
        row_of = np.repeat(np.arange(len(rows)), np.diff(batch.query_start_loc))
        tables, slots = [], []
        for blocks in self.blocks:
            table = np.zeros((len(rows), max(len(blocks[r]) for r in rows)), np.int32)
            for row, r in enumerate(rows):
                table[row, : len(blocks[r])] = blocks[r]
            first = table[row_of, batch.positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
            tables.append(table)
            slots.append(first + batch.positions % BLOCK_SIZE)
        return replace(batch, block_tables=tuple(tables), slot_mapping=tuple(slots))


def logits_of(decoder: Decoder, steps: list[list[int]]) -> Floats:
    """Of every token of every request, request by request."""
    pages = Pages(decoder)
    rows: list[list[Floats]] = [[] for _ in LENGTHS]
    for counts in steps:
        batch = pages.batch(counts)
        logits = decoder.logits(decoder.forward(batch)).copy()
        running = [r for r, count in enumerate(counts) if count]
        for r, part in zip(running, np.split(logits, batch.query_start_loc[1:-1]), strict=True):
            rows[r].append(part)
    return np.concatenate([part for parts in rows for part in parts])


ALL = ["F32", "Q4_1", "BF16", "Q8_0", "F16"]
MODELS = {
    "every type": (shape(), ALL),
    "every type, shifted": (shape(), ALL[3:] + ALL[:3]),
    "nothing is whole blocks": (shape(hidden=100, mlp=33), ["F16", "F32", "BF16"]),
    "parts of rows by KV heads that are no whole blocks": (shape(heads=14, head_size=48), ["Q8_0"]),
    "one head of each kind": (shape(heads=1, kv_heads=1, head_size=16), ["Q4_1"]),
    "the largest heads": (shape(heads=3, kv_heads=1, head_size=256), ["Q8_0", "Q4_1"]),
    "as many query heads as can share": (shape(heads=64, kv_heads=1), ["Q4_1"]),
    "nine to one": (shape(heads=9, kv_heads=1, head_size=80), ["F16", "Q8_0"]),
    "a vocabulary of one": (shape(vocab=1), ["Q8_0"]),
    "a vocabulary of seven": (shape(vocab=7, layers=1), ["F32"]),
    "a vocabulary of many tiles": (shape(vocab=3001, layers=1), ["Q4_1", "F16"]),
}


@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_native_is_near_numpy_and_cuts_change_nothing(
    name: str, variant: str, activations: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", *MODELS[name])
    expected = logits_of(loaded(model, kernels="numpy"), CUTS[0])
    settings = {"instruction_set": variant, "activations": activations, "kv_cache_dtype": "float32"}
    decoder = loaded(model, kernels="native", **settings)
    found = [logits_of(decoder, steps) for steps in CUTS]
    assert found[0].tobytes() == found[1].tobytes()
    off = np.sqrt(np.mean((found[0] - expected) ** 2))
    print(f"off by {off:.5f} of {np.sqrt(np.mean(expected**2)):.2f}")
    assert off < NEAR[activations]
    again = logits_of(loaded(model, kernels="native", num_threads=1, **settings), CUTS[0])
    assert again.tobytes() == found[0].tobytes(), "from the image, by one thread"


@pytest.mark.parametrize(
    ("window", "kv_cache_dtype", "near"), [(6, "float32", 0.0003), (100, "float16", 0.003)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_with_and_without_a_window(
    window: int, kv_cache_dtype: str, near: float, variant: str
) -> None:
    """Two groups of layers, each with its own block table; random weights, which numpy is given as packed."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = json.dumps(TINY | {"num_hidden_layers": 3, "sliding_window": window, "layer_types": kinds})
    config = config.replace('"max_position_embeddings": 128', '"max_position_embeddings": 512')
    settings = {"kv_cache_dtype": kv_cache_dtype, "instruction_set": variant, "activations": "int16"}
    decoder = loaded(config, load_format="dummy", kernels="native", quantization="q8", **settings)
    twin = Decoder(decoder.spec, RefOps())
    for handle, weight in decoder.ops._weights.items():  # type: ignore[attr-defined]
        if isinstance(weight, PackedWeight):
            weight = np.concatenate([part.unpack() for part in weight.parts])
        twin.ops.add_weight(handle, weight)
    expected = logits_of(with_kv(twin), CUTS[0])
    found = [logits_of(decoder, steps) for steps in CUTS]
    assert found[0].tobytes() == found[1].tobytes()
    assert np.sqrt(np.mean((found[0] - expected) ** 2)) < near


def test_the_largest_of_any_vocabulary(tmp_path: Path) -> None:
    """Whether the head finds it or the logits are looked through; with masks, also one that allows none."""
    for vocab in (1, 7, 31, 33, 64, 65, 1000):
        model = write_model(tmp_path / f"{vocab}.gguf", shape(vocab=vocab), ["Q8_0"])
        decoder = loaded(model, kernels="native")
        assert decoder.greedy is not None
        hidden = decoder.forward(Pages(decoder).batch([5, 1, 60, 0])).copy()
        logits = decoder.logits(hidden).copy()
        ids, values = decoder.greedy(hidden)
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))
        np.testing.assert_array_equal(values, logits.max(axis=1))
        words = (
            np.random.default_rng(1)
            .integers(0, 2**32, (len(hidden), -(-vocab // 32)), np.uint32)
            .view(np.int32)
        )
        words[0] = 0
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
        masked = np.where(bits, logits, -np.inf)
        ids, values = decoder.greedy(hidden, list(words))
        np.testing.assert_array_equal(ids, np.where(bits.any(axis=1), masked.argmax(axis=1), -1))
        np.testing.assert_array_equal(values, masked.max(axis=1))
        sampled = greedy_rows(ids, values)
        assert sampled.errors[0] == NONE_ALLOWED, "no token is made up where none may come"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"heads": 65, "kv_heads": 1}, "65 query heads on a KV head are more than 64"),
        ({"head_size": 24}, "heads of 24 are no multiple of 16 up to 256"),
        ({"head_size": 272}, "heads of 272 are no multiple of 16 up to 256"),
    ],
)
def test_shapes_without_a_native_form_run_in_numpy(
    changes: dict[str, int], expected: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", shape(**changes), ["F16"])
    assert loaded(model).ops.name == "numpy"
    with pytest.raises(ConfigError, match=f"kernels native: {expected}"):
        loaded(model, kernels="native")


def test_a_view_of_hidden_states_outlives_growing_buffers(tmp_path: Path) -> None:
    """More rows than ever before need other memory; whoever still reads the old one must not read nothing."""
    decoder = loaded(write_model(tmp_path / "m.gguf", shape(), ["F16"]), kernels="native")
    hidden = decoder.forward(Pages(decoder).batch([5, 0, 0, 0]))
    before = hidden.copy()
    assert decoder.greedy is not None
    decoder.greedy(np.zeros((3000, 64), np.float32))
    decoder.logits(np.zeros((5000, 64), np.float32))
    np.testing.assert_array_equal(hidden, before)
    del decoder
    np.testing.assert_array_equal(hidden, before)


def test_the_time_of_steps_can_be_kept(tmp_path: Path) -> None:
    """As a benchmark asks for it: every step of the last pass, in their order; results stay what they are."""
    decoder = loaded(write_model(tmp_path / "m.gguf", shape(), ["F16"]), kernels="native")
    batch = Pages(decoder).batch([5, 0, 0, 0])
    before = decoder.forward(batch).copy()
    ops = decoder.ops
    assert isinstance(ops, NativeOps)
    (program,) = ops.programs("batch")
    assert program.times() == []
    program.keep_times(True)
    np.testing.assert_array_equal(decoder.forward(batch), before)
    kinds, taken_s = zip(*program.times(), strict=True)
    assert kinds.count("attention") == len(decoder.spec.layers)
    assert kinds.index("attention") < kinds.index("gated")
    assert min(taken_s) >= 0 < sum(taken_s)


@pytest.mark.parametrize("kernels", ["native", "numpy"])
def test_no_rows_at_all(kernels: str, tmp_path: Path) -> None:
    decoder = loaded(write_model(tmp_path / "m.gguf", shape(), ["Q8_0"]), kernels=kernels)
    none = np.zeros((0, 64), np.float32)
    assert decoder.logits(none).shape == (0, decoder.vocab_size)
    if decoder.greedy is not None:
        ids, values = decoder.greedy(none)
        assert ids.shape == values.shape == (0,)


def test_a_model_goes_with_its_last_reference(tmp_path: Path) -> None:
    """Sleeping gives the weights' memory back at once, also where the garbage collector passes them over."""
    decoder = loaded(write_model(tmp_path / "m.gguf", shape(), ["Q4_1"]), kernels="native")
    logits_of(decoder, CUTS[1])
    assert decoder.greedy is not None
    decoder.greedy(np.zeros((1, 64), np.float32))
    parts = [weakref.ref(decoder), weakref.ref(decoder.ops)]
    gc.disable()
    try:
        del decoder
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("quantization", ["q8", "q4"])
def test_rows_that_cannot_be_quantised_are_refused_by_name(quantization: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", shape(mlp=100), ["F16"])
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_down\.weight': rows of 100 weights, expected a"):
        loaded(model, quantization=quantization)


def spoil(bad: float, field: slice | None = None) -> Callable[[Any], None]:
    """Put a number into a tensor: in the place of a weight, or of the fp16 at these bytes of a block."""

    def change(raw: np.ndarray) -> None:
        if field is not None:
            raw[5, field] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
        elif raw.dtype == np.uint8:  # BF16
            raw[5].view(np.uint16)[40] = np.float32(bad).view(np.uint32) >> 16
        else:
            raw[5, 40] = bad

    return change


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("F32", None),
        ("F16", None),
        ("BF16", None),
        ("Q4_1", slice(0, 2)),
        ("Q4_1", slice(2, 4)),
        ("Q8_0", slice(34, 36)),
    ],
    ids=str,
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    kind: str, field: slice | None, bad: float, tmp_path: Path
) -> None:
    """Also at the second start: no image was kept of them."""
    name = "blk.1.ffn_up"
    model = write_model(tmp_path / "m.gguf", shape(), [kind], {name: spoil(bad, field)})
    for quantization in (None, None, "f16", "q8"):
        with pytest.raises(
            CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' holds NaN or infinity"
        ):
            loaded(model, kernels="native", quantization=quantization)
    assert list_images() == []


@pytest.mark.parametrize(
    ("quantization", "fits", "too_large"),
    [("f16", 65504.0, 65505.0), ("q8", 8.3e6, 8.4e6), ("q4", -65504.0, -65510.0), ("bf16", 3.38e38, 3.4e38)],
)
def test_what_a_quantization_cannot_hold_is_refused_by_name(
    quantization: str, fits: float, too_large: float, tmp_path: Path
) -> None:
    for bad in (fits, too_large):
        path = tmp_path / f"{bad}.gguf"
        write_model(path, shape(), ["F32"], {"blk.1.ffn_up": spoil(bad)})
    matrices = [part for _, parts in packed_values(tmp_path / f"{fits}.gguf", quantization) for part in parts]
    assert all(np.isfinite(matrix.unpack()).all() for matrix in matrices)
    refused = rf"tensor 'blk\.1\.ffn_up\.weight' holds .*, and {quantization} ends at"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=refused):
            loaded(tmp_path / f"{too_large}.gguf", kernels="native", quantization=quantization)
    assert len(list_images()) == 1


def packed_values(model: Path, quantization: str) -> list[tuple[str, tuple[Any, ...]]]:
    ops = loaded(model, kernels="native", quantization=quantization).ops
    return [(name, w.parts) for name, w in ops._weights.items() if isinstance(w, PackedWeight)]  # type: ignore[attr-defined]
