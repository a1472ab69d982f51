"""`mainspring serve`: the OpenAI-compatible server, with the flags that users of vLLM know.

Flags come from a file (`--config`), then from the command line, which wins. What has no effect here is taken
with a warning; what cannot be had is refused with a sentence; what is unknown, with the nearest name.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.base.config import EngineArgs, EngineConfig
from mainspring.base.errors import ConfigError
from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import (
    Parser,
    add_engine_flags,
    add_flag,
    engine_arguments,
    json_object,
    one_spelling,
)
from mainspring.server.settings import ServerSettings

if TYPE_CHECKING:
    from mainspring.frontend.async_llm import AsyncLLM

EXAMPLES = (
    "",
    "smollm2-135m --port 8080 --api-key secret",
    "--config server.yaml",
)
EVERYDAY = ("host", "port", "api_key", "served_model_name", "shutdown_timeout")
# of the engine's settings: taken in another way here
OURS = ("model", "served_model_name", "shutdown_timeout", "in_process")
NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "yaml": "pyyaml"}  # module -> what to install

# vLLM's flags that change nothing here, with a value and without
NO_EFFECT_VALUES = (
    *("attention-backend", "compilation-config", "cpu-offload-gb", "cudagraph-capture-sizes", "max-log-len"),
    *("model-impl", "optimization-level", "performance-mode", "prefix-caching-hash-algo", "swap-space"),
    *("uvicorn-log-level", "max-seq-len-to-capture", "max-parallel-loading-workers", "api-server-count"),
)
NO_EFFECT_SWITCHES = (
    *("disable-custom-all-reduce", "disable-log-requests", "enable-expert-parallel", "enable-log-requests"),
    *("enable-per-request-metrics", "enable-request-id-headers", "enable-server-load-tracking"),
    *("enable-sleep-mode", "use-tqdm-on-load", "disable-frontend-multiprocessing"),
)
# vLLM's flags of a server that are not there yet: what to say of them
NOT_YET = {
    **dict.fromkeys(
        ("enable-auto-tool-choice", "tool-call-parser", "tool-parser-plugin", "tool-server"),
        "tools are not supported yet; leave it out",
    ),
    **dict.fromkeys(("enable-lora", "lora-modules"), "adapters (LoRA) are not supported yet; leave it out"),
    **dict.fromkeys(
        ("data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port", "headless", "nnodes"),
        "many workers are not supported yet; leave it out",
    ),
    **dict.fromkeys(
        ("middleware", "log-config-file", "chat-template-content-format", "fingerprint-mode"),
        "is not supported yet; leave it out",
    ),
}


class _ServeParser(Parser):
    def explain_stranger(self, word: str) -> str:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-")
        return f"--{name}: {NOT_YET[name]}" if name in NOT_YET else super().explain_stranger(word)


def run(argv: list[str]) -> int:
    parser = _parser(argv)
    given = parser.read([*_from_file(argv, parser), *argv])
    if missing := [name for module, name in NEEDED.items() if find_spec(module) is None]:
        raise ConfigError(f"mainspring serve needs more packages: pip install {' '.join(missing)}")
    settings = server_settings(given)
    args = EngineArgs.from_mapping(_engine_arguments(given))
    set_up_logging(None if given.quiet else "info")
    for flag in given.no_effect:
        _say(f"{flag} has no effect here")
    return _serve(args, settings)


def _serve(args: EngineArgs, settings: ServerSettings) -> int:
    from mainspring.frontend.async_llm import AsyncLLM
    from mainspring.frontend.chat_template import template_text
    from mainspring.frontend.llm_engine import prepare
    from mainspring.server import run as server
    from mainspring.server.service import Service

    started_s = time.monotonic()
    template = None if args.chat_template is None else template_text(args.chat_template)
    listener = server.open_socket(settings)
    url = server.url_of(settings, listener)
    _say(f"listening on {url}; the model is loading")

    async def open_engine() -> AsyncLLM:
        for line in describe(args, settings, (await asyncio.to_thread(prepare, args)).config):
            _say(line)
        return await AsyncLLM.launch(args)

    def when_ready() -> None:
        gc.collect()
        gc.freeze()  # what is there now stays; to look through it again and again would hold the loop up
        _say(f"ready after {time.monotonic() - started_s:.1f} s: {url}/v1")

    async def main() -> None:
        service = Service(settings, args.model)
        await server.serve(service, listener, open_engine, template, when_ready=when_ready)

    server.raise_descriptor_limit()
    try:
        _run(main)
    except server.NeverReady:
        _say("told to end while the model was loading")
    _say("ended")
    return 0


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the faster loop, where it is installed."""
    factory = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


def describe(args: EngineArgs, settings: ServerSettings, config: EngineConfig) -> list[str]:
    """The resolved configuration, a line each; where something was chosen, with the reason."""
    scheduler = config.scheduler
    values = {
        "model": config.model,
        "served_model_name": ", ".join(settings.served_model_name) or args.model,
        "api_key": f"{len(settings.api_key)} of them" if settings.api_key else "none: everybody may ask",
        "load_format": config.load_format,
        "kernels": config.kernels,
        **{f.name: getattr(scheduler, f.name) for f in _struct_fields(scheduler)},
        "block_size": config.block_size,
        "async_scheduling": config.depth > 1,
        "seed": config.seed,
        "executor": config.executor,
        "max_num_queued_reqs": args.max_num_queued_reqs,
        "max_logprobs": args.max_logprobs,
    }
    return [f"  {name:<28} {config.reasons.get(name, _shown(value))}" for name, value in values.items()]


