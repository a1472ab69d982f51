"""Quantised folders: written here by the formats' definitions, a code at a time, and read back as numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from safetensors.numpy import save_file

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.folder import ModelFolder

OUTPUTS, INPUTS, GROUP = 24, 64, 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order in which a word has them, lowest bits first
Tensors = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packed weights are not kept for anybody."""
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))


# ---- the formats' definitions ------------------------------------------------------------------------------


def pack_rows(codes: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Codes of each row, side by side in words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    order = range(per_word) if order is None else order
    words = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for row in range(len(codes)):
        for word in range(words.shape[1]):
            for place, column in enumerate(order):
                at = word * per_word + column
                code = int(codes[row, at]) if at < codes.shape[1] else 0
                assert 0 <= code < 1 << bits
                words[row, word] |= np.uint32(code << (bits * place))
    return words.view(np.int32)


class Quantised:
    """A random matrix in codes, zeros and scales: `values[o, i] = (code - zero of its group) * scale`."""

    def __init__(
        self, bits: int, groups: np.ndarray, *, outputs: int = OUTPUTS, seed: int = 0, scale: str = "f2"
    ) -> None:
        rng = np.random.default_rng(seed)
        num_groups = int(groups.max()) + 1
        self.codes = rng.integers(0, 1 << bits, (outputs, len(groups)))
        self.zeros = rng.integers(1, 1 << bits, (outputs, num_groups))
        self.scales = rng.uniform(0.001, 0.01, (outputs, num_groups)).astype(scale)
        self.groups = groups

    @property
    def values(self) -> np.ndarray:
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups].astype(np.float64)
        return ((self.codes - zeros) * scales).astype(np.float32)


def in_order(inputs: int = INPUTS, group: int = GROUP) -> np.ndarray:
    return np.arange(inputs) // group


def gptq(q: Quantised, bits: int, version: int = 1, with_groups: bool = True) -> Tensors:
    """Everything is turned over; version 1 stores zeros less one."""
    zeros = (q.zeros.T - (version == 1)) % (1 << bits)
    tensors = {
        "qweight": np.ascontiguousarray(pack_rows(q.codes, bits).T),
        "qzeros": pack_rows(zeros, bits),
        "scales": np.ascontiguousarray(q.scales.T),
    }
    return tensors | ({"g_idx": q.groups.astype(np.int32)} if with_groups else {})


def awq(q: Quantised) -> Tensors:
    return {
        "qweight": pack_rows(q.codes.T, 4, AWQ_COLUMNS),
        "qzeros": pack_rows(q.zeros.T, 4, AWQ_COLUMNS),
        "scales": np.ascontiguousarray(q.scales.T),
    }


