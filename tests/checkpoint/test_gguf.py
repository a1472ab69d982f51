"""The GGUF reader: against files that the `gguf` package writes, and against every kind of damage."""

from __future__ import annotations

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.architectures import check_architecture
from mainspring.checkpoint.blocks import TENSOR_TYPES
from mainspring.checkpoint.catalog import pull
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.quoting import quoted

# ---- files -------------------------------------------------------------------------------------------------

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the table; `shape` as the file has it, fastest first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def build(
    entries: list[bytes],
    tensors: list[bytes],
    *,
    data: int = 64,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    head = magic + version
    head += struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors)
    head += struct.pack("<Q", len(entries) if num_entries is None else num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(range(256)) * (data // 256) + bytes(range(data % 256))


ARCH = entry("general.architecture", STRING, text("llama"))


def opened(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


# ---- reading what is right ---------------------------------------------------------------------------------

Q = gguf.GGMLQuantizationType
QUANTS = [Q(number) for number in TENSOR_TYPES]


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, row: int) -> np.ndarray:
    """Any bytes at all: NaN and infinite scales, denormals, every code."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(int(kind)).integers(0, 256, (rows, row // block * size), np.uint8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with each tensor type and each type of value, by the reference writer."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_string("a.text", "Grüße, 世界 🌍")
    writer.add_array("a.words", ["", "eins", "zwei", "Ġdrei"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_array("a.nested", [[1, 2], [3, 4]])
    for kind in QUANTS:
        raw = random_blocks(kind, 6, 256)
        if kind is Q.F32:
            writer.add_tensor(kind.name, raw.view(np.float32).reshape(2, 3, 256))
        elif kind is Q.F16:
            writer.add_tensor(kind.name, raw.view(np.float16).reshape(2, 3, 256))
        else:
            writer.add_tensor(kind.name, raw.reshape(2, 3, -1), raw_dtype=kind)
    # More than one tile, and not a whole number of them.
    writer.add_tensor("large", random_blocks(Q.Q4_1, 700, 320), raw_dtype=Q.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bits(values: np.ndarray) -> np.ndarray:
    """To compare floats as they are: NaN equals itself, -0 is not 0. Which NaN is not compared."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def test_every_type_of_value(written: Path) -> None:
    with GGUFFile(written) as file:
        got = dict(file.metadata)
    assert got["general.architecture"] == "llama"
    assert (got["a.u8"], got["a.i8"], got["a.u16"], got["a.i16"]) == (200, -100, 60_000, -30_000)
    assert (got["a.u32"], got["a.i32"]) == (4_000_000_000, -2_000_000_000)
    assert (got["a.u64"], got["a.i64"]) == (2**63 + 1, -(2**62))
    assert (got["a.f32"], got["a.f64"], got["a.yes"], got["a.no"]) == (0.5, 0.1, True, False)
    assert got["a.text"] == "Grüße, 世界 🌍"
    assert got["a.words"] == ["", "eins", "zwei", "Ġdrei"]
    assert (got["a.numbers"], got["a.floats"], got["a.nested"]) == ([1, -2, 3], [0.5, -1.5], [[1, 2], [3, 4]])


@pytest.mark.parametrize("kind", QUANTS, ids=lambda kind: kind.name)
def test_dequantised_bit_for_bit(written: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Case B178: each type equals the reference reader's, over blocks of random bytes."""
    with GGUFFile(written) as file, np.errstate(all="ignore"):
        info = file.info(kind.name)
        assert (info.type, info.shape) == (kind.name, (2, 3, 256))
        raw = random_blocks(kind, 6, 256)
        assert np.array_equal(file.raw(kind.name), raw.reshape(-1))
        expected = gguf.quants.dequantize(raw, kind).reshape(2, 3, 256).astype(np.float32)
        got = file.dequantise(kind.name)
        assert got.shape == info.shape
        assert got.dtype == np.float32
        assert np.array_equal(bits(got), bits(expected))


def test_dequantised_in_tiles_into_a_given_buffer(written: Path) -> None:
    with GGUFFile(written) as file, np.errstate(all="ignore"):
        out = np.empty((700, 320), np.float32)
        assert file.dequantise("large", out) is out
        expected = gguf.quants.dequantize(random_blocks(Q.Q4_1, 700, 320), Q.Q4_1)
        assert np.array_equal(bits(out), bits(expected))
        file.drop_pages()
        assert np.array_equal(bits(file.dequantise("large")), bits(expected))


def test_dequantised_in_two_threads(written: Path) -> None:
    with GGUFFile(written) as file, ThreadPoolExecutor(2) as pool:
        first = file.dequantise("large")
        assert all(np.array_equal(bits(first), bits(x)) for x in pool.map(file.dequantise, ["large"] * 8))


def test_version_2(tmp_path: Path) -> None:
    with opened(tmp_path, build([ARCH], [tensor("w")], version=struct.pack("<I", 2))) as file:
        assert file.tensor_names == ["w"]


def test_arrays_are_decoded_when_asked_for(tmp_path: Path) -> None:
    """Invalid text in an array nobody reads does not matter; reading it names the key, every time."""
    words = entry("t.words", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xff"))
    with opened(tmp_path, build([ARCH, words], [])) as file:
        assert file.metadata["general.architecture"] == "llama"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"'t\.words' is not UTF-8"):
                file.metadata["t.words"]


def test_views_outlive_the_file(tmp_path: Path) -> None:
    file = opened(tmp_path, build([ARCH], [tensor("w")]))
    view = file.raw("w")
    file.close()
    file.close()
    assert view.tolist() == list(range(16))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_the_real_model(smollm2: Path) -> None:
    """Every tensor of the catalogue's model lies where the reference reader finds it."""
    reference = gguf.GGUFReader(smollm2)
    with GGUFFile(smollm2) as file:
        assert file.tensor_names == [t.name for t in reference.tensors]
        for expected in reference.tensors:
            info = file.info(expected.name)
            assert (info.offset, info.num_bytes) == (expected.data_offset, expected.n_bytes)
            assert info.shape == tuple(map(int, expected.shape))[::-1]
        some = reference.tensors[7]
        assert np.array_equal(file.dequantise(some.name), gguf.quants.dequantize(some.data, some.tensor_type))
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
        assert file.metadata["tokenizer.ggml.token_type"][:3] == [3, 3, 3]


@pytest.mark.slow
def test_the_second_real_model() -> None:
    """All values of the catalogue's model of K-quants, each as the reference reader has it."""
    model = pull("gemma3-270m", progress=False)
    with GGUFFile(model) as file:
        found = set()
        for expected in gguf.GGUFReader(model).tensors:
            values = gguf.quants.dequantize(expected.data, expected.tensor_type)
            assert np.array_equal(bits(file.dequantise(expected.name)), bits(values)), expected.name
            assert file.is_finite(expected.name)
            found.add(file.info(expected.name).type)
    assert found == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with opened(tmp_path, build([ARCH], [tensor("w")])) as file, pytest.raises(CheckpointError, match="'v'"):
        file.info("v")


# ---- damage ------------------------------------------------------------------------------------------------

HUGE = struct.pack("<Q", 2**60)
NESTED = struct.pack("<IQ", ARRAY, 1)

DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "magic": (build([], [], magic=b"GGML"), "b'GGML', expected b'GGUF'"),
    "three bytes": (b"GGU", "b'GGU'"),
    "no version": (b"GGUF\x03", "the version"),
    "version 1": (
        build([], [], version=struct.pack("<I", 1)),
        "version 1 is not supported; supported: 2 and 3",
    ),
    "version 4": (build([], [], version=struct.pack("<I", 4)), "version 4"),
    "big-endian": (build([], [], version=struct.pack(">I", 3)), "big-endian"),
    "no counts": (b"GGUF\x03\0\0\0\1", "number of tensors"),
    "tensor count": (build([ARCH], [], num_tensors=2**60), f"{2**60} tensors"),
    "entry count": (build([ARCH], [], num_entries=2**63), f"{2**63} key-values"),
    "one entry too many": (build([ARCH], [], num_entries=3, data=0), "key-value 1|key-value 2|key ''"),
    "length of a key": (build([HUGE + b"x" * 40], []), f"name of key-value 0 announces {2**60} bytes"),
    "length of a value": (build([entry("k", STRING, HUGE)], []), f"key 'k' announces {2**60} bytes"),
    "type of a value": (build([entry("k", 13, b"\0" * 8)], []), "key 'k' has value type 13"),
    "cut in a value": (build([ARCH], [])[:50], "truncated"),
    "key is not text": (build([entry("k", UINT8, b"\0").replace(b"k", b"\xff")], []), "is not UTF-8"),
    "value is not text": (build([entry("k", STRING, text(b"\xff\xfe"))], []), "key 'k' is not UTF-8"),
    "key twice": (build([ARCH, ARCH], []), "'general.architecture' occurs twice"),
    "count of an array": (
        build([entry("k", ARRAY, struct.pack("<IQ", UINT32, 2**61))], []),
        f"key 'k' announces {2**61} elements",
    ),
    "count of strings": (
        build([entry("k", ARRAY, struct.pack("<IQ", STRING, 2**50))], []),
        f"key 'k' announces {2**50} elements",
    ),
    "string in an array": (
        build([entry("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + HUGE)], []),
        "element 1 of the value of key 'k' reaches past the end",
    ),
    "array cut": (
        build([entry("k", ARRAY, struct.pack("<IQ", STRING, 5) + text("a" * 60))], [], data=0)[:-20],
        "element 0 of the value of key 'k'",
    ),
    "type of elements": (build([entry("k", ARRAY, struct.pack("<IQ", 13, 1))], []), "array of type 13"),
    "nested too deep": (
        build([entry("k", ARRAY, NESTED * 5000)], []),
        "key 'k' has arrays nested more than 4",
    ),
    "alignment 24": (
        build([entry("general.alignment", UINT32, struct.pack("<I", 24))], [tensor("w")]),
        "'general.alignment' is 24",
    ),
    "alignment 0": (
        build([entry("general.alignment", UINT32, struct.pack("<I", 0))], [tensor("w")]),
        "'general.alignment' is 0",
    ),
    "alignment of text": (
        build([entry("general.alignment", STRING, text("32"))], [tensor("w")]),
        "'general.alignment' is '32'",
    ),
    "split of text": (
        build([entry("split.count", STRING, text("3"))], [tensor("w")]),
        "'split.count' is '3'",
    ),
    "split of less than none": (
        build([entry("split.count", 5, struct.pack("<i", -3))], [tensor("w")]),
        "'split.count' is -3, expected a count",
    ),
    "name of a tensor": (build([ARCH], [HUGE + b"x" * 40]), "name of tensor 0 announces"),
    "dimensions": (build([ARCH], [tensor("w", (1, 1, 1, 1, 4))]), "'w' has 5 dimensions, expected at most 4"),
    "dimension 0": (build([ARCH], [tensor("w", (4, 0))]), r"'w' has shape \[0, 4\]"),
    "type of a tensor": (
        build([ARCH], [tensor("w", (256,), 16)]),
        "'w' has type IQ2_XXS, which is not supported; supported: F32, F16, Q4_0, Q4_1, Q5_0, .*BF16",
    ),
    "type that nobody knows": (build([ARCH], [tensor("w", (256,), 99)]), "'w' has type number 99"),
    "row and block": (build([ARCH], [tensor("w", (48, 2), 3)]), "'w' has rows of 48 .* multiple of 32"),
    "row and super-block": (
        build([ARCH], [tensor("w", (640, 2), 12)]),
        "'w' has rows of 640 .* multiple of 256",
    ),
    "size overflows": (build([ARCH], [tensor("w", (2**40, 2**40))]), "'w' .* ends at byte"),
    "offset overflows": (build([ARCH], [tensor("w", offset=2**64 - 32)]), "'w' .* ends at byte"),
    "data cut": (build([ARCH], [tensor("w")], data=15), "'w' .* ends at byte 144, and the file ends at 143"),
    "offset off the grid": (build([ARCH], [tensor("w", offset=8)]), "'w' has offset 8, expected a multiple"),
    "tensor twice": (build([ARCH], [tensor("w"), tensor("w", offset=32)]), "'w' occurs twice"),
    "overlap": (
        build([ARCH], [tensor("w", (12,)), tensor("v", offset=32)], data=96),
        "'v' at byte .* overlaps tensor 'w'",
    ),
    "table cut": (build([ARCH], [tensor("w" * 40)], data=0)[:120], "of tensor 'w"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Case B178: wrong magic, version, lengths, counts and places, each told in one line."""
    content, culprit = DAMAGE[name]
    with pytest.raises(CheckpointError, match=culprit) as caught:
        opened(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'm.gguf'}: ")
    assert "\n" not in message
    assert len(message) < 400 + len(str(tmp_path))


def test_a_name_of_line_breaks_stays_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, build([ARCH], [tensor("a\nb" * 1000, kind=12)]))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a key", build([entry("k" * 100_000, 99, b"")], [])),
        ("a key that is no text", build([entry("k", UINT8, b"\0"), text(b"\xff" * 100_000)], [])),
        ("a text", build([entry("general.alignment", STRING, text("a" * 100_000))], [])),
        (
            "a list",
            build([entry("split.count", ARRAY, struct.pack("<IQ", UINT8, 100_000) + bytes(100_000))], []),
        ),
        ("a tensor", build([ARCH], [tensor("w" * 100_000, kind=12)])),
    ],
)
def test_long_names_are_cut(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, content)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_quoted_shows_both_ends() -> None:
    assert quoted("a\nb") == "'a\\nb'"
    assert quoted("a" * 100_000 + "z").endswith("aaz'")
    assert len(quoted("a" * 79)) <= 80
    assert len(quoted([1] * 1000)) <= 80


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"general.architecture": "rwkv"}, "^architecture 'rwkv' is not supported yet; supported: bert, "),
        ({"general.architecture": 7}, "^architecture 7 is not supported yet; supported: bert, "),
        ({}, "^key 'general.architecture' is missing: is this a language model"),
    ],
)
def test_another_family_is_refused_as_such(metadata: dict[str, Any], expected: str) -> None:
    assert check_architecture({"general.architecture": "llama"}) == "llama"
    with pytest.raises(CheckpointError, match=expected):
        check_architecture(metadata)


def test_a_path_is_named_once(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for path, culprit in ((empty, "the file is empty"), (Path("/dev/null"), "is a device or a pipe")):
        with pytest.raises(CheckpointError, match=f"^{path}: {culprit}; expected a GGUF file$"):
            GGUFFile(path)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a directory"):
        GGUFFile(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile("m\0.gguf")


def test_random_damage_is_refused_or_harmless(written: Path, tmp_path: Path) -> None:
    """Case B178: 600 mutations and truncations. None raises anything but `CheckpointError`, and none
    makes the reader hold more than a few times the file: the header's numbers decide nothing unchecked."""
    import tracemalloc

    whole = written.read_bytes()
    with GGUFFile(written) as file:
        head = min(file.info(name).offset for name in file.tensor_names)
    rng = random.Random(0)
    refused = 0
    tracemalloc.start()
    try:
        for round_ in range(600):
            damaged = bytearray(whole)
            if round_ % 4 == 0:
                del damaged[rng.randrange(len(whole)) :]
            for _ in range(rng.randint(1, 3)):
                if damaged:
                    damaged[rng.randrange(min(head, len(damaged)))] = rng.choice(
                        (0, 1, 0x7F, 0xFF, rng.randrange(256))
                    )
            path = tmp_path / "m.gguf"
            path.write_bytes(damaged)
            try:
                with GGUFFile(path) as file:
                    for key in file.metadata:
                        file.metadata[key]
                    for name in file.tensor_names:
                        if name != "large":
                            file.dequantise(name)
            except CheckpointError:
                refused += 1
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 200 < refused < 600
    assert peak_bytes < 8 * len(whole) + 2**22
