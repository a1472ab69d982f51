"""Families on native kernels with weights, keys and values of 16 bits: what rounding to 11 bits allows.

`test_families.py` has the native kernels in float32, by the tolerance of all. Experts have no native
form yet.
"""

from __future__ import annotations

from pathlib import Path

import family_fixtures
import numpy as np
import pytest
from family_files import write_folder
from gemma_phi_gpt2_configs import MAX_MODEL_LEN
from test_families import PROMPTS_ONLY, opened, row

from mainspring.kernels.native import library, why_not

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

MEAN, LARGEST = 0.01, 0.1  # of the differences of all log-probabilities of a fixture, at most


DENSE = [name for name in family_fixtures.names() if "expert" not in str(family_fixtures.load(name).config)]


@pytest.mark.parametrize("name", DENSE)
def test_16_bits(name: str, tmp_path: Path) -> None:
    fixture = family_fixtures.load(name)
    llm = opened(
        write_folder(fixture, tmp_path),
        max_model_len=MAX_MODEL_LEN.get(name),
        kernels="native",
        quantization="f16",
        block_size=16,
    )
    outputs = llm.generate(fixture.token_ids, PROMPTS_ONLY, use_tqdm=False)
    llm.shutdown()
    found = []
    for output, expected in zip(outputs, fixture.log_probs, strict=True):
        assert output.prompt_logprobs is not None
        rows = np.array([row(position) for position in output.prompt_logprobs[1:]])
        found.append(np.abs(rows - expected[:-1]).ravel())
    differences = np.concatenate(found)
    print(f"{name}: mean {differences.mean():.4f}, largest {differences.max():.4f}")
    assert differences.mean() < MEAN
    assert differences.max() < LARGEST
