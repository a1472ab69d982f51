"""`mainspring completion SHELL`: a script that completes commands, flags, choices, model names and files.

The script is made from what each command says of itself (`--help=json`), so it knows every flag; it starts no
program while somebody types. What a word may be is one of few kinds: a fixed list, a file, or anything.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from mainspring.base.errors import ConfigError
from mainspring.cli import bench, program
from mainspring.cli.dialect import Parser, nearest
from mainspring.cli.flags import add_help_flag

EXAMPLES = (
    'bash   # in ~/.bashrc: eval "$(mainspring completion bash)"',
    'zsh    # in ~/.zshrc, after compinit: eval "$(mainspring completion zsh)"',
    "fish   # once: mainspring completion fish > ~/.config/fish/completions/mainspring.fish",
)
MODEL_FLAGS = ("--model",)
MODEL_COMMANDS = ("serve", "doctor", "pull", "models")  # whose words are models
WORDS = {"models": ("show", "remove"), "completion": ("bash", "zsh", "fish")}  # and others
GROUPS = {"bench": bench.BENCHES}  # commands whose first word is another command


@dataclass(frozen=True, slots=True)
class Command:
    """What may follow a command's name."""

    help: str
    words: tuple[str, ...] = ()  # that may stand without a flag, beside files
    flags: dict[str, str] = field(default_factory=dict)  # help by name
    values: dict[str, tuple[str, ...] | None] = field(
        default_factory=dict
    )  # of flags that take one; None: any


def run(argv: list[str]) -> int:
    parser = Parser("completion", "Print what makes a shell complete mainspring's words.", EXAMPLES, argv)
    parser.usage = "%(prog)s SHELL"
    group = parser.add_argument_group("the shell")
    group.add_argument("shell", nargs="?", default=None, metavar="SHELL", help="bash, zsh or fish")
    add_help_flag(group, parser)
    shell = parser.read(argv).shell
    if shell not in SCRIPTS:
        near = nearest(shell or "", SCRIPTS)
        hint = f"did you mean {near}?" if near else f"give one of {', '.join(SCRIPTS)}"
        raise ConfigError(f"unknown shell {shell!r}; {hint}" if shell else hint)
    print(SCRIPTS[shell](commands()), end="")
    return 0


# --- what there is ------------------------------------------------------------------------------------------


def commands() -> dict[str, Command]:
    """By name; "bench serve" is one."""
    from mainspring.checkpoint.catalog import CATALOGUE

    models = tuple(CATALOGUE)
    found = {}
    for name, entry in program.COMMANDS.items():
        if (inner := GROUPS.get(name)) is None:
            found[name] = _command(name, entry.help, models)
            continue
        found[name] = Command(entry.help, tuple(inner))
        for word, help in inner.items():
            found[f"{name} {word}"] = _command(f"{name} {word}", help, models)
    return found


def _command(name: str, help: str, models: tuple[str, ...]) -> Command:
    command = Command(
        help, models if name in MODEL_COMMANDS else tuple(SCRIPTS) if name == "completion" else ()
    )
    for flag in described(name)["flags"]:
        for form in flag["names"]:
            command.flags[form] = flag["help"]
            if flag["takes"] is not None or flag["choices"] is not None:
                choices = flag["choices"] or (models if form in MODEL_FLAGS else None)
                command.values[form] = None if choices is None else tuple(choices)
    return command


