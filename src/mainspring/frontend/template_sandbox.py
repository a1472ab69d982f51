"""The sandbox of chat templates: what a template may make is metered, so that none can fill the memory.

A template comes with a model file, or with a request: it is somebody else's program. jinja2's own sandbox
keeps it from the machine, not from `{{ 'a' * 10**9 }}`. So each rendering has an allowance of characters.
What could be large is paid for *before* it is made (repetition, padding, replacement, joining, text of nested
lists), all else, which is at most a few times the size of what it was made of, when it has been made; every
turn of a loop costs as many characters as the loop's body has pieces. When the allowance is used up the
rendering ends. Nothing is given back for what is freed, so loops end too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

ITEM = 32  # characters that an element of a list, a key or a value counts for

CALL = 128  # that a call of the template's own macros and loops counts for

_FIELD = re.compile(r"%[^%a-zA-Z]*[a-zA-Z%]|\{[^{}]*\}")
_WIDTH_FROM_VALUES = re.compile(r"%[^%a-zA-Z(]*\*|\{[^{}]*\{[^{}]*\}")
# Filters that make no text of a list's or mapping's elements.
_LOOKERS = frozenset({"length", "count", "first", "last", "random", "default", "d", "list", "items", "map"})
_LOOKERS |= {"select", "reject", "selectattr", "rejectattr", "sort", "unique", "groupby", "reverse", "min"}
_LOOKERS |= {"max", "dictsort", "attr", "sum", "batch", "slice"}


class Meter:
    """What one rendering may still make, in characters."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise TemplateError(
                f"it makes too much text: the limit is {self.limit} characters, in all its steps together"
            )

    def spend_on_text_of(self, value: object, indent: int = 0, depth: int = 0) -> int:
        """Pay for `str(value)`, whose size may be exponential in the memory that `value` takes; returns what
        that was. Each element may have a line of its own that is indented by its depth.
        """
        before = self.left
        if isinstance(value, Namespace):
            value = object.__getattribute__(value, "_Namespace__attrs")  # which its text shows
        if isinstance(value, str | bytes) or not isinstance(value, Collection):
            self.spend(_size(value))
        else:
            self.spend(1 + (ITEM + indent * (depth + 1)) * len(value))
            for item in value:
                self.spend_on_text_of(item, indent, depth + 1)
            if isinstance(value, Mapping):
                for item in value.values():
                    self.spend_on_text_of(item, indent, depth + 1)
        return before - self.left


_meter: ContextVar[Meter] = ContextVar("meter")


@contextmanager
def metered(limit: int) -> Iterator[Meter]:
    """What the sandbox makes in here, compiling or rendering, costs. `TemplateError` beyond `limit`."""
    meter = Meter(limit)
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def _size(value: object) -> int:
    """Of the value alone, not of what it contains."""
    match value:
        case str() | bytes():
            return len(value)
        case int():
            return 1 + value.bit_length() // 4
        case Collection():
            return 1 + ITEM * len(value)
    return 1


def _made(value: Any) -> Any:
    _meter.get().spend(_size(value))
    return value


