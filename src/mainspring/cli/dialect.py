"""How flags are spelled: argparse with the dialect vLLM's users know, and flags made from settings' types.

- `_` and `-` mean the same in a flag's name; a boolean has `--no-x`.
- Whole numbers may be human: `1k` is 1,000 and `1K` is 1,024, likewise m/M and g/G, also `1.5k`.
- A flag that is not given leaves no trace in the result, so that the engine's own defaults decide.
- A flag that does not exist is refused, with the nearest one that does; abbreviations are not guessed.
- `--help` shows the everyday flags, `--help=all` every one.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from mainspring.base.config import AUTO_MAX_MODEL_LEN, VLLM_ARGUMENTS, EngineArgs
from mainspring.base.errors import ConfigError

SCALES = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20, "g": 1000**3, "G": 1 << 30}
SHOW_ALL = "--help=all"
METAVARS: dict[object, str] = {int: "N", float: "X", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """argparse that raises `ConfigError` instead of printing its usage and leaving."""

    def __init__(
        self, command: str, description: str, examples: Sequence[str], argv: Sequence[str] = ()
    ) -> None:
        """`examples`: arguments of the command, shown as lines to type. `argv`: how much help to show."""
        super().__init__(
            prog=f"mainspring {command}",
            usage="%(prog)s [flags]",
            description=description,
            epilog="\n".join(
                ["for example:", *(f"  mainspring {command} {example}".rstrip() for example in examples)]
            ),
            formatter_class=_Formatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            add_help=False,
        )
        self.show_all = SHOW_ALL in argv
        self.hides_flags = False  # from the everyday help

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own would hide a closed pipe

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`. Raises `ConfigError` for anything that is not understood."""
        words = ["--help" if word == SHOW_ALL else word for word in argv]
        given, unknown = self.parse_known_args(one_spelling(words))
        if unknown:
            self.error(self.explain_stranger(unknown[0]))
        return given

    def flag(self, word: str) -> argparse.Action | None:
        """What stands behind `--word`, if it is a flag."""
        return self._option_string_actions.get(word)

    def explain_stranger(self, word: str) -> str:
        """What to say of a word that is no flag here."""
        if not word.startswith("-"):
            return f"{word!r} belongs to no flag; {self.prog} --help lists the flags"
        name = word.partition("=")[0]
        if known := VLLM_ARGUMENTS.get(name.removeprefix("--").removeprefix("no-").replace("-", "_")):
            return f"{name} {known}"
        near = nearest(name, self._option_string_actions)
        return f"unknown flag {name}; " + (
            f"did you mean {near}?" if near else f"{self.prog} --help lists the flags"
        )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 100))


def one_spelling(argv: Iterable[str]) -> list[str]:
    """`--max_tokens=5` as `--max-tokens=5`; values and everything after `--` stay as they are."""
    words: list[str] = []
    over = False
    for word in argv:
        over = over or word == "--"
        if word.startswith("--") and not over:
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, or None: one that `word` begins, else the most similar."""
    known = sorted(known)
    longer = [name for name in known if len(word) > 3 and name.startswith(word)]
    return next(iter(longer or difflib.get_close_matches(word, known, 1)), None)


def human_int(text: str) -> int:
    """A whole number, perhaps with a unit: 512, 1k (1,000), 1K (1,024), 1.5k."""
    scale = SCALES.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        number = int(digits) if scale == 1 else float(digits) * scale
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number such as 512, 2k or 2K, got {text!r}")


def model_len(text: str) -> int:
    return AUTO_MAX_MODEL_LEN if text == "auto" else human_int(text)


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 0.7, got {text!r}") from None


def token_ids(text: str) -> list[int]:
    """Ids with commas or spaces between them, or a JSON list."""
    text = text.strip()
    inside = text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text
    try:
        return [int(word) for word in re.split(r"\s*,\s*|\s+", inside)] if inside else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, got {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as '{{\"5\": -100}}', got {text!r}")
    return value


READERS: dict[object, Callable[[str], Any]] = {
    int: human_int,
    float: real,
    str: str,
    list[int]: token_ids,
    dict[int, float]: json_object,
}


def add_flag(group: argparse._ArgumentGroup, name: str, kind: object, help: str, **more: Any) -> None:
    """A flag for a setting of type `kind`: bool, int, float, str, a `Literal` of strings, lists of these, or
    any of them or None."""
    flag = "--" + name.replace("_", "-")
    help = help if help is argparse.SUPPRESS else help.replace("%", "%%")
    kind = _without_none(kind)
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help, **more)
    elif typing.get_origin(kind) is typing.Literal:
        group.add_argument(flag, choices=typing.get_args(kind), help=help, **more)
    elif kind == list[str]:
        group.add_argument(flag, action="append", help=help, metavar="TEXT", **more)
    else:
        more.setdefault("type", READERS[kind])
        more.setdefault("metavar", METAVARS.get(kind, "JSON" if kind == dict[int, float] else "IDS"))
        group.add_argument(flag, help=help, **more)


def _without_none(kind: object) -> object:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        # `str | list[str]` and the like: the list is the general form
        return next((k for k in kinds if typing.get_origin(k) is list), kinds[0])
    return kind


EVERYDAY = ("model", "seed", "kernels", "num_threads", "max_model_len")


def add_engine_flags(
    parser: Parser, *, only: Container[str] | None = None, words: Mapping[str, str] | None = None
) -> None:
    """One flag for each field of `EngineArgs`, or of those in `only`; `words` are help for this command."""
    parser.hides_flags = only is None
    group = parser.add_argument_group("model and engine")
    hints = typing.get_type_hints(EngineArgs)
    for setting in fields(EngineArgs):
        if only is not None and setting.name not in only:
            continue
        help = (words or {}).get(setting.name, setting.metadata["help"])
        if setting.default is not None and "default" not in help:
            help += f" (default: {_shown(setting.default)})"
        if setting.name not in EVERYDAY and not parser.show_all:
            help = argparse.SUPPRESS
        more = {"type": model_len} if setting.name == "max_model_len" else {}
        add_flag(group, setting.name, hints[setting.name], help, **more)


def engine_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """What was typed of `EngineArgs`, and nothing else."""
    return {f.name: getattr(given, f.name) for f in fields(EngineArgs) if hasattr(given, f.name)}


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def add_common_flags(parser: Parser) -> None:
    """The last of a command's flags: the help depends on whether there are any of the engine."""
    group = parser.add_argument_group("and")
    group.add_argument("--json", action="store_true", default=False, help="print for programs")
    group.add_argument(
        "--verbose", action="store_true", default=False, help="log what the engine decides and does"
    )
    more = "; --help=all shows every setting of the engine" if parser.hides_flags else ""
    group.add_argument("--help", "-h", action="help", help=f"this{more}")
