"""Makes `tests/data/family_changes.json`: what transformers says of each change of `family_changes.py`.

    python tests/models/families/make_changes.py [NAME ...]

Names are of the families that are asked again; none: all.
Needs what `make_fixtures.py` needs, and its fixtures.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import family_fixtures
import numpy as np
import torch
from family_changes import FAMILIES, FILE, SAME, changed, changes_of
from family_files import write_folder
from family_fixtures import Fixture
from make_fixtures import logits_of
from transformers import AutoModelForCausalLM, logging


def last_row(fixture: Fixture, change: dict[str, Any], folder: Path) -> str | None:
    write_folder(fixture, folder, config=changed(fixture.config, change))
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        row = logits_of(model.eval(), fixture.token_ids[0])[-1]
    except Exception as error:
        print(f"{fixture.name} {change}: {type(error).__name__}")
        return None
    if any(info.values()):
        print(f"{fixture.name} {change}: {info}")
        return None
    if np.allclose(row, fixture.logits[0][-1], rtol=0, atol=1e-5):
        return SAME
    return base64.b85encode(row.astype("<f4").tobytes()).decode()


def main(names: list[str]) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    found = json.loads(FILE.read_text()) if names else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or FAMILIES:
            if name in family_fixtures.names():
                fixture = family_fixtures.load(name)
                found[name] = [last_row(fixture, change, Path(folder)) for change in changes_of(name)]
    lines = (f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
