"""`mainspring serve`: the OpenAI-compatible server, with the flags that users of vLLM know.

What becomes of vLLM's flags that are not there is in `vllm_flags.py`, the file of flags (`--config`) in
`config_file.py`.
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
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mainspring.base.config import EngineArgs, EngineConfig, judge
from mainspring.base.errors import ConfigError
from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import (
    add_engine_flags,
    add_flag,
    add_help_flag,
    add_log_flag,
    log_level,
    model_argument,
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
# Where a setting is shown, if not with the others.
OTHERS = "server"
GROUPS = {
    "connections": (
        *("host", "port", "uds", "root_path", "max_request_bytes", "request_timeout"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    ),
    "clients": ("api_key", "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    "conversations": (
        *("response_role", "trust_request_chat_template", "default_chat_template_kwargs"),
        *("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"),
        *("max_stored_responses", "max_stored_response_bytes"),
    ),
}
# of the engine's settings: taken in another way here
OURS = ("model", "served_model_name", "shutdown_timeout", "in_process")
NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "yaml": "pyyaml"}  # module -> what to install


def run(argv: list[str]) -> int:
    parser = _parser(argv)
    given = parser.read(argv)
    if missing := [name for module, name in NEEDED.items() if find_spec(module) is None]:
        raise ConfigError(f"mainspring serve needs more packages: pip install {' '.join(missing)}")
    settings = server_settings(given)
    args = EngineArgs.from_mapping(_engine_arguments(given))
    # A supervisor may tell all processes to end at once: the core then finishes what the server waits for.
    args.shutdown_timeout = settings.shutdown_timeout
    set_up_logging(log_level(given, None if given.quiet else "info"))
    return _serve(args, settings)


def _serve(args: EngineArgs, settings: ServerSettings) -> int:
    from mainspring.frontend.async_llm import AsyncLLM
    from mainspring.frontend.chat_template import template_text
    from mainspring.frontend.llm_engine import prepare
    from mainspring.server import run as server
    from mainspring.server.service import Service

    started_s = time.monotonic()
    judge(args)
    template = None if args.chat_template is None else template_text(args.chat_template)
    listener = server.open_socket(settings)
    url = server.url_of(settings, listener)
    _say(f"listening on {url}; the model is loading")

    async def open_engine() -> AsyncLLM:
        config = (await asyncio.to_thread(prepare, args)).config
        llm = await AsyncLLM.launch(args)  # refuses what only the model's shape shows to be wrong
        for line in describe(args, settings, config):
            _say(line)
        return llm

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
    parser = Parser("serve", "Serve a model to clients of the OpenAI API.", EXAMPLES, argv)
    parser.usage = "%(prog)s [MODEL] [flags]"
    group = parser.add_argument_group("the model")
    group.add_argument("model_tag", nargs="?", metavar="MODEL", help="catalogue name or path of a GGUF file")
    add_flag(group, "model", str, "the same, as a flag")
    add_server_flags(parser)
    add_engine_flags(parser, without=OURS)
    group = parser.add_argument_group("and")
    group.add_argument("--quiet", action="store_true", default=False, help="warnings and errors only")
    add_log_flag(group, parser)
    add_help_flag(group, parser)
    return parser


def add_server_flags(parser: Parser, only: Container[str] | None = None) -> None:
    """One flag for each field of `ServerSettings`, or of those in `only`."""
    hints = typing.get_type_hints(ServerSettings)
    chosen = [setting for setting in fields(ServerSettings) if only is None or setting.name in only]
    title_of = {name: title for title, names in GROUPS.items() for name in names} if parser.show_all else {}
    titles = dict.fromkeys(title_of.get(setting.name, OTHERS) for setting in chosen)
    groups = {title: parser.add_argument_group(title) for title in titles}
    for setting in chosen:
        kind, help = hints[setting.name], setting.metadata["help"]
        if isinstance(setting.default, int | float) and setting.default and "default" not in help:
            help += f" (default: {setting.default:g})"
        if setting.name not in EVERYDAY and not parser.show_all:
            help = argparse.SUPPRESS
        group = groups[title_of.get(setting.name, OTHERS)]
        if kind == list[str]:
            flag = "--" + setting.name.replace("_", "-")
            group.add_argument(flag, action="extend", nargs="+", metavar="TEXT", help=help)
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
    found = model_argument(given)
    for name in ("served_model_name", "shutdown_timeout"):  # the server's own
        found.pop(name, None)
    return {"disable_log_stats": False} | found
