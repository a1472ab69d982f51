"""The README's section about the server, run as it stands; only the port is another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_clients import environment
from test_serve_command import program

ROOT = Path(__file__).parents[2]
ANSWER = "The capital of Germany is Berlin."


def blocks() -> tuple[str, str, str]:
    """How to start it, a curl, a program."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## As a server\n")[1].split("\n## ")[0]
    start, curl, program = re.findall(r"```(?:sh|python)\n(.*?)```", section, re.DOTALL)
    return start, curl, program


@pytest.fixture(scope="module")
def server():
    command = blocks()[0].partition("#")[0].split()
    assert command[:2] == ["mainspring", "serve"]
    with program(*command[2:]) as found:
        found.wait_until_ready()
        yield found


def test_curl(server):
    assert shutil.which("curl")
    command = blocks()[1].replace(":8000", f":{server.port}")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.slow
def test_openai_client(server):
    python = environment("openai3", "openai>=3,<4") / "python"
    script = blocks()[2].replace(":8000", f":{server.port}")
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ANSWER
