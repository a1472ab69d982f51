"""`mainspring cache`: what it lists, removes and says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mainspring.checkpoint.images import open_image
from mainspring.cli import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(model: Path) -> None:
    model.write_bytes(b"weights")
    image = open_image(model, "q8, layout 1", 3_000_000)
    image.keep()


def test_nothing_yet(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == main(["cache", "--clear"]) == main(["cache", "--json"]) == 0
    assert capsys.readouterr().out == f"{cache}/packed: 0 MB of packed weights\nremoved 0 MB\n[]\n"


def test_listed_and_cleared(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also what is damaged, and a name that would write over the line."""
    keep(tmp_path / "m.gguf")
    keep(tmp_path / "line\nbreak.gguf")
    (cache / "packed" / "damaged.packed").write_bytes(b"[1]")
    assert main(["cache"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{cache}/packed: 6 MB of packed weights"
    assert len(lines) == 3
    assert any(line.endswith(f"{tmp_path}/m.gguf (q8, layout 1)") for line in lines)
    assert any(line.endswith("line\\nbreak.gguf' (q8, layout 1)") for line in lines)
    assert any(line.endswith("? (?)") for line in lines)
    assert main(["cache", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(entry["packing"] for entry in found) == ["?", "q8, layout 1", "q8, layout 1"]
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == "removed 6 MB\n"
    assert list((cache / "packed").iterdir()) == []


def test_what_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path / "m.gguf")

    def failing(*arguments: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", failing)
    assert main(["cache", "--clear"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(".packed cannot be removed: Permission denied\n")
    assert len(err.splitlines()) == 1
