"""A model's files, whatever their form: a GGUF file (or its parts), or a folder as Hugging Face writes it."""

from __future__ import annotations

import os
from pathlib import Path

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.folder import CONFIG_FILE, ModelFolder, has_weights
from mainspring.checkpoint.gguf import PART_NAME, GGUFFile

Checkpoint = GGUFFile | ModelFolder


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open what `path` names: a GGUF file, or a folder with `config.json` and weights, or one that holds a
    single GGUF file (parts of one count as one).

    Raises `CheckpointError`, one line that names the file at fault.
    """
    path = Path(path)
    try:
        is_folder = path.is_dir()
    except ValueError:  # a null byte
        is_folder = False
    if is_folder:
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: weights alone are no model; give their folder, with its {CONFIG_FILE}"
        )
    return GGUFFile(path)


def _open_folder(folder: Path) -> Checkpoint:
    has_config = (folder / CONFIG_FILE).is_file()
    if has_config and has_weights(folder):
        return ModelFolder(folder)
    models = [file for file in sorted(folder.glob("*.gguf")) if _is_first(file)]
    if len(models) == 1:
        return GGUFFile(models[0])
    if models:
        names = ", ".join(file.name for file in models)
        raise CheckpointError(f"{folder}: holds {len(models)} GGUF files; give one of them: {names}")
    if has_config:
        return ModelFolder(folder)  # which says what weights are missing
    raise CheckpointError(
        f"{folder}: is no model's folder; expected {CONFIG_FILE} and weights, or a GGUF file"
    )


def _is_first(file: Path) -> bool:
    """Whether it is a model's only part, or the first."""
    part = PART_NAME.fullmatch(file.name)
    return part is None or int(part["number"]) == 1
