"""A model's folder as Hugging Face writes it: settings in JSON files, weights in safetensors.

What is there is read when it is asked for; only `config.json` and the tables of the weights are read and
judged at opening. Weights that are quantised are offered as what they stand for (`checkpoint/quantised.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.hf_config import read_object
from mainspring.checkpoint.quoting import quoted
from mainspring.checkpoint.safetensors import (
    INDEX_FILE,
    ElementSource,
    RoutedTensors,
    SafetensorsFile,
    ShardedSafetensors,
)

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# What a folder needs beside its weights, where it has them: globs, for a download.
SETTINGS_FILES: Final = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_Normalize/config.json",
    "*_Dense/config.json",
)
DEFAULT_TEMPLATE: Final = "default"


class ModelFolder(RoutedTensors):
    """A folder, open for reading; also the source of its tensors. Safe to use from several threads until it
    is closed.

    Raises `CheckpointError`, one line that names the file at fault.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        config = dict(read_object(self.path / CONFIG_FILE))
        quantization = config.pop("quantization_config", None)  # which is understood here, or refused
        self.config: Mapping[str, Any] = config
        self._tensors = _open_weights(self.path)
        if quantization:
            self._tensors = self._dequantised(quantization)

    def _dequantised(self, quantization: Any) -> ElementSource:
        from mainspring.checkpoint.quantised import QuantisedTensors  # few folders need it

        try:
            if not isinstance(quantization, Mapping):
                raise CheckpointError(
                    f"quantization_config is {quoted(quantization)}; expected an object of options"
                )
            return QuantisedTensors(self._tensors, quantization)
        except CheckpointError as error:
            self._tensors.close()
            raise CheckpointError(f"{self.path}: {error}") from None

    # Tensors.

    @property
    def tensor_names(self) -> list[str]:
        return self._tensors.tensor_names

    @property
    def sources(self) -> Sequence[ElementSource]:
        return (self._tensors,)

    def source_of(self, name: str) -> ElementSource:
        return self._tensors

    # Settings.

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """What `generation_config.json` says; empty where there is none."""
        return self._object("generation_config.json")

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """What `tokenizer_config.json` says; empty where there is none."""
        return self._object("tokenizer_config.json")

    @cached_property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """What `special_tokens_map.json` says; empty where there is none."""
        return self._object("special_tokens_map.json")

    @property
    def tokenizer_json(self) -> Path | None:
        """The file, if it is there."""
        path = self.path / "tokenizer.json"
        return path if path.is_file() else None

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """Name -> template; the one without a name is called "default".

        A file of its own goes before `chat_template.json`, and that before `tokenizer_config.json`.
        """
        found = _named_templates(self.tokenizer_config, self.path / "tokenizer_config.json")
        if (self.path / "chat_template.json").is_file():
            found |= _named_templates(self._object("chat_template.json"), self.path / "chat_template.json")
        files = {path.stem: path for path in sorted(self.path.glob("additional_chat_templates/*.jinja"))}
        if (own := self.path / "chat_template.jinja").is_file():
            files[DEFAULT_TEMPLATE] = own
        return found | {name: _read_text(path) for name, path in files.items()}

    @property
    def chat_template(self) -> str | None:
        """The default one, or the only one."""
        templates = self.chat_templates
        if len(templates) == 1:
            return next(iter(templates.values()))
        return templates.get(DEFAULT_TEMPLATE)

    def special_token(self, name: str) -> str | None:
        """The text of the tokenizer's "bos_token", "eos_token", "pad_token" and the like."""
        for settings in (self.tokenizer_config, self.special_tokens_map):
            token = settings.get(name)
            if isinstance(token, Mapping):
                token = token.get("content")
            if isinstance(token, str):
                return token
        return None

    def _object(self, name: str) -> Mapping[str, Any]:
        path = self.path / name
        return read_object(path) if path.is_file() else {}


def has_weights(folder: Path) -> bool:
    """Whether weights of this form lie in `folder`."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()


def _open_weights(folder: Path) -> ElementSource:
    if (folder / WEIGHTS_FILE).is_file():
        return SafetensorsFile(folder / WEIGHTS_FILE)
    if (folder / INDEX_FILE).is_file():
        return ShardedSafetensors(folder / INDEX_FILE)
    expected = f"expected {WEIGHTS_FILE} or {INDEX_FILE}"
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder}: is an adapter (LoRA), which is not supported; {expected}")
    if any((folder / name).exists() for name in PICKLES):
        raise CheckpointError(
            f"{folder}: has its weights as a pickle ({PICKLES[0]}), which could run any code and is "
            f"not read; {expected}: convert it, or take a repository or revision that has them"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f" beside {quoted(others[0])}" if others else ""
    raise CheckpointError(f"{folder}: has no weights{found}; {expected}")


def _named_templates(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Of the key `chat_template`: a text, or a list of names and texts."""
    given = settings.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    try:
        found = {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError):
        found = {}
    if not found or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointError(
            f"{path}: chat_template is {quoted(given)}; expected a text, or a list of names and templates"
        )
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: cannot be read: it is not UTF-8") from None
