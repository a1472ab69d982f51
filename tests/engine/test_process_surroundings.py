"""What surrounds a front end must not change, stop or hang its core."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from process_tools import (
    DEATH_BOUND_S,
    FACTS,
    PATIENCE_S,
    Journal,
    Place,
    fake_config,
    in_thread,
    own_place,
    read_all,
    request,
    wait_until,
)

from mainspring.base.config import EngineArgs, EngineConfig
from mainspring.base.errors import ConfigError, EngineDeadError
from mainspring.base.messages import GetStats
from mainspring.engine.launch import CoreProcess
from mainspring.engine.socket_folder import FORGOTTEN_S, PREFIX, SocketFolder
from mainspring.frontend.llm_engine import LLMEngine, make_processors


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Where sockets can be."""
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        yield Path(folder)


@pytest.fixture
def place() -> Iterator[Place]:
    with own_place() as place:
        yield place


def run_script(text: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    script = folder / "front_end.py"
    script.write_text(textwrap.dedent(text))
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    return subprocess.run(
        [sys.executable, *flags, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_waiting_for_news_can_be_interrupted(place: Place):
    """A caller who only waits gets its turn every now and then: Ctrl-C must not wait for a long step."""
    client = place.client(fake_config(step_s=1.0))
    client.add_request(request("a", 5))
    asked_s = time.monotonic()
    assert not client.get_output().outputs
    assert time.monotonic() - asked_s < 0.9
    client.shutdown()


def test_a_front_end_whose_core_died_while_idle_ends(tmp_path: Path):
    """What could not be sent to a core that is gone is not waited for when the client is dropped."""
    done = run_script(
        """
        import os, signal, time
        from process_tools import fake_config, request
        from mainspring.base.errors import EngineDeadError
        from mainspring.engine.client import EngineCoreClient

        client = EngineCoreClient.make_client(fake_config())
        os.kill(client.process.pid, signal.SIGKILL)
        time.sleep(0.3)
        client.add_request(request("a", 5))
        try:
            while True:
                client.get_output()
        except EngineDeadError as error:
            print("dead:", "SIGKILL" in str(error))
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "dead: True\n"), done.stderr


def test_a_file_in_the_current_folder_is_no_module_of_the_core(tmp_path: Path):
    """The front end was started so that the folder is not searched; neither is it for its core."""
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')\n")
    done = run_script(
        """
        from process_tools import fake_config
        from mainspring.engine.client import EngineCoreClient

        EngineCoreClient.make_client(fake_config()).shutdown()
        print("served")
        """,
        tmp_path,
        "-P",
    )
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


# -- a start that is given up --------------------------------------------------------------------------------

STOPS_WHILE_LOADING = """
    import asyncio, os, signal, sys, tempfile, threading, time
    from pathlib import Path
    from process_tools import fake_config
    from mainspring.engine.client import EngineCoreClient

    mark = Path("mark")
    tempfile.tempdir = os.getcwd()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def strike():
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.01)
        os.kill(int(mark.read_text()), signal.SIGSTOP)
        print(time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike, daemon=True).start()
    config = fake_config(phase="loading", deed="sleep", nap_s=600.0, mark=str(mark))
"""


@pytest.mark.parametrize(
    "start",
    [
        "EngineCoreClient.make_client(config)",
        "asyncio.run(EngineCoreClient.make_async_client(config))",
    ],
)
def test_ctrl_c_while_a_core_that_is_stopped_loads(short_folder: Path, start: str):
    """Case B007: it cannot be asked to end, so it is ended by force; nobody waits until it might be ready."""
    text = textwrap.dedent(STOPS_WHILE_LOADING) + start
    done = run_script(text, short_folder)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert time.monotonic() - float(done.stdout) < 5.0
    assert not list(short_folder.glob("mainspring-*"))
    pid = int((short_folder / "mark").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_start_is_given_up_while_the_core_reads_nothing(place: Place):
    """Case B007: what it is told is more than a pipe holds, and a core that is stopped takes nothing out."""
    given_up, stopped = threading.Event(), []

    def config() -> EngineConfig:
        """Asked for once the core has said HELLO."""
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        stopped.extend(map(int, children))
        os.kill(stopped[-1], signal.SIGSTOP)
        threading.Timer(0.2, given_up.set).start()
        return msgspec.structs.replace(fake_config(), executor_args={"never_read": "x" * (1 << 20)})

    launching = in_thread(lambda: CoreProcess(config, given_up=given_up))
    with pytest.raises(EngineDeadError, match="given up"):
        launching.result(PATIENCE_S)
    assert not Path(f"/proc/{stopped[-1]}").exists()


def test_a_core_that_is_told_to_end_while_it_loads_does_so_at_once(place: Place):
    """It does not load to the end first."""
    launching = in_thread(lambda: place.client(fake_config(phase="loading", deed="sleep", mark=place.mark)))
    os.kill(place.wait_for_mark(), signal.SIGTERM)
    told_s = time.monotonic()
    with pytest.raises(EngineDeadError, match="was starting: it was told to end"):
        launching.result(PATIENCE_S)
    assert time.monotonic() - told_s < DEATH_BOUND_S


# -- a core that does not answer -----------------------------------------------------------------------------


def test_a_command_to_a_stopped_core_can_have_a_limit(place: Place):
    """Case B004. What it answers later disturbs nobody."""
    client = place.client(fake_config())
    engine = LLMEngine(client, *make_processors(EngineArgs(), FACTS, None, client.max_model_len))
    engine.check_health(PATIENCE_S)
    os.kill(client.process.pid, signal.SIGSTOP)
    asked_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"does not answer within 0\.3 s"):
        client.call(GetStats(), timeout_s=0.3)
    with pytest.raises(EngineDeadError, match=r"does not answer within 0\.3 s"):
        engine.check_health(timeout_s=0.3)
    assert time.monotonic() - asked_s < 2.0
    os.kill(client.process.pid, signal.SIGCONT)
    assert client.call(GetStats(), timeout_s=PATIENCE_S).num_running == 0
    journal = Journal(request("a"))
    client.add_request(request("a"))
    read_all(client, journal).assert_whole()


# -- files and folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["make_client(config)", "make_client(config, in_process=True)"])
def test_too_few_open_files_are_an_error_that_names_the_limit(short_folder: Path, start: str):
    text = f"""
        import resource
        from process_tools import fake_config
        from mainspring.base.errors import ConfigError
        from mainspring.engine.client import EngineCoreClient

        config = fake_config()
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        try:
            EngineCoreClient.{start}.shutdown()
        except ConfigError as error:
            print(error)
        """
    done = run_script(text, short_folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    if "in_process" in start:
        assert done.stdout == ""
    else:
        assert "this process may have 16 files open" in done.stdout
        assert "ulimit -n" in done.stdout


def test_the_files_that_are_asked_for_are_enough(short_folder: Path):
    """With as many descriptors free as are demanded a core is started, used and ended."""
    text = """
        import os, resource
        from process_tools import Journal, fake_config, read_all, request
        from mainspring.engine import launch
        from mainspring.engine.client import EngineCoreClient

        config = fake_config()
        limit = len(os.listdir("/dev/fd")) + launch.NUM_FILES + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        client = EngineCoreClient.make_client(config)
        client.add_request(request("a"))
        read_all(client, Journal(request("a"))).assert_whole()
        client.shutdown()
        print("served")
        """
    done = run_script(text, short_folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\n", ""), done.stderr


def sockets_of(place: Place) -> list[str]:
    return [path.name for path in place.path.iterdir() if path.name.startswith(PREFIX)]


@pytest.mark.parametrize("blow", [signal.SIGTERM, signal.SIGKILL])
def test_the_folder_of_the_sockets_goes_with_the_core(place: Place, blow: signal.Signals):
    """So nothing is left where its front end is killed afterwards: an idle one sees the end when it looks."""
    client = place.client(fake_config())
    assert sockets_of(place)
    os.kill(client.process.pid, blow)
    if blow is signal.SIGKILL:
        with pytest.raises(EngineDeadError):
            client.call(GetStats())
    wait_until(lambda: not sockets_of(place), DEATH_BOUND_S, "that the folder is gone")


def test_folders_that_were_forgotten_are_removed_and_no_others(place: Place):
    """Left by a core and a front end that were killed at once."""
    old_s = time.time() - 2 * FORGOTTEN_S
    kinds = ("forgotten", "fresh", "held", "full", "a file")
    names = {name: place.path / f"{PREFIX}{name}" for name in kinds}
    for name, path in names.items():
        path.touch() if name == "a file" else path.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(names["forgotten"] / "input"))
    (names["full"] / "a text").touch()
    for name in set(names) - {"fresh"}:
        os.utime(names[name], (old_s, old_s))
    held = os.open(names["held"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    client = place.client(fake_config())
    client.shutdown()
    assert {name for name, path in names.items() if path.exists()} == {"fresh", "held", "full", "a file"}
    os.close(held)
    (names["full"] / "a text").unlink()
    names["a file"].unlink()
    for name in ("fresh", "held", "full"):
        names[name].rmdir()


def test_a_folder_is_removed_by_two_at_once(place: Place, monkeypatch: pytest.MonkeyPatch):
    """One sees the core's end while the other brings it about: both are in the middle of it together."""
    folder = SocketFolder()
    both, remove_tree = threading.Barrier(2), shutil.rmtree

    def together(path: str, ignore_errors: bool) -> None:
        both.wait(PATIENCE_S)
        remove_tree(path, ignore_errors)
        both.wait(PATIENCE_S)

    monkeypatch.setattr(shutil, "rmtree", together)
    other = in_thread(folder.remove)
    folder.remove()
    other.result(PATIENCE_S)
    assert not os.path.exists(folder.path)
    folder.remove()


def test_a_folder_too_long_for_sockets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match="TMPDIR"):
        CoreProcess(fake_config())
    assert not list(folder.iterdir())
