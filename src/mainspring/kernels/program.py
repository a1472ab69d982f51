"""From the operations of a walk to the steps of a native program: what is fused, which rows are encoded.

Theory of operation.
- `record` rewrites a list of calls a few times, each time one fusion, then decides for every value whether
  its readers want floats, encoded rows, rounded ones or several of these. It is a pure function and knows no
  native code.
- A buffer's name is not a value: `normed` is written many times. Between two writes it is one *value*, read
  by what comes between, and each value gets the storage its own readers want. So the last norm, whose rows
  are read from outside, keeps floats, while the norms inside the layers keep only what their products read.
- Fusions: a product does to its result what follows element by element (bias, factor, cap, activation), and
  where that is only added to another buffer, it adds it itself; gate, up and what joins them are one step.
  Steps over rows are fused by the machine that replays them.
- Norms, sums, activations, products and attention write encoded rows themselves; where others changed a
  buffer, or rows come from outside, a step is put in. So it is after a product or an attention that shares
  out a row in parts that are no whole blocks, which it could not encode one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mainspring.kernels.ops import Call


class Storage(NamedTuple):
    """A buffer as its readers want it. Equal ones are the same memory."""

    buffer: str
    floats: bool
    encoded: bool
    rounded: bool = False


class Instruction(NamedTuple):
    """One native step. Operands that were buffers of the calls are `Storage`s now."""

    op: str
    operands: tuple[Any, ...]


class Recorded(NamedTuple):
    instructions: list[Instruction]
    last: dict[str, Storage]  # where the last value of a buffer is


class Reads(NamedTuple):
    """How the parts of a weight want what they are multiplied with."""

    floats: bool = False  # some part does
    encoded: bool = False
    rounded: bool = False


class Weights(NamedTuple):
    """What has to be known of weights to fuse: by handle, the rows of each stacked part."""

    part_rows: Callable[[str], Sequence[int]]
    reads: Callable[[str], Reads]


BLOCK = 32  # columns that are encoded together
POINTWISE = ("add_bias", "scale", "soft_cap")  # in place; a product does them itself
# Operations by what they do to their first operand: it gets a new value, or the one that it has is changed.
WRITES = (
    *("embedding", "rms_norm", "layer_norm", "linear", "activate", "gate", "gated", "attention"),
    *("recv", "all_gather", "experts"),
)
CHANGES = (*POINTWISE, "add", "add_position", "head_norm", "rope", "linear_add", "all_reduce", "scale_rows")
READS = {  # the other operand that is read as floats
    "rms_norm": 1,
    "layer_norm": 1,
    "add": 1,
    "activate": 1,
    "gate": 1,
    "write_kv": 1,
    "attention": 2,
    "experts": 2,
    "scale_rows": 1,
    "send": 0,
    "all_gather": 1,
}
PRODUCTS = {  # (input, weight)
    "linear": (1, 2),
    "linear_add": (1, 2),
    "gated": (1, 2),
    "experts": (1, 3),
    "argmax": (0, 1),
}
DO_NOT_ENCODE = ("head_norm", "rope", "all_reduce", "recv", "all_gather")


def record(
    calls: Sequence[Call],
    weights: Weights,
    *,
    given: str | None,
    kept: str | None,
    has_peers: bool = False,
) -> Recorded:
    """The program of `calls`.

    given: a buffer whose rows come from outside; kept: one whose last value is read as floats afterwards;
    has_peers: there are other ranks, so collectives are steps.
    Raises `NotImplementedError` for an operation that has no native step.
    """
    calls = list(calls) if has_peers else _one_rank(calls)
    return _store(_fuse_products(calls, weights), weights, given, kept)


def largest(calls: Sequence[Call], weights: Weights, *, given: str) -> Recorded:
    """The program of `calls` whose last product's largest output is wanted, and not its outputs."""
    *before, last = _fuse_products(_one_rank(calls), weights)
    assert last.op == "linear", f"{last.op} ends a walk of which the largest output is wanted"
    _, x, weight, then = last.operands
    return _store([*before, Call("argmax", (x, weight, then))], weights, given, None)


def last_written(calls: Sequence[Call]) -> str:
    """The buffer that a walk writes last."""
    for call in reversed(calls):
        if call.op in WRITES or call.op in CHANGES:
            buffer: str = call.operands[0]
            return buffer
    raise NotImplementedError("a walk that writes no buffer")


# ---- rewrites ----------------------------------------------------------------------------------------------


def _one_rank(calls: Sequence[Call]) -> list[Call]:
    """Collectives of one rank are nothing."""
    kept = []
    for call in calls:
        if call.op in ("send", "recv") or (call.op == "all_gather" and call.operands[0] != call.operands[1]):
            raise NotImplementedError(f"{call.op}: there is one rank")
        if call.op not in ("all_reduce", "all_gather"):
            kept.append(call)
    return kept


