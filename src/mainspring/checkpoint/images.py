"""Packed weights on disk, so that a second start reads or maps them instead of packing again.

Theory of operation.
- An image is one file: a page that says of what it is made, then the bytes. Its name is a digest of the
  identity of the model's files (device, inode, size, times of last change) and of how it is packed. Whatever
  changes a file's content changes its ctime; hashing the content would cost more than packing it.
- Small images are read into memory of this process, which comes in huge pages: a token of one stream then
  takes a fifth less time than from a map of the file, whose pages are small. Large ones are mapped, for
  reading them would take longer than a start should.
- An image is written under a name of its own, so that any number of engines may pack one model at once, and
  renamed when it is whole and on the disk: after a power cut there is all of it or nothing. Room is reserved
  first, for a full disk would end the process at some later write to a map. Where it cannot be kept, weights
  stay in memory of this process alone, and that is all that is lost.
- Who writes a part has it locked. A part that can be locked has lost its writer, and is removed.
- The folder is bounded: before an image is written the least recently used ones go until it fits.

`open_image` gives memory to fill or filled; whoever asks packs, and says `keep` when it is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mainspring.base.errors import EngineError
from mainspring.base.log import get_logger
from mainspring.checkpoint.catalog import default_cache_dir
from mainspring.checkpoint.gguf import PART_NAME

logger = get_logger(__name__)

SUFFIX = ".packed"
PART_SUFFIX = ".part"
MODEL_SUFFIXES = (".safetensors", ".json", ".gguf")  # in a model's folder
HEADER_BYTES = 4096
UNREADABLE = "?"  # in the place of what a damaged header said
MOST_BYTES = 16 * 2**30  # of all images together
MOST_COPIED_BYTES = 2 * 2**30  # of an image that is read instead of mapped: about half a second
MOST_SHARE = 0.25  # of the free disk, that a new image may take

Bytes = npt.NDArray[np.uint8]


class ImageInfo(NamedTuple):
    """What is told of an image to people."""

    path: Path
    model: str
    packing: str
    num_bytes: int
    last_used_s: float  # since the epoch


@dataclass
class Image:
    """Memory for packed weights, [num_bytes] uint8, at a multiple of 64 bytes."""

    memory: Bytes
    is_filled: bool
    header: bytes = b""
    path: Path | None = None  # where it is to be kept; None: nowhere
    part: _Part | None = None  # a file of which `memory` is a map, until it is kept

    def keep(self) -> None:
        """It is filled now: let later starts find it."""
        self.is_filled = True
        if self.path is None:
            return
        try:
            if self.part is None:
                self.part = _new_part(self.path, self.header, len(self.memory))
                self.part.file.write(self.memory.data)
            self.part.publish(self.path)
        except OSError as error:
            logger.info("packed weights are not kept: %s", error.strerror or error)
        finally:
            self.drop()

    def drop(self) -> None:
        """What is not kept by now will not be."""
        if self.part is not None:
            self.part.close()
        self.path = self.part = None


@dataclass
class _Part:
    """A file that is being written: locked until it is closed, and then gone, unless it was published."""

    file: BufferedRandom
    path: Path

    def publish(self, path: Path) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())  # what was written to a map as well
        os.replace(self.path, path)

    def close(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk, said before
            self.file.close()


def images_dir() -> Path:
    return default_cache_dir() / "packed"


def open_image(model: str | os.PathLike[str], packing: str, num_bytes: int) -> Image:
    """The image of a model file packed in the way that `packing` names: mapped, or new and to be filled.

    `packing` holds all that the bytes depend on beside the file's content.
    """
    path = images_dir() / f"{_digest(model, packing, num_bytes)}{SUFFIX}"
    memory = _existing(path, packing, num_bytes)
    if memory is not None:
        return Image(memory, True)
    try:
        return _new(path, model, packing, num_bytes)
    except OSError as error:
        logger.info("packed weights are not kept: %s: %s", path.parent, error.strerror or error)
        return Image(private_memory(num_bytes), False)


def list_images() -> list[ImageInfo]:
    """Of all that is there, damaged or not, most recently used first."""
    found = []
    for path in _files(images_dir(), SUFFIX):
        with suppress(OSError):  # it has gone since
            header, status = _read_header(path), path.stat()
            found.append(ImageInfo(path, header.model, header.packing, status.st_size, status.st_mtime))
    return sorted(found, key=lambda info: -info.last_used_s)


def clear_images() -> int:
    """Remove all images, finished or not; how many bytes that were. Engines that use one keep their map.

    Raises `EngineError` for one that cannot be removed, after the others.
    """
    freed, failed = 0, None
    for path in _files(images_dir(), SUFFIX, PART_SUFFIX):
        try:
            size = path.stat().st_size
            path.unlink()
            freed += size
        except FileNotFoundError:  # another was faster
            continue
        except OSError as error:
            failed = EngineError(f"{path} cannot be removed: {error.strerror}")
    if failed is not None:
        raise failed
    return freed


def private_memory(num_bytes: int) -> Bytes:
    """[num_bytes] for weights that are not kept: of this process alone, in huge pages if possible."""
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


# ---- inside ------------------------------------------------------------------------------------------------


def _digest(model: str | os.PathLike[str], packing: str, num_bytes: int) -> str:
    statuses = [os.stat(file) for file in _files_of(Path(model))]
    identities = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in statuses]
    text = json.dumps([identities, packing, num_bytes])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _files_of(model: Path) -> list[Path]:
    """What the weights come from: a file, all parts of a split one, or what lies in a folder."""
    if model.is_dir():
        return sorted(file for file in model.iterdir() if file.suffix in MODEL_SUFFIXES)
    part = PART_NAME.fullmatch(model.name)
    if part is None:
        return [model]
    others = (PART_NAME.fullmatch(file.name) for file in model.parent.iterdir())
    whole = part["stem"], part["count"]
    return sorted(model.with_name(o.string) for o in others if o and (o["stem"], o["count"]) == whole)


class _Header(msgspec.Struct, frozen=True):
    """What the first page says."""

    model: str
    packing: str


def _existing(path: Path, packing: str, num_bytes: int) -> Bytes | None:
    """The bytes of an image that is there and whole."""
    if not path.is_file():
        return None
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != HEADER_BYTES + num_bytes:
                return None
            if _parsed(file.read(HEADER_BYTES)).packing != packing:
                return None
            if num_bytes <= MOST_COPIED_BYTES:
                memory = private_memory(num_bytes)
                if file.readinto(memory.data) != num_bytes:
                    return None
            else:
                # copied on write: nobody writes it, but a read-only map could not be given to C++ as memory
                pages = mmap.mmap(file.fileno(), HEADER_BYTES + num_bytes, flags=mmap.MAP_PRIVATE)
                memory = np.frombuffer(pages, np.uint8)[HEADER_BYTES:]
        with suppress(OSError):
            os.utime(path)  # it was used now
    except (OSError, ValueError):
        return None
    return memory


def _new(path: Path, model: str | os.PathLike[str], packing: str, num_bytes: int) -> Image:
    path.parent.mkdir(parents=True, exist_ok=True)
    _make_room(path.parent, num_bytes)
    header = _header(model, packing)
    if num_bytes <= MOST_COPIED_BYTES:
        return Image(private_memory(num_bytes), False, header, path)
    part = _new_part(path, header, num_bytes)
    try:
        pages = mmap.mmap(part.file.fileno(), HEADER_BYTES + num_bytes)
    except BaseException:
        part.close()
        raise
    return Image(np.frombuffer(pages, np.uint8)[HEADER_BYTES:], False, header, path, part)


def _new_part(path: Path, header: bytes, num_bytes: int) -> _Part:
    """A file for what is to become `path`, all of its room reserved, its header written."""
    name = path.with_suffix(f".{secrets.token_hex(8)}{PART_SUFFIX}")
    part = _Part(open(name, "x+b"), name)  # noqa: SIM115  closed by whoever has the part
    try:
        with suppress(OSError):  # a file system without locks: then nobody takes it for lost either
            fcntl.flock(part.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(part.file.fileno(), 0, HEADER_BYTES + num_bytes)
        part.file.write(header)
        part.file.flush()
    except BaseException:
        part.close()
        raise
    return part


def _make_room(folder: Path, num_bytes: int) -> None:
    """Raises `OSError` if the image is too large to be kept at all."""
    _sweep(folder)
    disk = os.statvfs(folder)
    allowed = min(MOST_BYTES, int(MOST_SHARE * disk.f_bavail * disk.f_frsize))
    if num_bytes > allowed:
        raise OSError(f"an image of {num_bytes / 2**30:.1f} GiB, of {allowed / 2**30:.1f} allowed")
    images = list_images()
    total = sum(image.num_bytes for image in images)
    for image in reversed(images):
        if total + num_bytes <= MOST_BYTES:
            break
        with suppress(OSError):
            image.path.unlink()
        total -= image.num_bytes


def _sweep(folder: Path) -> None:
    """Remove parts whose writers ended before they were whole."""
    for part in _files(folder, PART_SUFFIX):
        with suppress(OSError), open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """Of these, regular files alone: opening another kind may wait for ever."""
    return [path for path in folder.glob("*") if path.suffix in suffixes and path.is_file()]


def _header(model: str | os.PathLike[str], packing: str) -> bytes:
    name = os.fsencode(model).decode(errors="replace")
    page = msgspec.json.encode(_Header(name, packing))
    if len(page) > HEADER_BYTES:
        page = msgspec.json.encode(_Header(UNREADABLE, packing))
    return page.ljust(HEADER_BYTES)


def _read_header(path: Path) -> _Header:
    with open(path, "rb") as file:
        try:
            return _parsed(file.read(HEADER_BYTES))
        except ValueError:
            return _Header(UNREADABLE, UNREADABLE)


def _parsed(page: bytes) -> _Header:
    """Raises `ValueError` for what no image begins with."""
    return msgspec.json.decode(page, type=_Header)