def _struct_fields(struct: Any) -> Sequence[Any]:
    import msgspec

    return msgspec.structs.fields(struct)


def _shown(value: object) -> str:
    if value is None:
        return "no limit"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# -- flags ---------------------------------------------------------------------------------------------------


def _parser(argv: Sequence[str]) -> Parser:
    parser = _ServeParser("serve", "Serve a model to clients of the OpenAI API.", EXAMPLES, argv)
    parser.usage = "%(prog)s [MODEL] [flags]"
    group = parser.add_argument_group("the model")
    group.add_argument("model_tag", nargs="?", metavar="MODEL", help="catalogue name or path of a GGUF file")
    add_flag(group, "model", str, "the same, as a flag")
    group.add_argument("--config", metavar="FILE", help="a YAML file of flags; those given here go before it")
    _add_server_flags(parser)
    add_engine_flags(parser, only=[f.name for f in fields(EngineArgs) if f.name not in OURS])
    parser.hides_flags = True
    group = parser.add_argument_group("and")
    group.add_argument("--quiet", action="store_true", default=False, help="warnings and errors only")
    group.add_argument("--help", "-h", action="help", help="this; --help=all shows every setting")
    parser.set_defaults(no_effect=[])
    for names, nargs in ((NO_EFFECT_VALUES, 1), (NO_EFFECT_SWITCHES, 0)):
        for name in names:
            forms = [f"--{name}"] if nargs else [f"--{name}", f"--no-{name}"]
            group.add_argument(*forms, nargs=nargs, action=_NoEffect, help=argparse.SUPPRESS)
    return parser


class _NoEffect(argparse.Action):
    """Notes that it was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        namespace.no_effect = [*namespace.no_effect, option_string]


def _add_server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    hints = typing.get_type_hints(ServerSettings)
    for setting in fields(ServerSettings):
        kind, help = hints[setting.name], setting.metadata["help"]
        if isinstance(setting.default, int | float) and setting.default and "default" not in help:
            help += f" (default: {setting.default:g})"
        if setting.name not in EVERYDAY and not parser.show_all:
            help = argparse.SUPPRESS
        flag = "--" + setting.name.replace("_", "-")
        if kind == list[str]:
            group.add_argument(flag, action="extend", nargs="+", metavar="TEXT", help=help)
        elif kind == dict[str, Any]:
            group.add_argument(flag, type=json_object, metavar="JSON", help=help)
        else:
            add_flag(group, setting.name, kind, help)


def server_settings(given: argparse.Namespace) -> ServerSettings:
    """What was typed, and what the environment adds. Raises `ConfigError`."""
    typed = {f.name: getattr(given, f.name) for f in fields(ServerSettings) if hasattr(given, f.name)}
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if len(listed := typed.get(name, [])) == 1 and listed[0].startswith("["):
            typed[name] = _json_list(name, listed[0])  # vLLM's spelling
    if "api_key" not in typed and (key := _environment("API_KEY")):
        typed["api_key"] = [key]
    if "server_dev_mode" not in typed and _environment("SERVER_DEV_MODE") == "1":
        typed["server_dev_mode"] = True
    return ServerSettings(**typed)


def _json_list(name: str, text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ConfigError(f"--{name.replace('_', '-')} must be words, or a JSON list of texts, got {text!r}")
    return found


def _environment(name: str) -> str | None:
    """Ours, else vLLM's under the same name."""
    if value := os.environ.get(f"MAINSPRING_{name}"):
        return value
    if value := os.environ.get(f"VLLM_{name}"):
        _say(f"VLLM_{name} of the environment is used; ours is MAINSPRING_{name}")
    return value


def _engine_arguments(given: argparse.Namespace) -> dict[str, Any]:
    found = engine_arguments(given)
    named = getattr(given, "model_tag", None)
    if named is not None and found.setdefault("model", named) != named:
        raise ConfigError(f"MODEL {named!r} and --model {found['model']!r} differ; give one")
    for name in ("served_model_name", "shutdown_timeout"):  # the server's own
        found.pop(name, None)
    return {"disable_log_stats": False} | found


# -- the file ------------------------------------------------------------------------------------------------


def _from_file(argv: Sequence[str], parser: Parser) -> list[str]:
    """The file's flags as words, without those that the command line has too. Raises `ConfigError`."""
    words = one_spelling(argv)
    at = next((i for i, word in enumerate(words) if word == "--config" or word.startswith("--config=")), None)
    if at is None:
        return []
    _, equals, path = words[at].partition("=")
    if not equals:
        if at + 1 == len(words):
            raise ConfigError("--config needs a file")
        path = words[at + 1]
    typed = {_bare(word) for word in words if word.startswith("--")}
    found = _read(path)
    for name, value in found.items():
        if (wrong := _judged(name, value, parser)) is not None:
            raise ConfigError(f"--config {path}: {name} {wrong}")
    return [
        word
        for name, value in found.items()
        if _bare(f"--{name}") not in typed
        for word in _words(name, value)
    ]


def _judged(name: str, value: Any, parser: Parser) -> str | None:
    """What is wrong with a line's value, where the words made of it would be misread."""
    if name in ("config", "help"):
        return "has no place in a file"
    action = parser.flag("--" + name.replace("_", "-"))
    if action is None or value is None:
        return None  # a stranger is told as one
    if action.nargs == 0 and not isinstance(value, bool):
        return f"must be true or false, got {value!r}"
    if action.nargs is None and isinstance(value, list | bool):
        return f"takes one value, got {value!r}"
    return None


def _read(path: str) -> Mapping[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"--config {path} must have lines such as 'port: 8080'")
    return {"model" if name == "model_tag" else name: value for name, value in found.items()}


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
