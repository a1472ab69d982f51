"""How a model makes a vector of a text, in whatever form its files say it.

A folder of sentence-transformers has `modules.json`: the network, how its hidden states are pooled, perhaps
that the vector's length is made 1; and `sentence_bert_config.json`: after how many tokens a text ends. A GGUF
file has a key `pooling_type`. Where nothing is said, an encoder gives the mean of all tokens and a decoder
the state of the last one, which alone has seen the whole text; both of length 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mainspring.base.config import PoolingFacts
from mainspring.base.errors import CheckpointError
from mainspring.base.params import PoolingKind
from mainspring.checkpoint.architectures import ENCODERS
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.hf_config import read_object
from mainspring.checkpoint.quoting import quoted

MODULES_FILE: Final = "modules.json"
LENGTH_FILE: Final = "sentence_bert_config.json"
GGUF_KINDS: Final[Mapping[object, PoolingKind]] = {1: "mean", 2: "cls", 3: "last"}
MODES: Final[Mapping[str, PoolingKind]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
MODE_NAMES: Final[Mapping[object, PoolingKind]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
SCORES: Final = "classifier.weight"


def gguf_pooling(file: GGUFFile, architecture: str) -> PoolingFacts:
    width = file.metadata.get(f"{architecture}.embedding_length")
    key = f"{architecture}.pooling_type"
    given = file.metadata.get(key, 0)
    if given not in (0, *GGUF_KINDS):
        raise CheckpointError(
            f"{file.path}: {key} is {quoted(given)}; expected 1 (mean), 2 (cls) or 3 (last): others are not "
            "supported yet"
        )
    kind = GGUF_KINDS.get(given, _usual(architecture))
    return PoolingFacts(kind=kind, width=width if isinstance(width, int) else None)


def folder_pooling(folder: ModelFolder) -> PoolingFacts:
    """Raises `CheckpointError` for a way of pooling that is not supported, naming the file."""
    config = folder.config
    width = config.get("hidden_size")
    kind, normalize = _usual(str(config.get("model_type"))), True
    labels = _labels(folder)
    if labels:
        kind = "cls"
    if (folder.path / MODULES_FILE).is_file():
        kind, normalize = _modules(folder.path, kind)
    return PoolingFacts(
        kind=kind,
        normalize=normalize,
        width=width if isinstance(width, int) else None,
        labels=labels,
        token_kinds=2 if labels and config.get("type_vocab_size", 2) != 1 else 1,
    )


def longest_text(folder: ModelFolder) -> int | None:
    """Tokens that the model's makers let a text have, where they say so."""
    path = folder.path / LENGTH_FILE
    if not path.is_file():
        return None
    length = read_object(path).get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
        raise CheckpointError(f"{path}: max_seq_length is {quoted(length)}; expected a positive integer")
    return length


def _usual(architecture: str) -> PoolingKind:
    return "mean" if architecture in ENCODERS else "last"


def _modules(folder: Path, kind: PoolingKind) -> tuple[PoolingKind, bool]:
    path = folder / MODULES_FILE
    try:
        modules = json.loads(path.read_bytes())
        types = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [folder / module["path"] for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(f"{path}: is no list of modules, each with a type and a path") from None
    if types[:1] != ["Transformer"]:
        raise CheckpointError(f"{path}: begins with {quoted(types[:1])}; expected a Transformer")
    normalize = False
    for name, place in zip(types[1:], places[1:], strict=True):
        match name:
            case "Pooling":
                kind = _mode(place / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise CheckpointError(
                    f"{path}: the module {quoted(name)} is not supported yet; expected Pooling and Normalize"
                )
    return kind, normalize


def _mode(path: Path) -> PoolingKind:
    config: Mapping[str, Any] = read_object(path)
    named = config.get("pooling_mode")
    modes = [mode for mode, value in config.items() if mode.startswith("pooling_mode_") and value is True]
    if named is not None and not modes:
        modes = [f"pooling_mode {named}"]
        kind = MODE_NAMES.get(named) if isinstance(named, str) else None
    else:
        kind = MODES.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        raise CheckpointError(
            f"{path}: pools by {quoted(modes)}; expected one of {', '.join(MODES)}: others are not supported"
        )
    return kind


def _labels(folder: ModelFolder) -> tuple[str, ...]:
    """Of the head that classifies, by its rows; named by the config, else by numbers."""
    if SCORES not in folder.tensor_names:
        return ()
    names = folder.config.get("id2label")
    given = names if isinstance(names, Mapping) else {}
    num_labels = folder.info(SCORES).shape[0]
    return tuple(str(given.get(str(i), f"LABEL_{i}")) for i in range(num_labels))
