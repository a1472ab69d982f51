"""How flags are spelled: argparse with the dialect vLLM's users know, and flags made from settings' types.

- `_` and `-` mean the same in a flag's name; a boolean has `--no-x`.
- Whole numbers may be human: `1k` is 1,000 and `1K` is 1,024, likewise m/M and g/G, also `1.5k`.
- `--x.y.z 5` is `--x '{"y": {"z": 5}}'` for a flag that takes a JSON object; several of them are joined.
- A flag that is not given leaves no trace in the result, so that the engine's own defaults decide.
- A flag that does not exist is refused, with the nearest one that does; abbreviations are not guessed.
- What becomes of vLLM's other flags is in `vllm_flags.py`, what a file of flags may have in `config_file.py`.
- `--help` shows the everyday flags, `--help=all` every one, `--help=GROUP` or `--help=WORD` some, and
  `--help=json` all of them for programs.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import sys
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from mainspring.base.config import AUTO_MAX_MODEL_LEN, EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.cli import config_file, vllm_flags

SCALES = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20, "g": 1000**3, "G": 1 << 30}
HELP_OF = "--help="  # all, json, a group or a word
METAVARS: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
WIDEST = 100  # columns of help
LOG_LEVELS = ("debug", "info", "warning", "error")


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
        self.show_all = any(word.startswith(HELP_OF) for word in argv)
        self.hides_flags = False  # from the everyday help

    def error(self, message: str) -> NoReturn:
        """`message` is argparse's; of a flag's forms the first will do."""
        raise ConfigError(re.sub(r"^(--[\w-]+)(/-[\w-]+)+:", r"\1:", message.removeprefix("argument ")))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's hook for choices; its own words have no nearest one."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = nearest(str(value), known)
            hint = f"did you mean {near}? " if near else ""
            raise argparse.ArgumentError(
                action, f"no such choice {value!r}; {hint}there are {', '.join(known)}"
            )

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own would hide a closed pipe

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of `argv`. Raises `ConfigError` for anything that is not understood; what has no effect
        is said."""
        for word in argv:
            if word.startswith(HELP_OF):
                print(self._some_help(word.removeprefix(HELP_OF)), end="")
                raise SystemExit
        words = one_spelling(argv)
        if self.flag(config_file.FLAG) is not None:
            words = [*config_file.words_of_file(words, self), *words]
        given, unknown = self.parse_known_args(self._undotted(words))
        if unknown:
            self.error(self.explain_stranger(unknown[0]))
        for flag in getattr(given, "no_effect", []):
            print(f"{flag} has no effect here", file=sys.stderr)
        return given

    def flag(self, word: str) -> argparse.Action | None:
        """What stands behind `--word`, if it is a flag."""
        return self._option_string_actions.get(word)

    def explain_stranger(self, word: str) -> str:
        """What to say of a word that is no flag here."""
        if not word.startswith("-"):
            return f"{word!r} belongs to no flag; {self.prog} --help lists the flags"
        name = word.partition("=")[0]
        if words := vllm_flags.refusal(name):
            return words
        shown = [name for name, action in self._option_string_actions.items() if not _is_foreign(action)]
        near = nearest(name, shown)
        return f"unknown flag {name}; " + (
            f"did you mean {near}?" if near else f"{self.prog} --help lists the flags"
        )

    def _undotted(self, words: Sequence[str]) -> list[str]:
        """`--x.y 5` as `--x={"y": 5}`, where --x takes a JSON object."""
        result: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "--":
                return [*result, word, *rest]
            name, equals, value = word.partition("=")
            flag, *path = name.split(".")
            if not (path and word.startswith("--") and isinstance(self.flag(flag), _MergeObjects)):
                result.append(word)
                continue
            if not equals and (value := next(rest, "")) == "":
                self.error(f"{name}: expected one argument")
            found = _json_or_text(value)
            for key in reversed(path):
                found = {key: found}
            result.append(f"{flag}={json.dumps(found)}")
        return result

    # --- help -----------------------------------------------------------------------------------------------

    def groups(self) -> dict[str, list[argparse.Action]]:
        """The flags that are shown, by their group's title."""
        found = {str(group.title): group._group_actions for group in self._action_groups}
        shown = {
            title: [a for a in actions if a.help is not argparse.SUPPRESS] for title, actions in found.items()
        }
        return {title: actions for title, actions in shown.items() if actions}

    def _some_help(self, what: str) -> str:
        """All of it, a group, or the flags whose names have the word. Raises `ConfigError`."""
        if what == "all":
            return self.format_help()
        if what == "json":
            return json.dumps(self.described(), indent=1) + "\n"
        groups, sought = self.groups(), what.lower().lstrip("-").replace("_", "-")
        title = next((t for t in groups if sought in (t.lower(), t.lower().replace(" ", "-"))), None)
        if title is not None:
            return self._listing({title: groups[title]})
        found = {
            title: [a for a in actions if any(sought in name for name in [a.dest, *a.option_strings])]
            for title, actions in groups.items()
        }
        if not any(found.values()):
            raise ConfigError(f"--help={what}: no such flag or group; the groups are {', '.join(groups)}")
        return self._listing({title: actions for title, actions in found.items() if actions})

    def _listing(self, groups: Mapping[str, Sequence[argparse.Action]]) -> str:
        formatter = self._get_formatter()
        for title, actions in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def described(self) -> dict[str, Any]:
        """The command's flags, for programs: shell completion and the documentation are made of it."""
        return {
            "command": self.prog.removeprefix("mainspring "),
            "description": self.description,
            "groups": [
                {"title": title, "flags": [_described(action) for action in actions]}
                for title, actions in self.groups().items()
            ],
        }


