"""What the tests of processes share: cores with a fake executor, requests and their answers, what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mainspring.base.config import EngineArgs, EngineConfig, ModelFacts, resolve
from mainspring.base.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from mainspring.base.params import SamplingParams
from mainspring.engine.client import EngineCoreClient
from mainspring.engine.launch import CoreAddress
from mainspring.engine.mp_client import SyncMPClient
from mainspring.testing.fake_model import FakeModel, Said, reference

EXECUTOR = "mainspring.testing.process_executor:ProcessExecutor"
VOCAB_SIZE = 64
MAX_MODEL_LEN = 256
DEATH_BOUND_S = 2.0  # from a death to the last client that knows of it
ORPHAN_BOUND_S = 5.0  # from the end of a front end to the end of its core
PATIENCE_S = 20.0  # for what has no bound of its own, on a busy machine
FACTS = ModelFacts(
    path="", architecture="fake", max_position_embeddings=1024, vocab_size=VOCAB_SIZE, eos_token_ids=()
)
T = TypeVar("T")


def fake_config(*, settings: dict[str, Any] | None = None, **executor_args: Any) -> EngineConfig:
    """A core with a `ProcessExecutor` that is told `executor_args`; `settings` are fields of `EngineArgs`."""
    given = {"num_gpu_blocks_override": 129, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
    args = EngineArgs(executor=EXECUTOR, **(given | (settings or {})))
    return msgspec.structs.replace(resolve(args, FACTS), executor_args=executor_args)


def request(
    request_id: str, max_tokens: int = 20, num_prompt_tokens: int = 5, **fields: Any
) -> EngineCoreRequest:
    """Greedy; its prompt depends on its id."""
    first = sum(request_id.encode())
    prompt = [(first + 7 * i) % VOCAB_SIZE for i in range(num_prompt_tokens)]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return EngineCoreRequest(request_id, prompt, params, **fields)


def right_answer(message: EngineCoreRequest) -> Said:
    return reference(message, FakeModel(VOCAB_SIZE), MAX_MODEL_LEN)


class Journal:
    """What a front end has heard of its requests."""

    def __init__(self, *messages: EngineCoreRequest) -> None:
        self.messages = {message.request_id: message for message in messages}
        self.tokens: dict[str, list[int]] = {name: [] for name in self.messages}
        self.ends: dict[str, EngineCoreOutput] = {}

    def take(self, news: EngineCoreOutputs) -> None:
        for output in news.outputs:
            assert output.request_id not in self.ends, f"{output.request_id}: something is said after the end"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    @property
    def is_complete(self) -> bool:
        return len(self.ends) == len(self.messages)

    def reason(self, name: str) -> FinishReason | None:
        end = self.ends.get(name)
        return None if end is None else end.finish_reason

    def assert_whole(self) -> None:
        for name, message in self.messages.items():
            said = right_answer(message)
            assert (self.tokens[name], self.reason(name)) == (said.token_ids, said.finish_reason), name

    def assert_beginnings(self) -> None:
        for name, message in self.messages.items():
            whole = right_answer(message).token_ids
            assert self.tokens[name] == whole[: len(self.tokens[name])], name


def read_all(client: EngineCoreClient, journal: Journal) -> Journal:
    """Until every request has ended, or the core has."""
    while not journal.is_complete:
        journal.take(client.get_output())
    return journal


# -- waiting -------------------------------------------------------------------------------------------------


def wait_until(is_true: Callable[[], T], timeout_s: float = PATIENCE_S, what: str = "it") -> T:
    """Poll; what `is_true` gave when it gave something true."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := is_true()):
        assert time.monotonic() < deadline_s, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.01)
    return value


