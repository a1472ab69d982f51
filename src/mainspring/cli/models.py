"""`mainspring models`: the catalogue, what of it and of the hub is on this disk, and how to make room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.cli.dialect import Parser, nearest
from mainspring.cli.flags import add_common_flags

if TYPE_CHECKING:
    from mainspring.checkpoint.images import ImageInfo

EXAMPLES = ("", "show smollm2-135m", "remove smollm2-135m")
ACTIONS = ("list", "show", "remove")


class Known(msgspec.Struct):
    """A model that has a name here, and its place on this disk."""

    name: str
    source: str  # "catalogue", or "hub": what was fetched from there under its own name
    num_bytes: int
    path: str | None = None  # None: it is not here
    packed_bytes: int = 0  # of its weights as the kernels hold them (`mainspring cache`)
    description: str = ""
    licence: str = ""


def run(argv: list[str]) -> int:
    parser = Parser("models", "List models by name, show one, or remove one from this disk.", EXAMPLES, argv)
    parser.usage = "%(prog)s [show NAME | remove NAME] [flags]"
    group = parser.add_argument_group("what to do")
    group.add_argument("action", nargs="?", default="list", help="list (the default), show or remove")
    group.add_argument("name", nargs="?", default=None, help="of the model")
    add_common_flags(parser)
    given = parser.read(argv)
    if given.action not in ACTIONS:
        near = nearest(given.action, ACTIONS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(ACTIONS)}"
        raise ConfigError(f"models {given.action!r}: {hint}")
    if (given.action == "list") != (given.name is None):
        wrong = "takes no name; models show NAME shows one" if given.name else "needs the name of a model"
        raise ConfigError(f"models {given.action} {wrong}")
    match given.action:
        case "list":
            return _list(known_models(), given.json)
        case "show":
            return _show(_named(given.name), given.json)
    return _remove(_named(given.name), given.json)


def known_models() -> list[Known]:
    """The catalogue, then what lies in the hub's cache."""
    from mainspring.checkpoint.catalog import list_models
    from mainspring.checkpoint.images import list_images

    images = list_images()
    found = [
        Known(
            entry.name,
            "catalogue",
            entry.num_bytes,
            str(path) if path else None,
            sum(image.num_bytes for image in images if path and _is_of(image, path)),
            entry.description,
            entry.licence,
        )
        for entry, path in list_models()
    ]
    return found + _of_hub(images)


def _of_hub(images: list[ImageInfo]) -> list[Known]:
    """Whole models are told from other things by what they must have: a config, or weights in one file."""
    from mainspring.checkpoint.hub import hub_cache_dir

    found = []
    for folder in sorted(hub_cache_dir().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        files = [file for file in folder.glob("snapshots/*/*") if file.exists()]
        if any(file.name == "config.json" or file.suffix == ".gguf" for file in files):
            num_bytes = sum({file.resolve(): file.stat().st_size for file in files}.values())
            packed = sum(image.num_bytes for image in images if _is_of(image, folder))
            found.append(Known(name, "hub", num_bytes, str(folder), packed))
    return found


def _is_of(image: ImageInfo, path: Path) -> bool:
    """Whether these weights were packed from that file, or from one in that folder."""
    return Path(image.model).is_relative_to(path)


def _named(name: str) -> Known:
    models = {model.name: model for model in known_models()}
    if (model := models.get(name)) is not None:
        return model
    near = nearest(name, models)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(models)}"
    raise CheckpointError(f"no model {name[:100]!r} here; {hint}")


# --- what is done -------------------------------------------------------------------------------------------


def _list(models: list[Known], as_json: bool) -> int:
    if as_json:
        print(json.dumps([msgspec.to_builtins(model) for model in models]))
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        where = "here" if model.path else "to fetch"
        packed = f", {_mb(model.packed_bytes)} packed" if model.packed_bytes else ""
        about = f"{model.description} ({model.licence})" if model.description else "from the hub"
        print(f"{model.name:<{width}}  {_mb(model.num_bytes):>8} {where}{packed}  {about}")
    return 0


def _show(model: Known, as_json: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(model)))
        return 0
    lines = {
        "name": model.name,
        "what": model.description,
        "licence": model.licence,
        "size": _mb(model.num_bytes),
        "packed": _mb(model.packed_bytes) if model.packed_bytes else "",
        "here": model.path or f"no; mainspring pull {model.name}",
        "memory": f"mainspring doctor {model.name}" if model.path else "",
    }
    for label, text in lines.items():
        if text:
            print(f"{label:<8} {text}")
    return 0


def _remove(model: Known, as_json: bool) -> int:
    """The file, what was kept of an interrupted download, and the packed weights."""
    if model.source == "hub":
        raise ConfigError(
            f"{model.name} lies in the hub's cache, which other programs use too; remove {model.path} by hand"
        )
    from mainspring.checkpoint.catalog import remove
    from mainspring.checkpoint.images import list_images

    freed = 0
    for image in list_images() if model.path else []:
        if _is_of(image, Path(str(model.path))):
            image.path.unlink(missing_ok=True)
            freed += image.num_bytes
    freed += remove(model.name)
    if as_json:
        print(json.dumps({"name": model.name, "freed_bytes": freed}))
    else:
        print(f"removed {model.name}: {_mb(freed)}" if freed else f"{model.name} was not here")
    return 0


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
