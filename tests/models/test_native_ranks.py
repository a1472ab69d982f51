"""Native kernels of several ranks: collectives are steps of the program, and a peer's end is an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from test_loading import METADATA, FakeSource
from test_parallel import LENGTHS, links, places

pytest.importorskip("mainspring_native", reason="the native kernels are not installed")

from model_toys import BLOCK_SIZE, Requests

from mainspring.base.errors import EngineError
from mainspring.base.messages import KVCacheConfig, KVCacheGroup
from mainspring.kernels.collectives import Collectives, PipeCollectives
from mainspring.kernels.native import NativeOps
from mainspring.kernels.ops import Batch, Floats
from mainspring.models.decoder import Decoder
from mainspring.models.families import Model, from_gguf
from mainspring.models.packing import pack_weights
from mainspring.models.parallel import Place, share_of
from mainspring.models.weights import load_vectors, tensors_of

PAGE = 16  # tokens of a native block
STEPS = [[4, 1, 16], [4, 0, 14], [1, 0, 0]]
assert PAGE % BLOCK_SIZE == 0


class Source(FakeSource):
    def raw(self, name: str) -> Any:
        return self.values[name].reshape(-1).view(np.uint8)

    def is_finite(self, name: str) -> bool:
        return True


def decoder_of(model: Model, source: Any, place: Place, collectives: Collectives | None) -> Decoder:
    tensors = tensors_of(model, source)
    if collectives is not None:
        model = share_of(model, place)
        tensors = tensors_of(model, tensors)
    ops = NativeOps(64, num_threads=1, kv_type="float32", collectives=collectives)
    decoder = Decoder(model.spec, ops)
    pack_weights(model, tensors, ops, None, None)
    load_vectors(model, tensors, ops)
    spec = decoder.kv_cache_specs()[0]
    group = KVCacheGroup(tuple(range(len(model.spec.layers))), spec)
    decoder.initialize_kv(KVCacheConfig(100, PAGE, (group,)))
    return decoder


class Pages(Requests):
    """Requests whose blocks are longer."""

    def batch(self, counts: list[int]) -> Batch:
        rows = [r for r, count in enumerate(counts) if count]
        starts = {r: self.done[r] for r in rows}
        batch = super().batch(counts)
        tables = np.array([[self.tables[0][r][0], self.tables[0][r][-1]] for r in rows], np.int32)
        positions = np.concatenate([np.arange(starts[r], self.done[r]) for r in rows])
        row_of = np.concatenate([np.full(self.done[r] - starts[r], at) for at, r in enumerate(rows)])
        slots = tables[row_of, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        return Batch(
            batch.token_ids, batch.positions, batch.query_start_loc, batch.seq_lens, (tables,), (slots,)
        )


def said_by(decoder: Decoder, speaks: bool = True) -> list[Floats]:
    requests = Pages(LENGTHS, 1)
    said = []
    for counts in STEPS:
        hidden = decoder.forward(requests.batch(counts))
        if speaks:
            said.append(decoder.logits(hidden).copy())
            if decoder.spec.head_size is not None:
                assert decoder.greedy is not None
                ids, values = decoder.greedy(hidden.copy(), ())
                np.testing.assert_array_equal(ids, said[-1].argmax(axis=1))
                np.testing.assert_array_equal(values, said[-1].max(axis=1))
    return said


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_native_ranks_together_say_what_one_says(tp: int, pp: int) -> None:
    source = Source()
    model = from_gguf(METADATA, source)
    expected = said_by(decoder_of(model, source, Place(), None))
    connections = links(tp * pp)

    def run(place: Place) -> list[Floats]:
        peers = PipeCollectives(place.rank, place.group, connections[place.rank])
        return said_by(decoder_of(model, source, place, peers), place.is_last_stage)

    with ThreadPoolExecutor(tp * pp) as ranks:
        by_rank = [said for said in ranks.map(run, places(tp, pp)) if said]
    assert len(by_rank) == tp
    for said in by_rank:
        for found, wanted in zip(said, expected, strict=True):
            if tp == 1:
                np.testing.assert_array_equal(found, wanted)
            else:
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)
        for found, first in zip(said, by_rank[0], strict=True):
            np.testing.assert_array_equal(found, first)


def test_a_peer_that_is_gone_ends_the_pass_and_not_the_process() -> None:
    """The exception comes out of the pass, with nothing held; the next pass raises it too."""
    source = Source()
    model = from_gguf(METADATA, source)
    connections = links(2)
    place = places(2, 1)[0]
    decoder = decoder_of(model, source, place, PipeCollectives(0, place.group, connections[0]))
    connections[1][0].close()
    for _ in range(2):
        with pytest.raises(EngineError, match="rank 1 is gone"):
            decoder.forward(Pages(LENGTHS, 1).batch([4, 1, 16]))
