"""A model shared out over ranks says what it says whole. Ranks are threads here, their links real pipes."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from model_toys import kv_config, logits_of
from test_loading import METADATA, FakeSource

from mainspring.base.errors import ConfigError, EngineError
from mainspring.kernels.collectives import PipeCollectives
from mainspring.kernels.ops import Floats
from mainspring.kernels.ref import RefOps
from mainspring.models.decoder import Decoder
from mainspring.models.families import Model, from_gguf
from mainspring.models.parallel import Place, check_divisible, layers_of, share_of
from mainspring.models.spec import weight_table
from mainspring.models.views import View, Views
from mainspring.models.weights import load_weights, tensors_of

LENGTHS = [9, 1, 30]
STEPS = [[4, 1, 16], [4, 0, 14], [1, 0, 0]]


def links(num_ranks: int) -> list[dict[int, Connection]]:
    """For each rank, a connection to each other."""
    found: list[dict[int, Connection]] = [{} for _ in range(num_ranks)]
    for one, other in itertools.combinations(range(num_ranks), 2):
        found[one][other], found[other][one] = Pipe()
    return found


def places(tp: int, pp: int) -> list[Place]:
    return [Place(rank, tp, pp) for rank in range(tp * pp)]


def part(model: Model, source: Any, place: Place, connections: dict[int, Connection]) -> Decoder:
    whole = tensors_of(model, source)
    share = share_of(model, place)
    ops = RefOps(collectives=PipeCollectives(place.rank, place.group, connections))
    decoder = Decoder(share.spec, ops)
    load_weights(share, tensors_of(share, whole), ops)
    decoder.initialize_kv(kv_config(decoder))
    return decoder


def logits_of_ranks(model: Model, source: Any, tp: int, pp: int) -> list[list[Floats]]:
    """What each rank of the last stage says."""
    connections = links(tp * pp)

    def run(place: Place) -> list[Floats]:
        decoder = part(model, source, place, connections[place.rank])
        if place.is_last_stage:
            return logits_of(decoder, LENGTHS, STEPS)
        decoder.logits = lambda hidden: hidden[:, :1]  # type: ignore[method-assign]  # not for us to say
        logits_of(decoder, LENGTHS, STEPS)
        return []

    with ThreadPoolExecutor(tp * pp) as ranks:
        return [said for said in ranks.map(run, places(tp, pp)) if said]


def whole_logits(model: Model, source: Any) -> list[Floats]:
    decoder = Decoder(model.spec, RefOps())
    load_weights(model, tensors_of(model, source), decoder.ops)
    decoder.initialize_kv(kv_config(decoder))
    return logits_of(decoder, LENGTHS, STEPS)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_together_say_what_one_says(tp: int, pp: int, tied: bool) -> None:
    """TP 4 has two ranks to a KV head. Sums are made in another order, so the last bits may differ."""
    source = FakeSource()
    if not tied:
        source.values["output.weight"] = source.values["token_embd.weight"][::-1].copy()
    model = from_gguf(METADATA, source)
    expected = whole_logits(model, source)
    said = logits_of_ranks(model, source, tp, pp)
    assert len(said) == tp
    for rows in said:
        for found, wanted in zip(rows, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)
    for rows in said[1:]:
        for found, first in zip(rows, said[0], strict=True):
            np.testing.assert_array_equal(found, first)  # ranks that sample for themselves must agree


def test_stages_alone_change_no_bit() -> None:
    source = FakeSource()
    model = from_gguf(METADATA, source)
    (rows,) = logits_of_ranks(model, source, 1, 2)
    for found, wanted in zip(rows, whole_logits(model, source), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_rank_reads_its_own_share_only() -> None:
    source = FakeSource()
    model = from_gguf(METADATA, source)
    sizes = []
    for place in places(2, 2):
        share = share_of(model, place)
        tensors = tensors_of(share, tensors_of(model, source))
        shapes = {
            part.role: tuple(tensors.info(share.names[part.role]).shape)
            for _, parts in weight_table(share.spec)
            for part in parts
        }
        sizes.append(sum(int(np.prod(shape)) for shape in shapes.values()))
        assert ("embedding" in shapes) == place.is_first_stage
        assert ("head" in shapes) == place.is_last_stage
        assert shapes["layers.0.wq"] == (32, 64)
        assert shapes["layers.0.wo"] == (64, 32)
        assert shapes["layers.0.w_down"] == (64, 48)
    whole = sum(value.size for value in source.values.values())
    assert max(sizes) < 0.7 * whole


def test_columns_of_quantised_rows_are_cut_in_bytes() -> None:
    """A share of a row is whole blocks where it can be: then it stays in the file's type."""

    class Quantised(FakeSource):
        def info(self, name: str) -> Any:
            return replace(super().info(name), type="Q8_0")

        def raw(self, name: str) -> Any:
            rows, columns = self.values[name].shape
            return np.arange(rows * columns // 32 * 34, dtype=np.uint32).astype(np.uint8)

    source = Quantised({"w": np.zeros((4, 96), np.float32)})
    views = Views(source, {"right": View("w", columns=(32, 96)), "cut": View("w", columns=(16, 96))})
    assert (views.info("right").shape, views.info("right").type) == ((4, 64), "Q8_0")
    raw = source.raw("w").reshape(4, 3 * 34)
    np.testing.assert_array_equal(views.raw("right").reshape(4, -1), raw[:, 34:])
    assert (views.info("cut").shape, views.info("cut").type) == ((4, 80), "F32")
    assert views.raw("cut").nbytes == 4 * 80 * 4


def test_what_cannot_be_shared_out_is_refused_with_numbers() -> None:
    spec = from_gguf(METADATA, FakeSource()).spec
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 .* 4 query heads, 2 KV heads .* 1, 2, 4"):
        check_divisible(spec, Place(0, 3, 1))
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size 3 must be at most 2"):
        check_divisible(spec, Place(0, 1, 3))


def test_stages_have_every_layer_once() -> None:
    for num_layers, stages in itertools.product((2, 5, 30), (1, 2)):
        parts = [layers_of(num_layers, place) for place in places(1, stages)]
        assert [layer for part in parts for layer in part] == list(range(num_layers))


def test_a_peer_that_is_gone_is_an_error_at_once() -> None:
    connections = links(2)
    one = PipeCollectives(0, range(2), connections[0])
    connections[1][0].close()
    with pytest.raises(EngineError, match="rank 1 is gone"):
        one.all_reduce(np.zeros((2, 3), np.float32))
