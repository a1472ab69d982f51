"""A JSON schema on its way to the library: what that takes too lightly is made exact, or refused by name.

Found by running the JSON Schema test suite and many thousands of random texts against it (tests/grammar):

1. `format` date, time and date-time let days and leap seconds through that do not exist: they become
   patterns.
2. A property that is said twice counts once, so `minProperties` cannot be counted where names are free.
3. `\\S` in a pattern is everything but white space, and ECMAScript counts U+FEFF as that.
4. Draft 3 has keywords that later ones do not know, and would pass over. Up to draft 7 `contentEncoding` and
   `contentMediaType` may be asserted.
5. Characters that JSON can only spell as \\uXXXX cannot be said (see `translate.json_options`).
6. What `multipleOf` costs grows with its number, without the factors 2 and 5, and where several of them meet,
   with their least common multiple; none of the library's limits counts that.
7. `additionalItems`, or a list as `items`, make `prefixItems` be passed over: they are of different drafts.
8. Numbers are read as float64, not always the nearest, and written as the shortest decimal for that; integers
   may be taken for int64 before. A range that ends at the least int64 overflows the stack, and the process is
   gone. So a number that would come out as another is refused. A maximum of integers may be beyond int64:
   what it allows there is not said.
9. References that lead in a circle end an answer where it meets them (`references.py`).

A schema may refer to any place in itself, so every mapping is looked at, whatever stands above it; only what
is data (`const`, `enum` and the like) is left alone.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, NoReturn

from mainspring.grammar.references import check_references
from mainspring.grammar.words import GrammarError, shown

OPTIONS_KEY = "x-guidance"  # in a schema: the library's own settings, strictness among them

_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_CLOCK})"  # without leap seconds
EXACT_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}

MAX_MULTIPLE = 10_000  # of all of them, see 6
MAX_MULTIPLES = 50_000  # their sum: some 0.5 s

MAX_INT64 = 2**63 - 1
MAX_EXACT_INTEGER = 2**53  # up to here float64 has them all
MAX_DIGITS = 15  # decimals of so many are told apart by float64
MAX_POWER = 22  # up to here float64 has those of 10, so that what is divided by one is rounded once

_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
_BOUNDS = ("minimum", "exclusiveMinimum", *_UPPER_BOUNDS)

_DATA_KEYS = {"const", "enum", "default", "examples", "example"}
_NAME_KEYS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
_OLD_DRAFTS = re.compile(r"json-schema\.org/draft-0[1-3]/")
_ASSERTING_DRAFTS = re.compile(r"json-schema\.org/draft-0[4-7]/")
_UNSPEAKABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def prepare_schema(name: str, schema: Any, *, closed: bool = False) -> dict[str, Any]:
    """The schema as it is to be enforced. `closed`: objects that name properties, and say nothing of others,
    have no others. A schema may be True: everything fits it. Raises `GrammarError`, in which it is called
    `name`."""
    if schema is False:
        raise GrammarError(f"{name} is the schema False, which nothing fits")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"{name} must be a JSON schema, which is an object; got {shown(schema)}")
    try:
        preparation = _Preparation(name, closed, str(schema.get("$schema", "")))
        prepared = preparation.schema(schema)
        preparation.judge_multiples()
        check_references(name, schema)
        return prepared
    except RecursionError:
        raise GrammarError(f"{name} is nested too deeply") from None


class _Preparation:
    def __init__(self, name: str, closed: bool, draft: str) -> None:
        self._name = name
        self._closed = closed
        self._multiples: list[int] = []
        self._asserts_content = _ASSERTING_DRAFTS.search(draft) is not None
        if _OLD_DRAFTS.search(draft):
            raise GrammarError(f"{name} has $schema {draft}, which is too old; write it for draft 4 or later")

    def schema(self, node: dict[str, Any]) -> dict[str, Any]:
        if OPTIONS_KEY in node:
            raise GrammarError(f"{self._name} has the keyword {OPTIONS_KEY}, which is not a schema's to set")
        copy = {key: self._value(key, value) for key, value in node.items()} | self._bounds(node)
        if isinstance(pattern := copy.get("pattern"), str):
            copy["pattern"] = ecma_pattern(pattern)
        if isinstance(named := copy.get("format"), str) and named in EXACT_FORMATS:
            del copy["format"]
            if "pattern" in copy:
                copy["allOf"] = [*copy.get("allOf", []), {"pattern": EXACT_FORMATS[named]}]
            else:
                copy["pattern"] = EXACT_FORMATS[named]
        is_open = not copy.keys() & {"additionalProperties", "patternProperties"}
        if self._closed and is_open and isinstance(copy.get("properties"), dict):
            copy["additionalProperties"] = False
        self._judge(copy)
        return copy

    def judge_multiples(self) -> None:
        """Of all places together: any two of them may meet, by `allOf` or `$ref`."""
        if math.lcm(*self._multiples) > MAX_MULTIPLE or sum(self._multiples) > MAX_MULTIPLES:
            raise GrammarError(
                f"{self._name}: multipleOf is too complex: without the factors 2 and 5, the least common "
                f"multiple of all of them may be {MAX_MULTIPLE}, and their sum {MAX_MULTIPLES}"
            )

    def _value(self, key: str, value: Any) -> Any:
        if key in _DATA_KEYS:
            return self._said(key, value) if key in ("const", "enum") else value
        if isinstance(value, dict):
            if key not in _NAME_KEYS:
                return self.schema(value)
            if key == "properties":
                self._said(key, list(value))
            named = {name: self._value("", part) for name, part in value.items()}
            return {ecma_pattern(k): v for k, v in named.items()} if key == "patternProperties" else named
        if isinstance(value, list):
            return [self._value("", part) for part in value]
        return value

    def _judge(self, node: dict[str, Any]) -> None:
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > 0 and math.isfinite(multiple):
            self._multiples.append(_without_2_and_5(multiple))
        least, required = node.get("minProperties"), node.get("required", [])
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        has_free_names = node.get("additionalProperties") is not False or "patternProperties" in node
        if has_free_names and isinstance(least, int | float) and least > max(1, num_required):
            raise GrammarError(
                f"{self._name}: minProperties {shown(least)} cannot be counted where names are free: set "
                "additionalProperties to false, or list more names in required"
            )
        is_old = "additionalItems" in node and "items" not in node
        if "prefixItems" in node and (is_old or isinstance(node.get("items"), list)):
            raise GrammarError(
                f"{self._name}: prefixItems and {'additionalItems' if is_old else 'a list of items'} are of "
                "different drafts: give prefixItems, and items for those that follow"
            )
        for key in ("contentEncoding", "contentMediaType"):
            if self._asserts_content and isinstance(node.get(key), str):
                raise GrammarError(f"{self._name}: {key} is not supported in this draft")

    def _bounds(self, node: dict[str, Any]) -> dict[str, int | float]:
        """Of numbers, as the library will see them. See 8."""
        kinds = node.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        are_integers = "integer" in kinds and "number" not in kinds
        found: dict[str, int | float] = {}
        for key in _BOUNDS:
            if not _is_number(node.get(key)):
                continue  # one of draft 4's, or a mistake that the library names
            number = _as_integer(node[key])
            if are_integers and key in _UPPER_BOUNDS and number > MAX_INT64:
                number = MAX_INT64
            if not _is_exact(number, are_integers):
                self._refuse_number(key, node[key])
            found[key] = number
        return found

    def _said(self, key: str, value: Any) -> Any:
        """Data that must be said as it is."""
        match value:
            case str():
                if found := _UNSPEAKABLE.search(value):
                    raise GrammarError(
                        f"{self._name}: {key} has the control character U+{ord(found[0]):04X}, which is not "
                        "supported"
                    )
            case list():
                return [self._said(key, part) for part in value]
            case dict():
                self._said(key, list(value))
                return {name: self._said(key, part) for name, part in value.items()}
            case _ if _is_number(value):
                number = _as_integer(value)
                if not _is_exact(number, True):
                    self._refuse_number(key, value)
                return number
        return value

    def _refuse_number(self, key: str, number: float) -> NoReturn:
        raise GrammarError(
            f"{self._name}: {key} {shown(number)} has more digits than can be enforced exactly, {MAX_DIGITS}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_integer(number: float) -> float:
    """1.0 is 1, and 1e18 what it is in decimals."""
    return int(Decimal(str(number))) if isinstance(number, float) and number.is_integer() else number


def _is_exact(number: float, may_be_int64: bool) -> bool:
    """Whether the library says this number, and no other. See 8."""
    if abs(number) > MAX_INT64:
        return False
    if isinstance(number, int):
        if abs(number) <= MAX_EXACT_INTEGER:
            return True
        if number != float(number):
            return may_be_int64 and number == MAX_INT64
        if may_be_int64:
            return True
    _, digits, power = Decimal(str(number)).normalize().as_tuple()
    return len(digits) <= MAX_DIGITS and int(power) >= -MAX_POWER


def _without_2_and_5(number: float) -> int:
    """Of a number above 0, as it is written in decimals; where the point stands does not matter."""
    if isinstance(number, int):
        digits = number
    else:
        digits = int("".join(map(str, Decimal(str(number)).as_tuple().digits)))
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    return digits


def ecma_pattern(pattern: str) -> str:
    r"""`pattern` with `\S` as ECMAScript has it. Raises `GrammarError` where that cannot be said."""
    if r"\S" not in pattern:
        return pattern
    parts, in_class = [], False
    for part in re.findall(r"\\.|[^\\]|\\$", pattern, re.DOTALL):
        if part == r"\S":
            if in_class and r"\s" not in pattern:
                raise GrammarError(r"pattern: \S is supported in a class of characters only together with \s")
            part = part if in_class else r"[^\s\uFEFF]"
        elif part in "[]":
            in_class = part == "[" or (in_class and part != "]")
        parts.append(part)
    return "".join(parts)
