"""Several engine cores for a caller that waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from process_tools import Journal, fake_config, read_all, request, wait_until

from mainspring.base.errors import EngineDeadError, EngineError
from mainspring.base.messages import CheckHealth, EngineCoreOutputs, GetStats
from mainspring.engine.dp_client import CoreGroup
from mainspring.engine.sync_dp_client import SyncDPClient


@contextmanager
def cores(step_s: float = 0.0) -> Iterator[tuple[SyncDPClient, CoreGroup]]:
    group = CoreGroup.of_alike(lambda: fake_config(step_s=step_s), 2)
    client = SyncDPClient(group)
    try:
        yield client, group
    finally:
        client.shutdown()
        for process in group.processes:
            assert process.how_it_ended() is not None


def ask(client: SyncDPClient, number: int, max_tokens: int = 20) -> Journal:
    asked = [request(f"r{i}", max_tokens) for i in range(number)]
    for one in asked:
        client.add_request(one)
    return Journal(*(request(one.request_id, max_tokens) for one in asked))


def test_a_rank_that_is_killed_costs_no_token() -> None:
    """Case B163: for a caller that waits, too."""
    with cores(step_s=0.002) as (client, group):
        journal = ask(client, 12, max_tokens=60)
        while sum(map(len, journal.tokens.values())) < 100:
            journal.take(client.get_output())
        assert client.call(CheckHealth()) is True
        group.processes[1].process.kill()
        read_all(client, journal).assert_whole()
        assert client.get_output() == EngineCoreOutputs()
        stats = client.call(GetStats())
        assert stats.num_scheduled_tokens >= 12 * 60
        of_each = [engine.num_scheduled_tokens for engine in stats.engines]
        assert len(of_each) == 2
        assert min(of_each) > 0, "what the dead one has done stays done"
        assert sum(of_each) == stats.num_scheduled_tokens
        read_all(client, ask(client, 3)).assert_whole()


def test_wherever_it_is_called() -> None:
    """Beside a loop that runs, as in notebooks; and from one thread after another."""
    with cores() as (client, _):

        async def inside_a_loop() -> None:
            read_all(client, ask(client, 4)).assert_whole()

        asyncio.run(inside_a_loop())
        for _ in range(3):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(lambda: read_all(client, ask(client, 4)).assert_whole()).result()


def test_aborts_and_time_limits() -> None:
    with cores(step_s=0.002) as (client, group):
        journal = ask(client, 4, max_tokens=200)
        client.abort_requests(["r0", "r2", "unknown"])
        gone = [journal.messages.pop(name) for name in ("r0", "r2")]
        assert len(gone) == 2
        read_all(client, journal)
        assert not journal.tokens["r0"] + journal.tokens["r2"]
        os.kill(group.processes[0].pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError, match=r"the engine cores do not answer within 0\.2 s"):
                client.call(CheckHealth(), 0.2)
        finally:
            os.kill(group.processes[0].pid, signal.SIGCONT)
        assert client.call(CheckHealth()) is True


def test_the_last_rank_s_end_is_the_end() -> None:
    with cores(step_s=0.005) as (client, group):
        ask(client, 2, max_tokens=200)
        for process in group.processes:
            process.process.kill()

        def ended() -> bool:
            try:
                client.get_output()
            except EngineDeadError as error:
                return "was killed by SIGKILL" in str(error)
            return False

        wait_until(ended)
        with pytest.raises(EngineDeadError):
            client.add_request(request("late"))
        client.abort_requests(["r0"])
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        client.get_output()
    client.abort_requests(["r1"])
    client.shutdown()


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy has no thread that would answer."""
    with cores() as (client, _):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(EngineError, match="belongs to the process that made it"):
                client.add_request(request("child"))
        read_all(client, ask(client, 1)).assert_whole()


@pytest.mark.parametrize("victim", [None, signal.SIGTERM, signal.SIGKILL])
def test_one_that_is_dropped_is_collected(victim: signal.Signals | None) -> None:
    """Twice in one program, and a rank may have ended before: the collector waits for no socket."""
    program = f"""
        import gc, os, sys
        sys.path += {sys.path!r}
        from process_tools import fake_config, request
        from mainspring.engine.dp_client import CoreGroup
        from mainspring.engine.sync_dp_client import SyncDPClient

        for name in "ab":
            client = SyncDPClient(CoreGroup.of_alike(fake_config, 2))
            client.add_request(request(name, 200))
            client.get_output()
            if {victim and int(victim)}:
                os.kill(client._client._clients[0].process.pid, {victim and int(victim)})
            client.get_output()
            del client
            gc.collect()
        print("ended")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "ended\n")


@pytest.mark.parametrize("make", ["SyncDPClient(group)", "None"])
def test_a_program_that_forgets_them_ends_in_silence(make: str) -> None:
    """Nor is it a traceback where a group is closed by the interpreter's end, which lets nobody begin
    threads."""
    program = f"""
        import atexit, sys
        sys.path += {sys.path!r}
        from process_tools import fake_config, request
        from mainspring.engine.dp_client import CoreGroup
        from mainspring.engine.sync_dp_client import SyncDPClient

        group = CoreGroup.of_alike(fake_config, 2)
        kept = {make}
        if isinstance(kept, SyncDPClient):
            kept.add_request(request("a", 200))
            kept.get_output()
        else:
            atexit.register(group.close)
        print(*(process.pid for process in group.processes))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *_ = done.stdout.splitlines()
    assert not [pid for pid in first.split() if os.path.exists(f"/proc/{pid}")]
