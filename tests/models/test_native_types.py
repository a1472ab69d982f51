"""Every tensor type that files may have, on the native kernels: packed as it is read, and refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from model_toys import engine_config

from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.base.messages import KVCacheConfig, KVCacheGroup
from mainspring.checkpoint.blocks import TYPES_BY_NAME, TensorType, decode_blocks
from mainspring.checkpoint.images import private_memory
from mainspring.kernels.native import KV_TILE, choose_variant, library, why_not
from mainspring.kernels.ops import Batch, Floats
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model
from mainspring.models.packing import EXPANDED, packed_type

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

ROWS, COLUMNS = 37, 512
KINDS = list(TYPES_BY_NAME.values())
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
# Of the largest value of 32: nothing is lost, a scale is rounded to fp16, all is quantised again.
EXACT, ROUNDED, AGAIN = 0.0, 2.0**-10, 0.51 / 127


def random_blocks(
    kind: TensorType, rows: int, columns: int, largest: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Raw bytes [rows, row_bytes] of finite weights of which the largest is about `largest`."""
    rng = np.random.default_rng(seed)
    num_blocks = rows * columns // kind.block_size
    blocks = rng.integers(0, 256, (num_blocks, kind.block_bytes), np.uint8).reshape(-1).view(kind.layout)
    if kind.layout.names is None:
        values = rng.uniform(-largest, largest, num_blocks).astype(np.float32)
        if kind.name == "BF16":
            blocks[:] = values.view(np.uint32) >> 16
        else:
            blocks[:] = values
    else:
        blocks["scale"] = 1
        if "minimum" in kind.layout.names:
            blocks["minimum"] = 0
        found = np.empty((num_blocks, kind.block_size), np.float32)
        decode_blocks(kind, blocks.view(np.uint8), found)
        blocks["scale"] = largest * rng.uniform(0.5, 1, num_blocks) / np.abs(found).max()
        if "minimum" in kind.layout.names:
            # Minimums that centre the codes are added to blocks of 32 and taken away from super-blocks.
            sign = 1 if kind.group_scales else -1
            blocks["minimum"] = sign * blocks["scale"] * found.max() / 2 / (40 if kind.group_scales else 1)
    return blocks.view(np.uint8).reshape(rows, -1)


def values_of(kind: TensorType, raw: np.ndarray, columns: int) -> np.ndarray:
    out = np.empty((len(raw), columns), np.float32)
    decode_blocks(kind, raw.reshape(-1), out)
    return out


@each_kind
def test_what_is_packed_is_what_is_read(kind: TensorType) -> None:
    """Case B178: the native form of a type against numpy's values of the same bytes."""
    native = library()
    assert native is not None
    raw = random_blocks(kind, ROWS, COLUMNS)
    values = values_of(kind, raw, COLUMNS)
    matrix = native.Matrix(packed_type(kind.name, None), ROWS, COLUMNS)
    matrix.bind(private_memory(matrix.num_bytes)[: matrix.num_bytes])
    if kind.name in EXPANDED:
        matrix.pack_floats(values, 0, ROWS)
    else:
        matrix.pack(raw.reshape(-1), 0, ROWS)
    allowed = AGAIN if kind.name in EXPANDED else ROUNDED if kind.group_scales else EXACT
    largest = np.abs(values).reshape(ROWS, -1, 32).max(-1, keepdims=True)
    apart = np.abs(matrix.unpack() - values).reshape(ROWS, -1, 32)
    if kind.group_scales and allowed == ROUNDED:
        largest = largest + 2 * np.abs(values).max()  # a minimum is rounded, too, which may be larger
    assert (apart <= allowed * largest).all()


# ---- whole models ------------------------------------------------------------------------------------------

Change = Mapping[str, Callable[[np.ndarray], None]]
HIDDEN, MLP, VOCAB, HEADS, HEAD_SIZE = 256, 512, 256, 4, 64


