"""Paged attention in numpy: one operation for any mix of decodes and prompt chunks, in bounded memory.

Theory of operation.
- A request's rows are cut into pieces of at most `MAX_ROWS`. Pieces with equally many rows and similar
  numbers of keys are stacked into a *tile*: 32 decodes are a few tiles, not 32 rounds of Python.
- The keys of a tile are read in *spans* of at most `MAX_KEYS`, each gathered through the block tables by one
  `take` into reused scratch. Several spans are joined by the running maximum and sum of the softmax. So
  scratch depends on neither the chunk nor the context.
- Tiles, spans and masks depend on the batch and on (window, causal), not on the layer: they are planned once
  a step.

The cache of a layer is [num_blocks, block_size, 2 (key, value), kv heads, head size]: a block is one run of
memory, whatever the heads (so KV groups of different shapes may share a pool), and a token's keys and values
are written by one assignment.

Invariant: what a row may not see never reaches it, not even as 0 * NaN. Scores of hidden keys are
overwritten, and values of stacked requests are cleared behind their ends, where the block may still hold what
its last owner wrote.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.kernels.ops import AttentionShape, Batch, Floats

# of a piece; with 3 query heads per KV head this makes 192-row products, where sgemm is at its best
MAX_ROWS = 64
MAX_KEYS = 1024  # of a span: 1.5 MB of keys and values at 3 heads of 64, about a second-level cache
MAX_STACKED_KEYS = 1536  # of all requests of a tile; see MAX_KEYS
VECTOR_ROWS = 8  # up to here a matrix-vector product per row beats sgemm with keys on the right
LOWEST = np.float32(-1e30)  # a maximum that exp() of anything minus it survives


class Span(NamedTuple):
    """The next `num_keys` keys of every request of a tile."""

    blocks: npt.NDArray[np.intp]  # [requests, blocks]
    num_keys: int
    hidden: npt.NDArray[np.bool_] | None  # [requests, 1, rows, 1, num_keys] True: not seen; None: all seen
    ends: list[tuple[int, int]]  # (request, its number of keys), where that is below num_keys


class Tile(NamedTuple):
    rows: npt.NDArray[np.intp]  # [requests, rows of each], indices into the batch
    spans: list[Span]


class Piece(NamedTuple):
    """Some rows of one request. Sorted, pieces that stack well come to stand side by side."""

    num_rows: int
    num_keys: int  # from first_key on, until the last any of the rows sees
    first_key: int  # a multiple of the block size
    request: int
    first_row: int


def plan_attention(batch: Batch, group: int, shape: AttentionShape, block_size: int) -> list[Tile]:
    pieces = sorted(_pieces(batch, shape, block_size))
    tiles: list[Tile] = []
    start = 0
    for end in range(1, len(pieces) + 1):
        if end == len(pieces) or not _stacks(pieces[start], pieces[end], end - start + 1):
            tiles.append(_tile(pieces[start:end], batch, group, shape, block_size))
            start = end
    return tiles


def _pieces(batch: Batch, shape: AttentionShape, block_size: int) -> list[Piece]:
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    window = shape.sliding_window
    pieces = []
    for request, length in enumerate(lengths):
        end_row = starts[request + 1]
        for row in range(starts[request], end_row, MAX_ROWS):
            num_rows = min(MAX_ROWS, end_row - row)
            position = length - (end_row - row)
            last_key = position + num_rows - 1 if shape.causal else length - 1
            first_key = max(0, position - window + 1) // block_size * block_size if window else 0
            pieces.append(Piece(num_rows, last_key + 1 - first_key, first_key, request, row))
    return pieces


def _stacks(first: Piece, piece: Piece, count: int) -> bool:
    """Whether `piece` may be the count-th of the tile that `first`, which has the fewest keys, begins."""
    return (
        piece.num_rows == first.num_rows
        and piece.num_keys * count <= MAX_STACKED_KEYS
        and piece.num_keys - first.num_keys <= 32 + first.num_keys // 4
        and piece.num_rows * count <= MAX_ROWS
    )


def _tile(pieces: list[Piece], batch: Batch, group: int, shape: AttentionShape, block_size: int) -> Tile:
    rows = np.array([piece.first_row for piece in pieces], np.intp)[:, None] + np.arange(pieces[0].num_rows)
    requests = np.array([piece.request for piece in pieces], np.intp)
    first_keys = np.array([piece.first_key for piece in pieces], np.intp)
    table, column = batch.block_tables[group], first_keys // block_size
    if shape.causal:
        last_seen = batch.positions[rows] - first_keys[:, None]
    else:
        last_seen = np.repeat((batch.seq_lens[requests] - 1)[:, None], rows.shape[1], axis=1)
    longest = pieces[-1].num_keys
    step = max(1, MAX_KEYS // block_size) * block_size
    spans = []
    for start in range(0, longest, step):
        num_keys = min(step, longest - start)
        columns = column[:, None] + np.arange(start // block_size, -(-(start + num_keys) // block_size))
        blocks = table[requests[:, None], np.minimum(columns, table.shape[1] - 1)].astype(np.intp)
        ends = [
            (i, max(0, p.num_keys - start)) for i, p in enumerate(pieces) if p.num_keys - start < num_keys
        ]
        hidden = _hidden(last_seen - start, num_keys, shape.sliding_window)
        spans.append(Span(blocks, num_keys, hidden, ends))
    return Tile(rows, spans)


def _hidden(
    last_seen: npt.NDArray[np.int_], num_keys: int, window: int | None
) -> npt.NDArray[np.bool_] | None:
    """Which of keys 0, 1, ... rows may not see; `last_seen` [requests, rows] counts from the same key."""
    nothing_later = last_seen.min() >= num_keys - 1
    nothing_earlier = window is None or last_seen.max() < window
    if nothing_later and nothing_earlier:
        return None
    keys, last = np.arange(num_keys), last_seen[:, None, :, None, None]
    hidden = keys > last
    if window is not None:
        hidden |= keys <= last - window
    return hidden


class Scratch:
    """Arrays that are used again: a fresh large array costs a page fault per 4 KiB."""

    def __init__(self) -> None:
        self._arrays: dict[str, Floats] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """An array of `shape` with any content, valid until `name` is taken again."""
        size = 1
        for length in shape:
            size *= length
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, np.float32)
        return array[:size].reshape(shape)


def attend(
    tile: Tile, q: Floats, cache: Floats, out: Floats, shape: AttentionShape, scratch: Scratch
) -> None:
    """Compute the rows of `tile`.

    q, out [T, num_heads * head_size]; cache [num_blocks, block_size * kv_width].
    """
    num_requests, num_rows = tile.rows.shape
    kv_heads, size = shape.num_kv_heads, shape.head_size
    per_kv = shape.num_heads // kv_heads
    heads = (num_requests, kv_heads, num_rows, per_kv)
    by_kv_head = (num_requests, num_rows, kv_heads, per_kv, size)
    query = scratch.take("query", (*heads, size))
    np.multiply(q[tile.rows].reshape(by_kv_head).transpose(0, 2, 1, 3, 4), np.float32(shape.scale), out=query)
    query = query.reshape(num_requests, kv_heads, num_rows * per_kv, size)
    result = scratch.take("result", query.shape)
    peak = total = np.empty(0, np.float32)
    for index, span in enumerate(tile.spans):
        keys, values = _gather(span, cache, shape, scratch)
        scores = scratch.take("scores", (num_requests, kv_heads, num_rows * per_kv, span.num_keys))
        if num_rows * per_kv <= VECTOR_ROWS:
            np.matmul(keys[:, :, None], query[..., None], out=scores[..., None])
        else:
            np.matmul(query, keys.swapaxes(-1, -2), out=scores)
        if shape.soft_cap:
            scores /= np.float32(shape.soft_cap)
            np.tanh(scores, out=scores)
            scores *= np.float32(shape.soft_cap)
        if span.hidden is not None:
            np.copyto(scores.reshape(*heads, span.num_keys), -np.inf, where=span.hidden)
        span_peak = np.maximum(scores.max(axis=-1, keepdims=True), LOWEST)
        if index == 0:
            peak = span_peak
            np.exp(np.subtract(scores, peak, out=scores), out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            np.matmul(scores, values, out=result)
        else:
            old_peak, peak = peak, np.maximum(peak, span_peak)
            np.exp(np.subtract(scores, peak, out=scores), out=scores)
            fade = np.exp(old_peak - peak)
            total = total * fade + scores.sum(axis=-1, keepdims=True)
            result *= fade
            result += np.matmul(scores, values, out=scratch.take("part", query.shape))
    result /= total
    rows = (
        result.reshape(*heads, size).transpose(0, 2, 1, 3, 4).reshape(num_requests * num_rows, shape.q_width)
    )
    out[tile.rows.reshape(-1)] = rows


def _gather(span: Span, cache: Floats, shape: AttentionShape, scratch: Scratch) -> tuple[Floats, Floats]:
    """Keys and values of a span, each [requests, kv heads, num_keys, head size]."""
    num_requests, num_blocks = span.blocks.shape
    gathered = scratch.take("kv", (num_requests, num_blocks, cache.shape[1]))
    # "clip" lets take write into `out` directly; a table's unread entries may hold anything.
    np.take(cache, span.blocks, axis=0, out=gathered, mode="clip")
    tokens = gathered.reshape(num_requests, -1, 2, shape.num_kv_heads, shape.head_size)[:, : span.num_keys]
    keys, values = tokens[:, :, 0].transpose(0, 2, 1, 3), tokens[:, :, 1].transpose(0, 2, 1, 3)
    for request, end in span.ends:
        values[request, :, end:] = 0.0
    return keys, values
