"""`mainspring bench`: the measurements that ship. Tables for people; with `--json` one line on standard
output.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import (
    Parser,
    add_common_flags,
    add_engine_flags,
    add_flag,
    engine_arguments,
    nearest,
)

BENCHES = {
    "scheduler": "what a step costs in bookkeeping alone; needs no model",
    "throughput": "prefill, decode and memory with a real model",
    "startup": "import, first token, size of the install",
}


def run(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-h") or argv[0].startswith("--help"):
        print("usage: mainspring bench NAME [flags]\n")
        print("\n".join(f"  {name:<12} {what}" for name, what in BENCHES.items()))
        return 0
    name, *rest = argv
    match name:
        case "scheduler":
            return _scheduler(rest)
        case "throughput":
            return _throughput(rest)
        case "startup":
            return _startup(rest)
    near = nearest(name, BENCHES)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(BENCHES)}"
    raise ConfigError(f"unknown benchmark {name!r}; {hint}")


def _scheduler(argv: list[str]) -> int:
    examples = ("", "--process", "--json")
    parser = Parser("bench scheduler", f"Measure {BENCHES['scheduler']}.", examples, argv)
    parser.add_argument_group("the measurement").add_argument(
        "--process",
        action="store_true",
        default=False,
        help="instead: what it costs that the core has a process of its own",
    )
    add_common_flags(parser)
    given = parser.read(argv)
    from mainspring.bench import process, scheduler

    bench = process if given.process else scheduler
    figures = bench.measure()
    _show(bench.table(figures), figures, given.json)
    return 0


def _throughput(argv: list[str]) -> int:
    examples = ("", "--kernels numpy --repeats 3 --json")
    parser = Parser("bench throughput", f"Measure {BENCHES['throughput']}.", examples, argv)
    _add_repeats(parser)
    add_engine_flags(parser)
    add_common_flags(parser)
    given = parser.read(argv)
    set_up_logging("info" if given.verbose else None)
    from mainspring.bench import throughput

    figures = throughput.measure(_repeats(given), engine_arguments(given))
    _show(throughput.table(figures), figures, given.json)
    return 0


def _startup(argv: list[str]) -> int:
    parser = Parser("bench startup", f"Measure {BENCHES['startup']}.", ("", "--json"), argv)
    _add_repeats(parser)
    add_engine_flags(parser, only=("model", "kernels"))
    add_common_flags(parser)
    given = parser.read(argv)
    from mainspring.bench import startup

    args = EngineArgs.from_mapping(engine_arguments(given))
    figures = startup.measure(_repeats(given), args.model, args.kernels)
    _show(startup.table(figures), figures, given.json)
    return 0


def _add_repeats(parser: Parser) -> None:
    group = parser.add_argument_group("the measurement")
    add_flag(group, "repeats", int, "each figure is the median of so many runs (default: 5)", default=5)


def _repeats(given: Namespace) -> int:
    repeats: int = given.repeats
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats} must be at least 1")
    return repeats


def _show(table: str, figures: dict[str, object], as_json: bool) -> None:
    """For people on standard output; for programs one line of JSON there, and the table on standard error."""
    print(table, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(figures))