def write_model(path: Path, kind: TensorType, change: Change | None = None) -> Path:
    """One layer whose matrices are all of `kind`; `change` gets the blocks of a tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "rope.dimension_count": HEAD_SIZE,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (MLP, HIDDEN),
        "blk.0.ffn_up": (MLP, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, MLP),
    } | {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    for seed, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        raw = random_blocks(kind, *shape, largest=3 * shape[1] ** -0.5, seed=seed)
        if change and name in change:
            change[name](raw.reshape(-1).view(kind.layout))
        if kind.name in ("F32", "F16"):
            writer.add_tensor(f"{name}.weight", raw.view(kind.layout))
        else:
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))


def loaded(model: Path, kernels: str, **settings: object) -> Decoder:
    return load_model(
        engine_config(str(model), load_format="auto", kernels=kernels, block_size=KV_TILE, **settings)
    )


def logits_of(decoder: Decoder) -> Floats:
    """Of a request that fills the first block of its cache but one token."""
    (spec,) = decoder.kv_cache_specs()
    decoder.initialize_kv(KVCacheConfig(2, KV_TILE, (KVCacheGroup((0,), spec),)))
    tokens = np.arange(KV_TILE - 1, dtype=np.int32)
    batch = Batch(
        token_ids=tokens * 17 % VOCAB,
        positions=tokens,
        query_start_loc=np.array([0, len(tokens)], np.int32),
        seq_lens=np.array([len(tokens)], np.int32),
        block_tables=(np.array([[1]], np.int32),),
        slot_mapping=(tokens.astype(np.int64) + KV_TILE,),
    )
    return decoder.logits(decoder.forward(batch)).copy()


@each_kind
def test_a_model_of_one_type(kind: TensorType, tmp_path: Path) -> None:
    """Case B178: logits of a model whose matrices are all of one type, native and numpy."""
    model = write_model(tmp_path / "m.gguf", kind)
    expected = logits_of(loaded(model, "numpy"))
    found = logits_of(loaded(model, "native", activations="int16", kv_cache_dtype="float32"))
    apart = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert apart < (0.02 if kind.name in EXPANDED else 0.001)


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_keys_and_values_in_bf16_by_name(activations: str, tmp_path: Path) -> None:
    """What auto may choose can be named, and is refused where the processor does not multiply it."""
    model = write_model(tmp_path / "m.gguf", TYPES_BY_NAME["Q8_0"])
    settings = {"activations": activations, "kv_cache_dtype": "bfloat16"}
    native = library()
    assert native is not None
    with pytest.raises(ConfigError, match=r"kv_cache_dtype bfloat16: avx2 has no products of it"):
        loaded(model, "native", instruction_set="avx2", **settings)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype bfloat16 needs native kernels"):
        loaded(model, "numpy", **settings)
    if not native.has_bf16(choose_variant("auto")):
        pytest.skip("no products of bf16 on this processor")
    exact = logits_of(loaded(model, "native", activations=activations, kv_cache_dtype="float32"))
    found = logits_of(loaded(model, "native", **settings))
    assert 0 < np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)) < 0.02


@pytest.mark.parametrize("name", [kind.name for kind in KINDS if kind.group_scales])
def test_scales_that_fp16_cannot_hold(name: str, tmp_path: Path) -> None:
    """Finite in the file, and infinite in the kernels' form: refused by name, but numpy takes it."""

    def enlarge(blocks: np.ndarray) -> None:
        blocks["scale"][-1] = 6e4
        for field in set(blocks.dtype.names or ()) - {"scale", "minimum"}:
            blocks[field][-1] = 0x44

    model = write_model(tmp_path / "m.gguf", TYPES_BY_NAME[name], {"blk.0.ffn_down": enlarge})
    if name in EXPANDED:
        assert loaded(model, "native").weights_form
        return
    with pytest.raises(
        CheckpointError, match=rf"'blk\.0\.ffn_down\.weight' \({name}\) has a group with a scale"
    ):
        loaded(model, "native")
    assert loaded(model, "numpy").weights_form == "float32"


@pytest.mark.parametrize("kernels", ["native", "numpy"])
@each_kind
def test_a_number_that_is_none_is_named(kind: TensorType, kernels: str, tmp_path: Path) -> None:
    """Case B178: one NaN in a scale, or in a plain number, in the last block of a tensor."""

    def spoil(blocks: np.ndarray) -> None:
        if kind.name == "BF16":
            blocks[-1] = 0x7FC0
        elif kind.layout.names is None:
            blocks[-1] = np.nan
        else:
            blocks["scale"][-1] = np.nan

    model = write_model(tmp_path / "m.gguf", kind, {"blk.0.attn_k": spoil})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_k\.weight' holds NaN or infinity"):
        loaded(model, kernels)
