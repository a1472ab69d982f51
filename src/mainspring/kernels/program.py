"""From the operations of a walk to the steps of a native program: what is fused, which rows are encoded.

Theory of operation.
- `record` rewrites a list of calls a few times, each time one fusion, then decides for every value whether
  its readers want floats, encoded rows or both. It is a pure function and knows no native code.
- A buffer's name is not a value: `normed` is written many times. Between two writes it is one *value*, read
  by what comes between, and each value gets the storage its own readers want. So the last norm, whose rows
  are read from outside, keeps floats, while the norms inside the layers keep only what their products read.
- Fusions: a product whose result is only added to another buffer adds it itself; gate, up and SwiGLU are one
  step; so are rotation and keeping keys and values. Norms, sums, activations and attention write encoded rows
  themselves; where a product's result is read encoded, or rows come from outside, a step is put in. So it is
  after an attention whose KV heads share out a row in parts that are no whole blocks, which it could not
  encode one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mainspring.kernels.ops import Call


class Storage(NamedTuple):
    """A buffer as its readers want it. Equal ones are the same memory."""

    buffer: str
    floats: bool
    encoded: bool


class Instruction(NamedTuple):
    """One native step. Operands that were buffers of the calls are `Storage`s now."""

    op: str
    operands: tuple[Any, ...]


class Recorded(NamedTuple):
    instructions: list[Instruction]
    last: dict[str, Storage]  # where the last value of a buffer is


class Weights(NamedTuple):
    """What has to be known of weights to fuse: by handle, the rows of each stacked part."""

    part_rows: Callable[[str], Sequence[int]]
    reads_encoded: Callable[[str], tuple[bool, bool]]  # (some part wants floats, some part encoded rows)


BLOCK = 32  # columns that are encoded together
IN_PLACE = {"add": 0, "rope": 0, "linear_add": 0, "rope_write": 0, "encode": 0}  # the operand that is changed
WRITES = {"embedding": 0, "rms_norm": 0, "linear": 0, "gate": 0, "gated": 0, "attention": 0}
READS = {  # the operands that are read as floats
    "rms_norm": (1,),
    "add": (0, 1),
    "gate": (1,),
    "rope": (0,),
    "rope_write": (0,),
    "write_kv": (1,),
    "attention": (2,),
    "linear_add": (0,),
}
PRODUCTS = {"linear": (1, 2), "linear_add": (1, 2), "gated": (1, 2), "argmax": (0, 1)}  # (input, weight)
ENCODE_THEMSELVES = {"embedding", "rms_norm", "add", "gate", "gated", "attention"}


def record(calls: Sequence[Call], weights: Weights, *, given: str | None, kept: str | None) -> Recorded:
    """The program of `calls`.

    given: a buffer whose rows come from outside; kept: one whose last value is read as floats afterwards.
    Raises `NotImplementedError` for an operation that has no native step.
    """
    calls = _fuse_adds(_one_rank(calls))
    calls = _fuse_rotations(_fuse_gates(calls, weights))
    return _store(calls, weights, given, kept)


def largest(calls: Sequence[Call], weights: Weights, *, given: str) -> Recorded:
    """The program of `calls` whose last product's largest output is wanted, and not its outputs."""
    *before, last = _one_rank(calls)
    assert last.op == "linear", f"{last.op} ends a walk of which the largest output is wanted"
    _, x, weight = last.operands
    return _store([*before, Call("argmax", (x, weight))], weights, given, None)


# ---- rewrites ----------------------------------------------------------------------------------------------


def _one_rank(calls: Sequence[Call]) -> list[Call]:
    """Collectives of one rank are nothing."""
    kept = []
    for call in calls:
        if call.op in ("send", "recv") or (call.op == "all_gather" and call.operands[0] != call.operands[1]):
            raise NotImplementedError(f"{call.op}: the native backend is one rank")
        if call.op not in ("all_reduce", "all_gather"):
            kept.append(call)
    return kept


def _fuse_adds(calls: list[Call]) -> list[Call]:
    """linear(b, x, w); add(h, b): linear_add(h, x, w), where nothing else reads b."""

    def fused(first: Call, second: Call, rest: Sequence[Call]) -> Call | None:
        if first.op != "linear" or second.op != "add":
            return None
        branch, x, weight = first.operands
        out, added = second.operands
        if added != branch or out in (branch, x) or not _is_dead(branch, rest):
            return None
        return Call("linear_add", (out, x, weight))

    return _pairs(calls, fused)


