"""Structural tags: free text with structured parts, as a Lark grammar.

Two forms, both vLLM's. The older has `triggers` and `structures`: text is free until one of the triggers has
been said; then one of the structures that begin with it must follow (its begin, a text that fits its schema,
its end), and text is free again. The newer one is a tree, `format`, of nodes with a type.

Two things are ours: a node may be any other constraint (`structured_outputs`, with the fields of
`StructuredOutputsParams`), and beside `format` there may be a `limit` of how long the free text is that the
whole begins with (`limited.py`).

A node becomes a rule. What a node may say is checked here by name, key by key: a key that is not understood
could be a constraint, so it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mainspring.grammar.schema import OPTIONS_KEY, prepare_schema
from mainspring.grammar.words import GrammarError, as_json, shown

ANY_TEXT = r"/(.|\n)*/"

# By type of node: keys it must have, keys it may have.
_NODES: dict[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "any_text": (set(), set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
_CONSTRAINT = "structured_outputs"  # this node's keys are judged by who reads it


def structural_tag_to_lark(
    tag: Any, json_options: Mapping[str, Any], closed: bool, constraint: Callable[[dict[str, Any]], str]
) -> str:
    """Raises `GrammarError`. `json_options` are the library's settings for the schemas inside; `closed` is as
    in `prepare_schema`; `constraint` makes a grammar of the fields of another one."""
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise GrammarError('structural_tag must be an object with "type": "structural_tag"')
    writer = _Writer(json_options, closed, constraint)
    if "format" in tag:
        _check_keys("structural_tag", tag, {"type", "format"}, {"limit"})
        limit_of(tag)
        node = tag["format"]
    else:
        _check_keys("structural_tag", tag, {"type", "triggers", "structures"}, set())
        node = {
            "type": "triggered_tags",
            "triggers": tag["triggers"],
            "tags": [_structure_as_tag(part) for part in _list("structures", tag["structures"])],
        }
    try:
        body = writer.node(node, is_last=True)
    except RecursionError:
        raise GrammarError("structural_tag is nested too deeply") from None
    return "\n".join([f"start: {body}", *writer.rules])


class Limit(NamedTuple):
    """Of free text between two tags, with which a text begins, if it does."""

    begin: str  # empty: it has begun
    end: str
    max_tokens: int  # after the begin and before the end


def limit_of(tag: dict[str, Any]) -> Limit | None:
    """Raises `GrammarError`."""
    if (limit := tag.get("limit")) is None:
        return None
    if not isinstance(limit, dict):
        raise GrammarError(f"structural_tag: limit must be an object, got {shown(limit)}")
    _check_keys("limit", limit, {"begin", "end", "max_tokens"}, set())
    begin, end, most = _text("begin", limit["begin"]), _text("end", limit["end"]), limit["max_tokens"]
    if not end or type(most) is not int or most < 0:
        raise GrammarError("structural_tag: limit needs an end, and max_tokens of 0 or more")
    return Limit(begin, end, most)


def _structure_as_tag(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, dict):
        raise GrammarError(f"structural_tag: structures must be objects, got {shown(structure)}")
    _check_keys("structures", structure, {"begin", "end"}, {"schema", "structural_tag_id"})
    content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


class _Writer:
    """Collects rules; `node` returns the expression that stands for a node."""

    def __init__(
        self, json_options: Mapping[str, Any], closed: bool, constraint: Callable[[dict[str, Any]], str]
    ) -> None:
        self.rules: list[str] = []
        self._json_options = json_options
        self._closed = closed
        self._constraint = constraint

    def node(self, node: Any, *, is_last: bool) -> str:
        """`is_last`: nothing follows it in the whole text, so it may be text without an end."""
        if isinstance(node, dict) and node.get("type") == _CONSTRAINT:
            fields = {key: value for key, value in node.items() if key != "type"}
            return self._rule(f"%lark {{\n{self._constraint(fields)}\n}}")
        if not isinstance(node, dict) or node.get("type") not in _NODES:
            kind = node.get("type") if isinstance(node, dict) else node
            raise GrammarError(f"structural_tag: no format {shown(kind)}; there are {', '.join(_NODES)}")
        kind = node["type"]
        _check_keys(kind, node, {"type"} | _NODES[kind][0], _NODES[kind][1])
        match kind:
            case "const_string":
                return _literal("value", node["value"])
            case "json_schema":
                return self._schema(node["json_schema"])
            case "regex":
                return self._rule(f"/{_text('pattern', node['pattern']).replace('/', chr(92) + '/')}/")
            case "any_text":
                if not is_last:
                    raise GrammarError("structural_tag: any_text must be a tag's content, or come last")
                return self._rule(ANY_TEXT)
            case "sequence":
                *first, last = _list("elements", node["elements"])
                parts = [self.node(part, is_last=False) for part in first]
                return f"({' '.join([*parts, self.node(last, is_last=is_last)])})"
            case "or":
                parts = [self.node(part, is_last=is_last) for part in _list("elements", node["elements"])]
                return f"({' | '.join(parts)})"
            case "tag":
                return self._tag(node, "")
            case "triggered_tags":
                return self._triggered(node, is_last)
            case _:
                return self._separated(node)

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _schema(self, schema: Any) -> str:
        prepared = prepare_schema("json_schema", schema, closed=self._closed)
        text = as_json("json_schema", prepared | {OPTIONS_KEY: dict(self._json_options)})
        return self._rule(f"%json {text}")

    def _tag(self, node: Any, said: str) -> str:
        """`said` is what of its begin has been said already."""
        if not isinstance(node, dict) or node.get("type") != "tag":
            raise GrammarError(f"structural_tag: tags must be of type tag, got {shown(node)}")
        _check_keys("tag", node, {"type"} | _NODES["tag"][0], set())
        rest = _text("begin", node["begin"])[len(said) :]
        begin = _literal("begin", rest) if rest else ""
        end, content = _text("end", node["end"]), node["content"]
        if isinstance(content, dict) and content.get("type") == "any_text":
            _check_keys("any_text", content, {"type"}, set())
            if not end:
                raise GrammarError("structural_tag: a tag of any_text needs an end")
            inside = self._rule(f"{ANY_TEXT} {_literal('end', end)}", "[lazy]")
        else:
            inside = self.node(content, is_last=False) + (f" {_literal('end', end)}" if end else "")
        return self._rule(f"{begin} {inside}")

    def _triggered(self, node: dict[str, Any], is_last: bool) -> str:
        stops, must = _flag(node, "stop_after_first"), _flag(node, "at_least_one")
        if not is_last and not stops:
            raise GrammarError("structural_tag: triggered_tags must come last: the text after them is free")
        tags = _list("tags", node["tags"])
        triggers = [_text("triggers", trigger) for trigger in _list("triggers", node["triggers"])]
        if "" in triggers:
            raise GrammarError("structural_tag: a trigger must not be empty")
        begins = [tag.get("begin") if isinstance(tag, dict) else None for tag in tags]
        for begin in begins:
            found = [trigger for trigger in triggers if isinstance(begin, str) and begin.startswith(trigger)]
            if len(found) != 1:
                raise GrammarError(
                    f"structural_tag: begin {shown(begin)} must start with one of the triggers, and only one"
                )
        calls = []
        for trigger in triggers:
            following = [
                self._tag(tag, trigger)
                for tag, begin in zip(tags, begins, strict=True)
                if str(begin).startswith(trigger)
            ]
            if not following:
                raise GrammarError(f"structural_tag: no tag begins with the trigger {shown(trigger)}")
            until = self._rule(f"{ANY_TEXT} {_literal('triggers', trigger)}", "[lazy]")
            calls.append(f"{until} ({' | '.join(following)})")
        call = self._rule(" | ".join(calls))
        first = self._rule(" | ".join(self._tag(tag, "") for tag in tags)) if must else ""
        text = self._rule(ANY_TEXT)
        if stops:
            return first if must else f"({call} | {text})"
        return f"({first} {call}* {text})"

    def _separated(self, node: dict[str, Any]) -> str:
        tag = self._rule(" | ".join(self._tag(tag, "") for tag in _list("tags", node["tags"])))
        separator = _text("separator", node["separator"])
        more = f"({_literal('separator', separator)} {tag})*" if separator else f"{tag}*"
        several = tag if _flag(node, "stop_after_first") else f"({tag} {more})"
        return several if _flag(node, "at_least_one") else f"({several})?"


def _check_keys(where: str, node: dict[str, Any], needed: set[str], allowed: set[str]) -> None:
    for key in sorted(needed - node.keys()):
        raise GrammarError(f"structural_tag: {where} has no {key}")
    for key in node.keys() - needed - allowed:
        raise GrammarError(f"structural_tag: {where} has the key {shown(key)}, which is not supported")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"structural_tag: {name} must be a list that is not empty, got {shown(value)}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise GrammarError(f"structural_tag: {name} must be text, got {shown(value)}")
    return value


def _literal(name: str, value: Any) -> str:
    if not (text := _text(name, value)):
        raise GrammarError(f"structural_tag: {name} must not be empty")
    return json.dumps(text)


def _flag(node: dict[str, Any], name: str) -> bool:
    value = node.get(name, False)
    if not isinstance(value, bool):
        raise GrammarError(f"structural_tag: {name} must be true or false, got {shown(value)}")
    return value
