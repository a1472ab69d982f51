"""`mainspring cache`: what is kept on disk beside the models, and `--clear` to remove it.

Packed weights are made from a model's file at its first start and mapped at the next (checkpoint/images.py).
Removing them costs a second at the next start, and nothing else.
"""

from __future__ import annotations

import json
import time

from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags

EXAMPLES = ("", "--clear", "--json")


def run(argv: list[str]) -> int:
    parser = Parser("cache", "List the packed weights that are kept on disk.", EXAMPLES, argv)
    group = parser.add_argument_group("the cache")
    group.add_argument("--clear", action="store_true", default=False, help="remove them; models stay")
    add_common_flags(parser)
    given = parser.read(argv)
    from mainspring.checkpoint.images import clear_images, images_dir, list_images

    if given.clear:
        freed = clear_images()
        print(json.dumps({"freed_bytes": freed}) if given.json else f"removed {freed / 1e6:.0f} MB")
        return 0
    images = list_images()
    if given.json:
        print(json.dumps([{**image._asdict(), "path": str(image.path)} for image in images]))
        return 0
    print(f"{images_dir()}: {sum(image.num_bytes for image in images) / 1e6:.0f} MB of packed weights")
    for image in images:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.last_used_s))
        model = image.model if image.model.isprintable() else repr(image.model)
        print(f"{image.num_bytes / 1e6:8.0f} MB  used {used}  {model} ({image.packing})")
    return 0