def in_thread(run: Callable[[], T]) -> Future[T]:
    """Run it beside us. The thread is a daemon: what hangs fails its test and nothing else."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


# -- what is there, and what is left -------------------------------------------------------------------------


class Place:
    """A folder of temporary files of our own: every process and socket of a test names it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ms-"))  # short: it is part of socket addresses
        self.mark = str(self.path / "mark")
        self.clients: list[SyncMPClient] = []

    def client(self, config: EngineConfig, shutdown_timeout_s: float = 0.0) -> SyncMPClient:
        """With a core of its own; it is shut down whatever becomes of the test."""
        self.clients.append(SyncMPClient(config, shutdown_timeout_s))
        return self.clients[-1]

    def wait_for_mark(self) -> int:
        """Until the executor is in the phase it watches for; the pid of its process."""
        mark = Path(self.mark)
        return int(wait_until(lambda: mark.exists() and mark.read_text(), what="the phase"))

    def pids(self) -> list[int]:
        """Of the processes whose command line names the folder, zombies excepted; cores first."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                try:
                    command = Path("/proc", entry, "cmdline").read_bytes()
                except OSError:
                    continue
                if os.fsencode(self.path) in command:
                    found.append((b"mainspring.engine.proc" not in command, int(entry)))
        return [pid for _, pid in sorted(found)]

    def core_pids(self) -> list[int]:
        return [pid for pid in self.pids() if b"mainspring.engine.proc" in _command_of(pid)]

    def remains(self) -> list[str]:
        """Processes, socket folders and shared memory that are left."""
        left = [f"process {pid}" for pid in self.pids()]
        left += [str(path) for path in self.path.iterdir() if path.name.startswith("mainspring-")]
        left += [name for name in os.listdir("/dev/shm") if "mainspring" in name]
        return left

    def assert_clean(self, timeout_s: float = ORPHAN_BOUND_S) -> None:
        wait_until(lambda: not self.remains(), timeout_s, f"that nothing is left ({self.remains()})")


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def own_place() -> Iterator[Place]:
    """Sockets go to a folder of our own; at the end nothing may be left, and what is left is killed."""
    place, before = Place(), tempfile.tempdir
    tempfile.tempdir = str(place.path)
    try:
        yield place
        for client in place.clients:
            client.shutdown()
        place.assert_clean()
    finally:
        tempfile.tempdir = before
        for pid in place.pids():
            os.kill(pid, signal.SIGKILL)
        for client in place.clients:
            client.shutdown()
        shutil.rmtree(place.path, ignore_errors=True)


# -- a front end in a process of its own ---------------------------------------------------------------------

FRONT_END = """
import json, signal, sys, tempfile

class Planned(Exception):
    pass

def raise_planned(number, frame):
    raise Planned("by the script")

signal.signal(signal.SIGUSR1, raise_planned)
tempfile.tempdir = sys.argv[1]

import msgspec
from mainspring.base.config import EngineConfig
from mainspring.base.messages import EngineCoreRequest
from mainspring.engine.client import EngineCoreClient

def say(word, **more):
    print(json.dumps({"word": word, **more}), flush=True)

config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
requests = msgspec.json.decode(sys.stdin.readline(), type=list[EngineCoreRequest])
client = EngineCoreClient.make_client(config)
say("idle")
sys.stdin.readline()
for request in requests:
    client.add_request(request)
unfinished = {request.request_id for request in requests}
while unfinished:
    for output in client.get_output().outputs:
        ended = output.finish_reason is not None
        say("token", id=output.request_id, tokens=output.new_token_ids, ended=ended)
        if ended:
            unfinished.discard(output.request_id)
client.shutdown()
say("end")
"""

JOINING_FRONT_END = """
import asyncio, json, sys
import msgspec
from mainspring.base.messages import EngineCoreRequest
from mainspring.engine.launch import CoreAddress
from mainspring.engine.mp_client import SyncMPClient
from mainspring.engine.mp_client import AsyncMPClient

def say(word, **more):
    print(json.dumps({"word": word, **more}), flush=True)

async def main():
    address = msgspec.json.decode(sys.stdin.readline(), type=CoreAddress)
    requests = msgspec.json.decode(sys.stdin.readline(), type=list[EngineCoreRequest])
    client = await AsyncMPClient.join(address, 1)
    for request in requests:
        await client.add_request(request)
    while True:
        for output in (await client.get_output()).outputs:
            say("token", id=output.request_id, tokens=output.new_token_ids)

asyncio.run(main())
"""


class FrontEnd:
    """A script without a main guard that uses a core; it says what happens to it, a JSON object a line."""

    def __init__(
        self,
        place: Place,
        start: EngineConfig | CoreAddress,
        *messages: EngineCoreRequest,
        text: str = FRONT_END,
    ) -> None:
        """`start`: what the script reads first."""
        script = place.path / "front_end.py"
        script.write_text(text)
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(place.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.words: list[dict[str, Any]] = []
        self._errors: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [in_thread(self._read_words), in_thread(self._read_errors)]
        self.write(msgspec.json.encode(start).decode())
        self.write(msgspec.json.encode(list(messages)).decode())

    def _read_words(self) -> None:
        for line in self.process.stdout:
            self.words.append(json.loads(line))

    def _read_errors(self) -> None:
        self._errors.append(self.process.stderr.read())

    def write(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def go_on(self) -> None:
        """From idle to its requests."""
        self.write("")

    def wait_for(self, word: str) -> None:
        def said() -> bool:
            assert word == "end" or self.process.poll() is None or self._has_said(word), self.errors()
            return self._has_said(word)

        wait_until(said, what=f"the word {word!r}")

    def _has_said(self, word: str) -> bool:
        return any(said["word"] == word for said in self.words)

    def tokens(self, request_id: str) -> list[int]:
        return [token for said in self.words if said.get("id") == request_id for token in said["tokens"]]

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for it; its exit status."""
        status = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.result(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return status

    def errors(self) -> str:
        return "".join(self._errors)
