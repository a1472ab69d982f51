"""`mainspring pull`: fetch a model of the catalogue or of the hub, or list the catalogue."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from mainspring.base.config import EngineArgs
from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags, log_level

if TYPE_CHECKING:
    from mainspring.checkpoint.catalog import Listing

EXAMPLES = ("", "smollm2-135m", "org/name:Q4_K_M", "org/name --revision main --json")
HUB_FLAGS = ("revision", "hf_token", "download_dir")


def run(argv: list[str]) -> int:
    parser = Parser(
        "pull", "Fetch a model into the cache; without a name, list the catalogue.", EXAMPLES, argv
    )
    group = parser.add_argument_group("the model")
    group.add_argument(
        "name",
        nargs="?",
        default=None,
        help="of the catalogue, or on the hub: org/name, org/name:file.gguf, org/name:Q4_K_M",
    )
    for field in fields(EngineArgs):
        if field.name in HUB_FLAGS:
            flag = f"--{field.name.replace('_', '-')}"
            group.add_argument(flag, default=None, metavar="TEXT", help=field.metadata["help"])
    add_common_flags(parser)
    given = parser.read(argv)
    set_up_logging(log_level(given))
    from mainspring.checkpoint import catalog

    if given.name is None:
        return _list(given.json)
    folder = None if given.download_dir is None else Path(given.download_dir)
    path = catalog.pull(
        given.name, folder, progress=not given.json, revision=given.revision, token=given.hf_token
    )
    print(json.dumps({"name": given.name, "path": str(path)}) if given.json else f"{given.name}: {path}")
    return 0


def _list(as_json: bool) -> int:
    from mainspring.checkpoint import catalog

    listings = catalog.list_models()
    if as_json:
        print(json.dumps([listing_as_json(listing) for listing in listings]))
        return 0
    for entry, path in listings:
        where = f"here: {path}" if path else f"{entry.num_bytes / 1e6:.0f} MB to fetch"
        print(f"{entry.name}  {entry.description} ({entry.licence})\n{'':{len(entry.name)}}  {where}")
    return 0


def listing_as_json(listing: Listing) -> dict[str, object]:
    entry, path = listing
    return {
        "name": entry.name,
        "description": entry.description,
        "licence": entry.licence,
        "terms": entry.terms,
        "num_bytes": entry.num_bytes,
        "path": str(path) if path else None,
    }