def _fuse_products(calls: list[Call], weights: Weights) -> list[Call]:
    """Products with what follows them, where it can be part of them: of

    linear        (out, x, weight, then)
    linear_add    (out, x, weight, then): added to `out`
    gated         (out, x, weight, bias or None, activation)

    `then` are calls without the buffer, done to every element of the product in turn.
    """
    result: list[Call] = []
    index = 0
    while index < len(calls):
        call = calls[index]
        index += 1
        if call.op == "linear":
            call, index = _fuse_product(call, calls, index, weights)
        result.append(call)
    return result


def _fuse_product(product: Call, calls: list[Call], index: int, weights: Weights) -> tuple[Call, int]:
    """`product` with what it can do of the calls from `index` on, and the index of the first that is left."""
    out, x, weight = product.operands
    assert out != x, f"a product of {x} into itself"
    then: list[Call] = []
    while index < len(calls):
        op, operands = calls[index]
        if op in POINTWISE and operands[0] == out:
            then.append(Call(op, operands[1:]))
            index += 1
            continue
        if op not in ("activate", "add", "gate") or operands[1] != out:
            break
        target = operands[0]
        if target == x or not (target == out or _is_dead(out, calls, index + 1)):
            break
        if op == "activate":
            then.append(Call(op, operands[2:]))
            out = target
            index += 1
            continue
        if op == "add" and target != out:
            return Call("linear_add", (target, x, weight, tuple(then))), index + 1
        only_bias = [call.op for call in then] in ([], ["add_bias"])
        if op == "gate" and only_bias and _are_halves(weights.part_rows(weight)):
            bias = then[0].operands[0] if then else None
            return Call("gated", (target, x, weight, bias, operands[2])), index + 1
        break
    return Call("linear", (out, x, weight, tuple(then))), index


def _are_halves(rows: Sequence[int]) -> bool:
    """Whether a gate and what it is for can be computed, and encoded, side by side."""
    return len(rows) == 2 and rows[0] == rows[1] and rows[0] % BLOCK == 0


def _is_dead(buffer: str, calls: Sequence[Call], index: int) -> bool:
    """Whether `buffer` is written before it is read, from `index` on."""
    for call in itertools.islice(calls, index, None):
        op, operands = call
        sources = [source for source in (READS.get(op), PRODUCTS.get(op, (None,))[0]) if source is not None]
        if any(operands[source] == buffer for source in sources):
            return False
        if operands[0] == buffer and (op in CHANGES or op in WRITES):
            return op in WRITES
    return True


# ---- storage -----------------------------------------------------------------------------------------------


class _Value:
    """What a buffer holds from one write to the next, and the storage that it gets: known at the end."""

    def __init__(self, buffer: str, encodes: bool) -> None:
        self.buffer = buffer
        self.floats = not encodes
        self.encoded = self.rounded = False
        # Whether encoded and rounded rows, where there are any, are those of the floats: whoever can encode
        # does both.
        self.is_fresh = encodes

    def storage(self) -> Storage:
        floats = self.floats or not (self.encoded or self.rounded)
        return Storage(self.buffer, floats, self.encoded, self.rounded)


def _store(calls: Sequence[Call], weights: Weights, given: str | None, kept: str | None) -> Recorded:
    values: dict[str, _Value] = {} if given is None else {given: _Value(given, encodes=False)}
    steps: list[tuple[str, list[Any]]] = []
    for call in calls:
        operands = list(call.operands)
        if call.op not in {*WRITES, *CHANGES, *READS, *PRODUCTS}:
            raise NotImplementedError(f"{call.op} has no native kernel")
        if call.op in READS:
            value = values[operands[READS[call.op]]]
            value.floats = True
            operands[READS[call.op]] = value
        if call.op in PRODUCTS:
            source, weight = PRODUCTS[call.op]
            value = values[operands[source]]
            reads = weights.reads(operands[weight])
            value.floats |= reads.floats
            value.encoded |= reads.encoded
            value.rounded |= reads.rounded
            if (reads.encoded or reads.rounded) and not value.is_fresh:
                value.is_fresh = True
                steps.append(("encode", [value]))
            operands[source] = value
        if call.op in WRITES:
            value = _Value(operands[0], _encodes(call, weights))
            values[operands[0]] = value
            operands[0] = value
        elif call.op in CHANGES:
            value = values[operands[0]]
            value.floats = True
            value.is_fresh = _encodes(call, weights)
            operands[0] = value
        steps.append((call.op, operands))
    if kept is not None:
        values[kept].floats = True
    instructions = [
        Instruction(op, tuple(o.storage() if isinstance(o, _Value) else o for o in operands))
        for op, operands in steps
    ]
    return Recorded(instructions, {name: value.storage() for name, value in values.items()})


def _encodes(writer: Call, weights: Weights) -> bool:
    """Whether an operation can write encoded rows as well: where the parts that it shares out are blocks."""
    if writer.op in ("linear", "linear_add"):
        return all(rows % BLOCK == 0 for rows in weights.part_rows(writer.operands[2]))
    if writer.op == "attention":
        shape = writer.operands[3]
        part: int = shape.num_heads // shape.num_kv_heads * shape.head_size  # of a row, by one KV head
        return part % BLOCK == 0
    return writer.op not in DO_NOT_ENCODE
