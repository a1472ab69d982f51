"""The safetensors reader: against files that the `safetensors` package writes, and every kind of damage."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.safetensors import ELEMENT_TYPES, SafetensorsFile, ShardedSafetensors

# ---- files -------------------------------------------------------------------------------------------------


def build(table: object, data: int = 16, *, length: int | None = None) -> bytes:
    """A file with `table` (JSON, or the bytes as they are) before so many bytes of data."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(range(data))


def entry(begin: int = 0, end: int = 16, shape: tuple[int, ...] = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def opened(folder: Path, content: bytes) -> SafetensorsFile:
    path = folder / "m.safetensors"
    path.write_bytes(content)
    return SafetensorsFile(path)


def bits(values: np.ndarray) -> np.ndarray:
    """To compare floats as they are: NaN equals itself, -0 is not 0. Which NaN is not compared."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def any_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bytes at all: NaN, infinities, denormals."""
    rng = np.random.default_rng(3)
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    kinds = ("f4", "f2", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f8")
    made = {f"a.{kind}": any_bits(kind, (6, 33)) for kind in kinds}
    made["one"] = np.array(1.5, np.float32)
    made["ümlaut ☃\n"] = any_bits("f4", (2, 3, 5))
    made["large"] = any_bits("f2", (700, 321))  # more than one tile
    return made


@pytest.fixture(scope="module")
def written(tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of many types, by the reference writer."""
    path = tmp_path_factory.mktemp("safetensors") / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "braces": '} {"a": "]'})
    return path


# ---- reading what is right ---------------------------------------------------------------------------------


def test_every_type_as_the_reference_writes_it(written: Path, tensors: dict[str, np.ndarray]) -> None:
    with SafetensorsFile(written) as file:
        assert set(file.tensor_names) == tensors.keys()
        for name, value in tensors.items():
            assert file.info(name).shape == value.shape
            assert file.raw(name).tobytes() == value.tobytes()
            assert file.elements(name).dtype == value.dtype
            np.testing.assert_array_equal(file.elements(name), value)
            if value.dtype in (np.float32, np.float16):
                with np.errstate(all="ignore"):
                    expected = value.astype(np.float32)
                np.testing.assert_array_equal(bits(file.dequantise(name)), bits(expected))
                assert file.is_finite(name) == np.isfinite(value).all()


def test_bfloat16(tmp_path: Path) -> None:
    halves = np.array([[0x3F80, 0xC000, 0x0001], [0x7F80, 0x7FC1, 0x8000]], "<u2")
    content = build({"w": entry(0, 12, (2, 3), "BF16")}, 0) + halves.tobytes()
    with opened(tmp_path, content) as file:
        found = file.dequantise("w")
        assert found[0].tolist() == [1.0, -2.0, 2.0**-133]
        assert np.isposinf(found[1, 0])
        assert np.isnan(found[1, 1])
        assert not file.is_finite("w")
        assert file.dequantise_rows("w", 0, 1).tolist() == [[1.0, -2.0, 2.0**-133]]


def test_rows_into_and_threads(written: Path) -> None:
    with SafetensorsFile(written) as file, ThreadPoolExecutor(2) as pool:
        whole = file.dequantise("large")
        out = np.empty((700, 321), np.float32)
        assert file.dequantise("large", out) is out
        for found in (
            out,
            np.concatenate(
                list(pool.map(lambda i: file.dequantise_rows("large", i, i + 7), range(0, 700, 7)))
            ),
        ):
            np.testing.assert_array_equal(bits(found), bits(whole))


def test_a_view_outlives_the_file_and_pages_come_back(written: Path, tensors: dict[str, np.ndarray]) -> None:
    file = SafetensorsFile(written)
    view = file.raw("a.f4")
    file.drop_pages()
    file.close()
    file.close()
    assert view.tobytes() == tensors["a.f4"].tobytes()
    assert not view.flags.writeable


def test_numbers_that_are_no_weights_are_refused_as_such(written: Path) -> None:
    with SafetensorsFile(written) as file:
        for use in (file.dequantise, file.is_finite, lambda name: file.dequantise_rows(name, 0, 1)):
            with pytest.raises(
                CheckpointError, match=r"tensor 'a\.f8' has type F64, .*; supported: F32, F16, BF16"
            ):
                use("a.f8")
        with pytest.raises(CheckpointError, match="no tensor 'b' among its 14"):
            file.info("b")


def test_data_that_is_not_aligned(tmp_path: Path) -> None:
    """Old writers do not pad the table."""
    content = build(b' {"w" :{"data_offsets":[0,8],"dtype":"F32" ,"shape":[ 2,1 ]}\t} ', 0)
    assert len(content) % 4
    with opened(tmp_path, content + struct.pack("<2f", 1.5, -2.0)) as file:
        assert file.dequantise("w").tolist() == [[1.5], [-2.0]]
        assert file.elements("w").tolist() == [[1.5], [-2.0]]
        assert file.is_finite("w")


# ---- damage ------------------------------------------------------------------------------------------------

W, GOOD = entry(), build({"w": entry()})
HALF = b'"dtype":"F32","shape":[2],'
TWICE = b'{"w":{%s"data_offsets":[0,8]},"\\u0077":{%s"data_offsets":[8,16]}}' % (HALF, HALF)
DAMAGE = {
    "empty": (b"", "the file is empty; expected a safetensors file"),
    "short": (b"\x08\0\0", "ends at byte 3, inside the length of its table: truncated"),
    "no table": (struct.pack("<Q", 2**63), "announces a table of 9223372036854775808 bytes, and 0 are left"),
    "another format": (b"GGUF" + bytes(60), "announces a table of .* bytes, and 56 are left"),
    "a page": (b"<!DOCTYPE html><html></html>", "announces a table of"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a pointer of Git LFS"),
    "truncated": (GOOD[:-1], "tensor 'w' lies at bytes 0 to 16 of the data, which has 15: truncated"),
    "longer": (GOOD + b"\0", "1 bytes follow tensor 'w', the last, ending at byte"),
    "table cut": (build({"w": W}, length=20), "the table has .* at byte 9; expected a tensor's name"),
    "no object": (build([1, 2]), r"the table has .* at byte 8; expected '\{'"),
    "nothing": (build({}), "has no tensors"),
    "notes only": (build({"__metadata__": {"a": "b"}}), "has no tensors"),
    "after the table": (build(json.dumps({"w": W}).encode() + b" x"), ".*; expected the table's end"),
    "deep": (build(b'{"w":' + b"[" * 100_000), "the table has .* at byte 9; expected a tensor's name"),
    "nested": (build({"w": {**W, "a": {}}}), ".*; expected a tensor's name and its entry"),
    "no UTF-8": (build(b'{"\xff":{}}'), "the name .* at byte 9 is not UTF-8"),
    "half a pair": (build(rb'{"\ud800":{}}'), "the name .* at byte 9 is not UTF-8"),
    "twice": (build(TWICE), "tensor 'w' occurs twice"),
    "a key twice": (
        build(b'{"w":{%s%s"data_offsets":[0,8]}}' % (HALF, HALF)),
        "the entry of tensor 'w' has a key twice",
    ),
    "a key more": (build({"w": {**W, "offset": 1}}), "the entry of tensor 'w' .*unknown field `offset`"),
    "a key less": (
        build({"w": {"dtype": "F32"}}),
        "the entry of tensor 'w' .*missing required field `shape`",
    ),
    "no shape": (build({"w": {**W, "shape": "4"}}), "the entry of tensor 'w' .*`array`, got `str`"),
    "a float": (build({"w": {**W, "shape": [4.0]}}), "the entry of tensor 'w' .*`int`, got `float`"),
    "three offsets": (build({"w": {**W, "data_offsets": [0, 8, 16]}}), "the entry of tensor 'w'"),
    "notes": (build({"__metadata__": {"a": 1}, "w": W}), "'__metadata__' is no object of texts"),
    "unknown type": (build({"w": entry(dtype="F4")}), "tensor 'w' has type 'F4', .*; supported: BOOL,"),
    "dimensions": (build({"w": entry(shape=(1,) * 9)}), "tensor 'w' has 9 dimensions, expected at most 8"),
    "of zero": (build({"w": entry(0, 0, (0, 4))}), r"tensor 'w' has shape \[0, 4\], expected dimensions"),
    "negative": (build({"w": entry(shape=(-1, -4))}), ".*, expected dimensions of 1 or more"),
    "huge": (build({"w": entry(shape=(2**62,) * 8)}), ".*, expected dimensions of 1 or more"),
    "large": (build({"w": entry(shape=(2**40,) * 8)}), ".* has 16 bytes, expected 8543948143683640"),
    "too few": (build({"w": entry(shape=(5,))}), r"tensor 'w' \(F32 \[5\]\) has 16 bytes, expected 20"),
    "backwards": (build({"w": entry(16, 0)}), "tensor 'w' lies at bytes 16 to 0 of the data"),
    "before": (build({"w": entry(-16, 0)}), "tensor 'w' lies at bytes -16 to 0 of the data"),
    "beyond": (build({"w": entry(0, 2**63)}), "tensor 'w' lies at bytes 0 to 9223372036854775808"),
    "hole in front": (build({"w": entry(4, 16, (3,))}), "tensor 'w' begins at .*, the end of the table"),
    "hole": (
        build({"a": entry(0, 4, (1,)), "b": entry(8, 16, (2,))}),
        "tensor 'b' begins at byte .*the end of tensor 'a'",
    ),
    "overlap": (
        build({"a": entry(0, 8, (2,)), "b": entry(4, 16, (3,))}),
        "tensor 'b' at byte .* overlaps tensor 'a'",
    ),
    "the same": (build({"a": entry(), "b": entry()}), "tensor 'b' at byte .* overlaps tensor 'a'"),
    "long name": (build({"n" * 5000: entry(dtype="?")}), "tensor 'nnn.*nnn' has type"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    """Case B178, of this format: one line, which names the file and the tensor."""
    content, expected = DAMAGE[damage]
    with opened(tmp_path, GOOD) as file:
        assert file.tensor_names == ["w"]
    with pytest.raises(CheckpointError, match=f"^{tmp_path / 'm.safetensors'}: {expected}") as caught:
        opened(tmp_path, content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_not_a_file(tmp_path: Path) -> None:
    """A pipe is refused, not waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path, culprit in (
        (tmp_path / "pipe", "is a device or a pipe"),
        (tmp_path, "is a directory"),
        (tmp_path / "none", "no such file"),
        (Path("/dev/null"), "is a device or a pipe"),
        (Path("m\0"), "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=culprit):
            SafetensorsFile(path)


def test_random_damage_is_refused_or_harmless(written: Path, tmp_path: Path) -> None:
    """Case B178, of this format: 600 mutations and truncations. What this reader opens the reference opens
    too, and none makes this one hold more than a few times the file."""
    whole = written.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    rng = random.Random(0)
    refused = 0
    tracemalloc.start()
    try:
        for round_ in range(600):
            damaged = bytearray(whole)
            if round_ % 4 == 0:
                del damaged[rng.randrange(len(whole)) :]
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(8 + length)
                if at < len(damaged):
                    damaged[at] = rng.choice((0, 0x30, 0x22, 0x7B, 0x7D, 0xFF, rng.randrange(256)))
            path = tmp_path / "m.safetensors"
            path.write_bytes(damaged)
            try:
                with SafetensorsFile(path) as file:
                    for name in file.tensor_names:
                        file.elements(name)
            except CheckpointError:
                refused += 1
                continue
            with safetensors.safe_open(path, "np") as reference:
                assert set(reference.keys()) == set(SafetensorsFile(path).tensor_names)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 300 < refused < 600
    assert peak_bytes < 8 * len(whole) + 2**22


HOSTILE = {
    "names": lambda n: b"{" + b'"":{},' * n,
    "lists": lambda n: b'{"w":{"shape":[' + b"[]," * n,
    "numbers": lambda n: b'{"w":{"dtype":"F32","shape":[' + b"1," * n + b'1],"data_offsets":[0,4]}}',
    "notes": lambda n: b'{"__metadata__":{' + b'"":"",' * n + b'"":""}}',
    "spaces": lambda n: b"{" + b" " * n,
    "quotes": lambda n: b'{"w":{' + b'"' * n,
    "escapes": lambda n: b'{"' + b"\\" * n,
    "braces": lambda n: b'{"w":' + b"{" * n,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_table_costs_no_more_than_its_size(kind: str, tmp_path: Path) -> None:
    """A megabyte of anything, refused in memory of a few times that; twice the size in about twice the time,
    which a walk that begins again at each byte would not do within the limit of a test."""
    content = build(HOSTILE[kind](250_000), 4)
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * len(content)


# ---- shards ------------------------------------------------------------------------------------------------


def shards(folder: Path, places: object, files: dict[str, dict[str, np.ndarray]]) -> Path:
    for name, held in files.items():
        save_file(held, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(places))
    return index


def test_shards_are_one(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.float16)
    places = {"metadata": {"total_size": 32}, "weight_map": {"b": "2.safetensors", "a": "1.safetensors"}}
    index = shards(tmp_path, places, {"1.safetensors": {"a": a}, "2.safetensors": {"b": b}})
    with ShardedSafetensors(index) as file:
        assert file.tensor_names == ["b", "a"]
        assert file.info("a").shape == (2, 3)
        np.testing.assert_array_equal(file.dequantise("a"), a)
        np.testing.assert_array_equal(file.dequantise_rows("a", 1, 2), a[1:])
        np.testing.assert_array_equal(file.elements("b"), b)
        assert file.raw("b").tobytes() == b.tobytes()
        assert file.is_finite("b")
        file.drop_pages()
        with pytest.raises(CheckpointError, match=r"index.json: no tensor 'c' among its 2$"):
            file.info("c")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], "is no index of shards; expected JSON with a weight_map"),
        ({"metadata": {}}, "is no index of shards"),
        ({"weight_map": {"a": 1}}, "is no index of shards"),
        ({"weight_map": {}}, "the weight_map is empty"),
        ({"weight_map": {"a": "../m.safetensors"}}, r"tensor 'a' is said to be in '\.\./m"),
        ({"weight_map": {"a": ".."}}, r"tensor 'a' is said to be in '\.\.'"),
        ({"weight_map": {"a": "m\n"}}, "tensor 'a' is said to be in"),
        ({"weight_map": {"a": "m" * 3000}}, "tensor 'a' is said to be in 'mmm"),
        ({"weight_map": {"a": "none.safetensors"}}, r"none\.safetensors: no such file"),
        (
            {"weight_map": {"a": "m.safetensors", "c": "m.safetensors"}},
            "tensor 'c' should be in m.safetensors, which does not have it",
        ),
        ({"weight_map": {"a": "m.safetensors"}}, "tensor 'b' is in m.safetensors, but not in the index"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(places: object, expected: str, tmp_path: Path) -> None:
    held = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    index = shards(tmp_path, places, {"m.safetensors": held})
    with pytest.raises(CheckpointError, match=expected) as caught:
        ShardedSafetensors(index)
    assert "\n" not in str(caught.value)


def test_the_table_of_types_agrees_with_its_names() -> None:
    for name, kind in ELEMENT_TYPES.items():
        assert 8 * kind.itemsize == (8 if name == "BOOL" else int(name.split("_")[0].lstrip("BFIU")))