def packed(q: Quantised, bits: int, symmetric: bool, with_groups: bool = False) -> Tensors:
    """compressed-tensors: codes are signed, and packed with half their range added; zeros down the rows."""
    if symmetric:
        q.zeros[:] = 1 << (bits - 1)
    tensors = {
        "weight_packed": pack_rows(q.codes, bits),
        "weight_scale": q.scales,
        "weight_shape": np.array(q.codes.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_rows(q.zeros.T, bits).T)
    return tensors | ({"weight_g_idx": q.groups.astype(np.int32)} if with_groups else {})


def int8(q: Quantised, symmetric: bool) -> Tensors:
    if symmetric:
        q.zeros[:] = 128
    tensors = {"weight": (q.codes - 128).astype(np.int8), "weight_scale": q.scales}
    return tensors | ({} if symmetric else {"weight_zero_point": (q.zeros - 128).astype(np.int8)})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed(form: str, bits: int, symmetric: bool, strategy: str = "group", **more: Any) -> dict[str, Any]:
    weights = {
        **{"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False},
        **{"group_size": GROUP if strategy == "group" else None, "observer": "minmax", "actorder": None},
    }
    group = {"targets": ["Linear"], "weights": weights | more, "input_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None},
    }


def folder(
    path: Path, layers: Mapping[str, Tensors], quantization: Any, others: Tensors | None = None
) -> Path:
    path.mkdir(exist_ok=True)
    named = {f"{layer}.{name}": value for layer, found in layers.items() for name, value in found.items()}
    save_file(named | (others or {}), path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": quantization})
    )
    return path


# ---- what is read back -------------------------------------------------------------------------------------

SHUFFLED = np.random.default_rng(5).permutation(in_order())
ONE = np.zeros(INPUTS, int)
CASES: dict[str, tuple[Quantised, Callable[[Quantised], Tensors], dict[str, Any]]] = {
    "gptq": (Quantised(4, in_order()), lambda q: gptq(q, 4), GPTQ),
    "gptq without g_idx": (Quantised(4, in_order()), lambda q: gptq(q, 4, 1, False), GPTQ),
    "gptq act-order": (Quantised(4, SHUFFLED), lambda q: gptq(q, 4), GPTQ | {"desc_act": True}),
    "gptq 8 bits": (Quantised(8, in_order()), lambda q: gptq(q, 8), GPTQ | {"bits": 8}),
    "gptq 2 bits": (Quantised(2, in_order(), outputs=32), lambda q: gptq(q, 2), GPTQ | {"bits": 2}),
    "gptq v2": (Quantised(4, in_order()), lambda q: gptq(q, 4, 2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq one group": (Quantised(4, ONE), lambda q: gptq(q, 4), GPTQ | {"group_size": -1}),
    "gptq float32": (Quantised(4, in_order(), scale="f4"), lambda q: gptq(q, 4), GPTQ),
    "awq": (Quantised(4, in_order()), awq, AWQ),
    "awq one group": (Quantised(4, ONE), awq, AWQ | {"group_size": -1}),
    "awq old spelling": (
        Quantised(4, in_order()),
        awq,
        {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"},
    ),
    "int4": (
        Quantised(4, in_order()),
        lambda q: packed(q, 4, True),
        compressed("pack-quantized", 4, True),
    ),
    "int4 zeros": (
        Quantised(4, in_order(), outputs=20),
        lambda q: packed(q, 4, False),
        compressed("pack-quantized", 4, False),
    ),
    "int4 act-order": (
        Quantised(4, SHUFFLED),
        lambda q: packed(q, 4, True, True),
        compressed("pack-quantized", 4, True, actorder="group"),
    ),
    "int4 channel, odd": (
        Quantised(4, np.zeros(61, int), outputs=19),
        lambda q: packed(q, 4, False),
        compressed("pack-quantized", 4, False, "channel"),
    ),
    "int8 packed": (
        Quantised(8, in_order()),
        lambda q: packed(q, 8, True),
        compressed("pack-quantized", 8, True),
    ),
    "W8A8": (Quantised(8, ONE), lambda q: int8(q, True), compressed("int-quantized", 8, True, "channel")),
    "W8A8 zeros": (
        Quantised(8, ONE),
        lambda q: int8(q, False) | {"input_scale": np.ones(1, np.float32)},
        compressed("int-quantized", 8, False, "channel"),
    ),
    "int8 groups": (Quantised(8, in_order()), lambda q: int8(q, True), compressed("int-quantized", 8, True)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_their_codes_stand_for(case: str, tmp_path: Path) -> None:
    """Exactly: the product of a code and a scale of 16 bits is a float32."""
    q, write, quantization = CASES[case]
    path = folder(tmp_path / "m", {"a.q": write(q)}, quantization, {"n.weight": np.ones(3, np.float32)})
    with ModelFolder(path) as found:
        assert found.tensor_names == ["n.weight", "a.q.weight"]
        assert "quantization_config" not in found.config
        info = found.info("a.q.weight")
        assert (info.shape, info.type) == (q.codes.shape, "F32")
        np.testing.assert_array_equal(found.dequantise("a.q.weight"), q.values)
        out = np.empty(q.codes.shape, np.float32)
        assert found.dequantise("a.q.weight", out) is out
        np.testing.assert_array_equal(out, q.values)
        np.testing.assert_array_equal(found.dequantise_rows("a.q.weight", 3, 18), q.values[3:18])
        np.testing.assert_array_equal(found.elements("a.q.weight"), q.values)
        for _ in range(2):
            assert found.raw("a.q.weight").tobytes() == q.values.tobytes()
            found.drop_pages()
        assert found.is_finite("a.q.weight")
        assert found.dequantise("n.weight").tolist() == [1, 1, 1]


def test_more_rows_than_are_made_at_a_time(tmp_path: Path) -> None:
    q = Quantised(4, in_order(16, 8), outputs=520)
    with ModelFolder(folder(tmp_path, {"a": gptq(q, 4)}, GPTQ | {"group_size": 8})) as found:
        np.testing.assert_array_equal(found.dequantise("a.weight"), q.values)


def test_one_scale_for_all_rows_and_bfloat16(tmp_path: Path) -> None:
    q = Quantised(8, ONE)
    written = int8(q, True) | {"weight_scale": np.array([0.5], np.float32)}
    with ModelFolder(
        folder(tmp_path / "t", {"a": written}, compressed("int-quantized", 8, True, "tensor"))
    ) as found:
        np.testing.assert_array_equal(found.dequantise("a.weight"), (q.codes - 128) * np.float32(0.5))
    path = folder(tmp_path / "b", {"a": int8(q, True)}, compressed("int-quantized", 8, True, "channel"))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F16"', b'"BF16"').replace(b"}}  ", b"}} ", 1))
    bits = q.scales.view(np.uint16).astype(np.uint32) << 16
    with ModelFolder(path) as found:
        np.testing.assert_array_equal(found.dequantise("a.weight"), (q.codes - 128) * bits.view(np.float32))


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    q = Quantised(4, in_order())
    q.scales[3, 1] = np.nan
    with ModelFolder(folder(tmp_path, {"a": awq(q)}, AWQ)) as found:
        assert not found.is_finite("a.weight")
        assert np.isnan(found.dequantise("a.weight")).sum() == GROUP


def test_what_becomes_of_them_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ModelFolder(folder(tmp_path, {"a": awq(Quantised(4, in_order()))}, AWQ)) as found:
        assert caplog.text == ""
        found.dequantise("a.weight")
        found.raw("a.weight")
    assert caplog.text.count("weights: AWQ, 4 bits, dequantised to float32: no kernel for them yet") == 1


# ---- a whole model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
def test_a_model_computes_as_with_plain_weights(kernels: str, tmp_path: Path) -> None:
    """The same folder twice, quantised and not: the same tokens and, to the last bit, the same logprobs."""
    stored, values = tiny_llama.vectors(), tiny_llama.vectors()
    for i, layer in enumerate(tiny_llama.LAYERS):
        for j, (name, (outputs, inputs)) in enumerate(tiny_llama.MATRICES.items()):
            q = Quantised(4, in_order(inputs), outputs=outputs, seed=10 * i + j)
            stored |= {f"{layer}.{name}.{part}": value for part, value in gptq(q, 4).items()}
            values[f"{layer}.{name}.weight"] = q.values
    quantised = tiny_llama.write(tmp_path / "q", stored, {**tiny_llama.CONFIG, "quantization_config": GPTQ})
    plain = tiny_llama.write(tmp_path / "p", values)
    assert tiny_llama.said(quantised, kernels) == tiny_llama.said(plain, kernels)


# ---- what is refused ---------------------------------------------------------------------------------------


def changed(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**values, **more}


CT = compressed("pack-quantized", 4, True)
MIXED = changed(
    CT, config_groups={**CT["config_groups"], "b": compressed("x", 8, True)["config_groups"]["group_0"]}
)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method is 'bitsandbytes', which is not supported; expected awq, c",
        ),
        ({"bits": 4}, "quant_method is None, which is not supported; expected awq, compressed-tensors, gptq"),
        ([1], r"quantization_config is \[1\]; expected an object of options"),
        (
            changed(GPTQ, bits=3),
            "quantization_config.bits is 3, which is not supported; expected 4 or 8 or 2",
        ),
        (changed(GPTQ, bits=4.0), "quantization_config.bits is 4.0, which is not supported"),
        (changed(GPTQ, **{"a\nb": 1}), r"quantization_config.'a\\nb' is 1: not supported"),
        (changed(GPTQ, bits=True), "quantization_config.bits is True, which is not supported"),
        ({"quant_method": "gptq"}, "quantization_config.bits is None, which is not supported"),
        (
            changed(GPTQ, group_size=0),
            "quantization_config.group_size is 0, which is not supported; expected -1 or",
        ),
        (changed(GPTQ, is_marlin_format=True), "quantization_config.is_marlin_format is True"),
        (changed(GPTQ, checkpoint_format="marlin"), "quantization_config.checkpoint_format is 'marlin'"),
        (changed(GPTQ, dynamic={"-:x": {}}), "quantization_config.dynamic is .*expected none"),
        (changed(GPTQ, rotation="hadamard"), "quantization_config.rotation is 'hadamard': not supported"),
        (changed(AWQ, version="gemv"), "quantization_config.version is 'gemv'"),
        (changed(AWQ, zero_point=False), "quantization_config.zero_point is False"),
        (changed(CT, format="nvfp4-pack-quantized"), "quantization_config.format is 'nvfp4-pack-quantized'"),
        (
            changed(CT, kv_cache_scheme={"num_bits": 8}),
            "quantization_config.kv_cache_scheme is .*expected none",
        ),
        (changed(CT, sparsity_config={"format": "sparse-24"}), "quantization_config.sparsity_config is"),
        (changed(CT, transform_config={"a": 1}), "quantization_config.transform_config is"),
        (changed(CT, config_groups={}), r"config_groups is \{\}, .*expected an object of groups"),
        (changed(CT, config_groups={"a": {}}), "quantization_config.config_groups.a.weights is missing"),
        (MIXED, r"config_groups\.b\.weights is not the same as .*\.group_0\.weights: mixed schemes are not"),
        (
            compressed("pack-quantized", 4, True, "block"),
            r"config_groups\.group_0\.weights\.strategy is 'block'",
        ),
        (compressed("float-quantized", 8, True), "quantization_config.format is 'float-quantized'"),
        (compressed("pack-quantized", 4, True, type="float"), r"weights\.type is 'float'"),
        (compressed("pack-quantized", 4, True, rotation=1), r"weights\.rotation is 1: not supported"),
        (GPTQ, r"the config says GPTQ, 4 bits, and no tensor has a name that ends in \.qweight"),
    ],
)
def test_options_that_are_not_understood(quantization: Any, expected: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"a": {"weight": np.ones((2, 2), np.float32)}}, quantization)
    with pytest.raises(CheckpointError, match=f"^{path}: .*{expected}") as caught:
        ModelFolder(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "quantization", "expected"),
    [
        ({"qweight": np.zeros((8, 24), np.float32)}, GPTQ, "tensor 'a.qweight' has type F32; expected I32"),
        (
            {"qweight": np.zeros(8, np.int32)},
            GPTQ,
            r"tensor 'a.qweight' has shape \[8\]; expected \[inputs / 8, out",
        ),
        ({"qweight": np.zeros((8, 20), np.int32)}, GPTQ, r"tensor 'a.qweight' has shape \[8, 20\]; expected"),
        (
            {"scales": np.zeros((3, 24), np.float16)},
            GPTQ,
            r"'a.scales' has shape \[3, 24\]; expected \[4, 24\]",
        ),
        (
            {"qzeros": np.zeros((4, 4), np.int32)},
            GPTQ,
            r"tensor 'a.qzeros' has shape \[4, 4\]; expected \[4, 3\]",
        ),
        ({"qzeros": None}, GPTQ, "no tensor 'a.qzeros' among its 3"),
        ({"g_idx": np.full(64, 4, np.int32)}, GPTQ, "tensor 'a.g_idx' has groups 4 to 4, expected 0 to 3"),
        ({"g_idx": np.full(64, -1, np.int32)}, GPTQ, "tensor 'a.g_idx' has groups -1 to -1, expected 0 to 3"),
        (
            {"weight_shape": np.array([24, 65])},
            CT,
            r"'a.weight_packed' has shape \[24, 8\]; expected \[24, 9\], fo",
        ),
        (
            {"weight_shape": np.array([-24, 64])},
            CT,
            r"'a.weight_packed' has shape \[24, 8\]; expected \[-24, 8\]",
        ),
        (
            {"weight_scale": np.ones((24, 1), np.float16)},
            CT,
            r"'a.weight_scale' has shape \[24, 1\]; expected \[24, 4",
        ),
        (
            {"weight_scale": np.ones((24, 4), np.int8)},
            CT,
            "'a.weight_scale' has type I8; expected F32 or F16 or BF16",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    tensors: dict[str, Any], quantization: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    q = Quantised(4, in_order())
    whole = gptq(q, 4) if quantization is GPTQ else packed(q, 4, True)
    kept = {name: value for name, value in {**whole, **tensors}.items() if value is not None}
    with pytest.raises(CheckpointError, match=expected) as caught:
        ModelFolder(folder(tmp_path / "m", {"a": kept}, quantization))
    assert "\n" not in str(caught.value)


def test_int8_weights_of_another_type(tmp_path: Path) -> None:
    """Weights of 8-bit floats are not taken for whole numbers."""
    q = Quantised(8, ONE)
    path = folder(tmp_path / "m", {"a": int8(q, True)}, compressed("int-quantized", 8, True, "channel"))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"I8"', b'"U8"'))
    with pytest.raises(CheckpointError, match=r"tensor 'a\.weight' has type U8; expected I8"):
        ModelFolder(path)
