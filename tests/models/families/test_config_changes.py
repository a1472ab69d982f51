"""Whatever a config says is computed as an independent implementation computes it, or refused by name."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import family_changes
import family_fixtures
import numpy as np
import pytest
from family_changes import changed
from family_files import write_folder
from model_toys import Requests, engine_config, kv_config

from mainspring.base.errors import CheckpointError
from mainspring.kernels.ops import Floats
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model

RECORDED = family_changes.read()
# Where the recorded values are not followed: that version reads the one theta of older OLMo 3 configs for
# layers without a window only; the versions before it, and training, had it for all.
DISPUTED = [("olmo3", {"rope_theta": 300.0})]
# Nor where it stumbles over the size of heads, which Mixtral's configs do not say.
DISPUTED += [
    ("mixtral", change)
    for change, _ in RECORDED["mixtral"]
    if (change.get("rope_scaling") or {}).get("rope_type") == "yarn"
]


def named(change: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in change.items())


def last_row(decoder: Decoder, token_ids: list[int]) -> Floats:
    kv = kv_config(decoder)
    decoder.initialize_kv(kv)
    requests = Requests([len(token_ids)], len(kv.groups))
    requests.tokens = [np.array(token_ids, np.int32)]
    return decoder.logits(decoder.forward(requests.batch([len(token_ids)]))[-1:])[0]


@pytest.mark.parametrize("name", RECORDED)
def test_right_or_refused(name: str, tmp_path: Path) -> None:
    """Case B155: configs that turn positions otherwise, bound attention or add to a layer; each either is
    computed, or refused in one line that names the key or the tensor at fault."""
    fixture = family_fixtures.load(name)
    wrong, computed = [], 0
    for change, recorded in RECORDED[name]:
        if (name, change) in DISPUTED:
            continue
        folder = write_folder(fixture, tmp_path, config=changed(fixture.config, change))
        try:
            decoder = load_model(
                engine_config(str(folder), load_format="auto", vocab_size=61, kernels="numpy")
            )
        except CheckpointError as refusal:
            said = str(refusal)
            if "\n" in said or not (
                any(key in said for key in fixture.config | change) or "tensor '" in said
            ):
                wrong.append(f"{named(change)}: refused without its name: {said}")
            continue
        if recorded is None:
            wrong.append(f"{named(change)}: should be refused")
            continue
        expected = np.frombuffer(base64.b85decode(recorded), "<f4")
        if recorded == family_changes.SAME:
            expected = fixture.logits[0][-1]
        difference = np.abs(last_row(decoder, fixture.token_ids[0]) - expected).max()
        computed += 1
        if difference > 1e-4:
            wrong.append(f"{named(change)}: differs by {difference:.2g}")
    assert not wrong, "\n".join(wrong)
    assert computed > 5, "most changes mean nothing to a family, or what they say"
