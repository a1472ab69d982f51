"""On a processor older than the library's best: no illegal instruction, and a word about what is used.

The processors are emulated (qemu-user), whose word is good: it refuses what the named one does not have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

native = pytest.importorskip("mainspring_native")

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (qemu-user) is not installed"),
]

# The interpreter of a virtual environment finds it by its own name, which an emulator does not pass on.
PREPARE = f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n"

COMPUTE = """
import json
import numpy as np
import mainspring_native as native
from mainspring.kernels.native import fastest_variant, library, measured_variants, why_not

assert library() is native
results = {}
rng = np.random.default_rng(1)
x = rng.standard_normal((3, 64)).astype(np.float32)
for source in ("F32", "q8", "q4"):
    matrix = native.Matrix(source, 37, 64)
    memory = np.zeros(matrix.num_bytes + 64, np.uint8)
    matrix.bind(memory[-memory.ctypes.data % 64 :][: matrix.num_bytes])
    values = rng.standard_normal((37, 64)).astype(np.float32)
    if source == "F32":
        matrix.pack(values.view(np.uint8).reshape(-1), 0, 37)
    else:
        matrix.pack_floats(values, 0, 37)
    results[source] = native.linear(matrix, x, "avx2").tobytes().hex()
variants = native.runnable_variants()
print(json.dumps([variants, fastest_variant(), [name for name, _ in measured_variants()], results]))
"""

MODEL = """
import json
from mainspring import LLM, SamplingParams

CONFIG = {
    "model_type": "llama",
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SETTINGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "in_process": True,
    "num_gpu_blocks_override": 20,
    "kernels": "native",
    "num_threads": 1,
    "instruction_set": "avx2",
}
common = {"max_tokens": 4, "ignore_eos": True, "detokenize": False, "logprobs": 2}
params = [SamplingParams(temperature=0, **common), SamplingParams(temperature=1, seed=1, **common)]
prompts = [{"prompt_token_ids": list(range(1, 20))}, {"prompt_token_ids": [3]}]
with LLM(json.dumps(CONFIG), **SETTINGS) as llm:
    outputs = llm.generate(prompts, params, use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def run(script: str, *emulator: str) -> subprocess.CompletedProcess[str]:
    command = [*emulator, os.path.realpath(sys.executable), "-c", PREPARE + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def printed(script: str, *emulator: str) -> str:
    ended = run(script, *emulator)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def haswell() -> tuple[str, ...]:
    assert QEMU is not None
    return QEMU, "-cpu", "Haswell"


def test_one_with_avx2_alone_computes_the_same_bits() -> None:
    variants, fastest, measured, results = json.loads(printed(COMPUTE, *haswell()))
    assert variants == measured == ["avx2"]
    assert fastest == "avx2"
    assert json.loads(printed(COMPUTE))[3] == results


def test_a_model_on_it() -> None:
    assert printed(MODEL, *haswell()) == printed(MODEL)


def test_what_it_lacks_is_refused_by_name() -> None:
    script = MODEL.replace('"avx2"', '"avx512"')
    assert "instruction_set 'avx512' cannot be used on this processor" in run(script, *haswell()).stderr


def test_one_without_avx2_runs_numpy() -> None:
    """It is told why there are no native kernels, and the library loads without an illegal instruction."""
    assert QEMU is not None
    script = "from mainspring.kernels.native import library, why_not\nprint(library(), why_not())"
    expected = "None this processor has none of the instruction sets that mainspring-native is compiled for\n"
    assert printed(script, QEMU, "-cpu", "Nehalem") == expected
