"""Packed weights on disk: found again, never half written, and never in the way of a start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mainspring.base.errors import EngineError
from mainspring.checkpoint import images
from mainspring.checkpoint.images import HEADER_BYTES, Image, clear_images, list_images, open_image

SIZE = 100_000
PACKING = "as the file"


@pytest.fixture(autouse=True, params=["a cache", "größer/with 🌍"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / str(request.param)
    monkeypatch.setenv("MAINSPRING_CACHE", str(folder))
    return folder / "packed"


@pytest.fixture(params=["read", "mapped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small images are read, large ones mapped."""
    if request.param == "mapped":
        monkeypatch.setattr(images, "MOST_COPIED_BYTES", 0)
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    return path


def fill(model: Path, value: int, packing: str = PACKING) -> Image:
    image = open_image(model, packing, SIZE)
    assert not image.is_filled
    image.memory[:] = value
    image.keep()
    assert image.is_filled
    assert (image.memory == value).all()
    return image


def is_kept(model: Path, value: int, packing: str = PACKING) -> bool:
    image = open_image(model, packing, SIZE)
    kept = image.is_filled
    assert not kept or (image.memory == value).all(), "an image of something else was served"
    image.drop()
    return kept


@pytest.mark.parametrize(
    ("named", "names"),
    [
        ("m-00002-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        (".", ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors", "config.json"]),
        (".", ["any.gguf"]),
    ],
)
def test_each_file_of_a_model_counts(tmp_path: Path, named: str, names: list[str]) -> None:
    """A model of several files is another when one of them changes. What lies beside them does not count."""
    (tmp_path / "model").mkdir()
    model = tmp_path / "model" / named
    for name in names:
        (tmp_path / "model" / name).write_bytes(b"weights")
    fill(model, 1)
    (tmp_path / "model" / "m-00001-of-00003.txt").write_bytes(b"beside")
    assert is_kept(model, 1)
    for value, name in enumerate(names, 2):
        (tmp_path / "model" / name).write_bytes(b"WEIGHTS")
        assert not is_kept(model, value)
        fill(model, value)
        assert is_kept(model, value)


def names(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir())


def test_what_was_kept_is_found(way: str, model: Path, cache: Path) -> None:
    fill(model, 7)
    assert is_kept(model, 7)
    image = open_image(model, PACKING, SIZE)
    assert image.memory.ctypes.data % 64 == 0
    image.memory[:] = 9  # it is this process's own
    assert is_kept(model, 7)
    assert names(cache) == [".packed"]


def test_what_was_dropped_leaves_nothing(way: str, model: Path, cache: Path) -> None:
    open_image(model, PACKING, SIZE).drop()
    assert names(cache) == []


def test_other_packings_and_changed_models_have_images_of_their_own(
    way: str, model: Path, tmp_path: Path
) -> None:
    fill(model, 1)
    fill(model, 2, "q8")
    model.write_bytes(b"WEIGHTS")  # of the same size
    fill(model, 3)
    assert is_kept(model, 3)
    (tmp_path / "other.gguf").write_bytes(b"weights")
    os.replace(tmp_path / "other.gguf", model)
    assert not is_kept(model, 3)


