"""`--config FILE`: flags from a YAML file, as words for the parser. The command line goes before the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.base.errors import ConfigError

if TYPE_CHECKING:
    from mainspring.cli.dialect import Parser

FLAG = "--config"


def words_of_file(typed: Sequence[str], parser: Parser) -> list[str]:
    """The file's flags, without those that are typed too (in one spelling). Raises `ConfigError`."""
    path = _path(typed)
    if path is None:
        return []
    given = {_bare(word) for word in typed if word.startswith("--")}
    found = _read(path)
    for name, value in found.items():
        if (wrong := _judged(name, value, parser)) is not None:
            raise ConfigError(f"--config {path}: {name} {wrong}")
    return [
        word
        for name, value in found.items()
        if _bare(f"--{name}") not in given
        for word in _words(name, value)
    ]


def _path(typed: Sequence[str]) -> str | None:
    at = next((i for i, word in enumerate(typed) if word == FLAG or word.startswith(FLAG + "=")), None)
    if at is None:
        return None
    _, equals, path = typed[at].partition("=")
    if not equals:
        if at + 1 == len(typed):
            raise ConfigError("--config needs a file")
        path = typed[at + 1]
    return path


def _judged(name: str, value: Any, parser: Parser) -> str | None:
    """What is wrong with a line's value, where the words made of it would be misread."""
    if name in ("config", "help"):
        return "has no place in a file"
    if isinstance(value, dict) and not _is_json(value):
        return "has something that is no JSON, such as a date, or stands within itself"
    action = parser.flag("--" + name.replace("_", "-"))
    if action is None or value is None:
        return None  # a stranger is told as one
    if action.nargs == 0 and not isinstance(value, bool):
        return f"must be true or false, got {value!r}"
    if action.nargs is None and isinstance(value, list | bool):
        return f"takes one value, got {value!r}"
    return None


def _is_json(value: Mapping[str, Any]) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _read(path: str) -> Mapping[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.safe_load(text)
        twice = _said_twice(yaml.compose(text, yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"--config {path} must have lines such as 'port: 8080'")
    if twice is not None:
        raise ConfigError(f"--config {path}: {twice}; say it once")
    return {"model" if name == "model_tag" else name: value for name, value in found.items()}


def _said_twice(root: Any) -> str | None:
    """Where a mapping of the document has a name twice, of which YAML's reader would keep the last without a
    word; in the outermost one, which has flags, also in two spellings."""
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias, perhaps of what it stands in
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name = str(key.value) if node is not root else str(key.value).replace("_", "-")
                line = key.start_mark.line + 1
                if name in lines:
                    return f"{key.value} is on line {lines[name]} and again on line {line}"
                lines[name] = line
                waiting.append(value)
    return None


def _bare(word: str) -> str:
    """A flag's name without its dress."""
    name = word.partition("=")[0].removeprefix("--").replace("_", "-")
    return name.removeprefix("no-")


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return [f"--no-{flag.removeprefix('--')}"]
        case list():
            return [flag, *map(str, value)] if value else []
        case dict():
            return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]
