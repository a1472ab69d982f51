"""`mainspring bench`: the measurements that ship. Tables for people; with `--json` one line on standard
output.
"""

from __future__ import annotations

import json
import sys
import typing
from argparse import SUPPRESS, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import Parser, nearest
from mainspring.cli.flags import add_common_flags, add_engine_flags, add_flag, engine_arguments, log_level
from mainspring.cli.values import json_object, real

if TYPE_CHECKING:
    from mainspring.bench.arguments import LoadArgs

BENCHES = {
    "scheduler": "what a step costs in bookkeeping alone; needs no model",
    "throughput": "prefill, decode and memory with a real model; or many requests at once",
    "latency": "how long a batch takes, again and again",
    "startup": "import, first token, size of the install",
    "serve": "a server under load: latencies, throughput, goodput",
}


REPEATS = 5


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
        case "latency":
            return _latency(rest)
        case "startup":
            return _startup(rest)
        case "serve":
            return _serve(rest)
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
    return _show(bench.table(figures), figures, given)


THROUGHPUT_HELP = {
    "num_prompts": "requests",
    "input_len": "random: tokens of a prompt (default: 1024)",
    "output_len": "tokens of an answer (default: 128; sharegpt: as long as the file's)",
    "dataset_name": "random tokens, or the conversations of --dataset-path",
    "dataset_path": "a JSON file of conversations in ShareGPT's form",
}
LATENCY_HELP = {
    "batch_size": "requests at once",
    "input_len": "tokens of a prompt",
    "output_len": "tokens of an answer",
    "num_iters": "rounds",
    "num_iters_warmup": "rounds before, which are not measured",
}


def _throughput(argv: list[str]) -> int:
    """The project's own scenarios; with any flag of vLLM's benchmark of that name, that one."""
    from mainspring.bench.arguments import ThroughputArgs

    examples = ("", "--num-prompts 100 --input-len 128 --output-len 64", "--kernels numpy --repeats 3 --json")
    parser = Parser("bench throughput", f"Measure {BENCHES['throughput']}.", examples, argv)
    _add_repeats(parser)
    _add_fields(parser, "or so many requests at once, as vLLM measures", ThroughputArgs, THROUGHPUT_HELP)
    _add_output(parser)
    add_engine_flags(parser)
    add_common_flags(parser)
    given = parser.read(argv)
    named = _named(given, THROUGHPUT_HELP)
    if named and hasattr(given, "repeats"):
        first = next(iter(named)).replace("_", "-")
        raise ConfigError(f"--repeats is for the scenarios; leave it out, or --{first}")
    set_up_logging(log_level(given))
    if not named:
        from mainspring.bench import throughput

        figures = throughput.measure(_repeats(given), engine_arguments(given))
        return _show(throughput.table(figures), figures, given)
    from mainspring.bench import offline

    args = ThroughputArgs(**named, seed=getattr(given, "seed", 0))
    with _bar(args.num_prompts, "request") as bar:
        figures = offline.measure_throughput(args, engine_arguments(given), bar.update)
    return _show(offline.throughput_table(figures), figures, given)


def _latency(argv: list[str]) -> int:
    from mainspring.bench.arguments import LatencyArgs

    examples = ("", "--batch-size 1 --input-len 512 --output-len 64 --num-iters 5 --num-iters-warmup 1")
    parser = Parser("bench latency", f"Measure {BENCHES['latency']}.", examples, argv)
    _add_fields(parser, "the measurement", LatencyArgs, LATENCY_HELP)
    _add_output(parser)
    add_engine_flags(parser)
    add_common_flags(parser)
    given = parser.read(argv)
    args = LatencyArgs(**_named(given, LATENCY_HELP), seed=getattr(given, "seed", 0))
    set_up_logging(log_level(given))
    from mainspring.bench import offline

    with _bar(args.num_iters_warmup + args.num_iters, "round") as bar:
        figures = offline.measure_latency(args, engine_arguments(given), bar.update)
    return _show(offline.latency_table(figures), figures, given)


