"""benchmarks/fuzz_checkpoints.py: some hundred of its cases, and that it would find what it looks for."""

from __future__ import annotations

import filecmp
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mainspring.base.errors import CheckpointError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def import_path() -> Iterator[None]:
    """As it is for a script in the folder."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def fuzz() -> ModuleType:
    return importlib.import_module("fuzz_checkpoints")


def test_the_corpus_is_sound(fuzz: ModuleType) -> None:
    """Damage is damage only to what was right: all of it is read as it is."""
    found = fuzz.models()
    assert len(found) == 7
    for model in found:
        for path in [model, *model.glob("*.gguf")]:
            fuzz.read_everything(path)


def test_the_corpus_is_what_its_script_writes(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    corpus = importlib.import_module("fuzz_corpus")
    corpus.write_corpus(tmp_path / "corpus")
    made = sorted(path for path in (tmp_path / "corpus").rglob("*") if path.is_file())
    assert len(made) == 12
    for path in made:
        assert filecmp.cmp(path, corpus.CORPUS / path.relative_to(tmp_path / "corpus"), shallow=False), path


def test_some_hundred_cases(fuzz: ModuleType, tmp_path: Path) -> None:
    """Case B178: damaged GGUF and safetensors files, of one file or several, are refused in a line or read,
    in little time and in memory of a few times their size."""
    counts: Counter[str] = Counter()
    for number in range(500):
        outcome = fuzz.run_case(fuzz.make_case(20, number, tmp_path / "case"))
        assert outcome.is_right, f"case {number} of seed 20: {outcome}"
        assert outcome.seconds < fuzz.HANG_S
        counts[outcome.kind] += 1
    assert counts["refused"] > 200
    assert counts["read"] > 40


def test_a_case_is_its_number(fuzz: ModuleType, tmp_path: Path) -> None:
    paths = [fuzz.make_case(3, 7, tmp_path / name) for name in "ab"]
    assert paths[0].name == paths[1].name
    trees = [{p.name: p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()} for name in "ab"]
    assert trees[0] == trees[1]
    fuzz.make_case(3, 8, tmp_path / "b")
    assert trees[0] != {p.name: p.read_bytes() for p in (tmp_path / "b").rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda: {}["x"], "KeyError: 'x'"),
        (lambda: np.ones(2 << 20, np.uint8), "bytes for files of"),
        (lambda: (_ for _ in ()).throw(CheckpointError("a\nb")), "a message of several lines"),
        (lambda: (_ for _ in ()).throw(CheckpointError("a" * 5000)), "a message of 5000 characters"),
    ],
)
def test_what_is_wrong_is_found(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: object, expected: str
) -> None:
    def faulty(path: Path) -> None:
        result = fault()  # type: ignore[operator]
        for _ in result if hasattr(result, "send") else ():
            pass

    monkeypatch.setattr(fuzz, "read_everything", faulty)
    outcome = fuzz.run_case(fuzz.make_case(0, 0, tmp_path / "case"))
    assert not outcome.is_right
    assert expected in outcome.kind


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        ("crash", "the child ended: status -11"),
        ("hang", "it takes longer than allowed: status -9"),
        ("memory", "the child ended: status 1: .*Unable to allocate"),
    ],
)
def test_a_child_that_dies_or_hangs_is_found(
    fuzz: ModuleType, tmp_path: Path, plant: str, expected: str
) -> None:
    """The fourth case goes wrong, its files are kept, and another child plays the rest."""
    args = fuzz.parse(["--cases", "8", "--plant", plant, "--hang-s", "2", "--keep", str(tmp_path / "kept")])
    args.case = 0
    said: list[str] = []
    report = fuzz.watch(args, say=said.append)
    assert list(report.found) == [3]
    assert re.search(expected, report.found[3])
    assert report.counts.total() == 8
    assert said == [f"case 3: {report.found[3]}"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["3"]
