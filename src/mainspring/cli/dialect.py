"""How flags are spelled and explained: argparse with the dialect that vLLM's users know.

- `_` and `-` mean the same in a flag's name; a boolean has `--no-x`.
- Values are read by `values.py`; settings become flags in `flags.py`.
- `--x.y.z 5` is `--x '{"y": {"z": 5}}'` for a flag that takes a JSON object; several of them are joined.
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mainspring.base.errors import ConfigError
from mainspring.cli import config_file, vllm_flags

HELP_OF = "--help="  # all, json, a group or a word
WIDEST = 100  # columns of help


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

    def _get_option_tuples(self, option_string: str) -> Any:
        """argparse's guess at an unknown flag. It takes `-p` for `-pp`, whatever `allow_abbrev` says;
        only a flag with its value behind it, as `-O3`, is one."""
        return [
            found for found in super()._get_option_tuples(option_string) if option_string.startswith(found[1])
        ]

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
            if not (path and word.startswith("--") and isinstance(self.flag(flag), MergeObjects)):
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


class NoEffect(argparse.Action):
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


class MergeObjects(argparse.Action):
    """JSON objects given one after the other are one; what comes later goes before."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest, {}), values))


class FittingObject(MergeObjects):
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
    return isinstance(action, NoEffect | FittingObject)


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


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
