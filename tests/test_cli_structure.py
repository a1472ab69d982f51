"""Flags of `generate` for what the text must look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.cli.dialect import Parser
from mainspring.cli.structure import FLAGS, add_structure_flags, structure

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}}


def read(*argv: str) -> StructuredOutputsParams | None:
    parser = Parser("test", "", (), argv)
    add_structure_flags(parser)
    return structure(parser.read(argv))


def test_each_flag_is_a_structure(tmp_path: Path):
    text = json.dumps(SCHEMA)
    (tmp_path / "schema.json").write_text(text)
    (tmp_path / "words.ebnf").write_text('root ::= "a"')
    assert read() is None
    assert read("--json-schema", text) == StructuredOutputsParams(json=SCHEMA)
    assert read("--json_schema", str(tmp_path / "schema.json")) == StructuredOutputsParams(json=SCHEMA)
    assert read("--json-object") == StructuredOutputsParams(json_object=True)
    assert read("--regex", "a+") == StructuredOutputsParams(regex="a+")
    assert read("--choice", "yes", "--choice", "no") == StructuredOutputsParams(choice=["yes", "no"])
    assert read("--grammar", str(tmp_path / "words.ebnf")) == StructuredOutputsParams(grammar='root ::= "a"')
    assert read("--grammar", 'root ::= "b"') == StructuredOutputsParams(grammar='root ::= "b"')
    assert read("--structural-tag", "{}") == StructuredOutputsParams(structural_tag="{}")


def test_mistakes_are_named(tmp_path: Path):
    with pytest.raises(RequestError, match="--json-schema and --regex contradict"):
        read("--regex", "a", "--json-schema", "{}")
    with pytest.raises(RequestError, match=r"--json-schema 'nope\.json' is neither"):
        read("--json-schema", "nope.json")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(RequestError, match="not UTF-8"):
        read("--grammar", str(tmp_path / "latin"))


def test_help_names_the_everyday_ones():
    for argv, shown in (((), 3), (("--help=all",), 6)):
        parser = Parser("test", "", (), argv)
        add_structure_flags(parser)
        text = parser.format_help()
        assert sum("--" + name.replace("_", "-") in text for name in FLAGS) == shown
