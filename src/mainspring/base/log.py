"""One logger for the package, silent until somebody asks.

`MAINSPRING_LOG_LEVEL` (debug, info, warning, error) sets the level; the default is `warning`, so a library
user sees nothing but trouble. The CLI raises it to `info` with `--verbose`.
"""

from __future__ import annotations

import logging
import os

FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """A child of the package's logger; `name` is usually `__name__`."""
    return logging.getLogger(name)


def set_up_logging(level: str | None = None, label: str = "") -> None:
    """Send the package's records to standard error. Called by programs, never by an import. label: which of
    several processes says it."""
    chosen = (level or os.environ.get("MAINSPRING_LOG_LEVEL") or "warning").upper()
    root = logging.getLogger("mainspring")
    root.setLevel(chosen)
    if not root.handlers:
        handler = logging.StreamHandler()
        line = f"[{label}] {FORMAT}" if label else FORMAT
        handler.setFormatter(logging.Formatter(line, datefmt="%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