def test_a_link_is_the_file_that_it_leads_to(way: str, model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    fill(link, 4)
    assert is_kept(model, 4)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"others")
    link.unlink()
    link.symlink_to(other)
    assert not is_kept(link, 4)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, HEADER_BYTES + SIZE - 1),
    "grown": lambda path: os.truncate(path, HEADER_BYTES + SIZE + 1),
    "zeros for a header": lambda path: overwrite(path, bytes(HEADER_BYTES)),
    "a header of another kind": lambda path: overwrite(path, b"[1]".ljust(HEADER_BYTES)),
    "a header of brackets": lambda path: overwrite(path, b"[" * HEADER_BYTES),
    "a header that is no text": lambda path: overwrite(path, b"\xff" * HEADER_BYTES),
    "another packing's": lambda path: overwrite(
        path, b'{"model": "m.gguf", "packing": "q8"}'.ljust(HEADER_BYTES)
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


def overwrite(path: Path, header: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(header)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_image_is_made_again(damage: str, way: str, model: Path, cache: Path) -> None:
    """What lies in an image's place may be anything."""
    fill(model, 5)
    (path,) = cache.iterdir()
    DAMAGES[damage](path)
    list_images()
    fill(model, 6)
    if damage != "a folder":  # that stays, and weights are packed at every start
        assert is_kept(model, 6)
        (info,) = list_images()
        assert (info.model, info.packing) == (str(model), PACKING)
        clear_images()
        assert names(cache) == []


def test_damaged_images_are_listed_counted_and_cleared(model: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "x.packed").write_bytes(b"[1]" * 100)
    (info,) = list_images()
    assert (info.model, info.packing, info.num_bytes) == ("?", "?", 300)
    assert clear_images() == 300
    assert clear_images() == 0


def test_names_of_any_bytes(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n" + b"x" * 200 + b".gguf"))
    path.write_bytes(b"weights")
    fill(path, 1)
    assert is_kept(path, 1)
    assert "�" in list_images()[0].model


@pytest.mark.parametrize("blocked", ["a file", "a part of the path is a file", "not allowed"])
def test_without_a_folder_weights_are_packed_every_time(
    blocked: str, way: str, model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if blocked == "a file":
        cache.parent.mkdir(parents=True)
        cache.write_text("")
    elif blocked == "a part of the path is a file":
        cache.parent.parent.mkdir(parents=True, exist_ok=True)
        cache.parent.write_text("")
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o500)
        if os.access(cache, os.W_OK):
            pytest.skip("whoever runs this may write everywhere")
    with caplog.at_level("INFO"):
        fill(model, 1)
    assert "packed weights are not kept" in caplog.text
    assert not is_kept(model, 1)
    assert list_images() == []


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "replace"])
def test_a_disk_that_fails(
    call: str,
    way: str,
    model: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, failing)
    with caplog.at_level("INFO"):
        fill(model, 1)
    assert "No space left on device" in caplog.text
    assert names(cache) == []


def test_the_folder_is_bounded(way: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_BYTES", 3 * (HEADER_BYTES + SIZE))
    cache.mkdir(parents=True)
    (cache / "damaged.packed").write_bytes(bytes(SIZE))
    os.utime(cache / "damaged.packed", (0, 0))  # the least recently used
    for number in range(5):
        fill(model, number, f"packing {number}")
        time.sleep(0.01)  # a file's time may be as coarse
        assert is_kept(model, 0, "packing 0"), "what is used stays"
    assert {info.packing for info in list_images()} == {"packing 0", "packing 3", "packing 4"}


def test_an_image_larger_than_all_may_be_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_BYTES", SIZE - 1)
    fill(model, 1)
    assert not is_kept(model, 1)


def test_several_threads_at_once(way: str, model: Path, cache: Path) -> None:
    """Each writes a file of its own; whichever is renamed last is as good as the others."""
    together = threading.Barrier(4)
    found: list[bool] = []

    def start() -> None:
        image = open_image(model, PACKING, SIZE)
        together.wait()
        image.memory[:] = 8
        together.wait()
        image.keep()
        found.append(bool((image.memory == 8).all()))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert is_kept(model, 8)
    assert names(cache) == [".packed"]


def write_half(model: Path, is_half: object, is_over: object) -> None:
    images.MOST_COPIED_BYTES = 0
    image = open_image(model, PACKING, SIZE)
    image.memory[: SIZE // 2] = 1
    is_half.set()  # type: ignore[attr-defined]
    is_over.wait()  # type: ignore[attr-defined]


def test_killed_while_packing(model: Path, cache: Path) -> None:
    """A living process's part stays, a dead one's goes, in whatever container it had that process id."""
    context = multiprocessing.get_context("spawn")
    is_half, is_over = context.Event(), context.Event()
    writer = context.Process(target=write_half, args=(model, is_half, is_over))
    writer.start()
    try:
        assert is_half.wait(30)
        fill(model, 2, "another")
        assert names(cache) == [".packed", ".part"]
    finally:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert not is_kept(model, 1)
    assert names(cache) == [".packed"]


def test_what_cannot_be_removed_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(model, 1)

    def failing(*arguments: object, **more: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(EngineError, match=r"\.packed cannot be removed: Read-only file system"):
        clear_images()
