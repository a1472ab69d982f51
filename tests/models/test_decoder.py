"""The forward pass on tiny random models: any chunking through any blocks is one pass."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from model_toys import TINY, WINDOWED, Requests, engine_config, kv_config, logits_of, tiny

from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.kernels.ops import Floats, Recorder
from mainspring.models.decoder import Decoder
from mainspring.models.families import from_config
from mainspring.models.loader import load_model
from mainspring.models.spec import weight_table
from mainspring.models.weights import dummy_weights


@pytest.mark.parametrize("config", [TINY, WINDOWED, TINY | {"tie_word_embeddings": True}])
def test_any_chunking_through_scattered_blocks_is_one_whole_pass(config: dict[str, Any]) -> None:
    lengths = [1, 17, 30]
    decoder = tiny(config)
    whole = logits_of(decoder, lengths, [lengths])
    chunked = [[0, 5, 1], [1, 1, 12], [0, 10, 16], [0, 1, 1]]
    single = [[int(i < length) for length in lengths] for i in range(30)]
    for steps in (chunked, single):
        for found, expected in zip(logits_of(decoder, lengths, steps), whole, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(whole[1][3], whole[1][4]), "different positions say different things"


def test_a_window_changes_what_is_said_only_behind_it() -> None:
    """Case B154: a window is honoured. Until token 5 the window of 6 reaches the start."""
    (full,) = logits_of(tiny(), [20], [[20]])
    (windowed,) = logits_of(tiny(WINDOWED), [20], [[20]])
    np.testing.assert_allclose(full[:6], windowed[:6], rtol=1e-5, atol=1e-5)
    assert not np.allclose(full[6:], windowed[6:], atol=1e-2)


def test_logits_are_asked_for_by_rows() -> None:
    decoder = tiny()
    hidden = decoder.forward(Requests([9], 1).batch([9])).copy()
    everything = decoder.logits(hidden).copy()
    assert everything.shape == (9, decoder.vocab_size)
    np.testing.assert_allclose(decoder.logits(hidden[[8, 2]]), everything[[8, 2]], rtol=1e-5, atol=1e-5)


def test_hidden_states_outlive_the_logits_of_their_tiles() -> None:
    decoder = tiny()
    hidden = decoder.forward(Requests([9], 1).batch([9]))
    kept = hidden.copy()
    for start in (0, 3, 6):
        decoder.logits(hidden[start : start + 3])
    np.testing.assert_array_equal(hidden, kept)


def test_more_tokens_than_announced_are_served() -> None:
    (found,) = logits_of(tiny(), [40], [[40]])
    (expected,) = logits_of(tiny(), [40], [[16], [16], [8]])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_two_different_batches_record_the_same_operations() -> None:
    spec = from_config(WINDOWED)
    recorder = Recorder()
    decoder = Decoder(spec, recorder)
    dummy_weights(spec, recorder)
    decoder.initialize_kv(kv_config(decoder))
    programs = []
    for lengths in ([1], [5, 1, 30, 2]):
        hidden = decoder.forward(Requests(lengths, 2).batch(lengths))
        walked = recorder.calls
        decoder.logits(hidden)
        programs.append((walked, recorder.calls))
    assert programs[0] == programs[1]
    layers, head = programs[0]
    ops = [call.op for call in layers]
    assert ops.count("attention") == ops.count("write_kv") == 2
    assert ops.index("write_kv") < ops.index("attention")
    assert [call.op for call in head] == ["linear", "all_gather"]
    used = {operand for call in layers + head for operand in call.operands if isinstance(operand, str)}
    assert used >= {handle for handle, _ in weight_table(spec)}, "every weight is used"


def test_dummy_weights_come_from_the_seed() -> None:
    def loaded(seed: int) -> Floats:
        decoder = load_model(engine_config(json.dumps(TINY), seed=seed))
        decoder.initialize_kv(kv_config(decoder))
        return logits_of(decoder, [5], [[5]])[0]

    np.testing.assert_array_equal(loaded(1), loaded(1))
    assert not np.allclose(loaded(1), loaded(2), atol=0.1)
    assert 0.1 < loaded(1).std() < 10.0


def test_native_kernels_are_refused_until_they_exist() -> None:
    with pytest.raises(ConfigError, match="kernels native"):
        load_model(engine_config(json.dumps(TINY), kernels="native"))


def test_num_threads_reaches_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("mainspring.models.loader.set_blas_threads", asked.append)
    load_model(engine_config(json.dumps(TINY), num_threads=1))
    assert asked == [1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{nonsense", "not JSON"),
        (json.dumps(TINY | {"hidden_act": "gelu"}), "hidden_act is 'gelu'"),
        (json.dumps(TINY | {"num_key_value_heads": 3}), "num_key_value_heads is 3; expected a divisor"),
        (json.dumps(TINY | {"vocab_size": True}), "vocab_size is True; expected a positive integer"),
        (json.dumps(TINY | {"rms_norm_eps": "x"}), "rms_norm_eps is 'x'; expected a positive number"),
        (json.dumps(TINY | {"head_dim": 7}), "head_dim is 7; expected an even"),
        (json.dumps(TINY | {"layer_types": ["sliding_attention"] * 2}), "layer_types"),
        (json.dumps(TINY | {"layer_types": []}), "layer_types"),
        (json.dumps(TINY | {"model_type": "rwkv"}), "model_type is 'rwkv'; expected one of"),
        (json.dumps({k: v for k, v in TINY.items() if k != "hidden_size"}), "hidden_size is missing"),
        ("no/such/config.json", "cannot be read"),
        ("no/such/file.gguf", "no such file"),
    ],
)
def test_wrong_configs_are_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected) as refusal:
        load_model(engine_config(text))
    assert "\n" not in str(refusal.value)
