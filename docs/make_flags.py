"""Writes `flags.md` beside this file: every flag of every command, from what the commands say of themselves.

python docs/make_flags.py            writes it
python docs/make_flags.py --check    exit status 1 if it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mainspring.cli import bench, program
from mainspring.cli.completion import described
from mainspring.cli.flags import GROUPS

DOCUMENT = Path(__file__).parent / "flags.md"
HEAD = """\
# Flags

Every flag of every command. `docs/make_flags.py` has written this; what one needs to know beside it is in
[cli.md](cli.md). The engine's settings are the same for all commands that have an engine: they are here once.
Where a default is not shown, the engine decides, and `mainspring serve` says at its start what it decided.
"""


def document() -> str:
    names = [name for name in program.COMMANDS if name != "bench"] + [
        f"bench {name}" for name in bench.BENCHES
    ]
    found = {name: described(name) for name in names}
    engine = [group for group in found["doctor"]["groups"] if group["title"] in GROUPS]
    lines = [HEAD, "## The engine\n"]
    for group in engine:
        lines += [f"### {group['title'].capitalize()}\n", *table(group["flags"])]
    titles = {group["title"] for group in engine}
    for name, command in found.items():
        own = [
            group for group in command["groups"] if group["title"] not in titles and group["title"] != "and"
        ]
        with_engine = {group["title"] for group in command["groups"]} >= titles
        note = (
            " The engine's settings, and:"
            if with_engine and own
            else " The engine's settings."
            if with_engine
            else ""
        )
        lines.append(f"## mainspring {name}\n\n{command['description']}{note}\n")
        for group in own:
            lines += [f"**{group['title']}**\n", *table(group["flags"])]
    return "\n".join(lines).rstrip() + "\n"


def table(flags: list[dict[str, Any]]) -> list[str]:
    return ["| flag | |", "| --- | --- |", *map(row, flags), ""]


def row(flag: dict[str, Any]) -> str:
    value = "\\|".join(flag["choices"]) if flag["choices"] else flag["takes"] or ""
    shown = ", ".join(f"`{name}`" for name in flag["names"]) or f"`{flag['takes']}`"
    if value and flag["names"]:
        shown += f" {value}"
    return f"| {shown} | {flag['help'].replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        DOCUMENT.write_text(document(), encoding="utf-8")
    elif DOCUMENT.read_text(encoding="utf-8") != document():
        sys.exit("docs/flags.md is not current: run python docs/make_flags.py")
