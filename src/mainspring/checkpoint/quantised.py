"""Quantised weights of Hugging Face folders, offered as what they stand for: `x.weight`, in float32.

Theory of operation. What is stored says which layers are quantised: `x.qweight`, `x.weight_packed`, or
`x.weight` in int8 beside its scales. Each becomes one matrix [outputs, inputs] whose rows are computed when
they are asked for; what it is made of is no longer seen. All formats are the same arithmetic,

    weight[row, column] = (code - zero) * scale, zero and scale those of the row and the column's group,

and differ in how codes, zeros and scales lie:

    compressed-tensors  int8: codes as they are; int4, int8 packed: along rows, with 2^(bits-1) added
    GPTQ                packed along columns of the transpose, zeros along its rows (less one, in version 1)
    AWQ                 packed along rows of the transpose, eight columns in the order 0 2 4 6 1 3 5 7

Activations are not quantised here, so W8A8 computes more exactly than its makers had in mind. No kernel takes
these forms yet; the numbers are exact, and the memory that of float32.

An option that is not understood is refused by name: a wrong guess is a model that talks nonsense.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.base.log import get_logger
from mainspring.checkpoint.blocks import Floats
from mainspring.checkpoint.quoting import MAX_QUOTED, quoted
from mainspring.checkpoint.safetensors import WEIGHT_TYPES, ElementSource, RoutedTensors
from mainspring.checkpoint.tensors import TensorInfo

logger = get_logger(__name__)

Ints = npt.NDArray[Any]
Index = tuple[slice, ...]
ALL: Final = slice(None)
MADE_TYPE: Final = "F32"
ROWS: Final = 256  # made at a time
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of eight columns is


# ---- one layer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One quantised matrix. Functions of (begin, end) give what belongs to those rows."""

    shape: tuple[int, int]  # outputs, inputs
    codes: Callable[[int, int], Ints]  # [rows, inputs]
    scales: Callable[[int, int], Floats]  # [rows, groups]
    zeros: Callable[[int, int], Ints] | None  # [rows, groups]
    group_of: Ints | None  # [inputs]; None: one group
    parts: tuple[str, ...]  # tensors that it is made of

    def rows(self, begin: int, end: int) -> Floats:
        scales = self.scales(begin, end)
        codes = self.codes(begin, end).astype(np.int32)
        zeros = None if self.zeros is None else self.zeros(begin, end)
        if self.group_of is not None:
            scales = scales[:, self.group_of]
            zeros = None if zeros is None else zeros[:, self.group_of]
        if zeros is not None:
            codes -= zeros
        with np.errstate(all="ignore"):  # a scale may be infinite: its reader's to judge
            return codes.astype(np.float32) * scales


class _Stored:
    """The tensors of one layer, by their names after the layer's own, with shapes and types judged."""

    def __init__(self, source: ElementSource, held: Container[str], layer: str) -> None:
        self._source = source
        self._held = held
        self._layer = layer
        self.used: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self._layer + name in self._held

    def ints(self, name: str, types: Sequence[str], shape: tuple[int, ...] | None = None) -> Ints:
        self._check(name, types, shape)
        return self._source.elements(self._layer + name)

    def floats(self, name: str, shape: tuple[int, ...]) -> Callable[[Index], Floats]:
        """A function that reads some of them: together, the scales of a large model are large, too."""
        self._check(name, WEIGHT_TYPES, shape)
        stored = self._source.elements(self._layer + name)
        if self._source.info(self._layer + name).type != "BF16":
            return lambda index: stored[index].astype(np.float32)
        return lambda index: (stored[index].astype(np.uint32) << 16).view(np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._source.info(self._layer + name).shape)

    def ignore(self, *names: str) -> None:
        """What is there but not needed."""
        self.used += [self._layer + name for name in names if name in self]

    def group_of(self, name: str, num_inputs: int, num_groups: int, group_size: int) -> Ints | None:
        """Each input's group: as the file has it, or one group after another."""
        if name in self:
            groups = self.ints(name, ("I32", "I64"), (num_inputs,)).astype(np.int64)
            if groups.min() < 0 or groups.max() >= num_groups:
                raise CheckpointError(
                    f"tensor {quoted(self._layer + name)} has groups {groups.min()} to {groups.max()}, "
                    f"expected 0 to {num_groups - 1}"
                )
            return groups
        if num_groups == 1:
            return None
        return np.arange(num_inputs) // group_size

    def refuse(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"tensor {quoted(self._layer + name)} has shape {list(self.shape(name))}; expected {expected}"
        )

    def _check(self, name: str, types: Sequence[str], shape: tuple[int, ...] | None) -> None:
        info = self._source.info(self._layer + name)
        if info.type not in types:
            raise CheckpointError(
                f"tensor {quoted(info.name)} has type {info.type}; expected {' or '.join(types)}"
            )
        if shape is not None and tuple(info.shape) != shape:
            raise self.refuse(name, str(list(shape)))
        self.used.append(self._layer + name)


