"""`mainspring pull`: fetch a model of the catalogue, or list what there is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mainspring.base.log import set_up_logging
from mainspring.cli.dialect import Parser, add_common_flags

if TYPE_CHECKING:
    from mainspring.checkpoint.catalog import Listing

EXAMPLES = ("", "smollm2-135m", "smollm2-135m --json")


def run(argv: list[str]) -> int:
    parser = Parser(
        "pull", "Fetch a model into the cache; without a name, list the catalogue.", EXAMPLES, argv
    )
    group = parser.add_argument_group("the model")
    group.add_argument("name", nargs="?", default=None, help="a name of the catalogue")
    add_common_flags(parser)
    given = parser.read(argv)
    set_up_logging("info" if given.verbose else None)
    from mainspring.checkpoint import catalog

    if given.name is None:
        return _list(given.json)
    path = catalog.pull(given.name, progress=not given.json)
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
        "num_bytes": entry.num_bytes,
        "path": str(path) if path else None,
    }