# ---- the language ------------------------------------------------------------------------------------------


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """To be used inside `metered`, also for compiling: constants are computed then."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        self.concat = _concat  # type: ignore[method-assign]  # joins what a macro or a block has written
        del self.globals["lipsum"]
        self.filters |= {name: _metered_filter(name, filter) for name, filter in self.filters.items()}
        self.filters[_LOOP], self.filters[_TILDE] = _turns, _tilde

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        self.filters[name] = _metered_filter(name, filter)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Rewriter().visit(source), *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        if operator == "%" and isinstance(left, str | bytes):
            _spend_on_format(left, right)
        elif operator == "*":
            for thing, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    meter.spend(_size(thing) * (max(times, 0) if isinstance(thing, Sized) else 1))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.spend(_size(left) * max(right, 1))
        elif operator == "+":
            meter.spend(_size(left) + _size(right))
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = tuple(_settled(arg) for arg in args)
            _spend_on_method(owner, __obj.__name__, args, kwargs)
        elif isinstance(__obj, LoopContext):
            args = tuple(map(_turns, args))
        if isinstance(__obj, LoopContext | Macro):  # which may call themselves, again and again
            _meter.get().spend(CALL)
        return _made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        form = super().wrap_str_format(value)
        if form is None:
            return None

        def metered_format(*args: Any, **kwargs: Any) -> str:
            _spend_on_format(value.__self__, [*args, kwargs])
            made: str = _made(form(*args, **kwargs))
            return made

        return metered_format


_LOOP, _TILDE = "for ... in", "~"  # names that no template can write


class _Rewriter(NodeTransformer):
    """Makes filters of what jinja2 does not let a sandbox intercept: loops, and joining by `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        pieces = sum(len(output.nodes) for output in node.find_all(nodes.Output))
        self.generic_visit(node)
        node.iter = _filter(_LOOP, node.iter, nodes.Const(1 + pieces))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(_TILDE, nodes.List(node.nodes, lineno=node.lineno))


def _filter(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _turns(items: Any, cost: int = 1) -> Any:
    items = _settled(items)
    _meter.get().spend(cost * (len(items) if isinstance(items, Sized) else 1))
    return items


def _tilde(parts: list[Any]) -> str:
    _meter.get().spend_on_text_of(parts)
    return "".join(map(str, parts))


def _shown(value: Any) -> Any:
    """`{{ value }}`; text is paid for where it is joined or handed over."""
    if not isinstance(value, str):
        _meter.get().spend_on_text_of(value)
    return value


def _concat(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    _meter.get().spend(sum(map(len, pieces)))
    return "".join(pieces)


def _settled(value: Any) -> Any:
    """A list of what an iterator gives, so that it can be weighed."""
    return list(value) if isinstance(value, Iterator) else value


# ---- methods and filters -----------------------------------------------------------------------------------


def _metered_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(filter, "jinja_pass_arg"))  # the value's place

    @wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = _settled(args[first])
        if name == "format":
            _spend_on_format(str(value), [*args[first + 1 :], kwargs])
        elif name not in _LOOKERS:
            _meter.get().spend_on_text_of([value, *args[first + 1 :], *kwargs.values()])
        _spend_on_method(value, name, args[first + 1 :], kwargs)
        return _made(filter(*args[:first], value, *args[first + 1 :], **kwargs))

    return call


def _spend_on_method(value: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Pay for what multiplies: methods and filters whose result may be longer than what they are given."""
    meter, given = _meter.get(), [*args, *kwargs.values()]
    numbers = sum(abs(number) for number in given if isinstance(number, int))
    texts = sum(len(text) for text in given if isinstance(text, str | bytes))
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "to_bytes" | "round":
            meter.spend(numbers)
        case "batch" | "slice":
            meter.spend(ITEM * numbers)
        case "expandtabs":
            meter.spend(value.count("\t" if isinstance(value, str) else b"\t") * (8 + numbers))
        case "indent":
            meter.spend((1 + str(value).count("\n")) * (4 + numbers + texts))
        case "replace" if len(given) >= 2:
            old, new = (str(text) for text in given[:2])
            meter.spend((str(value).count(old) + 1) * len(new))
        case "translate":
            meter.spend(len(value) * max((_size(text) for text in _values(given[0])), default=1))
        case "wordwrap" | "urlize" | "xmlattr":
            meter.spend(_size(value) * (1 + texts))
        case "tojson" | "pprint":
            for item in given:  # separators are a tuple of texts
                numbers += meter.spend_on_text_of(item)
            meter.spend_on_text_of(value, indent=1 + numbers)
        case "join":
            items, separator = (args[0], value) if isinstance(value, str | bytes) and args else (value, "")
            meter.spend_on_text_of(items)
            meter.spend((len(items) if isinstance(items, Sized) else 1) * (texts + len(separator)))
        case "sum":
            meter.spend_on_text_of(value)


def _values(table: Any) -> Iterable[Any]:
    return table.values() if isinstance(table, Mapping) else table


def _spend_on_format(form: str | bytes, values: Any) -> None:
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    if _WIDTH_FROM_VALUES.search(text):
        raise TemplateError("it formats with a width that is a value, which is not supported")
    fields = _FIELD.findall(text)
    meter = _meter.get()
    meter.spend(sum(int(digits[:9]) for field in fields for digits in re.findall(r"\d+", field)))
    meter.spend(len(fields) * meter.spend_on_text_of(values))
