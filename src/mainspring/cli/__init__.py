"""The command `mainspring`: flags and commands. It assembles what the lower floors offer and adds nothing.

Rules.
1. Nothing is imported before it is needed: `mainspring --help` loads no arrays, no tokenizer and no engine.
2. A user's mistake is one line on standard error that says the way out, and exit status 2; never a traceback.
3. What a program might read is printed by `--json`, alone on standard output; words for people go to
   standard error.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Entry point of the script `mainspring`."""
    try:
        from mainspring.cli import program

        return program.main(argv)
    except KeyboardInterrupt:  # also while all of it is still being imported
        return 130
