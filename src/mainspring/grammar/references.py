"""References of a JSON schema that lead in a circle: back to where they began, with no value on the way.

Theory of operation. `$ref`, `allOf`, `anyOf` and `oneOf` speak of the very value that the schema around them
is for. Where following them comes back to a schema that is being followed, it would be judged for ever: JSON
schema forbids that, and a grammar would have a rule that is made of itself. A way through a property or an
element is none of these, for there the value is another; recursion is welcome.

A reference is resolved as far as it stays in the document: by `$id`, `$anchor` and pointers. What cannot be
resolved is for the library to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from mainspring.grammar.words import GrammarError, shown

_IN_PLACE = ("allOf", "anyOf", "oneOf")

Node = dict[str, Any]


def check_references(name: str, schema: Node) -> None:
    """Raises `GrammarError`, in which the schema is called `name`."""
    document = _Document(schema)
    done: set[int] = set()  # ids of schemas whose ways all end
    for start in document.referring:
        way = {id(start): document.in_place(start)}
        while way:
            here, nodes = next(reversed(way.items()))
            node = next(nodes, None)
            if node is None:
                del way[here]
                done.add(here)
            elif id(node) in way:
                raise GrammarError(f"{name}: $ref {shown(start['$ref'])} leads in a circle")
            elif id(node) not in done:
                way[id(node)] = document.in_place(node)


class _Document:
    def __init__(self, schema: Node) -> None:
        self.referring: list[Node] = []  # schemas that have a reference
        self._bases: dict[int, str] = {}  # by id of a schema: what its references are relative to
        self._named: dict[tuple[str, str], Node] = {("", ""): schema}  # by URI and fragment
        self._read(schema, "")

    def _read(self, value: Any, base: str) -> None:
        if isinstance(value, list):
            for part in value:
                self._read(part, base)
        if not isinstance(value, dict):
            return
        if isinstance(value.get("$id"), str):
            base, _ = _joined(base, value["$id"])
            self._named.setdefault((base, ""), value)
        if isinstance(value.get("$anchor"), str):
            self._named.setdefault((base, value["$anchor"]), value)
        if isinstance(value.get("$ref"), str):
            self.referring.append(value)
        self._bases[id(value)] = base
        for part in value.values():
            self._read(part, base)

    def in_place(self, node: Node) -> Iterator[Node]:
        """Schemas of the same value."""
        if isinstance(node.get("$ref"), str) and (target := self._target(node)) is not None:
            yield target
        for key in _IN_PLACE:
            if isinstance(parts := node.get(key), list):
                yield from (part for part in parts if isinstance(part, dict))

    def _target(self, node: Node) -> Node | None:
        uri, fragment = _joined(self._bases[id(node)], node["$ref"])
        if not fragment.startswith("/"):
            return self._named.get((uri, fragment))
        found: Any = self._named.get((uri, ""))
        for key in unquote(fragment).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal():
                found = dict(enumerate(found)).get(int(key))
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None


def _joined(base: str, reference: str) -> tuple[str, str]:
    """URI and fragment."""
    try:
        uri, fragment = urldefrag(reference)
        return (urljoin(base, uri) if uri else base), fragment
    except ValueError:  # it is none
        return reference, ""