def _add_fields(parser: Parser, title: str, kind: type, words: Mapping[str, str]) -> None:
    """A flag for each of these fields of a dataclass."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind)
    defaults = {f.name: f.default for f in fields(kind)}
    for name, help in words.items():
        shown = "" if defaults[name] is None else f" (default: {defaults[name]})"
        add_flag(group, name, hints[name], help + shown)


def _named(given: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """What was typed of these."""
    return {name: getattr(given, name) for name in names if hasattr(given, name)}


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("what comes of it")
    group.add_argument("--output-json", metavar="FILE", help="write the figures there, as JSON")


def _bar(total: int, unit: str, is_silent: bool = False) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, unit=unit, disable=is_silent or None)  # None: unless a terminal looks on


def _startup(argv: list[str]) -> int:
    parser = Parser("bench startup", f"Measure {BENCHES['startup']}.", ("", "--json"), argv)
    _add_repeats(parser)
    add_engine_flags(parser, only=("model", "kernels"))
    add_common_flags(parser)
    given = parser.read(argv)
    from mainspring.bench import startup

    args = EngineArgs.from_mapping(engine_arguments(given))
    figures = startup.measure(_repeats(given), args.model, args.kernels)
    return _show(startup.table(figures), figures, given)


SERVE_HELP = {
    "backend": "openai-chat: /v1/chat/completions with text; openai: /v1/completions with token ids",
    "base_url": "where the server is",
    "endpoint": "path, instead of the backend's",
    "model": "its name; default: the first that the server lists",
    "header": "Name=value, sent with each request; may be repeated",
    "num_prompts": "requests",
    "num_warmups": "requests before, which are not measured",
    "request_rate": "mean arrivals per second; inf: all at once",
    "burstiness": "of arrivals: 1 is Poisson, less comes in bursts, more is even",
    "max_concurrency": "most requests on their way; default: no limit",
    "random_input_len": "tokens of a prompt (words, where it must be text)",
    "random_output_len": "tokens of an answer",
    "random_range_ratio": "lengths are drawn from length x (1 - ratio) to length x (1 + ratio)",
    "random_prefix_len": "tokens that all prompts begin with, besides",
    "ignore_eos": "answers have their full length",
    "temperature": "of sampling; 0: the likeliest token",
    "extra_body": "more fields for each request, as JSON",
    "seed": "of prompts, lengths and arrivals",
    "goodput": "a limit in milliseconds such as ttft:500, of ttft, tpot, itl, e2el; may be several",
    "metric_percentiles": "percentiles to show, with commas",
    "dataset_name": "what is asked: random words or tokens, the only one so far",
    "ready_check_timeout_sec": "seconds in which the server must answer at first",
    "server_pid": "process whose CPU time is counted; default: what /metrics shows",
}
SERVE_RARE = (
    *(
        "endpoint",
        "header",
        "num_warmups",
        "burstiness",
        "random_range_ratio",
        "random_prefix_len",
        "extra_body",
    ),
    *("metric_percentiles", "dataset_name", "ready_check_timeout_sec", "server_pid"),
)


def _serve(argv: list[str]) -> int:
    from mainspring.bench.arguments import LoadArgs

    examples = (
        "--request-rate 4 --num-prompts 40",
        "--backend openai --max-concurrency 8 --goodput ttft:500 itl:50 --plot load.svg",
    )
    parser = Parser("bench serve", f"Measure {BENCHES['serve']}.", examples, argv)
    parser.hides_flags = True
    group = parser.add_argument_group("the load")
    hints = typing.get_type_hints(LoadArgs)
    for setting in fields(LoadArgs):
        flag, help = "--" + setting.name.replace("_", "-"), SERVE_HELP[setting.name]
        if setting.name in SERVE_RARE and not parser.show_all:
            help = SUPPRESS
        match setting.name:
            case "goodput":
                group.add_argument(flag, nargs="+", action="extend", metavar="NAME:MS", help=help)
            case "metric_percentiles":
                group.add_argument(flag, type=_numbers, metavar="P,P", help=f"{help} (default: 50,90,99)")
            case "extra_body":
                group.add_argument(flag, type=json_object, metavar="JSON", help=help)
            case _:
                default = "on" if setting.default is True else setting.default
                shown = "" if default in (None, MISSING) else f" (default: {default})"
                shown = help if help is SUPPRESS else help + shown
                add_flag(group, setting.name, hints[setting.name], shown)
    add_flag(group, "host", str, "where the server is, instead of --base-url")
    add_flag(group, "port", int, "and its port (default: 8000)")
    group = parser.add_argument_group("what comes of it")
    group.add_argument("--plot", metavar="FILE.svg", default=None, help="draw distributions and course")
    add_flag(group, "disable_tqdm", bool, "no progress bar", default=False)
    add_common_flags(parser)
    given = parser.read(argv)
    if given.plot is not None and not given.plot.endswith(".svg"):
        raise ConfigError(f"--plot {given.plot} must end in .svg: that is what it draws")
    named = {f.name: getattr(given, f.name) for f in fields(LoadArgs) if hasattr(given, f.name)}
    if hasattr(given, "host") or hasattr(given, "port"):
        where = f"http://{getattr(given, 'host', '127.0.0.1')}:{getattr(given, 'port', 8000)}"
        named.setdefault("base_url", where)
    return _measure_server(LoadArgs(**named), given)


def _measure_server(args: LoadArgs, given: Namespace) -> int:
    """Exit status 1 if a request failed: then the figures are not those of the load that was asked for."""
    import asyncio

    from mainspring.bench import plot, serve

    with _bar(args.num_prompts, "request", given.disable_tqdm) as bar:
        measured = asyncio.run(
            serve.measure(args, on_done=lambda answer: bar.update(1), on_start=bar.unpause)
        )
    _show(serve.table(measured), serve.figures(measured), given)
    if given.plot is not None:
        try:
            Path(given.plot).write_text(plot.svg(measured), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {given.plot} cannot be written: {error.strerror}") from None
    return 0 if len(measured.completed) == len(measured.answers) else 1


def _numbers(text: str) -> list[float]:
    return [real(word) for word in text.split(",")]


def _add_repeats(parser: Parser) -> None:
    group = parser.add_argument_group("the measurement")
    help = f"each figure is the median of so many runs (default: {REPEATS})"
    add_flag(group, "repeats", int, help)


def _repeats(given: Namespace) -> int:
    repeats: int = getattr(given, "repeats", REPEATS)
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats} must be at least 1")
    return repeats


def _show(table: str, figures: dict[str, Any], given: Namespace) -> int:
    """For people on standard output; for programs one line of JSON there, and the table on standard error."""
    print(table, file=sys.stderr if given.json else sys.stdout)
    if given.json:
        print(json.dumps(figures))
    if (path := getattr(given, "output_json", None)) is not None:
        try:
            Path(path).write_text(json.dumps(figures, indent=4) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output-json {path} cannot be written: {error.strerror}") from None
    return 0