def described(name: str) -> dict[str, Any]:
    """A command's help for programs, with the flags of all groups in one list."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        program.main([*name.split(), "--help=json"])
    found: dict[str, Any] = json.loads(shown.getvalue())
    return {**found, "flags": [flag for group in found["groups"] for flag in group["flags"]]}


# --- scripts ------------------------------------------------------------------------------------------------

BASH = Template("""\
# mainspring's words for bash: eval "$$(mainspring completion bash)"
_mainspring_words() { COMPREPLY=( $$(compgen -W "$$2" -- "$$1") ); }
_mainspring_files() { compopt -o filenames 2>/dev/null; COMPREPLY+=( $$(compgen -f -- "$$1") ); }
_mainspring() {
    local current=$${COMP_WORDS[COMP_CWORD]} before=$${COMP_WORDS[COMP_CWORD-1]}
    local command=$${COMP_WORDS[1]} words="" flags=""
    if [[ $$current == "=" ]]; then current=""; fi
    if [[ $$before == "=" ]]; then before=$${COMP_WORDS[COMP_CWORD-2]}; fi
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        _mainspring_words "$$current" "$commands"
        return
    fi
    case "$$command" in
$groups
    esac
    case "$$command $$before" in
$values
    esac
    case "$$command" in
$words
    esac
    if [[ $$current == -* ]]; then
        _mainspring_words "$$current" "$$flags"
    else
        _mainspring_words "$$current" "$$words"
        _mainspring_files "$$current"
    fi
}
complete -F _mainspring mainspring
""")


def bash(found: Mapping[str, Command]) -> str:
    groups, values, words = [], [], []
    for name, command in found.items():
        if name in GROUPS:
            inner = " ".join(command.words)
            groups += [
                f"        {name})",
                f'            words="{inner}"',
                "            if (( COMP_CWORD == 2 ))",
                '            then _mainspring_words "$current" "$words"; return; fi',
                f'            command="{name} ${{COMP_WORDS[2]}}" ;;',
            ]
            continue
        by_choices: dict[tuple[str, ...] | None, list[str]] = {}
        for flag, choices in command.values.items():
            by_choices.setdefault(choices, []).append(f'"{name} {flag}"')
        for choices, patterns in by_choices.items():
            if choices is None:
                reply = '_mainspring_files "$current"'
            else:
                reply = f'_mainspring_words "$current" "{" ".join(choices)}"'
            values.append(f"        {'|'.join(patterns)}) {reply}; return ;;")
        flags = " ".join(command.flags)
        words.append(f'        "{name}") flags="{flags}" words="{" ".join(command.words)}" ;;')
    return BASH.substitute(
        commands=" ".join(program.COMMANDS),
        groups="\n".join(groups),
        values="\n".join(values),
        words="\n".join(words),
    )


ZSH = Template("""\
#compdef mainspring
# mainspring's words for zsh: after compinit, eval "$$(mainspring completion zsh)"
_mainspring() {
    local command=$${words[2]}
    local -a known
    if (( CURRENT == 2 )); then
        known=($commands)
        _describe command known
        return
    fi
    case "$$command" in
$groups
    esac
    shift words
    (( CURRENT-- ))
    case "$$command" in
$words
    esac
}
compdef _mainspring mainspring
""")


def zsh(found: Mapping[str, Command]) -> str:
    groups, words = [], []
    for name, command in found.items():
        if name in GROUPS:
            inner = " ".join(_quoted(f"{word}:{_plain(help)}") for word, help in GROUPS[name].items())
            groups += [
                f"        {name})",
                f"            if (( CURRENT == 3 )); then known=({inner}); _describe name known; return; fi",
                f'            command="{name} ${{words[3]}}"; shift words; (( CURRENT-- )) ;;',
            ]
            continue
        lines = [_zsh_flag(flag, help, command) for flag, help in command.flags.items()]
        listed = f"{{ compadd -- {' '.join(command.words)}; _files }}" if command.words else "_files"
        words += [f"        {_quoted(name)})", "            _arguments \\"]
        words += [f"                {line} \\" for line in lines]
        words += [f"                {_quoted('*:word:' + listed)} ;;"]
    known = " ".join(_quoted(f"{name}:{_plain(entry.help)}") for name, entry in program.COMMANDS.items())
    return ZSH.substitute(commands=known, groups="\n".join(groups), words="\n".join(words))


def _zsh_flag(flag: str, help: str, command: Command) -> str:
    text = re.sub(r"([\[\]:])", r"\\\1", _plain(help))
    if flag not in command.values:
        return _quoted(f"*{flag}[{text}]")
    choices = command.values[flag]
    values = "_files" if choices is None else f"({' '.join(choices)})"
    equals = "=" if flag.startswith("--") else ""
    return _quoted(f"*{flag}{equals}[{text}]:value:{values}")


FISH = """\
# mainspring's words for fish: mainspring completion fish > ~/.config/fish/completions/mainspring.fish
function __mainspring_at
    set -l words (commandline -opc)
    set -e words[1]
    string match -q -- "$argv *" "$words "
end
function __mainspring_after
    set -l words (commandline -opc)
    set -e words[1]
    test "$words" = "$argv"
end
"""


def fish(found: Mapping[str, Command]) -> str:
    lines = []
    for name, command in found.items():
        before, _, last = name.rpartition(" ")
        lines.append(_fish(f"__mainspring_after {before}".rstrip(), f"-f -a {last}", command.help))
        if name in GROUPS:
            continue
        here = f"__mainspring_at {name}"
        if command.words:
            lines.append(_fish(here, f"-a {_quoted(' '.join(command.words))}"))
        lines += [_fish(here, _fish_flag(flag, command), help) for flag, help in command.flags.items()]
    return FISH + "\n".join(lines) + "\n"


def _fish(condition: str, what: str, help: str = "") -> str:
    about = f" -d {_quoted(_plain(help))}" if help else ""
    return f"complete -c mainspring -n {_quoted(condition)} {what}{about}"


def _fish_flag(flag: str, command: Command) -> str:
    bare = flag.lstrip("-")
    kind = "-l" if flag.startswith("--") else "-s" if len(bare) == 1 else "-o"
    if flag not in command.values:
        return f"{kind} {bare}"
    choices = command.values[flag]
    return f"{kind} {bare} -r" + ("" if choices is None else f" -f -a {_quoted(' '.join(choices))}")


def _plain(help: str) -> str:
    """What is safe to show in any of the shells, and short."""
    return " ".join(re.sub(r"""["`$\\]""", "", help).split())[:80]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
