"""Names of the hub, against one on this machine: it speaks what huggingface_hub asks of the real one."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_llama

from mainspring import LLM, SamplingParams
from mainspring.base.config import EngineArgs
from mainspring.base.errors import CheckpointError
from mainspring.checkpoint import hub as hub_module
from mainspring.checkpoint.catalog import pull, resolve_model
from mainspring.checkpoint.hub import choose, is_hub_name

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
BIG = bytes(range(256)) * 2000
FOLDER = {
    "README.md": b"no",
    "config.json": b'{"of": "the model"}',
    "tokenizer.json": b'{"of": "the tokenizer"}',
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": BIG,
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"no",
    "consolidated.safetensors": b"no",
    "original/consolidated.00.pth": b"no",
    "1_Pooling/config.json": b'{"of": "pooling"}',
    "onnx/model.onnx": b"no",
}
NEEDED = {name for name, content in FOLDER.items() if content != b"no"}
GGUF = {
    "config.json": b"{}",
    "m-Q4_K_M.gguf": b"q4",
    "m-q8_0.gguf": BIG,
    "mmproj-m-Q4_K_M.gguf": b"no",
    "big/m-BF16-00001-of-00002.gguf": b"1",
    "big/m-BF16-00002-of-00002.gguf": b"2",
}


class Hub(ThreadingHTTPServer):
    """Repositories by name; remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {"org/folder": FOLDER, "org/gguf": GGUF}
        self.commits = {"main": COMMIT, COMMIT: COMMIT, "v1": OLDER, OLDER: OLDER}
        self.gated: str | None = None  # a token that opens all
        self.status = 200
        self.delay_s = 0.0
        self.cut_at: int | None = None  # of a body; then nothing more
        self.asked: list[tuple[str, str]] = []  # method and path
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()  # that came with questions for a repository

    def handle_error(self, *_: object) -> None:
        """Clients hang up here, and mean to."""

    @property
    def fetched(self) -> list[str]:
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path in self.asked
            if method == "GET" and "/resolve/" in path
        ]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.server
        hub.asked.append((self.command, self.path))
        if "/org/" in self.path:
            hub.tokens.add(self.headers["Authorization"])
        time.sleep(hub.delay_s)
        if hub.status != 200:
            return self.reply(hub.status, b"sorry")
        parts = self.path.split("?")[0].removeprefix("/api/models").strip("/").split("/")
        name, kind, revision, file = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
        if name not in hub.repositories:
            return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        if hub.gated is not None and self.headers["Authorization"] != f"Bearer {hub.gated}":
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if revision not in hub.commits:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files, commit = hub.repositories[name], hub.commits[revision]
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self.reply(200, json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
        if file not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = files[file]
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "GET" and (asked := self.headers["Range"]):
            hub.ranges.append(asked)
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self.reply(206, content[first:], headers)
        return self.reply(200, content, headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            limit = self.server.cut_at
            self.wfile.write(body[:limit])
            if limit is not None and len(body) > limit:
                self.close_connection = True
                self.server.cut_at = 0

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a hub that nobody listens at."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hf" / "hub"


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


def get(name: str, **more: Any) -> Path:
    return pull(name, progress=False, **more)


def held(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


# ---- what is fetched ---------------------------------------------------------------------------------------


def test_of_a_folder_what_a_model_needs(hub: Hub, cache: Path) -> None:
    folder = get("org/folder")
    assert folder == cache / "models--org--folder" / "snapshots" / COMMIT
    assert held(folder) == {name: FOLDER[name] for name in NEEDED}
    assert sorted(hub.fetched) == sorted(NEEDED)
    asked = len(hub.asked)
    assert get("org/folder") == folder
    assert [path for _, path in hub.asked[asked:]] == ["/api/models/org/folder/revision/main"]
    assert resolve_model("org/folder", fetch=True) == folder
    asked = len(hub.asked)
    assert resolve_model("org/folder") == folder
    assert len(hub.asked) == asked


def test_one_file_of_many(hub: Hub, cache: Path) -> None:
    path = get("org/gguf:m-q8_0.gguf")
    assert path.read_bytes() == BIG
    assert hub.fetched == ["m-q8_0.gguf"]
    assert get("org/gguf:q8_0") == get("org/gguf:Q8_0") == path
    assert get("org/gguf").name == "m-Q4_K_M.gguf"
    big = get("org/gguf:bf16")
    assert big.relative_to(cache / "models--org--gguf" / "snapshots" / COMMIT) == Path(
        "big/m-BF16-00001-of-00002.gguf"
    )
    assert {path.name for path in big.parent.iterdir()} == {
        Path(name).name for name in GGUF if "BF16-" in name
    }


def test_a_revision(hub: Hub, cache: Path) -> None:
    assert get("org/folder", revision="v1").name == OLDER
    assert resolve_model("org/folder", revision="v1").name == OLDER
    assert resolve_model("org/folder", revision=OLDER).name == OLDER
    with pytest.raises(
        CheckpointError, match=r"^org/folder is not in the cache \(.*hub\), and the hub was not asked: get"
    ):
        resolve_model("org/folder")
    with pytest.raises(CheckpointError, match=r"^org/folder, revision \.\./\.\., is not in the cache"):
        resolve_model("org/folder", revision="../..")


def test_a_folder_of_ones_own(hub: Hub, tmp_path: Path) -> None:
    folder = get("org/folder", cache_dir=tmp_path / "mine")
    assert folder.is_relative_to(tmp_path / "mine")
    assert not (tmp_path / "hf" / "hub").exists()


def test_a_model_by_its_name_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    """From a name to an answer, with the engine's own settings for it."""
    folder = tiny_llama.write(tmp_path / "m", tiny_llama.weights())
    hub.repositories["org/tiny"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.gated = "hf_right"
    settings = {"skip_tokenizer_init": True, "in_process": True, "kernels": "numpy", "num_threads": 1}
    where = {"revision": "v1", "hf_token": "hf_right", "download_dir": str(tmp_path / "mine")}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    said = []
    for model, more in (("org/tiny", where), (str(folder), {})):
        with LLM(model, **settings, **more) as llm:
            (answer,) = llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
            said.append(answer.outputs[0].token_ids)
    assert said[0] == said[1]
    assert (tmp_path / "mine" / "models--org--tiny" / "snapshots" / OLDER / "config.json").is_file()
    assert "hf_right" not in repr(EngineArgs(model="org/tiny", hf_token="hf_right"))


def test_a_path_goes_before_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "folder").mkdir(parents=True)
    assert resolve_model("org/folder", fetch=True) == Path("org/folder")
    assert hub.asked == []


def test_a_program_of_its_own(hub: Hub, cache: Path) -> None:
    """The whole command, where huggingface_hub reads the environment itself and draws its bars on a terminal;
    and then without a network."""
    command = [sys.executable, "-m", "mainspring", "pull", "org/folder"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_TOKEN": "hf_mine"}
    folder = cache / "models--org--folder" / "snapshots" / COMMIT
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True)
        os.close(theirs)
        assert b"model-00002-of-00002.safetensors" in terminal.read(4096)
    assert done.stdout.decode() == f"org/folder: {folder}\n"
    assert hub.tokens == {"Bearer hf_mine"}
    asked = len(hub.asked)
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run([*command, "--json"], capture_output=True, env=environment, check=True)
    assert json.loads(done.stdout) == {"name": "org/folder", "path": str(folder)}
    assert done.stderr == b""
    assert len(hub.asked) == asked


def test_no_bar(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    get("org/gguf:m-q8_0.gguf")
    assert capfd.readouterr() == ("", "")


# ---- a hub that is not there -------------------------------------------------------------------------------


def test_an_unreachable_hub_costs_little_and_the_cache_is_taken(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = get("org/folder")
    hub.delay_s = 4.0
    for endpoint in (f"http://127.0.0.1:{hub.server_port}", "http://127.0.0.1:9"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        start_s = time.monotonic()
        caplog.clear()
        assert get("org/folder") == folder
        assert time.monotonic() - start_s < 3.0
        assert "the hub does not answer (" in caplog.text
        assert "org/folder is taken from the cache" in caplog.text
        with pytest.raises(
            CheckpointError, match=r"^org/other is not in the cache .*the hub does not answer \("
        ):
            get("org/other")


def test_a_name_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        time.sleep(1.5)
        raise OSError("too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(hub_module, "PROBE_S", 0.1)
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match="does not answer"):
        get("org/folder")
    assert time.monotonic() - start_s < 1.4


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_is_no_hub(hub: Hub, status: int) -> None:
    folder = get("org/folder")
    hub.status = status
    assert get("org/folder") == folder
    with pytest.raises(CheckpointError, match=f"and the hub answers {status}: try again when the network is"):
        get("org/other")


def test_offline_asks_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        CheckpointError, match=r"^org/folder is not in the cache .*, and HF_HUB_OFFLINE is set: un"
    ):
        get("org/folder")
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    path = get("org/gguf:m-Q4_K_M.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.asked)
    assert get("org/gguf:Q4_K_M") == get("org/gguf") == path
    with pytest.raises(
        CheckpointError, match=r"no Q8_0; its GGUF files are Q4_K_M: .*; that is what the cache h"
    ):
        get("org/gguf:Q8_0")
    assert len(hub.asked) == asked


def test_broken_off_and_taken_up_again(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name does not lead to half a model: the revision is written down when all is there."""
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub waits between its tries
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.repositories["org/folder"] = {**FOLDER, "model-00003-of-00003.safetensors": BIG[::-1]}
    hub.cut_at = 300_000
    with pytest.raises(
        CheckpointError, match=r"^the download of org/folder broke off \(.*; pull again to go on"
    ):
        get("org/folder")
    assert not (cache / "models--org--folder" / "refs" / "main").exists()
    with pytest.raises(CheckpointError, match="is not in the cache"):
        resolve_model("org/folder")
    hub.cut_at = None
    assert held(get("org/folder"))["model-00003-of-00003.safetensors"] == BIG[::-1]
    assert "bytes=300000-" in hub.ranges


# ---- a hub that says no ------------------------------------------------------------------------------------


def test_a_gated_repository_and_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = "hf_right"
    for token in (None, "hf_wrong"):
        with pytest.raises(
            CheckpointError, match=r"^org/gguf is gated: accept its terms at http://127.*/org/gguf, and"
        ) as caught:
            get("org/gguf", token=token)
        assert "--hf-token or HF_TOKEN" in str(caught.value)
        assert "hf_" not in str(caught.value)
    assert get("org/gguf", token="hf_right").name == "m-Q4_K_M.gguf"
    asked = hub.tokens
    assert "Bearer hf_right" in asked


@pytest.mark.parametrize(
    ("name", "revision", "expected"),
    [
        (
            "org/none",
            None,
            r"^no repository org/none on the hub \(http://127\.0\.0\.1:\d+\), or it is private, and",
        ),
        (
            "org/folder",
            "v9",
            r"^org/folder has no revision 'v9'; give a branch, a tag or a commit, or leave it",
        ),
        ("org/folder:m.gguf", None, r"^org/folder has no file 'm\.gguf'; it has no GGUF files"),
        ("org/folder:Q4_K_M", None, r"^org/folder has no Q4_K_M; it has no GGUF files"),
        ("org/gguf:m-q8.gguf", None, r"^org/gguf has no file 'm-q8\.gguf'; did you mean m-q8_0\.gguf\?"),
        (
            "org/gguf:Q5_K_M",
            None,
            r"^org/gguf has no Q5_K_M; its GGUF files are BF16, Q4_K_M, q8_0: give one as",
        ),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, name: str, revision: str | None, expected: str) -> None:
    """One line, also where the cache would have something: a wrong name is not served from memory."""
    with pytest.raises(CheckpointError, match=expected) as caught:
        get(name, revision=revision)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_wrong(hub: Hub, status: int) -> None:
    hub.status = status
    with pytest.raises(
        CheckpointError,
        match=f"^the hub refuses org/folder .{status}.: the token is wrong or may|no repository",
    ):
        get("org/folder", token="hf_wrong")


def test_a_cache_that_cannot_be_written_to(hub: Hub, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(
        CheckpointError, match=r"hub: org/folder cannot be written there \(.*\); make room or set HF"
    ):
        get("org/folder")


# ---- names and choices -------------------------------------------------------------------------------------


def test_names_of_the_hub() -> None:
    for name in ("org/name", "o/n:f.gguf", "o/n:sub/f.gguf", "Qwen/Qwen2.5-0.5B", "a/b_c:Q4_K_M"):
        assert is_hub_name(name)
    for name in (
        "name",
        "a/b/c",
        "./a",
        "../a",
        "~/a",
        "/a/b",
        "a/..",
        "a/b:",
        "a/b:c:d",
        "a--b/c",
        "ä/b",
        "a/b\n",
    ):
        assert not is_hub_name(name)


SINGLE = ["config.json", "model.safetensors", "model.safetensors.index.json", "model-1.safetensors"]


@pytest.mark.parametrize(
    ("files", "choice", "expected"),
    [
        (SINGLE, None, (["config.json", "model.safetensors"], "")),
        (["config.json", "x.gguf"], None, (["x.gguf"], "x.gguf")),
        (["x.Q8_0.gguf", "y.Q8_0.gguf"], "y.Q8_0.gguf", (["y.Q8_0.gguf"], "y.Q8_0.gguf")),
        (["m.Q4_K_S.gguf", "m.Q4_K_M.gguf", "m.IQ4_XS.gguf"], "iq4_xs", (["m.IQ4_XS.gguf"], "m.IQ4_XS.gguf")),
        (["m-f16.gguf", "m-f32.gguf"], "F16", (["m-f16.gguf"], "m-f16.gguf")),
    ],
)  # fmt: skip
def test_choices(files: list[str], choice: str | None, expected: tuple[list[str], str]) -> None:
    assert choose("o/n", files, choice) == expected


@pytest.mark.parametrize(
    ("files", "choice", "expected"),
    [
        ([], None, "o/n has no model that can be read; expected config.json with model.safetensors or"),
        (
            ["config.json", "pytorch_model.bin"],
            None,
            r"o/n has its weights only as a pickle \(pytorch_model.bin\)",
        ),
        (["adapter_config.json"], None, r"o/n has an adapter \(LoRA\), which is not supported"),
        (
            ["x.Q8_0.gguf", "y.Q8_0.gguf"],
            "q8_0",
            r"o/n has several files of q8_0; give one: x\.Q8_0\.gguf, y",
        ),
        (
            ["x.Q8_0.gguf", "x.Q5_0.gguf"],
            None,
            "o/n has no Q4_K_M; its GGUF files are Q5_0, Q8_0: give one as o/n:N",
        ),
        (["m-Q4_K_M.gguf"], "Q4_K", "o/n has no Q4_K; its GGUF files are Q4_K_M"),
        (["mmproj.gguf"], None, "o/n has no model that can be read"),
    ],
)
def test_no_choice(files: list[str], choice: str | None, expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{expected}"):
        choose("o/n", files, choice)
