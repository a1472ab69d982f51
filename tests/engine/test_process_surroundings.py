"""What surrounds a front end must not change, stop or hang its core."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tools import Place, fake_config, own_place, request

from mainspring.base.errors import ConfigError
from mainspring.engine.launch import CoreProcess

PATIENCE_S = 20.0


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


def test_a_folder_too_long_for_sockets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match="TMPDIR"):
        CoreProcess(fake_config())
    assert not list(folder.iterdir())