def _fuse_gates(calls: list[Call], weights: Weights) -> list[Call]:
    """linear(g, x, w); gate(out, g, activation): gated(out, x, w, activation), where nothing else reads g."""

    def fused(first: Call, second: Call, rest: Sequence[Call]) -> Call | None:
        if first.op != "linear" or second.op != "gate":
            return None
        gate_up, x, weight = first.operands
        out, source, activation = second.operands
        parts = weights.part_rows(weight)
        halves = len(parts) == 2 and parts[0] == parts[1] and parts[0] % BLOCK == 0
        if source != gate_up or out == x or not halves or not _is_dead(gate_up, rest):
            return None
        return Call("gated", (out, x, weight, activation))

    return _pairs(calls, fused)


def _fuse_rotations(calls: list[Call]) -> list[Call]:
    """rope(x, ...); write_kv(layer, x, shape): rope_write."""

    def fused(first: Call, second: Call, rest: Sequence[Call]) -> Call | None:
        del rest
        if first.op != "rope" or second.op != "write_kv" or second.operands[1] != first.operands[0]:
            return None
        layer, _, shape = second.operands
        return Call("rope_write", (*first.operands, layer, shape))

    return _pairs(calls, fused)


def _pairs(calls: list[Call], fused: Callable[[Call, Call, Sequence[Call]], Call | None]) -> list[Call]:
    result: list[Call] = []
    index = 0
    while index < len(calls):
        both = fused(calls[index], calls[index + 1], calls[index + 2 :]) if index + 1 < len(calls) else None
        result.append(both or calls[index])
        index += 2 if both else 1
    return result


def _is_dead(buffer: str, rest: Sequence[Call]) -> bool:
    """Whether `buffer` is written before it is read."""
    for call in rest:
        reads = {call.operands[i] for i in READS.get(call.op, ())}
        if call.op in PRODUCTS:
            reads.add(call.operands[PRODUCTS[call.op][0]])
        if buffer in reads:
            return False
        if call.op in WRITES and call.operands[WRITES[call.op]] == buffer:
            return True
    return True


# ---- storage -----------------------------------------------------------------------------------------------


class _Value:
    """What a buffer holds from one write to the next."""

    def __init__(self, buffer: str, writer: Call | None) -> None:
        self.buffer = buffer
        self.writer = writer  # the operation that wrote it last; None: rows from outside
        self.floats = not _encodes(writer)
        self.encoded = False

    def storage(self) -> Storage:
        return Storage(self.buffer, self.floats or not self.encoded, self.encoded)


def _store(calls: Sequence[Call], weights: Weights, given: str | None, kept: str | None) -> Recorded:
    values: dict[str, _Value] = {} if given is None else {given: _Value(given, None)}
    steps: list[tuple[str, list[Any]]] = []
    for call in calls:
        operands = list(call.operands)
        if call.op not in WRITES and call.op not in READS and call.op not in PRODUCTS:
            raise NotImplementedError(f"{call.op} has no native kernel")
        for index in READS.get(call.op, ()):
            value = values[operands[index]]
            value.floats = True
            operands[index] = value
        if call.op in PRODUCTS:
            source, weight = PRODUCTS[call.op]
            value = values[operands[source]]
            floats, encoded = weights.reads_encoded(operands[weight])
            value.floats |= floats
            if encoded and not value.encoded:
                value.encoded = True
                if not _encodes(value.writer):
                    steps.append(("encode", [value]))
            operands[source] = value
        if call.op in WRITES:
            written = values[operands[0]] = _Value(operands[0], call)
            operands[0] = written
        elif call.op in IN_PLACE:
            _rewrite(operands[0], call)
        steps.append((call.op, operands))
    last = values[kept] if kept is not None else None
    if last is not None:
        last.floats = True
    instructions = [
        Instruction(op, tuple(o.storage() if isinstance(o, _Value) else o for o in operands))
        for op, operands in steps
    ]
    return Recorded(instructions, {name: value.storage() for name, value in values.items()})


def _encodes(writer: Call | None) -> bool:
    """Whether an operation can write encoded rows as well."""
    if writer is None or writer.op not in ENCODE_THEMSELVES:
        return False
    if writer.op != "attention":
        return True
    shape = writer.operands[3]
    part: int = shape.num_heads // shape.num_kv_heads * shape.head_size  # of a row, by one KV head
    return part % BLOCK == 0


def _rewrite(value: Any, call: Call) -> None:
    """An operation in place: the same storage, and what was encoded is stale unless the writer encodes."""
    assert isinstance(value, _Value)
    assert not value.encoded, f"{call.op} changes {value.buffer}, whose encoded rows were read already"
    value.writer = call
