"""Flags made from settings' types: those of the engine, in groups, and those that most commands have.

A flag that is not given leaves no trace in the result, so that the engine's own defaults decide.
"""

from __future__ import annotations

import argparse
import os
import types
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import fields
from typing import Any

from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.cli import config_file, vllm_flags
from mainspring.cli.dialect import FittingObject, MergeObjects, NoEffect, Parser
from mainspring.cli.values import human_int, json_object, model_len, real, token_ids

METAVARS: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_VARIABLES = ("MAINSPRING_LOG_LEVEL", "VLLM_LOGGING_LEVEL")
READERS: dict[object, Callable[[str], Any]] = {
    int: human_int,
    float: real,
    str: str,
    list[int]: token_ids,
}
OBJECTS = (dict[int, float], dict[str, Any])


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
        group.add_argument(*flags, action=MergeObjects, type=json_object, metavar="JSON", help=help, **more)
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
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
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
            "runner",
            "task",
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
        *("data_parallel_routing", "data_parallel_rank", "data_parallel_external_lb"),
        *("data_parallel_hybrid_lb", "data_parallel_size_local", "data_parallel_start_rank"),
        "enable_expert_parallel",
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
                *forms, nargs=int(takes_value), action=NoEffect, values=values, help=argparse.SUPPRESS
            )
    for name, allowed in vllm_flags.FITTING_OBJECTS.items():
        if parser.flag(f"--{name}") is None:
            group.add_argument(
                f"--{name}", action=FittingObject, type=json_object, values=allowed, help=argparse.SUPPRESS
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


def add_help_flag(group: argparse._ArgumentGroup, parser: Parser) -> None:
    more = (
        "; --help=all: every flag; --help=WORD: those of a group, or with the word"
        if parser.hides_flags
        else ""
    )
    group.add_argument("--help", "-h", action="help", help=f"this{more}")


def log_level(given: argparse.Namespace, usually: str | None = None) -> str | None:
    """For `set_up_logging`: what was typed, else what the environment says, else `usually`."""
    if hasattr(given, "log_level"):
        return str(given.log_level)
    if getattr(given, "verbose", False):
        return "info"
    for name in LOG_VARIABLES:
        if text := os.environ.get(name):
            if text.lower() not in LOG_LEVELS:
                raise ConfigError(
                    f"{name} {text!r} in the environment must be one of {', '.join(LOG_LEVELS)}"
                )
            return text.lower()
    return usually
