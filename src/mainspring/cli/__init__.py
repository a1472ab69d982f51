"""The command `mainspring`: flags and commands. It assembles what the lower floors offer and adds nothing.

Rules.
1. Nothing is imported before it is needed: `mainspring --help` loads no arrays, no tokenizer and no engine.
2. A user's mistake is one line on standard error that says the way out, and exit status 2; never a traceback.
3. What a program might read is printed by `--json`, alone on standard output; words for people go to
   standard error.
"""

from mainspring.cli.program import main

__all__ = ["main"]
