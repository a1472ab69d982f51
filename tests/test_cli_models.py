"""`mainspring models`: what is listed, shown and removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mainspring.checkpoint.images import open_image
from mainspring.cli import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def here(smollm2: Path, cache: Path) -> Path:
    """A model of the catalogue in a cache of its own, with packed weights."""
    path = cache / "models" / smollm2.name
    path.parent.mkdir(parents=True)
    os.link(smollm2, path) if smollm2.stat().st_dev == path.parent.stat().st_dev else path.symlink_to(smollm2)
    open_image(path, "as the file, layout 1", 3_000_000).keep()
    return path


@pytest.fixture
def of_hub(tmp_path: Path) -> Path:
    """As huggingface_hub lays a repository out; beside it one that is no model, and one that is not whole."""
    folder = tmp_path / "hub" / "models--some--small-model"
    blob = folder / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"x" * 2_000_000)
    for snapshot in ("one", "two"):
        (folder / "snapshots" / snapshot).mkdir(parents=True)
        (folder / "snapshots" / snapshot / "model.Q8_0.gguf").symlink_to(blob)
    (tmp_path / "hub" / "models--a--b" / "snapshots" / "one").mkdir(parents=True)
    (tmp_path / "hub" / "models--a--b" / "snapshots" / "one" / "config.json").symlink_to("nowhere")
    (tmp_path / "hub" / "datasets--a--b").mkdir()
    return folder


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["models", *argv]) == 0
    return capsys.readouterr().out


def test_listed(here: Path, of_hub: Path, capsys: pytest.CaptureFixture[str]):
    first, *others = said(capsys).splitlines()
    assert first.split()[:6] == ["smollm2-135m", "98", "MB", "here,", "3", "MB"]
    assert any("to fetch" in line for line in others)
    assert others[-1].split() == ["some/small-model", "2", "MB", "here", "from", "the", "hub"]
    found = {model["name"]: model for model in json.loads(said(capsys, "--json"))}
    assert found["smollm2-135m"]["path"] == str(here)
    assert found["smollm2-135m"]["packed_bytes"] >= 3_000_000
    assert found["gemma3-270m"]["path"] is None
    assert (found["some/small-model"]["source"], found["some/small-model"]["num_bytes"]) == ("hub", 2_000_000)
    assert "a/b" not in found


def test_shown(here: Path, capsys: pytest.CaptureFixture[str]):
    lines = dict(line.split(maxsplit=1) for line in said(capsys, "show", "smollm2-135m").splitlines())
    assert (lines["licence"], lines["size"], lines["here"]) == ("Apache-2.0", "98 MB", str(here))
    assert "no; mainspring pull gemma3-270m" in said(capsys, "show", "gemma3-270m")
    assert json.loads(said(capsys, "show", "gemma3-270m", "--json"))["path"] is None


def test_removed(here: Path, cache: Path, capsys: pytest.CaptureFixture[str]):
    """With its packed weights, and nothing else."""
    other = cache / "mine.gguf"
    other.write_bytes(b"weights")
    open_image(other, "as the file, layout 1", 1_000_000).keep()
    assert said(capsys, "remove", "smollm2-135m") == "removed smollm2-135m: 101 MB\n"
    assert not here.exists()
    assert len(list((cache / "packed").glob("*.packed"))) == 1
    assert said(capsys, "remove", "smollm2-135m") == "smollm2-135m was not here\n"
    assert json.loads(said(capsys, "remove", "smollm2-135m", "--json"))["freed_bytes"] == 0


def test_what_others_use_is_not_removed(of_hub: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["models", "remove", "some/small-model"]) == 2
    assert f"other programs use too; remove {of_hub} by hand" in capsys.readouterr().err
    assert of_hub.exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["shwo", "x"], "models 'shwo': did you mean show?"),
        (["remove"], "models remove needs the name of a model"),
        (["list", "x"], "models list takes no name; models show NAME shows one"),
        (["show", "smollm-135m"], "no model 'smollm-135m' here; did you mean smollm2-135m?"),
    ],
)
def test_mistakes(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    assert main(["models", *argv]) == 2
    assert capsys.readouterr().err == f"mainspring: {line}\n"


@pytest.mark.parametrize(
    ("typed", "meant"), [("ls", "models"), ("collect-env", "doctor"), ("download", "pull")]
)
def test_other_programs_names(typed: str, meant: str, capsys: pytest.CaptureFixture[str]):
    assert main([typed]) == 2
    assert capsys.readouterr().err.endswith(f"did you mean {meant}?\n")


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]):
    assert main(["help", "models"]) == 0
    assert capsys.readouterr().out.startswith("usage: mainspring models")
