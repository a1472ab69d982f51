"""How a model pools, as its files say it: the forms of GGUF files, and of folders that say nothing of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mainspring.base.config import PoolingFacts
from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.pooling import folder_pooling, gguf_pooling, longest_text


def gguf(architecture: str, **keys: Any) -> PoolingFacts:
    metadata = {f"{architecture}.{name}": value for name, value in keys.items()}
    file: Any = SimpleNamespace(path=Path("model.gguf"), metadata=metadata)
    return gguf_pooling(file, architecture)


@pytest.mark.parametrize(
    ("architecture", "given", "kind"),
    [
        ("bert", None, "mean"),
        ("llama", None, "last"),
        ("bert", 0, "mean"),
        ("bert", 1, "mean"),
        ("bert", 2, "cls"),
        ("bert", 3, "last"),
        ("qwen3", 3, "last"),
        ("qwen3", 1, "mean"),
    ],
)
def test_gguf(architecture: str, given: int | None, kind: str):
    keys = {} if given is None else {"pooling_type": given}
    assert gguf(architecture, embedding_length=384, **keys) == PoolingFacts(kind=kind, width=384)


@pytest.mark.parametrize("given", [4, -1, "mean", 1.5])
def test_gguf_that_pools_otherwise(given: object):
    with pytest.raises(CheckpointError, match=r"bert.pooling_type is .*; expected 1 \(mean\)"):
        gguf("bert", pooling_type=given)


def folder(path: Path, config: str, **tensors: tuple[int, ...]) -> ModelFolder:
    (path / "config.json").write_text(config)
    held = {name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file({"x": np.zeros(2, np.float32), **held}, path / "model.safetensors", {"format": "pt"})
    return ModelFolder(path)


def test_folders_that_say_nothing(tmp_path: Path):
    bert = folder(tmp_path, '{"model_type": "bert", "hidden_size": 32}')
    assert folder_pooling(bert) == PoolingFacts(kind="mean", width=32)
    assert longest_text(bert) is None
    llama = folder(tmp_path, '{"model_type": "llama", "hidden_size": 64}')
    assert folder_pooling(llama) == PoolingFacts(kind="last", width=64)


def test_labels_are_as_many_as_the_head_has_rows(tmp_path: Path):
    """Named by the config, as far as that names them."""
    config = '{"model_type": "bert", "hidden_size": 8, "id2label": {"0": "sad", "2": "glad"}}'
    found = folder_pooling(folder(tmp_path, config, classifier__weight=(3, 8)))
    assert found.labels == ("sad", "LABEL_1", "glad")
    assert (found.kind, found.token_kinds) == ("cls", 2)
    config = '{"model_type": "bert", "hidden_size": 8, "type_vocab_size": 1}'
    assert folder_pooling(folder(tmp_path, config, classifier__weight=(1, 8))).token_kinds == 1
