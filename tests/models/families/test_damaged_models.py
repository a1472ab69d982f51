"""Models that are not whole, or more than whole, are refused by name: folders and GGUF files alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family_fixtures
import numpy as np
import pytest
from family_files import gguf_architecture, gguf_name, write_folder, write_gguf
from family_fixtures import Fixture, Floats
from model_toys import Requests, engine_config, kv_config

from mainspring.base.errors import CheckpointError
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model

Edit = Callable[[dict[str, Floats]], object]
FORMS = ("folder", "gguf")
# One of each kind: plain, norms inside, norms behind, fused tensors, tensors turned over.
FAMILIES = ("llama", "qwen3", "olmo2", "phi3", "gpt2")


@dataclass(frozen=True)
class Altered(Fixture):
    edit: Edit = lambda tensors: None

    def tensors(self) -> dict[str, Floats]:
        tensors = super().tensors()
        self.edit(tensors)
        return tensors


def write(form: str, name: str, folder: Path, edit: Edit = lambda tensors: None, **config: Any) -> Path:
    fixture = family_fixtures.load(name)
    altered = Altered(**vars(fixture), edit=edit)
    if form == "gguf":
        return write_gguf(altered, folder / "model.gguf")
    return write_folder(altered, folder, config=fixture.config | config)


def loaded(path: Path) -> Decoder:
    return load_model(engine_config(str(path), load_format="auto", vocab_size=61, kernels="numpy"))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    return said


def some_tensors(name: str) -> list[str]:
    """Those outside of layers, and those of a layer that is not the first."""
    shapes = family_fixtures.load(name).shapes
    return [tensor for tensor in shapes if not any(f".{layer}." in tensor for layer in (0, 2, 3))]


def shown(form: str, name: str, tensor: str) -> str:
    return gguf_name(family_fixtures.load(name), tensor) if form == "gguf" else tensor


def stem(form: str, name: str, tensor: str) -> str:
    """Parts of fused tensors have names that begin so."""
    return shown(form, name, tensor).rpartition(".")[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_missing(name: str, form: str, tmp_path: Path) -> None:
    """Case B152: no weight is made up."""
    for tensor in some_tensors(name):
        if form == "gguf" and tensor == "lm_head.weight":
            continue  # a whole file, whose head is the embedding
        said = refusal(write(form, name, tmp_path, lambda tensors, gone=tensor: tensors.pop(gone)))
        assert f"tensor '{shown(form, name, tensor)}' is missing" in said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_of_another_shape(name: str, form: str, tmp_path: Path) -> None:
    for tensor in some_tensors(name):

        def cut(tensors: dict[str, Floats], tensor: str = tensor) -> None:
            tensors[tensor] = tensors[tensor][..., :-2]

        said = refusal(write(form, name, tmp_path, cut))
        assert f"tensor '{stem(form, name, tensor)}" in said
        assert "expected" in said


@pytest.mark.parametrize("name", FAMILIES)
def test_more_than_there_is_a_place_for(name: str, tmp_path: Path) -> None:
    inside = "h.1." if name == "gpt2" else "model.layers.1."
    for extra in ("a_thing.weight", inside + "self_attn.g_proj.weight", inside + "mlp.bias"):
        said = refusal(
            write("folder", name, tmp_path, lambda t, extra=extra: t.update({extra: np.ones(4, np.float32)}))
        )
        assert f"tensor '{extra}' is in the file" in said
        assert "no place for it" in said


@pytest.mark.parametrize("name", FAMILIES)
def test_more_than_there_is_a_place_for_in_gguf(name: str, tmp_path: Path) -> None:
    for extra in ("a_thing.weight", "blk.1.attn_sinks.weight", "blk.1.ffn_gate_inp.weight"):
        path = write_gguf(
            family_fixtures.load(name),
            tmp_path / "model.gguf",
            change=lambda writer, extra=extra: writer.add_tensor(extra, np.ones(4, np.float32)),
        )
        said = refusal(path)
        assert f"tensor '{extra}' is in the file" in said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_not_a_number(name: str, form: str, tmp_path: Path) -> None:
    for index, tensor in enumerate(some_tensors(name)):

        def spoil(tensors: dict[str, Floats], tensor: str = tensor, index: int = index) -> None:
            tensors[tensor].reshape(-1)[-1] = (np.nan, np.inf, -np.inf)[index % 3]

        said = refusal(write(form, name, tmp_path, spoil))
        assert f"tensor '{stem(form, name, tensor)}" in said
        assert "holds NaN or infinity" in said


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_cut_off(name: str, form: str, tmp_path: Path) -> None:
    path = write(form, name, tmp_path)
    file = path if form == "gguf" else path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert str(file) in refusal(path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_is_not_known(name: str, tmp_path: Path) -> None:
    said = refusal(write("folder", name, tmp_path, sparse_attention=True))
    assert "sparse_attention is True: not supported, may change the mathematics" in said
    arch = gguf_architecture(family_fixtures.load(name))
    path = write_gguf(
        family_fixtures.load(name),
        tmp_path / "model.gguf",
        change=lambda writer: writer.add_float32(f"{arch}.attention.sparseness", 0.5),
    )
    assert f"{arch}.attention.sparseness is 0.5: not supported" in refusal(path)


# ---- ties --------------------------------------------------------------------------------------------------


def last_row(path: Path) -> Floats:
    return last_row_of(path, family_fixtures.load("llama"))


def last_row_of(path: Path, fixture: Fixture) -> Floats:
    """What the model at `path` says behind the fixture's first sequence."""
    decoder = loaded(path)
    kv = kv_config(decoder)
    decoder.initialize_kv(kv)
    ids = fixture.token_ids[0]
    requests = Requests([len(ids)], len(kv.groups))
    requests.tokens = [np.array(ids, np.int32)]
    return decoder.logits(decoder.forward(requests.batch([len(ids)]))[-1:])[0].copy()


@pytest.mark.parametrize("head", ["none", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False, None])
def test_ties(tied: bool | None, head: str, tmp_path: Path) -> None:
    """Case B152: a config that ties, unties or says nothing, and a file with no head, the embedding again, or
    another one: all that is in the file is used, and a head that is nowhere is not made up."""

    def edit(tensors: dict[str, Floats]) -> None:
        own = tensors.pop("lm_head.weight")
        if head != "none":
            tensors["lm_head.weight"] = own if head == "different" else tensors["model.embed_tokens.weight"]

    path = write("folder", "llama", tmp_path, edit, tie_word_embeddings=tied)
    if head == "none" and not tied:
        assert "tensor 'lm_head.weight' is missing" in refusal(path)
        return
    found = last_row(path)
    as_made = family_fixtures.load("llama").logits[0][-1]
    if head == "different":
        np.testing.assert_allclose(found, as_made, rtol=0, atol=1e-4)
        return
    shared = last_row(
        write("gguf", "llama", tmp_path / "gguf", lambda tensors: tensors.pop("lm_head.weight"))
    )
    np.testing.assert_allclose(found, shared, rtol=0, atol=1e-4)
    assert not np.allclose(found, as_made, atol=0.1)
