"""Which executor a configuration names. The contract they share is `mainspring.base.protocols.Executor`."""

from __future__ import annotations

import importlib
import inspect

from mainspring.base.config import EngineConfig
from mainspring.base.errors import ConfigError
from mainspring.base.protocols import Executor

EXECUTORS = {
    "uniproc": "mainspring.executor.uniproc:UniProcExecutor",
    "multiproc": "mainspring.executor.multiproc:MultiprocExecutor",
}
METHODS = [name for name in vars(Executor) if not name.startswith("_")]


def make_executor(config: EngineConfig) -> Executor:
    """An executor by its short name or as `module:Class`, called with the configuration.

    Raises `ConfigError` where there is none of that name, or where it names something else.
    """
    place = EXECUTORS.get(config.executor, config.executor)
    module_name, colon, class_name = place.partition(":")
    if not (module_name and colon and class_name):
        known = ", ".join(sorted(EXECUTORS))
        raise ConfigError(f"executor {config.executor!r} is unknown; use {known} or module:Class")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a module of the user's may fail in any way
        raise ConfigError(f"executor {config.executor!r} cannot be imported: {error}") from error
    try:
        inspect.signature(made).bind(config)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"executor {config.executor!r} cannot be called with a configuration ({error}); name a class of "
            "executors, or a function that makes one"
        ) from error
    executor: Executor = made(config)
    if missing := [name for name in METHODS if not callable(getattr(executor, name, None))]:
        raise ConfigError(f"executor {config.executor!r} is none: it lacks {', '.join(missing)}")
    return executor
