"""The native backend: walks are recorded once and replayed by the C++ library, with the interpreter released.

Theory of operation.
- A walk is the same for every batch (see ops.py), so the first pass records it (`program.record`) and every
  pass replays the recorded steps in one call, on a pool of threads.
- Matrices are packed: see `PackedWeight`. Norms and frequencies stay as they are.
- Results of a request are the same bits in any batch, with any number of threads, for any cut of its prompt.
  They depend on the instruction-set variant and on `activations`, both fixed at start.

This module is the only one that imports `mainspring_native`; where that is not installed, `available` says so
and why, and everything else runs in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from mainspring.base.errors import ConfigError
from mainspring.base.log import get_logger
from mainspring.base.messages import KVCacheConfig
from mainspring.kernels import ops as contract
from mainspring.kernels.collectives import Collectives
from mainspring.kernels.ops import (
    Activation,
    AttentionShape,
    Batch,
    Call,
    ExpertShape,
    Floats,
    Ints,
    Recorder,
    Walk,
    Weight,
)
from mainspring.kernels.program import Reads, Recorded, Storage, Weights, largest, last_written, record

logger = get_logger(__name__)

Activations = Literal["int8", "int16"]
# "auto": 16 bits, of the kind that `_fitting_kv` says.
KVType = Literal["auto", "float32", "float16", "bfloat16", "int8"]

KV_FORMS = {"float32": 0, "float16": 1, "int8": 2, "bfloat16": 3}
KV_BYTES: dict[KVType, int] = {"auto": 2, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
# Per token, KV head, and K or V.
KV_SCALE_BYTES: dict[KVType, int] = {"auto": 0, "float32": 0, "float16": 0, "bfloat16": 0, "int8": 4}
QUANTISED = {"Q8", "Q4"}  # forms of matrices that read encoded rows
MOST_HEAD_SIZE = 256  # of an attention head; a multiple of KV_TILE
MOST_SHARING = 64  # query heads of a KV head
KV_TILE = 16  # tokens: blocks hold whole tiles
API_VERSION = 6  # of the library (native/csrc/module.cpp)


@cache
def library() -> ModuleType | None:
    """`mainspring_native`; None where it is not there, of another version, or of no use to this processor."""
    found = _found()
    if isinstance(found, ModuleType):
        return found
    logger.debug("no native kernels: %s", found)
    return None


def why_not() -> str:
    """Why there are no native kernels here, and what to do."""
    found = _found()
    assert isinstance(found, str), "there are native kernels"
    return found


def _found() -> ModuleType | str:
    try:
        import mainspring_native
    except ImportError as error:
        return f"mainspring-native is not installed ({error}); pip install 'mainspring[native]'"
    version = getattr(mainspring_native, "API_VERSION", 0)
    if version != API_VERSION:
        return (
            f"mainspring-native is of another version (its API is {version}, expected {API_VERSION}); "
            "pip install --upgrade 'mainspring[native]'"
        )
    if not mainspring_native.runnable_variants():
        return "this processor has none of the instruction sets that mainspring-native is compiled for"
    found: ModuleType = mainspring_native
    return found


@dataclass(frozen=True)
class PackedWeight:
    """A matrix as the native kernels hold it: parts, stacked, whose types may differ."""

    parts: tuple[Any, ...]  # of mainspring_native.Matrix

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.parts[0].columns


class NativeOps:
    """A backend on the native library.

    Raises `ConfigError` if there is none, or for a variant that this processor cannot run.
    """

    def __init__(
        self,
        max_rows: int,
        *,
        num_threads: int | None = None,
        variant: str = "auto",
        activations: Activations = "int8",
        kv_type: KVType = "auto",
        collectives: Collectives | None = None,
    ) -> None:
        native = library()
        if native is None:
            raise ConfigError(f"kernels native: {why_not()}; or use kernels numpy")
        self._native = native
        self.collectives = collectives
        self.variant = choose_variant(variant)
        if kv_type == "bfloat16" and not native.has_bf16(self.variant):
            raise ConfigError(
                f"kv_cache_dtype bfloat16: {self.variant} has no products of it on this processor; float16 "
                "is as small"
            )
        self.num_threads = native.num_usable_cpus() if num_threads is None else num_threads
        self.activations: Activations = activations
        self.kv_type: KVType = kv_type
        self.name = f"native {self.variant}"
        self.pool = native.Pool(self.num_threads)
        self._machine = native.Machine(self.pool, self.variant, activations == "int16")
        self._rounds = activations == "int8" and bf16_pays(self.variant)
        self._max_rows = max_rows
        self._recorder = Recorder()
        self._weights: dict[str, Weight] = {}
        self._storages: dict[Storage, int] = {}
        self._ropes: dict[tuple[str, float], int] = {}  # by frequencies and amplitude
        self._programs: dict[tuple[str, object], _Loaded] = {}  # by kind and `_function`
        self._group_of_layer: dict[int, int] = {}
        self._last: dict[str, int] = {}  # buffer -> where its last value is
        logger.info(
            "kernels: %s, %d thread%s, %s activations, %s KV",
            self.name, self.num_threads, "s" if self.num_threads > 1 else "", activations, kv_type,
        )  # fmt: skip

    @property
    def kv_dtype_bytes(self) -> int:
        return KV_BYTES[self.kv_type]

    @property
    def kv_scale_bytes(self) -> int:
        return KV_SCALE_BYTES[self.kv_type]

    # Set-up.

    def add_buffer(self, buffer: str, width: int) -> None:
        self._recorder.add_buffer(buffer, width)

    def add_weight(self, weight: str, value: Weight | PackedWeight) -> None:
        assert isinstance(value, PackedWeight) or (isinstance(value, np.ndarray) and value.ndim == 1), (
            f"{weight}: native matrices are packed"
        )
        self._weights[weight] = value  # type: ignore[assignment]
        self._recorder.weights[weight] = tuple(value.shape)

    def allocate_kv(self, config: KVCacheConfig) -> None:
        if config.block_size % KV_TILE:
            raise ConfigError(
                f"block_size {config.block_size} must be a multiple of {KV_TILE} for native kernels; "
                "or use kernels numpy"
            )
        self._recorder.allocate_kv(config)
        layers: dict[int, tuple[int, int, int]] = {}
        for index, group in enumerate(config.groups):
            for tensor, layer in enumerate(group.layers):
                layers[layer] = (tensor, group.spec.num_kv_heads, group.spec.head_size)
                self._group_of_layer[layer] = index
        self._machine.allocate_kv(
            config.num_blocks,
            config.block_size,
            config.bytes_per_block // max(1, config.num_tensors),
            config.num_tensors,
            [layers[layer] for layer in sorted(layers)],
            KV_FORMS[self._fitting_kv()],
        )

    def _fitting_kv(self) -> str:
        """How K and V are held. Attention on bf16 is faster, where the processor multiplies it so, and rounds
        more: that is for models alone whose activations are rounded anyway."""
        if self.kv_type != "auto":
            return self.kv_type
        packed = [handle for handle, weight in self._weights.items() if isinstance(weight, PackedWeight)]
        reads = [self._reads(handle) for handle in packed]
        rounds = self._rounds and any(each.encoded or each.rounded for each in reads)
        return "bfloat16" if rounds else "float16"

    def release_kv(self) -> None:
        self._machine.release_kv()

    # A pass.

    def run(self, batch: Batch, walk: Walk) -> None:
        contract.check_batch(batch, self._recorder.num_groups)
        loaded = self._programs.get(("batch", _function(walk))) or self._load("batch", walk, None)
        self._last = loaded.last
        loaded.program.run_batch(
            batch.token_ids,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
            [np.ascontiguousarray(table) for table in batch.block_tables],
            list(batch.slot_mapping),
        )

    def run_rows(self, buffer: str, rows: Floats, walk: Walk) -> None:
        assert rows.shape[1] == self._recorder.widths[buffer]
        loaded = self._programs.get(("rows", _function(walk))) or self._load("rows", walk, buffer)
        self._last = loaded.last
        loaded.program.run_rows(loaded.given, np.ascontiguousarray(rows))

    def run_largest(
        self, buffer: str, rows: Floats, walk: Walk, masks: Sequence[Ints | None] = ()
    ) -> tuple[Ints, Floats]:
        """The largest output of the product that ends `walk`, for rows [S, width] put into `buffer`.

        Gives ids [S], the lowest among equals, and the values [S]; -1 and -inf where `masks` allow none. A
        NaN is larger than anything. masks: per row the words of a bit mask of allowed outputs, or None; or
        empty. Outputs that no row may take are not computed.
        """
        loaded = self._programs.get(("largest", _function(walk))) or self._load("largest", walk, buffer)
        num_words = -(-loaded.num_columns // 32)
        ids, values = loaded.program.run_argmax(
            loaded.given,
            np.ascontiguousarray(rows),
            loaded.num_columns,
            [mask if mask is None else _words(mask, num_words) for mask in masks],
        )
        return ids, values

    def read(self, buffer: str) -> Floats:
        rows: Floats = self._machine.rows(self._last[buffer])
        return rows

    def programs(self, kind: str) -> list[Any]:
        """The native programs of a kind ("batch", "rows", "largest") that passes have recorded: a benchmark
        asks them for the times of their steps."""
        return [loaded.program for (found, _), loaded in self._programs.items() if found == kind]

    def row_sampler(self, vocab_size: int) -> Any:
        """What samples rows of logits on these threads, a whole step in one call."""
        return self._native.Sampler(self.pool, self.variant, vocab_size)

    # Recording.

    def _load(self, kind: str, walk: Walk, given: str | None) -> _Loaded:
        self._recorder.calls = []
        walk(self._recorder)  # checks shapes and notes calls; a walk sees no batch
        weights = Weights(self._part_rows, self._reads)
        calls = self._recorder.calls
        if kind == "largest":
            assert given is not None
            recorded = largest(calls, weights, given=given)
        else:
            # the buffer that the walk writes last is what will be read
            has_peers = self.collectives is not None
            recorded = record(calls, weights, given=given, kept=last_written(calls), has_peers=has_peers)
        loaded = self._programs[kind, _function(walk)] = self._build(recorded, given)
        return loaded

    def _build(self, recorded: Recorded, given: str | None) -> _Loaded:
        program = self._native.Program(self._machine)
        num_columns = 0
        for rope in sorted({(i.operands[1], i.operands[5]) for i in recorded.instructions if i.op == "rope"}):
            program.angles(self._rope(*rope))
        for op, operands in recorded.instructions:
            if op == "argmax":
                num_columns = self._parts(operands[1])[0].rows
            getattr(self, f"_add_{op}")(program, *operands)
        last = {name: self._place(storage) for name, storage in recorded.last.items()}
        self._machine.reserve(self._max_rows)
        return _Loaded(program, last, -1 if given is None else last[given], num_columns)

    def _place(self, storage: Storage) -> int:
        if storage not in self._storages:
            place = self._machine.add_buffer(self._recorder.widths[storage.buffer])
            self._machine.want(place, storage.floats, storage.encoded, storage.rounded)
            self._storages[storage] = place
        return self._storages[storage]

    def _rope(self, freqs: str, amplitude: float) -> int:
        if (freqs, amplitude) not in self._ropes:
            frequencies = self._vector(freqs)
            self._ropes[freqs, amplitude] = self._machine.add_rope(frequencies.tolist(), amplitude)
        return self._ropes[freqs, amplitude]

    def _vector(self, weight: str) -> Floats:
        value = self._weights[weight]
        assert isinstance(value, np.ndarray)
        return value

    def _parts(self, weight: str) -> tuple[Any, ...]:
        value: Any = self._weights[weight]
        assert isinstance(value, PackedWeight)
        return value.parts

    def _part_rows(self, weight: str) -> list[int]:
        return [part.rows for part in self._parts(weight)]

    def _reads(self, weight: str) -> Reads:
        forms = {part.form for part in self._parts(weight)}
        rounded = {"BF16"} if self._rounds else set()
        return Reads(bool(forms - QUANTISED - rounded), bool(forms & QUANTISED), bool(forms & rounded))

    def _plan(self, layer: int, shape: AttentionShape) -> int:
        plan: int = self._machine.attention_plan(
            self._group_of_layer[layer],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            shape.scale,
            shape.sliding_window or 0,
            shape.soft_cap,
            shape.causal,
        )
        return plan

    # One method per instruction: storages and handles become numbers and objects.

    def _add_embedding(self, program: Any, out: Storage, weight: str) -> None:
        (part,) = self._parts(weight)
        program.embedding(self._place(out), part)

    def _add_add_position(self, program: Any, out: Storage, weight: str) -> None:
        (part,) = self._parts(weight)
        program.add_position(self._place(out), part)

    def _add_rms_norm(self, program: Any, out: Storage, x: Storage, weight: str, eps: float) -> None:
        program.rms_norm(self._place(out), self._place(x), self._vector(weight), eps)

    def _add_layer_norm(
        self, program: Any, out: Storage, x: Storage, weight: str, bias: str, eps: float
    ) -> None:
        program.layer_norm(self._place(out), self._place(x), self._vector(weight), self._vector(bias), eps)

    def _add_head_norm(
        self, program: Any, x: Storage, first: int, num_heads: int, weight: str, eps: float
    ) -> None:
        program.head_norm(self._place(x), first, num_heads, self._vector(weight), eps)

    def _add_linear(
        self, program: Any, out: Storage, x: Storage, weight: str, then: tuple[Call, ...], add: bool = False
    ) -> None:
        parts, column = [], 0
        for part in self._parts(weight):
            parts.append((part, column))
            column += part.rows
        program.linear(self._place(out), self._place(x), parts, self._pointwise(then), add)

    def _add_linear_add(
        self, program: Any, out: Storage, x: Storage, weight: str, then: tuple[Call, ...]
    ) -> None:
        self._add_linear(program, out, x, weight, then, add=True)

    def _add_gated(
        self, program: Any, out: Storage, x: Storage, weight: str, bias: str | None, activation: Activation
    ) -> None:
        gate, up = self._parts(weight)
        biases = None if bias is None else self._vector(bias)
        program.gated(self._place(out), self._place(x), gate, up, biases, self._activation(activation))

    def _add_argmax(self, program: Any, x: Storage, weight: str, then: tuple[Call, ...]) -> None:
        (part,) = self._parts(weight)
        program.argmax(self._place(x), part, self._pointwise(then))

    def _add_add(self, program: Any, out: Storage, x: Storage) -> None:
        program.add(self._place(out), self._place(x))

    def _add_add_bias(self, program: Any, x: Storage, bias: str) -> None:
        self._change(program, x, Call("add_bias", (bias,)))

    def _add_scale(self, program: Any, x: Storage, factor: float) -> None:
        self._change(program, x, Call("scale", (factor,)))

    def _add_soft_cap(self, program: Any, x: Storage, cap: float) -> None:
        self._change(program, x, Call("soft_cap", (cap,)))

    def _change(self, program: Any, x: Storage, call: Call) -> None:
        (what,) = self._pointwise((call,))
        program.pointwise(self._place(x), self._place(x), what)

    def _add_activate(self, program: Any, out: Storage, x: Storage, activation: Activation) -> None:
        (what,) = self._pointwise((Call("activate", (activation,)),))
        program.pointwise(self._place(out), self._place(x), what)

    def _add_gate(self, program: Any, out: Storage, x: Storage, activation: Activation) -> None:
        program.gate(self._place(out), self._place(x), self._activation(activation))

    def _pointwise(self, calls: tuple[Call, ...]) -> list[Any]:
        """What is done to every element, in turn. The calls are without their buffer."""
        make = self._native.Pointwise
        makers: dict[str, Callable[[Any], Any]] = {
            "add_bias": lambda bias: make.bias(self._vector(bias)),
            "scale": make.multiply,
            "soft_cap": make.soft_cap,
            "activate": lambda activation: make.activate(self._activation(activation)),
        }
        return [makers[op](*operands) for op, operands in calls]

    def _activation(self, activation: Activation) -> Any:
        return getattr(self._native.Activation, activation)

    def _add_encode(self, program: Any, x: Storage) -> None:
        program.encode(self._place(x))

    def _add_scale_rows(self, program: Any, out: Storage, x: Storage) -> None:
        program.scale_rows(self._place(out), self._place(x))

    def _add_experts(
        self,
        program: Any,
        out: Storage,
        x: Storage,
        scores: Storage,
        gate_up: str,
        down: str,
        correction: str | None,
        shape: ExpertShape,
    ) -> None:
        gates, ups, downs = self._parts(gate_up)[::2], self._parts(gate_up)[1::2], self._parts(down)
        copies = 2 * shape.top_k  # gathered rows of each expert begin with a pair: at most one more for each
        hidden = self._recorder.widths[x.buffer]
        buffers = (
            self._work_place("gathered", hidden, copies, self._reads(gate_up)),
            self._work_place("inner", shape.intermediate_size, copies, self._reads(down)),
            self._work_place("parts", hidden, copies, Reads(floats=True)),
        )
        program.experts(
            self._place(out),
            self._place(x),
            self._place(scores),
            buffers,
            list(zip(gates, ups, downs, strict=True)),
            None if correction is None else self._vector(correction),
            (shape.num_experts, shape.top_k, shape.first),
            shape.scoring == "sigmoid",
            shape.normalised,
            shape.scale,
            self._activation(shape.activation),
        )

    def _work_place(self, use: str, width: int, copies: int, reads: Reads) -> int:
        """A buffer for what lies between the parts of a step, the same for all that want such a one."""
        storage = Storage(f"{use} {width} x {copies}", *reads)
        if storage not in self._storages:
            place = self._machine.add_buffer(width, copies)
            self._machine.want(place, *reads)
            self._storages[storage] = place
        return self._storages[storage]

    def _add_rope(
        self,
        program: Any,
        x: Storage,
        freqs: str,
        num_heads: int,
        head_size: int,
        interleaved: bool,
        amplitude: float,
    ) -> None:
        program.rope(self._place(x), self._rope(freqs, amplitude), num_heads, head_size, interleaved)

    def _add_write_kv(self, program: Any, layer: int, qkv: Storage, shape: AttentionShape) -> None:
        program.write_kv(self._place(qkv), layer, self._plan(layer, shape), shape.q_width)

    # Collectives: calls back into Python, while the threads wait.

    @property
    def _peers(self) -> Collectives:
        assert self.collectives is not None
        return self.collectives

    def _add_all_reduce(self, program: Any, x: Storage) -> None:
        machine, place, peers = self._machine, self._place(x), self._peers
        program.outside(lambda: peers.all_reduce(machine.rows(place)))

    def _add_all_gather(self, program: Any, out: Storage, x: Storage) -> None:
        machine, place, source, peers = self._machine, self._place(out), self._place(x), self._peers

        def gather() -> None:
            np.concatenate(peers.all_gather(machine.rows(source)), axis=1, out=machine.rows(place))

        program.outside(gather)

    def _add_send(self, program: Any, x: Storage, rank: int) -> None:
        machine, place, peers = self._machine, self._place(x), self._peers
        program.outside(lambda: peers.send(machine.rows(place), rank))

    def _add_recv(self, program: Any, out: Storage, rank: int) -> None:
        machine, place, peers = self._machine, self._place(out), self._peers
        program.outside(lambda: peers.recv(machine.rows(place), rank))

    def _add_attention(
        self, program: Any, out: Storage, layer: int, qkv: Storage, shape: AttentionShape
    ) -> None:
        program.attention(self._place(out), self._place(qkv), layer, self._plan(layer, shape))


class _Loaded(NamedTuple):
    """A recorded program on the machine."""

    program: Any
    last: dict[str, int]
    given: int  # where rows from outside go; -1: none
    num_columns: int  # of an argmax


def _function(walk: Walk) -> object:
    """A walk without the model whose method it is: that holds this backend, and in a cycle neither would go,
    nor its memory, before the garbage collector found them."""
    return getattr(walk, "__func__", walk)


def _words(mask: Ints, num_words: int) -> Ints:
    """A bit mask in so many words; what a short one does not name is not allowed."""
    if len(mask) < num_words:
        mask = np.concatenate([mask, np.zeros(num_words - len(mask), mask.dtype)])
    return np.ascontiguousarray(mask)


def choose_variant(wanted: str) -> str:
    """The instruction-set variant to use; "auto" is the fastest of those this processor can run."""
    native = library()
    assert native is not None
    runnable: list[str] = native.runnable_variants()
    if wanted == "auto":
        return fastest_variant()
    if wanted not in runnable:
        raise ConfigError(
            f"instruction_set {wanted!r} cannot be used on this processor; expected one of: auto, "
            + ", ".join(runnable)
        )
    return wanted


@cache
def fastest_variant() -> str:
    """By measuring, for some milliseconds: a wider instruction set is not always the faster one."""
    native = library()
    assert native is not None
    runnable: list[str] = native.runnable_variants()
    return max(runnable, key=native.measure_variant) if len(runnable) > 1 else runnable[0]


@cache
def bf16_pays(variant: str) -> bool:
    """Whether weights in bf16 are multiplied faster by activations rounded to it."""
    native = library()
    assert native is not None
    pays: bool = native.bf16_pays(variant)
    return pays


def measured_variants() -> list[tuple[str, float]]:
    """(variant, GOP/s of a small product) of all that this processor can run: for `doctor`."""
    native = library()
    if native is None:
        return []
    measure: Callable[[str], float] = native.measure_variant
    return [(variant, measure(variant)) for variant in native.runnable_variants()]
