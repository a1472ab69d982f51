"""Models split over several GGUF files: all of them, of one model, whichever is opened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.gguf import GGUFFile

TENSORS = {f"blk.{i}.w": np.arange(64, dtype=np.float32).reshape(2, 32) + 100 * i for i in range(5)}


def write(path: Path, names: list[str], keys: dict[str, int | str | None]) -> None:
    """One file; a key of None is left out. The writer's own `general.architecture` is "llama" in all of them,
    as some converters repeat it."""
    writer = gguf.GGUFWriter(path, str(keys.pop("general.architecture", "llama")))
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            (writer.add_int32 if key == "split.tensors.count" else writer.add_uint16)(key, value)
    for name in names:
        writer.add_tensor(name, TENSORS[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(folder: Path, stem: str = "model", **changed: dict[str, Any]) -> list[Path]:
    """Three parts, of 2, 2 and 1 tensors. `changed` has keys of `part1`, ..., or other "tensors" for it."""
    names = list(TENSORS)
    paths = []
    for i, held in enumerate((names[:2], names[2:4], names[4:])):
        keys: dict[str, Any] = {"split.no": i, "split.count": 3, "split.tensors.count": len(TENSORS)}
        if i == 0:
            keys["general.name"] = stem
        keys |= changed.get(f"part{i + 1}", {})
        paths.append(folder / f"{stem}-{i + 1:05}-of-00003.gguf")
        write(paths[-1], keys.pop("tensors", held), keys)
    return paths


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_part_opens_all(tmp_path: Path, which: int) -> None:
    paths = split(tmp_path)
    with GGUFFile(paths[which]) as file:
        assert file.path == paths[0]
        assert file.paths == paths
        assert file.tensor_names == list(TENSORS)
        assert file.metadata["general.name"] == "model"
        for name, values in TENSORS.items():
            assert file.info(name).shape == (2, 32)
            assert np.array_equal(file.dequantise(name), values)
            assert np.array_equal(file.dequantise_rows(name, 1, 2), values[1:])
            assert np.array_equal(file.raw(name).view(np.float32), values.reshape(-1))
            assert file.is_finite(name)
        file.drop_pages()
        kept = file.raw("blk.4.w")
        assert np.array_equal(file.dequantise("blk.4.w"), TENSORS["blk.4.w"])
    assert kept.view(np.float32)[0] == 400


def test_parts_as_the_reference_writes_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "made.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "made")
    for name, values in TENSORS.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) == 3
    with GGUFFile(paths[1]) as file:
        assert file.paths == paths
        assert all(np.array_equal(file.dequantise(name), values) for name, values in TENSORS.items())


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    names = list(TENSORS)
    paths = split(tmp_path, part1={"tensors": []}, part2={"tensors": names[:4]})
    with GGUFFile(paths[2]) as file:
        assert file.tensor_names == names


def test_a_whole_file_may_say_that_it_is_one_part(tmp_path: Path) -> None:
    for count in (0, 1):
        write(tmp_path / "any.gguf", ["blk.0.w"], {"split.no": 0, "split.count": count})
        with GGUFFile(tmp_path / "any.gguf") as file:
            assert file.tensor_names == ["blk.0.w"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    """Case B178: a model that is not all there is refused, by the name of what is missing."""
    paths = split(tmp_path)
    paths[missing].unlink()
    for path in paths:
        if path != paths[missing]:
            with pytest.raises(CheckpointError) as caught:
                GGUFFile(path)
            assert f"part {missing + 1} of 3 is missing: expected {paths[missing].name}" in str(caught.value)
            assert str(caught.value).startswith(f"{path}: ")


def test_a_part_of_another_name(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for name in ("other.gguf", "model-00001-of-00003.gguf.bin", "model-00002-of-00004.gguf"):
        moved = shutil.copy(paths[1], tmp_path / name)
        with pytest.raises(CheckpointError, match=r"is part 2 of 3 .* ends in '-00002-of-00003\.gguf'"):
            GGUFFile(moved)


@pytest.mark.parametrize(
    ("changed", "which", "expected"),
    [
        ({"part2": {"split.count": 4}}, 1, "'split.count' is 4, and in .*-00001-of-00003.gguf 3: parts of"),
        ({"part2": {"split.count": None}}, 1, "'split.count' is None, and in .*-00001-of-00003.gguf 3"),
        ({"part3": {"split.no": 1}}, 2, "'split.no' is 1, expected 2 by its name"),
        ({"part3": {"split.no": None}}, 2, "'split.no' is None, expected 2 by its name"),
        ({"part3": {"split.tensors.count": 6}}, 2, "'split.tensors.count' is 6, and in .* 5: parts of diff"),
        ({"part2": {"general.architecture": "gpt2"}}, 1, "'general.architecture' is 'gpt2', .* 'llama'"),
        ({"part3": {"general.name": "other"}}, 2, "'general.name' is 'other', and in .* 'model'"),
        ({"part2": {"tensors": ["blk.0.w"]}}, 1, "'blk.0.w' is in model-00001-of-00003.gguf, too"),
        ({"part2": {"tensors": ["blk.2.w"]}}, 0, "the 3 parts have 4 tensors together, .* is 5: parts of"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_together(
    tmp_path: Path, changed: dict[str, dict[str, Any]], which: int, expected: str
) -> None:
    """Case B178: two tensors of a name, a wrong count, parts of different models."""
    paths = split(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=expected) as caught:
        GGUFFile(paths[0])
    assert str(caught.value).startswith(f"{paths[which]}: ")
    assert "\n" not in str(caught.value)


def test_a_part_of_another_model_under_the_right_name(tmp_path: Path) -> None:
    paths = split(tmp_path)
    (tmp_path / "b").mkdir()
    other = split(tmp_path / "b", "other", part2={"tensors": ["blk.0.w", "blk.1.w"]})
    shutil.copy(other[1], paths[1])
    with pytest.raises(CheckpointError, match=r"'blk\.0\.w' is in model-00001-of-00003\.gguf, too"):
        GGUFFile(paths[0])


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"'blk\.4\.w' .* ends at byte .*truncated") as caught:
        GGUFFile(paths[0])
    assert str(caught.value).startswith(f"{paths[2]}: ")
    paths[2].write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf: the file is empty"):
        GGUFFile(paths[1])
