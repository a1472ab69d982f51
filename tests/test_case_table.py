"""`CASES.md` is whole and true: each number has a row, each row tests that exist, each test its rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS / "CASES.md").read_text()
AWAITED = {
    "The OpenAI-compatible server, structured outputs and metrics",
    "Every file, every family, and the whole command line",
    "Many workers",
    "Tools, reasoning and the other two APIs",
    "draft tokens",
    "adapters",
}
ROW = re.compile(r"^\| (B\d{3}) \| ([USEP,]+) \| (.+?) \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w/]+\.py::\w+)`")
WAIT = re.compile(r"waits for: \*(.+?)\* \(.+\)$")
ROWS = {case: (level, tests) for case, level, _, tests in ROW.findall(TABLE)}


def functions() -> Iterator[tuple[str, str]]:
    """Every test as the table names it, and its docstring."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(TESTS).as_posix()}::{node.name}", ast.get_docstring(node) or ""


FUNCTIONS = dict(functions())


def test_every_number_has_one_row():
    intro = TABLE.partition("\n## ")[0]
    numbers = re.findall(r"B\d{3}", intro.partition("All numbers:")[2])
    assert len(numbers) == 120
    assert [case for case, *_ in ROW.findall(TABLE)] == numbers == sorted(set(numbers))
    lines = [line for line in TABLE.splitlines() if line.startswith("| B")]
    assert len(lines) == len(numbers), "a row of another form"


def test_every_row_has_a_test_or_says_what_it_waits_for():
    for case, (_, tests) in ROWS.items():
        wait = WAIT.search(tests)
        assert NAME.search(tests) or wait, case
        assert wait is None or wait[1] in AWAITED, f"{case} waits for {wait[1]}"
        assert ("waits for" in tests) == (wait is not None), f"{case}: a wait of another form"


def test_every_test_of_the_table_exists():
    named = {name: case for case, (_, tests) in ROWS.items() for name in NAME.findall(tests)}
    missing = {name: case for name, case in named.items() if name not in FUNCTIONS}
    assert not missing
    assert len(named) > 100


def test_every_case_of_a_docstring_is_in_the_table():
    unknown = {
        name: case
        for name, docstring in FUNCTIONS.items()
        for case in re.findall(r"\bB\d{3}\b", docstring)
        if case not in ROWS or not NAME.search(ROWS[case][1])
    }
    assert not unknown, "the table has no row with a test for these"
