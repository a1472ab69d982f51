"""Packed weights on disk, so that a second start reads or maps them instead of packing again.

Theory of operation.
- An image is one file: a page that says of what it is made, then the bytes. Its name is a digest of the model
  file's identity (device, inode, size, times of last change), of how it is packed, and of the layout's
  version. Whatever changes a file's content changes its ctime; hashing the content would cost more than
  packing it.
- Small images are read into memory of this process, which comes in huge pages: a token of one stream then
  takes a fifth less time than from a map of the file, whose pages are small. Large ones are mapped, for
  reading them would take longer than a start should.
- An image is written under another name and renamed when it is whole. Room is reserved first, for a full disk
  would end the process at some later write to a map. Where it cannot be kept, weights stay in memory of this
  process alone, and that is all that is lost.
- The folder is bounded: before an image is written the least recently used ones go until it fits.

`open_image` gives memory to fill or filled; whoever asks packs, and says `keep` when it is done.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.log import get_logger
from mainspring.checkpoint.catalog import default_cache_dir

logger = get_logger(__name__)

LAYOUT_VERSION = 1  # of the native kernels' packed matrices
SUFFIX = ".packed"
HEADER_BYTES = 4096
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
    part: Path | None = None  # a file of which `memory` is a map, until it is kept

    def keep(self) -> None:
        """It is filled now: let later starts find it."""
        self.is_filled = True
        if self.path is None:
            return
        try:
            part = self.part or self._write(_part_of(self.path))
            os.replace(part, self.path)
        except OSError as error:
            logger.info("packed weights are not kept: %s", error.strerror or error)
            self.drop()
        self.path = self.part = None

    def drop(self) -> None:
        """It will not be filled."""
        if self.path is not None:
            with suppress(OSError):
                _part_of(self.path).unlink()
        self.path = self.part = None

    def _write(self, part: Path) -> Path:
        with open(part, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + len(self.memory))
            file.write(self.header)
            file.write(self.memory.data)
        return part


def images_dir() -> Path:
    return default_cache_dir() / "packed"


def open_image(model: str | os.PathLike[str], packing: str, num_bytes: int) -> Image:
    """The image of a model file packed in the way that `packing` names: mapped, or new and to be filled.

    `packing` holds all that the bytes depend on beside the file's content.
    """
    path = images_dir() / f"{_digest(model, packing, num_bytes)}{SUFFIX}"
    memory = _existing(path, num_bytes)
    if memory is not None:
        return Image(memory, True)
    try:
        return _new(path, model, packing, num_bytes)
    except OSError as error:
        logger.info("packed weights are not kept: %s: %s", path.parent, error.strerror or error)
        return Image(private_memory(num_bytes), False)


def list_images() -> list[ImageInfo]:
    """Of all that is there, most recently used first."""
    found = []
    for path in images_dir().glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError):
            header = _read_header(path)
            status = path.stat()
            found.append(ImageInfo(path, header["model"], header["packing"], status.st_size, status.st_mtime))
    return sorted(found, key=lambda info: -info.last_used_s)


def clear_images() -> int:
    """Remove all images, finished or not; how many bytes that were. Engines that use one keep their map."""
    freed = 0
    for path in images_dir().glob("*"):
        if path.suffix in (SUFFIX, ".part"):
            with suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                freed += size
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
    status = os.stat(model)
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    text = json.dumps([LAYOUT_VERSION, identity, packing, num_bytes])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _existing(path: Path, num_bytes: int) -> Bytes | None:
    """The bytes of an image that is there and whole."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != HEADER_BYTES + num_bytes:
                return None
            if num_bytes <= MOST_COPIED_BYTES:
                file.seek(HEADER_BYTES)
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
    header = json.dumps({"model": os.fspath(model), "packing": packing}).encode()
    if len(header) > HEADER_BYTES:
        header = json.dumps({"model": "?", "packing": packing[:64]}).encode()
    header = header.ljust(HEADER_BYTES)
    if num_bytes <= MOST_COPIED_BYTES:
        return Image(private_memory(num_bytes), False, header, path)
    part = _part_of(path)
    with open(part, "w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + num_bytes)
            file.write(header)
            file.flush()
            pages = mmap.mmap(file.fileno(), HEADER_BYTES + num_bytes)
        except BaseException:
            part.unlink()
            raise
    return Image(np.frombuffer(pages, np.uint8)[HEADER_BYTES:], False, header, path, part)


def _part_of(path: Path) -> Path:
    """Where this process writes what is to become `path`."""
    return path.with_suffix(f".{os.getpid()}.part")


def _make_room(folder: Path, num_bytes: int) -> None:
    """Raises `OSError` if the image is too large to be kept at all."""
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
    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Parts of processes that ended before theirs was whole."""
    for part in folder.glob("*.part"):
        owner = part.suffixes[-2][1:] if len(part.suffixes) > 1 else ""
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):
                part.unlink()


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        header: dict[str, Any] = json.loads(file.read(HEADER_BYTES))
        return header
