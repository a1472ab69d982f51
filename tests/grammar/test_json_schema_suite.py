"""The JSON Schema test suite against what is enforced: nothing wrong gets through, every refusal has a
name.

The suite is a copy (tests/data/json_schema_test_suite.json, MIT licence). Its documents are fed byte by byte,
in three spellings. `RATES` pins how much is accepted, so that refusing everything would not pass.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from structured_toys import KEYWORDS, TOKENIZER, asked, fault_of, judge, random_text, snippets_of

from mainspring.base.errors import RequestError
from mainspring.grammar.check import check_structured_outputs
from mainspring.grammar.library import make_matcher

SUITE = json.loads((Path(__file__).parents[1] / "data" / "json_schema_test_suite.json").read_text())["drafts"]
URIS = {  # of drafts whose schemas do not name theirs
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
# Of each draft: schemas refused, and of the accepted ones' documents right ones let through and turned away.
RATES = {"draft4": (43, 370, 17), "draft7": (118, 459, 29), "draft2020-12": (235, 524, 42)}


def schemas(draft: str) -> list[tuple[Any, list[tuple[Any, bool]]]]:
    """(schema, [(document, whether it is valid)])"""
    groups = []
    for _, _, schema, documents in SUITE[draft]:
        if isinstance(schema, dict) and "$schema" not in schema and draft in URIS:
            schema = {"$schema": URIS[draft], **schema}
        groups.append((schema, documents))
    return groups


def spellings(document: Any) -> set[str]:
    return {
        json.dumps(document, separators=(",", ":")),
        json.dumps(document),
        json.dumps(document, ensure_ascii=False),
    }


def is_accepted(schema: Any) -> bool:
    try:
        check_structured_outputs(asked(json=json.dumps(schema)))
    except RequestError as error:
        refusal = error
    else:
        return True
    assert refusal.param == "structured_outputs"
    assert "\n" not in str(refusal)
    assert KEYWORDS.search(str(refusal)), f"{refusal} names no keyword"
    return False


@pytest.mark.parametrize("draft", RATES)
def test_no_wrong_document_gets_through(draft: str):
    """Cases B119, B127, B130: whatever a schema says, it holds, or it is refused by name."""
    found: Counter[str] = Counter()
    for schema, documents in schemas(draft):
        if not is_accepted(schema):
            found["refused"] += 1
            continue
        compiled = make_matcher(TOKENIZER, asked(json=json.dumps(schema))).matcher
        for document, is_valid in documents:
            gets_through = False
            for text in spellings(document):
                data = list(text.encode(errors="surrogatepass"))
                walker = compiled.deep_copy()
                gets_through |= walker.try_consume_tokens(data) == len(data) and walker.is_accepting()
            assert is_valid or not gets_through, (schema, document)
            found["through" if gets_through else "turned away" if is_valid else "rightly refused"] += 1
    assert (found["refused"], found["through"], found["turned away"]) == RATES[draft]
    assert found["rightly refused"] > 200


# jsonschema matches these as Python does, and not as ECMAScript: its verdict would be another's.
OTHERWISE = (r"\W", r"\D", r"\p")


def walk(draft: str, num_texts: int, seed: int) -> Counter[str]:
    dice, found = random.Random(seed), Counter[str]()
    for schema, _ in schemas(draft):
        text = json.dumps(schema)
        if not is_accepted(schema) or any(json.dumps(mark)[1:-1] in text for mark in OTHERWISE):
            continue
        validator, snippets = judge(schema), snippets_of(schema)
        for _ in range(num_texts):
            said, is_whole = random_text({"json": text}, dice, snippets, dice.choice((10, 60, 200)))
            if not is_whole:
                found["cut"] += 1
                continue
            assert (fault := fault_of(validator, said)) is None, (schema, said, fault)
            found["valid"] += 1
    return found


@pytest.mark.parametrize("draft", RATES)
def test_random_texts_validate(draft: str):
    found = walk(draft, 1, seed=1)
    assert found["valid"] > 100
    assert found["cut"] < found["valid"] / 5


@pytest.mark.slow
@pytest.mark.parametrize("draft", RATES)
def test_many_random_texts_validate(draft: str):
    found = walk(draft, 12, seed=2)
    assert found["valid"] > 1500
