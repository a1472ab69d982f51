"""Makes the fixtures of `family_fixtures.py`: tiny networks, computed by transformers in float32.

    python tests/models/families/make_fixtures.py [NAME ...]

Needs torch and transformers (made with 2.13.0 and 5.24.0), which mainspring does not: use an environment of
its own. Configs are written as makers publish them, and read as transformers reads a folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_configs import CONFIGS, SEQUENCES
from family_fixtures import ENCODERS, FOLDER, NUM_NEW, Fixture, Floats, save, tensors_of
from gemma_phi_gpt2_configs import ENCODER_CONFIGS
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, logging


def make(name: str) -> Fixture:
    config = CONFIGS[name]
    lengths = SEQUENCES.get(name, SEQUENCES["default"])
    model, shapes, saved_config = network(config, AutoModelForCausalLM)
    rng = np.random.default_rng(len(name))
    token_ids = [sequence(model, rng, config["vocab_size"], length) for length in lengths]
    logits = [logits_of(model, ids) for ids in token_ids]
    return Fixture(name, config, saved_config, shapes, token_ids, logits)


def make_encoder(name: str) -> Fixture:
    """Hidden states instead of logits."""
    config = ENCODER_CONFIGS[name]
    rng = np.random.default_rng(len(name))
    token_ids = [rng.integers(0, config["vocab_size"], length).tolist() for length in SEQUENCES["default"]]
    model, shapes, saved_config = network(config, AutoModel)
    with torch.no_grad():
        hidden = [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in token_ids]
    return Fixture(name, config, saved_config, shapes, token_ids, hidden)


def network(config: dict[str, Any], auto: Any) -> tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]:
    """The network, its checkpoint's shapes, and its config as transformers writes it."""
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "config.json").write_text(json.dumps(config))
        auto.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {tensor: tuple(file.get_slice(tensor).get_shape()) for tensor in sorted(file.keys())}
        saved_config = json.loads((folder / "config.json").read_text())
        # The published form again: this is what must be understood.
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors_of(config, shapes), folder / "model.safetensors", {"format": "pt"})
        model, info = auto.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    return model.eval(), shapes, saved_config


def sequence(model: Any, rng: np.random.Generator, vocab_size: int, length: int) -> list[int]:
    """A random prompt and what is likeliest behind it, by far enough that rounding cannot change it.

    Whole sequences are computed each time.
    """
    while True:
        ids: list[int] = rng.integers(0, vocab_size, length - NUM_NEW).tolist()
        while len(ids) < length:
            second, first = np.argsort(row := logits_of(model, ids)[-1])[-2:].tolist()
            if row[first] - row[second] < 1e-2:
                break
            ids.append(first)
        else:
            return ids


def logits_of(model: Any, ids: list[int]) -> Floats:
    with torch.no_grad():
        logits: Floats = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def main(names: list[str]) -> None:
    logging.disable_progress_bar()
    for name in names or [*CONFIGS, *ENCODER_CONFIGS]:
        encoder = name in ENCODER_CONFIGS
        fixture = make_encoder(name) if encoder else make(name)
        path = save(fixture, ENCODERS if encoder else FOLDER)
        spread: Any = np.concatenate(fixture.logits).std()
        print(f"{path.name}: {path.stat().st_size} bytes, logits spread over {spread:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
