"""What the documents name exists, and every module is on the map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mainspring"
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def named_paths(text: str) -> set[str]:
    """Whatever stands in backticks and looks like a file or a folder of the repository."""
    return {name for name in re.findall(r"`([\w./-]+)`", text) if re.search(r"\w/$|/.*\.(py|md|json)$", name)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(document: Path):
    text = document.read_text(encoding="utf-8")
    missing = {
        name for name in named_paths(text) if not ((ROOT / name).exists() or (PACKAGE / name).exists())
    }
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    missing |= {
        link for link in links if not link.startswith("http") and not (document.parent / link).exists()
    }
    assert missing == set()


def test_every_module_is_on_the_map():
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    modules = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")}
    named = named_paths(text)
    unnamed = {str(path) for path in modules if str(path) not in named and f"{path.parent}/" not in named}
    assert unnamed == set()


def test_every_name_and_behaviour_of_the_specification_is_accounted_for():
    """A row of the seed map has a file and a test, or says with what it comes."""
    text = (ROOT / "docs" / "seed-map.md").read_text(encoding="utf-8").split("## Names")[1]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    for section in text.split("## Behaviours")[1].split("### ")[1:]:
        assert section.splitlines()[0] in ("Motivation", "Key files", "Data flow", "Boundaries and failures")
        rows += [line.strip("|").split("|") for line in section.splitlines()[4:] if line]
    assert len(rows) > 60
    for name, where, test in rows:
        assert "comes with" in where or ("`" in where and "tests/" in test), name


def test_the_tests_that_are_named_exist():
    text = (ROOT / "docs" / "seed-map.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)`: `(test_\w+)`", text)
    assert len(named) > 10
    gone = [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert gone == []
