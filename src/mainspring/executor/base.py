"""Which executor a configuration names. The contract they share is `mainspring.base.protocols.Executor`."""

from __future__ import annotations

import importlib

from mainspring.base.config import EngineConfig
from mainspring.base.errors import ConfigError
from mainspring.base.protocols import Executor

EXECUTORS = {"uniproc": "mainspring.executor.uniproc:UniProcExecutor"}


def make_executor(config: EngineConfig) -> Executor:
    """An executor by its short name or as `module:Class`, called with the configuration.

    Raises `ConfigError` where there is none of that name.
    """
    place = EXECUTORS.get(config.executor, config.executor)
    module_name, colon, class_name = place.partition(":")
    if not (module_name and colon and class_name):
        known = ", ".join(sorted(EXECUTORS))
        raise ConfigError(f"executor {config.executor!r} is unknown; use {known} or module:Class")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"executor {config.executor!r} cannot be imported: {error}") from error
    executor: Executor = made(config)
    return executor
