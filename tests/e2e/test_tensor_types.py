"""The real model in other tensor types, as converters would write it: it says what it says in its own.

Its weights are Q4_1, so types of more bits hold them nearly as they are, and those of fewer a little worse.
What is compared is the mean negative log-likelihood of a text: a type that is read wrongly is off by nats.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from test_golden import PERPLEXITY

from mainspring import LLM, SamplingParams
from mainspring.kernels.native import library

pytestmark = pytest.mark.slow

Kind = gguf.GGMLQuantizationType
KERNELS = ["numpy"] if library() is None else ["numpy", "native"]
# How far off the mean may be, relative.
ALLOWED = {Kind.F16: 0.001, Kind.Q8_0: 0.005, Kind.Q5_1: 0.07, Kind.Q5_0: 0.07, Kind.Q4_0: 0.15}
NATIVE = 0.005  # between kernels: int8 activations


def convert(model: Path, made: Path, kind: gguf.GGMLQuantizationType, max_tensors: int = 0) -> Path:
    """The same keys and weights, matrices of `kind`; the first part's path, if there are several."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(made, "llama", split_max_tensors=max_tensors)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        elif kind is Kind.F16:
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(made.parent.glob(f"{made.stem}*.gguf"))


def mean_nll(model: Path, kernels: str) -> float:
    with LLM(str(model), kernels=kernels, in_process=True, max_model_len=len(PERPLEXITY["ids"]) + 1) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": PERPLEXITY["ids"]}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    steps = zip(PERPLEXITY["ids"][1:], output.prompt_logprobs[1:], strict=True)
    return float(np.mean([-position[token].logprob for token, position in steps if position is not None]))


@pytest.mark.parametrize("kind", ALLOWED, ids=lambda kind: kind.name)
def test_a_text_is_as_likely_in_other_types(
    kind: gguf.GGMLQuantizationType, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B178: files of other types, whole or in parts, say what the model says."""
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))
    made = convert(smollm2, tmp_path / "made.gguf", kind, max_tensors=100 if kind is Kind.Q8_0 else 0)
    found = {kernels: mean_nll(made, kernels) / PERPLEXITY["mean_nll"] - 1 for kernels in KERNELS}
    print(kind.name, found)
    assert all(abs(off) <= ALLOWED[kind] for off in found.values())
    assert max(found.values()) - min(found.values()) <= NATIVE
