"""What a file says of itself, shown in messages: it may be anything and of any length."""

from __future__ import annotations

MAX_QUOTED = 80  # characters


def quoted(value: object) -> str:
    """`repr(value)` on one line, cut in its middle where it is long: the ends of names tell them apart."""
    shown = repr(value)
    if len(shown) <= MAX_QUOTED:
        return shown
    half = (MAX_QUOTED - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"
