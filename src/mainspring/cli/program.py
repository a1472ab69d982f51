"""From what was typed to a command, and from what went wrong to an exit status.

0 done · 1 the engine or the machine failed · 2 the user can mend it · 130 Ctrl-C · 141 nobody reads any more
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from mainspring import __version__
from mainspring.base.errors import CheckpointError, ConfigError, EngineError, RequestError
from mainspring.cli.dialect import nearest


class Entry(NamedTuple):
    module: str  # of this package; its `run(argv)` returns the exit status
    help: str


COMMANDS = {
    "chat": Entry("chat", "talk with a model"),
    "generate": Entry("generate", "continue a text"),
    "pull": Entry("pull", "fetch a model into the cache; without a name, list them"),
    "bench": Entry("bench", "measure this machine: scheduler, throughput"),
    "doctor": Entry("doctor", "what mainspring found here: kernels, cores, memory, models"),
}
EXAMPLES = """
start here:
  mainspring chat
  mainspring generate --prompt "Once upon a time" --max-tokens 40
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Entry point of the script `mainspring`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    try:
        try:
            status = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # argparse, after showing help
            status = 0
        sys.stdout.flush()  # here, where a closed pipe is still our concern
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes at exit and would complain: give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (RequestError, ConfigError, CheckpointError) as error:
        return _say(error, 2)
    except EngineError as error:
        return _say(error, 1)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help") or argv[0].startswith("--help="):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"mainspring {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    command = importlib.import_module(f"mainspring.cli.{COMMANDS[name].module}")
    status: int = command.run(rest)
    return status


def _help() -> str:
    lines = [f"  {name:<10} {entry.help}" for name, entry in COMMANDS.items()]
    return (
        "mainspring: run a language model on this machine\n\ncommands:\n"
        + "\n".join(lines)
        + "\n"
        + EXAMPLES
        + "\n'mainspring COMMAND --help' tells more of a command, '--help=all' everything.\n"
    )


def _say(error: EngineError, status: int) -> int:
    """One line, whatever the message looked like."""
    print("mainspring: " + "; ".join(str(error).splitlines()), file=sys.stderr)
    return status
