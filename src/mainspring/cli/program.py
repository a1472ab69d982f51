"""From what was typed to a command, and from what went wrong to an exit status.

0 done · 1 the engine or the machine failed · 2 the user can mend it · 130 Ctrl-C · 141 nobody reads any more
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from mainspring import __version__
from mainspring.base.errors import CheckpointError, ConfigError, EngineError, RequestError, innermost
from mainspring.cli.dialect import nearest


class Entry(NamedTuple):
    module: str  # of this package; its `run(argv)` returns the exit status
    help: str


COMMANDS = {
    "chat": Entry("chat", "talk with a model"),
    "generate": Entry("generate", "continue a text"),
    "serve": Entry("serve", "serve a model to clients of the OpenAI API"),
    "complete": Entry("complete", "continue texts by a server"),
    "run-batch": Entry("run_batch", "answer a file of requests, in OpenAI's batch format"),
    "pull": Entry("pull", "fetch a model into the cache; without a name, list them"),
    "models": Entry("models", "models by name, and what of them is on this disk; remove one"),
    "bench": Entry(
        "bench", "measure this machine: scheduler, throughput, latency, startup; or a server: serve"
    ),
    "cache": Entry("cache", "packed weights on disk: list them, or clear"),
    "doctor": Entry("doctor", "what mainspring found here: kernels, cores, memory, models"),
    "completion": Entry("completion", "what makes a shell complete these words: bash, zsh, fish"),
}
# Names of other programs' commands that do what one of these does.
OTHER_NAMES = {
    **dict.fromkeys(("list", "ls", "rm", "remove", "show"), "models"),
    **dict.fromkeys(("collect-env", "env", "info"), "doctor"),
    **dict.fromkeys(("download", "fetch"), "pull"),
    **{"run": "chat", "start": "serve", "batch": "run-batch", "benchmark": "bench"},
}
EXAMPLES = """
start here:
  mainspring chat
  mainspring generate --prompt "Once upon a time" --max-tokens 40
"""


NO_MEMORY = (
    "lower what was set of max_num_batched_tokens, num_gpu_blocks_override and kv_cache_memory_bytes, "
    "or take a smaller model"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Entry point of the script `mainspring`."""
    if sys.stderr is None:  # closed by whoever started us: then `print` would write to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for as long as the program runs
    if sys.stdout is None:
        return _say("standard output is closed; open it, or send it to a file", 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what a terminal cannot show
    try:
        status = _status(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a closed pipe or a full disk is still our concern
        return status
    except BrokenPipeError:
        _abandon_stdout()
        return 141
    except OSError as error:
        return _say(_failed_stream(error), 1)


def _failed_stream(error: OSError) -> str:
    """What to say of it: most likely nothing more can be written, and then nothing more shall be."""
    try:
        sys.stdout.flush()
    except OSError as still:
        _abandon_stdout()
        error = still
    else:
        if error.filename is not None or error.errno != errno.ENOSPC:
            return innermost(error)
    return f"standard output cannot be written: {error.strerror}"


def _abandon_stdout() -> None:
    """The interpreter flushes at exit and would complain: give it somewhere to flush to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _status(argv: list[str]) -> int:
    """Run one command, and say what went wrong with it."""
    try:
        return _run(argv)
    except SystemExit:  # argparse, after showing help
        return 0
    except KeyboardInterrupt:
        return 130
    except (RequestError, ConfigError, CheckpointError) as error:
        return _say(str(error), 2)
    except EngineError as error:
        return _say(str(error), 1)
    except MemoryError as error:  # while an engine starts: later ones are the engine's failures
        return _say(f"not enough memory ({str(error) or 'no more is known'}): {NO_MEMORY}", 2)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"] or argv[0].startswith("--help="):
        print(_described() if argv == ["--help=json"] else _help())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"mainspring {__version__}")
        return 0
    name, *rest = argv if argv[0] != "help" else [argv[1], "--help"]
    if name not in COMMANDS:
        near = OTHER_NAMES.get(name) or nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    command = importlib.import_module(f"mainspring.cli.{COMMANDS[name].module}")
    status: int = command.run(rest)
    return status


def _described() -> str:
    """For programs; 'COMMAND --help=json' goes on from there."""
    import json

    return json.dumps({"commands": {name: entry.help for name, entry in COMMANDS.items()}}, indent=1)


def _help() -> str:
    lines = [f"  {name:<10} {entry.help}" for name, entry in COMMANDS.items()]
    return (
        "mainspring: run a language model on this machine\n\ncommands:\n"
        + "\n".join(lines)
        + "\n"
        + EXAMPLES
        + "\n'mainspring COMMAND --help' tells more of a command, 'COMMAND --help=all' all of it.\n"
    )


def _say(message: str, status: int) -> int:
    """One line, whatever the message looked like; where nothing can be said, the status must do."""
    with suppress(OSError):
        print("mainspring: " + "; ".join(message.splitlines()), file=sys.stderr)
    return status
