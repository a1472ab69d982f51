"""Every example runs as it stands, is short, and says what it is there to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SHOWS = {
    "core_alone": "step 5  long  [14]  length",
    "generate": "The capital of France is ->' Paris.",
    "stream": "The capital of Germany is Berlin.",
    "perplexity": "The sun rises in the east",
    "shared_prefix": "64 of 80 prompt tokens were cached",
    "engine_loop": "late     ' Wednesday'",
}
QUICK = {"core_alone", "generate"}


def test_every_example_is_listed_and_short():
    lengths = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert lengths.keys() == SHOWS.keys()
    assert max(lengths.values()) < 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SHOWS]
)
def test_example(name: str, smollm2: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", FOLDER / f"{name}.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert SHOWS[name] in done.stdout