def _unpacked(words: Ints, shifts: npt.NDArray[np.uint32], bits: int) -> Ints:
    """[...] -> [..., len(shifts)]: the codes in each word of 32 bits."""
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.astype(np.int32)


def _shifts(bits: int) -> npt.NDArray[np.uint32]:
    return np.arange(0, 32, bits, dtype=np.uint32)


def _columns(words: Ints, shifts: npt.NDArray[np.uint32], bits: int, begin: int, end: int) -> Ints:
    """Columns [begin, end) of a matrix that is packed along its rows: [rows, columns / per word]."""
    per_word = len(shifts)
    first = begin // per_word
    codes = _unpacked(np.ascontiguousarray(words[:, first : -(-end // per_word)]), shifts, bits)
    return codes.reshape(len(words), -1)[:, begin - first * per_word : end - first * per_word]


# ---- formats -----------------------------------------------------------------------------------------------


class _Options:
    """A method's options in `quantization_config`: each is read or known to matter to nobody here."""

    def __init__(self, values: Mapping[str, Any], shown: str) -> None:
        self._values = values
        self._shown = shown

    def one_of(self, key: str, allowed: Sequence[Any], default: Any) -> Any:
        value = self._values.get(key, default)
        if not any(type(value) is type(one) and value == one for one in allowed):  # neither True nor 4.0
            raise self.refusal(key, " or ".join(map(str, allowed)))
        return value

    def group_size(self, key: str) -> int:
        """-1: one group for all inputs."""
        value = self._values.get(key, -1)
        value = -1 if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
            raise self.refusal(key, "-1 or a positive integer")
        return value

    def empty(self, *keys: str) -> None:
        for key in keys:
            if self._values.get(key):
                raise self.refusal(key, "none")

    def refuse_others(self, known: frozenset[str]) -> None:
        for key in self._values:
            if key not in known:
                raise CheckpointError(
                    f"{self._shown}.{_shown(key)} is {quoted(self._values[key])}: not supported"
                )

    def refusal(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._shown}.{key} is {quoted(self._values.get(key))}, which is not supported; "
            f"expected {expected}"
        )


def _shown(key: str) -> str:
    return key if key.isprintable() and len(key) <= MAX_QUOTED else quoted(key)


class Scheme(NamedTuple):
    """How a folder is quantised: in words, and what makes a layer of its stored tensors."""

    words: str
    suffix: str  # of the tensor that shows that a layer is quantised
    layer: Callable[[_Stored], Layer]


def _gptq(options: _Options) -> Scheme:
    bits = options.one_of("bits", (4, 8, 2), None)
    group_size = options.group_size("group_size")
    options.one_of("desc_act", (True, False), False)  # g_idx says it
    options.one_of("sym", (True, False), True)  # qzeros say it
    options.one_of("is_marlin_format", (False,), False)
    options.one_of("pack_dtype", ("int32",), "int32")
    version = options.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    options.empty("dynamic")
    options.refuse_others(GPTQ_KNOWN)
    shifts, mask, less = _shifts(bits), (1 << bits) - 1, int(version == "gptq")
    per_word = len(shifts)

    def layer(stored: _Stored) -> Layer:
        packed = stored.ints("qweight", ("I32",))
        if packed.ndim != 2 or packed.shape[1] % per_word:
            raise stored.refuse("qweight", f"[inputs / {per_word}, outputs], the outputs in whole words")
        num_inputs, num_outputs = packed.shape[0] * per_word, packed.shape[1]
        num_groups = -(-num_inputs // group_size) if group_size > 0 else 1
        scales = stored.floats("scales", (num_groups, num_outputs))
        zeros = stored.ints("qzeros", ("I32",), (num_groups, num_outputs // per_word))

        def codes(begin: int, end: int) -> Ints:
            words = np.ascontiguousarray(packed[:, begin:end].T)
            return _unpacked(words, shifts, bits).reshape(end - begin, num_inputs)

        return Layer(
            (num_outputs, num_inputs),
            codes=codes,
            scales=lambda begin, end: scales((ALL, slice(begin, end))).T,
            zeros=lambda begin, end: ((_columns(zeros, shifts, bits, begin, end) + less) & mask).T,
            group_of=stored.group_of("g_idx", num_inputs, num_groups, group_size),
            parts=tuple(stored.used),  # last: now all are known
        )

    return Scheme(f"GPTQ, {bits} bits", "qweight", layer)


GPTQ_KNOWN: Final = frozenset(
    {
        *("quant_method", "bits", "group_size", "desc_act", "sym", "checkpoint_format", "is_marlin_format"),
        *("pack_dtype", "dynamic"),
        # How it was made, and how other programs run it.
        *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment"),
        *(
            "damp_percent",
            "dataset",
            "disable_exllama",
            "exllama_config",
            "hyb_act",
            "lm_head",
            "meta",
            "mse",
        ),
        *("max_input_length", "model_file_base_name", "model_name_or_path", "model_seqlen"),
        *("module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id", "quantizer"),
        *("static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
    }
)


def _awq(options: _Options) -> Scheme:
    bits = options.one_of("bits", (4,), 4)
    options.one_of("w_bit", (4,), 4)
    group_size = max(options.group_size("group_size"), options.group_size("q_group_size"))
    options.one_of("zero_point", (True,), True)
    options.one_of("version", ("gemm", "GEMM"), "gemm")
    options.refuse_others(AWQ_KNOWN)
    shifts = bits * np.array(AWQ_ORDER, np.uint32)
    per_word = len(shifts)

    def layer(stored: _Stored) -> Layer:
        packed = stored.ints("qweight", ("I32",))
        if packed.ndim != 2:
            raise stored.refuse("qweight", f"[inputs, outputs / {per_word}]")
        num_inputs, num_outputs = packed.shape[0], packed.shape[1] * per_word
        num_groups = -(-num_inputs // group_size) if group_size > 0 else 1
        scales = stored.floats("scales", (num_groups, num_outputs))
        zeros = stored.ints("qzeros", ("I32",), (num_groups, num_outputs // per_word))
        return Layer(
            (num_outputs, num_inputs),
            codes=lambda begin, end: _columns(packed, shifts, bits, begin, end).T,
            scales=lambda begin, end: scales((ALL, slice(begin, end))).T,
            zeros=lambda begin, end: _columns(zeros, shifts, bits, begin, end).T,
            group_of=None if num_groups == 1 else np.arange(num_inputs) // group_size,
            parts=tuple(stored.used),
        )

    return Scheme(f"AWQ, {bits} bits", "qweight", layer)


AWQ_KNOWN: Final = frozenset(
    {
        *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version"),
        *("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
        "modules_to_not_convert",
    }
)


def _compressed_tensors(options: _Options) -> Scheme:
    form = options.one_of("format", ("int-quantized", "pack-quantized"), None)
    options.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    options.empty("kv_cache_scheme", "transform_config")
    sparsity = options.one_of("sparsity_config", (None, {}, {"format": "dense"}), None)
    del sparsity  # none, in three spellings
    weights = _one_scheme(options)
    options.refuse_others(COMPRESSED_KNOWN)
    bits = weights.one_of("num_bits", (4, 8), None)
    weights.one_of("type", ("int",), "int")
    strategy = weights.one_of("strategy", ("tensor", "channel", "group"), "tensor")
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    weights.one_of("dynamic", (False,), False)
    weights.one_of(
        "actorder", (None, False, True, "weight", "static", "group", "dynamic"), None
    )  # g_idx says it
    weights.empty("block_structure")
    weights.refuse_others(WEIGHTS_KNOWN)
    group_size = weights.group_size("group_size") if strategy == "group" else -1
    make = _packed_layer if form == "pack-quantized" else _int8_layer
    suffix = "weight_packed" if form == "pack-quantized" else "weight_scale"

    def layer(stored: _Stored) -> Layer:
        return make(stored, bits, group_size, is_symmetric)

    return Scheme(f"compressed-tensors {form}, {bits} bits", suffix, layer)


def _one_scheme(options: _Options) -> _Options:
    """The arguments of weights, which all groups must share."""
    groups = options._values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise options.refusal("config_groups", "an object of groups")
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name, group in groups.items():
        shown = f"quantization_config.config_groups.{_shown(name)}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise CheckpointError(f"{shown}.weights is missing; expected how weights are quantised")
        inner = _Options(group, shown)
        inner.empty("output_activations")
        inner.one_of("format", (None, options._values.get("format")), None)
        inner.refuse_others(
            frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
        )
        found.append((f"{shown}.weights", group["weights"]))
    shown, first = found[0]
    for other, values in found[1:]:
        if any(values.get(key) != first.get(key) for key in WEIGHTS_ARITHMETIC):
            raise CheckpointError(f"{other} is not the same as {shown}: mixed schemes are not supported")
    return _Options(first, shown)


COMPRESSED_KNOWN: Final = frozenset(
    {
        *("quant_method", "format", "quantization_status", "config_groups", "kv_cache_scheme"),
        *("transform_config", "sparsity_config"),
        *("global_compression_ratio", "ignore", "provider", "run_compressed", "version"),
    }
)
WEIGHTS_ARITHMETIC: Final = ("num_bits", "type", "strategy", "symmetric", "group_size")
WEIGHTS_KNOWN: Final = frozenset(
    {*WEIGHTS_ARITHMETIC, "dynamic", "actorder", "block_structure"}
    | {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
)


def _int8_layer(stored: _Stored, bits: int, group_size: int, is_symmetric: bool) -> Layer:
    codes = stored.ints("weight", ("I8",))
    if codes.ndim != 2:
        raise stored.refuse("weight", "two dimensions")
    num_outputs, num_inputs = codes.shape
    scales, num_groups = _row_scales(stored, num_outputs, num_inputs, group_size)
    zeros = None
    if not is_symmetric:
        found = stored.ints("weight_zero_point", ("I8",), stored.shape("weight_scale"))
        zeros = np.broadcast_to(found.reshape(-1, num_groups), (num_outputs, num_groups))
    stored.ignore("input_scale", "input_zero_point", "output_scale", "output_zero_point")
    return Layer(
        (num_outputs, num_inputs),
        codes=lambda begin, end: codes[begin:end],
        scales=scales,
        zeros=None if zeros is None else lambda begin, end: zeros[begin:end].astype(np.int32),
        group_of=stored.group_of("weight_g_idx", num_inputs, num_groups, group_size),
        parts=tuple(stored.used),
    )


def _packed_layer(stored: _Stored, bits: int, group_size: int, is_symmetric: bool) -> Layer:
    shifts, middle = _shifts(bits), 1 << (bits - 1)
    per_word = len(shifts)
    shape = stored.ints("weight_shape", ("I64", "I32"), (2,)).tolist()
    num_outputs, num_inputs = shape
    packed = stored.ints("weight_packed", ("I32",))
    if packed.shape != (num_outputs, -(-num_inputs // per_word)):
        raise stored.refuse("weight_packed", f"[{num_outputs}, {-(-num_inputs // per_word)}], for {shape}")
    scales, num_groups = _row_scales(stored, num_outputs, num_inputs, group_size)
    zeros = None
    if not is_symmetric:
        zeros = stored.ints("weight_zero_point", ("I32",), (-(-num_outputs // per_word), num_groups))
    stored.ignore("input_scale", "input_zero_point", "output_scale", "output_zero_point")

    def zeros_of(begin: int, end: int) -> Ints:
        """They are packed down the rows."""
        assert zeros is not None
        return _columns(zeros.T, shifts, bits, begin, end).T - middle

    return Layer(
        (num_outputs, num_inputs),
        codes=lambda begin, end: _columns(packed[begin:end], shifts, bits, 0, num_inputs) - middle,
        scales=scales,
        zeros=None if zeros is None else zeros_of,
        group_of=stored.group_of("weight_g_idx", num_inputs, num_groups, group_size),
        parts=tuple(stored.used),
    )


def _row_scales(
    stored: _Stored, num_outputs: int, num_inputs: int, group_size: int
) -> tuple[Callable[[int, int], Floats], int]:
    """A function that gives [rows, groups], and how many groups. One scale may be for all rows."""
    num_groups = -(-num_inputs // group_size) if group_size > 0 else 1
    shape = stored.shape("weight_scale")
    allowed: list[tuple[int, ...]] = [(num_outputs, num_groups)]
    if num_groups == 1:
        allowed += [(num_outputs,), (1,), ()]
    if shape not in allowed:
        raise stored.refuse("weight_scale", " or ".join(str(list(one)) for one in allowed))
    scales = stored.floats("weight_scale", shape)
    if shape in ((1,), ()):
        return lambda begin, end: np.broadcast_to(scales(()).reshape(1, 1), (end - begin, 1)), 1
    return lambda begin, end: scales((slice(begin, end),)).reshape(-1, num_groups), num_groups


METHODS: Final[Mapping[str, Callable[[_Options], Scheme]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
}


# ---- the source --------------------------------------------------------------------------------------------


class QuantisedTensors(RoutedTensors):
    """The tensors of `source`, quantised ones as the matrices that they stand for."""

    def __init__(self, source: ElementSource, quantization: Mapping[str, Any]) -> None:
        """quantization: a config's `quantization_config`. Raises `CheckpointError` naming the option or
        tensor that is not supported or does not fit."""
        self.scheme = _read_scheme(quantization)
        self._source = source
        suffix = self.scheme.suffix
        held = set(source.tensor_names)
        layers = {
            f"{name.removesuffix(suffix)}weight": _Stored(source, held, name.removesuffix(suffix))
            for name in source.tensor_names
            if name.endswith(f".{suffix}")
        }
        if not layers:
            raise CheckpointError(
                f"the config says {self.scheme.words}, and no tensor has a name that ends in .{suffix}"
            )
        made = {name: self.scheme.layer(stored) for name, stored in layers.items()}
        self._made = _Made(made, self.scheme.words)
        hidden = {part for layer in made.values() for part in layer.parts}
        self._names = [name for name in source.tensor_names if name not in hidden] + list(made)

    @property
    def tensor_names(self) -> list[str]:
        return list(self._names)

    @property
    def sources(self) -> Sequence[ElementSource]:
        return (self._source, self._made)

    def source_of(self, name: str) -> ElementSource:
        return self._made if name in self._made.layers else self._source


def _read_scheme(quantization: Mapping[str, Any]) -> Scheme:
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"quantization_config.quant_method is {quoted(method)}, which is not supported; "
            f"expected {', '.join(METHODS)}"
        )
    return METHODS[method](_Options(quantization, "quantization_config"))


class _Made:
    """The matrices alone: an `ElementSource` of float32."""

    def __init__(self, layers: Mapping[str, Layer], words: str) -> None:
        self.layers = layers
        self._words = words
        self._lock = threading.Lock()
        self._last: tuple[str, Floats] | None = None  # a packer asks for one tensor many times

    @property
    def tensor_names(self) -> list[str]:
        return list(self.layers)

    def info(self, name: str) -> TensorInfo:
        num_outputs, num_inputs = self.layers[name].shape
        return TensorInfo(name, (num_outputs, num_inputs), MADE_TYPE, 4 * num_outputs * num_inputs, 0)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.elements(name).reshape(-1).view(np.uint8)

    def elements(self, name: str) -> Floats:
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = name, self.dequantise(name)
            return self._last[1]

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        self._tell()
        layer = self.layers[name]
        if out is None:
            out = np.empty(layer.shape, np.float32)
        for begin in range(0, layer.shape[0], ROWS):
            end = min(begin + ROWS, layer.shape[0])
            out[begin:end] = layer.rows(begin, end)
        return out

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        self._tell()
        return self.layers[name].rows(begin, end)

    def is_finite(self, name: str) -> bool:
        """Codes are numbers; scales may be none."""
        layer = self.layers[name]
        return bool(np.isfinite(layer.scales(0, layer.shape[0])).all())

    def drop_pages(self) -> None:
        with self._lock:
            self._last = None

    def close(self) -> None:
        self.drop_pages()

    def _tell(self) -> None:
        """Whoever reads weights learns once what becomes of them."""
        words, self._words = self._words, ""
        if words:
            logger.info(
                "weights: %s, dequantised to float32: no kernel for them yet; quantization q8 or q4 holds "
                "them in less memory",
                words,
            )