def _described(action: argparse.Action) -> dict[str, Any]:
    takes = action.metavar if action.option_strings else action.metavar or action.dest
    return {
        "names": list(action.option_strings),
        "takes": None if action.nargs == 0 else takes,
        "choices": None if action.choices is None else list(action.choices),
        "help": (action.help or "").replace("%%", "%"),
    }


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, max_help_position=32, width=width)


class _NoEffect(argparse.Action):
    """One of vLLM's flags: notes that it was given, if that is worth a word."""

    def __init__(self, *args: Any, values: tuple[str, ...] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._values = values

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if self._values is None:
            namespace.no_effect = [*namespace.no_effect, option_string]
        elif (given := values[0]) not in self._values:
            parser.error(f"{option_string} {given} is not supported yet; give {' or '.join(self._values)}")


class _MergeObjects(argparse.Action):
    """JSON objects given one after the other are one; what comes later goes before."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest, {}), values))


class _FittingObject(_MergeObjects):
    """One of vLLM's objects, of which some values are what is done here anyway."""

    def __init__(self, *args: Any, values: Mapping[str, tuple[Any, ...]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._values = values

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        for key, value in values.items():
            if key not in self._values:
                parser.error(f"{option_string}.{key} is not known; there are {', '.join(self._values)}")
            if value not in (fitting := self._values[key]):
                shown = " or ".join(map(json.dumps, fitting))
                parser.error(f"{option_string}.{key} {json.dumps(value)} is not supported yet; give {shown}")


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _is_foreign(action: argparse.Action) -> bool:
    return isinstance(action, _NoEffect | _FittingObject)


def one_spelling(argv: Iterable[str]) -> list[str]:
    """`--max_tokens=5` as `--max-tokens=5`; what follows a dot, values, and all after `--`, stay."""
    words: list[str] = []
    over = False
    for word in argv:
        over = over or word == "--"
        if word.startswith("--") and not over:
            name, equals, value = word.partition("=")
            flag, dot, path = name.partition(".")
            word = flag.replace("_", "-") + dot + path + equals + value
        words.append(word)
    return words


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, or None: one that `word` begins, else the most similar."""
    known = sorted(known)
    longer = [name for name in known if len(word) > 3 and name.startswith(word)]
    return next(iter(longer or difflib.get_close_matches(word, known, 1)), None)


# --- values -------------------------------------------------------------------------------------------------


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


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


READERS: dict[object, Callable[[str], Any]] = {
    int: human_int,
    float: real,
    str: str,
    list[int]: token_ids,
}
OBJECTS = (dict[int, float], dict[str, Any])


# --- flags --------------------------------------------------------------------------------------------------


def add_flag(
    group: argparse._ArgumentGroup, name: str, kind: object, help: str, alias: str | None = None, **more: Any
) -> None:
    """A flag for a setting of type `kind`: bool, int, float, str, a `Literal` of strings, lists of these, a
    dictionary, or any of them or None. `alias` is a short form."""
    flags = ["--" + name.replace("_", "-"), *([alias] if alias else [])]
    help = help if help is argparse.SUPPRESS else help.replace("%", "%%")
    kind = _without_none(kind)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=help, **more)
    elif typing.get_origin(kind) is typing.Literal:
        group.add_argument(*flags, choices=typing.get_args(kind), help=help, **more)
    elif kind == list[str]:
        group.add_argument(*flags, action="append", help=help, metavar="TEXT", **more)
    elif kind in OBJECTS:
        group.add_argument(*flags, action=_MergeObjects, type=json_object, metavar="JSON", help=help, **more)
    else:
        more.setdefault("type", READERS[kind])
        more.setdefault("metavar", METAVARS.get(kind, "IDS"))
        group.add_argument(*flags, help=help, **more)


def _without_none(kind: object) -> object:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kinds = [k for k in typing.get_args(kind) if k is not type(None)]
        # `str | list[str]` and the like: the list is the general form
        return next((k for k in kinds if typing.get_origin(k) is list), kinds[0])
    return kind


EVERYDAY = ("model", "seed", "kernels", "num_threads", "max_model_len")
ALIASES = {
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}
# Where a setting is shown; what is in none of these is shown with the engine's.
ENGINE = "engine"
GROUPS = {
    "model": (
        *("model", "revision", "hf_token", "download_dir", "served_model_name", "load_format", "dtype"),
        *(
            "quantization",
            "max_model_len",
            "chat_template",
            "skip_tokenizer_init",
            "trust_remote_code",
            "seed",
        ),
    ),
    "kernels": ("kernels", "instruction_set", "activations", "num_threads", "enforce_eager"),
    "memory": (
        *("kv_cache_memory_bytes", "kv_cache_dtype", "block_size", "num_gpu_blocks_override"),
        *("gpu_memory_utilization", "enable_prefix_caching", "watermark"),
    ),
    "scheduling": (
        *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold"),
        *("scheduling_policy", "async_scheduling", "max_num_queued_reqs", "max_num_queued_tokens"),
    ),
    "parallel": (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "collectives"),
        *("distributed_executor_backend", "executor", "in_process"),
    ),
    ENGINE: (),
}


def add_engine_flags(
    parser: Parser,
    *,
    only: Container[str] | None = None,
    without: Container[str] = (),
    words: Mapping[str, str] | None = None,
) -> None:
    """A flag for each field of `EngineArgs` not in `without`, for vLLM's others, and `--config`; or for
    the fields in `only`, and nothing else. `words` are help for this command."""
    hints = typing.get_type_hints(EngineArgs)
    group_of = {name: title for title, names in GROUPS.items() for name in names}
    chosen = [f for f in fields(EngineArgs) if (only is None or f.name in only) and f.name not in without]
    for title in GROUPS:
        members = [setting for setting in chosen if group_of.get(setting.name, ENGINE) == title]
        group = _group(parser, title if parser.show_all else "model and engine")
        for setting in members:
            help = (words or {}).get(setting.name, setting.metadata["help"])
            if setting.default is not None and "default" not in help:
                help += f" (default: {_shown(setting.default)})"
            if setting.name not in EVERYDAY and not parser.show_all:
                help = argparse.SUPPRESS
            more = {"type": model_len} if setting.name == "max_model_len" else {}
            add_flag(group, setting.name, hints[setting.name], help, ALIASES.get(setting.name), **more)
    if only is None:
        _add_foreign_flags(parser)
        parser.hides_flags = True


def _group(parser: Parser, title: str) -> argparse._ArgumentGroup:
    """The group of this title; a command may have begun it."""
    begun = (group for group in parser._action_groups if group.title == title)
    return next(begun, None) or parser.add_argument_group(title)


def _add_foreign_flags(parser: Parser) -> None:
    """`--config`, and those of vLLM's that are taken although they set nothing."""
    group = _group(parser, ENGINE if parser.show_all else "model and engine")
    help = "a YAML file of flags; those given here go before it" if parser.show_all else argparse.SUPPRESS
    group.add_argument(config_file.FLAG, metavar="FILE", help=help)
    parser.set_defaults(no_effect=[])
    for name, takes_value, values in vllm_flags.foreign_flags():
        dashes = "-" if len(name) == 1 else "--"
        forms = [dashes + name] if takes_value else [f"--{name}", f"--no-{name}"]
        if parser.flag(forms[0]) is None:
            group.add_argument(
                *forms, nargs=int(takes_value), action=_NoEffect, values=values, help=argparse.SUPPRESS
            )
    for name, allowed in vllm_flags.FITTING_OBJECTS.items():
        if parser.flag(f"--{name}") is None:
            group.add_argument(
                f"--{name}", action=_FittingObject, type=json_object, values=allowed, help=argparse.SUPPRESS
            )


def engine_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """What was typed of `EngineArgs`, and nothing else."""
    return {f.name: getattr(given, f.name) for f in fields(EngineArgs) if hasattr(given, f.name)}


def model_argument(given: argparse.Namespace) -> dict[str, Any]:
    """`engine_arguments`, where the model may stand without a flag (as `model_tag`)."""
    found = engine_arguments(given)
    named = getattr(given, "model_tag", None)
    if named is not None and found.setdefault("model", named) != named:
        raise ConfigError(f"MODEL {named!r} and --model {found['model']!r} differ; give one")
    return found


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def add_common_flags(parser: Parser) -> None:
    """The last of a command's flags: the help depends on whether there are any of the engine."""
    group = parser.add_argument_group("and")
    group.add_argument("--json", action="store_true", default=False, help="print for programs")
    group.add_argument(
        "--verbose", action="store_true", default=False, help="log what the engine decides and does"
    )
    add_log_flag(group, parser)
    add_help_flag(group, parser)


def add_log_flag(group: argparse._ArgumentGroup, parser: Parser) -> None:
    help = "of what is logged at least; default: warning, or MAINSPRING_LOG_LEVEL"
    shown = help if parser.show_all else argparse.SUPPRESS
    group.add_argument("--log-level", type=str.lower, choices=LOG_LEVELS, help=shown)


def log_level(given: argparse.Namespace, usually: str | None = None) -> str | None:
    """For `set_up_logging`: what was typed, else `usually`."""
    chosen: str | None = getattr(given, "log_level", None)
    return chosen or ("info" if getattr(given, "verbose", False) else usually)


def add_help_flag(group: argparse._ArgumentGroup, parser: Parser) -> None:
    more = (
        "; --help=all: every setting; --help=memory: of a group, or by a word" if parser.hides_flags else ""
    )
    group.add_argument("--help", "-h", action="help", help=f"this{more}")
