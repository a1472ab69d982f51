"""Models with experts, shared out over ranks: a part of each expert to every rank, or whole ones to each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_toys import Requests, kv_config, logits_of
from test_parallel import LENGTHS, STEPS, links, whole_logits

from mainspring.base.errors import ConfigError
from mainspring.kernels.collectives import PipeCollectives
from mainspring.kernels.ops import Floats
from mainspring.kernels.ref import RefOps
from mainspring.models.decoder import Decoder
from mainspring.models.families import Model, from_config
from mainspring.models.parallel import Place, check_divisible, share_of
from mainspring.models.spec import MLPSpec, ModelSpec, weight_table
from mainspring.models.views import View, Views
from mainspring.models.weights import RandomTensors, load_weights, random_model, tensors_of

CONFIG: dict[str, Any] = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.5,
    "vocab_size": 256,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 48,
    "vocab_size": 256,
}


def model_of(config: dict[str, Any]) -> tuple[Model, RandomTensors]:
    return random_model(from_config(config), seed=3)


def places(tp: int, pp: int, expert_parallel: bool) -> list[Place]:
    return [Place(rank, tp, pp, expert_parallel) for rank in range(tp * pp)]


def decoder_of(model: Model, source: Any, place: Place, **collectives: Any) -> Decoder:
    share = share_of(model, place)
    ops = RefOps(**collectives)
    decoder = Decoder(share.spec, ops)
    load_weights(share, tensors_of(share, tensors_of(model, source)), ops)
    decoder.initialize_kv(kv_config(decoder))
    return decoder


def logits_of_ranks(model: Model, source: Any, all_places: list[Place]) -> list[list[Floats]]:
    """What each rank of the last stage says."""
    connections = links(len(all_places))

    def run(place: Place) -> list[Floats]:
        peers = PipeCollectives(place.rank, place.group, connections[place.rank])
        decoder = decoder_of(model, source, place, collectives=peers)
        if not place.is_last_stage:
            decoder.logits = lambda hidden: hidden[:, :1]  # type: ignore[method-assign]  # not for us to say
        said = logits_of(decoder, LENGTHS, STEPS)
        return said if place.is_last_stage else []

    with ThreadPoolExecutor(len(all_places)) as ranks:
        return [said for said in ranks.map(run, all_places) if said]


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("config", [CONFIG, QWEN], ids=["glm4_moe", "qwen2_moe"])
def test_ranks_together_say_what_one_says(
    config: dict[str, Any], tp: int, pp: int, expert_parallel: bool
) -> None:
    """Sums are made in another order, so the last bits may differ; between ranks none may."""
    model, source = model_of(config)
    expected = whole_logits(model, source)
    said = logits_of_ranks(model, source, places(tp, pp, expert_parallel))
    assert len(said) == tp
    for found, wanted in zip(said[0], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=5e-5)
    for found, first in zip(said[1], said[0], strict=True):
        np.testing.assert_array_equal(found, first)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_rows_of_their_own_have_experts_for_all(num_ranks: int) -> None:
    """Data-parallel ranks: each with other requests, some with none at a step; 6 experts on 4 ranks are one
    or two each."""
    model, source = model_of(CONFIG)
    connections = links(num_ranks)
    counts = [[5, 1, 0], [0, 3, 2], [1, 1, 1], [0, 0, 7]]

    def run(rank: int) -> list[Floats]:
        peers = PipeCollectives(rank, range(num_ranks), connections[rank])
        place = Place(expert_rank=rank, num_expert_ranks=num_ranks)
        decoder = decoder_of(model, source, place, expert_ranks=peers)
        try:
            return _steps(decoder, counts[rank], rank)
        finally:  # so that others do not wait for one that has failed
            for connection in connections[rank].values():
                connection.close()

    with ThreadPoolExecutor(num_ranks) as ranks:
        said = list(ranks.map(run, range(num_ranks)))
    for rank, found in enumerate(said):
        alone = Decoder(model.spec, RefOps())
        load_weights(model, tensors_of(model, source), alone.ops)
        alone.initialize_kv(kv_config(alone))
        for rows, wanted in zip(found, _steps(alone, counts[rank], rank), strict=True):
            np.testing.assert_allclose(rows, wanted, rtol=1e-4, atol=5e-5)


def _steps(decoder: Decoder, counts: list[int], seed: int) -> list[Floats]:
    """One request, read in steps of so many tokens: an empty one is a step nevertheless."""
    requests = Requests([sum(counts) + 1], 1, seed)
    found = []
    for count in counts:
        batch = requests.batch([count]) if count else _empty(requests)
        found.append(decoder.forward(batch).copy())
    return found


def _empty(requests: Any) -> Any:
    one = requests.batch([1])
    requests.done[0] -= 1
    return replace(
        one,
        token_ids=one.token_ids[:0],
        positions=one.positions[:0],
        query_start_loc=one.query_start_loc[:1],
        seq_lens=one.seq_lens[:0],
        block_tables=tuple(table[:0] for table in one.block_tables),
        slot_mapping=tuple(slots[:0] for slots in one.slot_mapping),
    )


# ---- shares ------------------------------------------------------------------------------------------------


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {part.role: part.shape for _, parts in weight_table(spec) for part in parts}


def test_a_rank_holds_its_own_experts_only() -> None:
    model, _ = model_of(CONFIG)
    whole = shapes_of(model.spec)
    held: set[str] = set()
    for place in places(2, 1, True):
        own = shapes_of(share_of(model, place).spec)
        experts = {role for role in own if ".experts." in role}
        assert not held & experts
        held |= experts
        assert all(own[role] == whole[role] for role in experts)
        assert own["layers.1.router"] == whole["layers.1.router"], "all are scored everywhere"
        assert own["layers.1.shared.w_gate"] == (16, 64)
    assert held == {role for role in whole if ".experts." in role}


def test_a_part_of_each_expert() -> None:
    model, source = model_of(CONFIG)
    share = share_of(model, places(2, 1, False)[1])
    own = shapes_of(share.spec)
    assert own["layers.2.experts.5.w_gate"] == (16, 64)
    assert own["layers.2.experts.5.w_down"] == (64, 16)
    tensors = tensors_of(share, source)
    found = tensors.dequantise(share.names["layers.2.experts.5.w_down"])
    np.testing.assert_array_equal(found, source.dequantise("layers.2.experts.5.w_down")[:, 16:])


def test_experts_of_a_stack_in_a_files_type_stay_so_in_shares() -> None:
    """Rows and columns of one matrix of a quantised tensor of three dimensions are cut in bytes."""

    class Stack:
        raw_bytes = np.random.default_rng(0).integers(0, 60, (3, 8, 2 * 34), np.uint8)
        tensor_names = ("stack",)

        def info(self, name: str) -> Any:
            assert name == "stack"
            return SimpleNamespace(shape=(3, 8, 64), type="Q8_0")

        def raw(self, name: str) -> Any:
            return self.raw_bytes.reshape(-1)

        def is_finite(self, name: str) -> bool:
            raise AssertionError("one matrix is looked at, not all")

    stack: Any = Stack()
    experts = Views(stack, {"one": View("stack", 8, 16)})
    rank = Views(experts, {"rows": View("one", 4, 8), "columns": View("one", columns=(32, 64))})
    assert (rank.info("rows").shape, rank.info("rows").type) == ((4, 64), "Q8_0")
    np.testing.assert_array_equal(rank.raw("rows").reshape(4, -1), stack.raw_bytes[1, 4:])
    assert (rank.info("columns").shape, rank.info("columns").type) == ((8, 32), "Q8_0")
    np.testing.assert_array_equal(rank.raw("columns").reshape(8, -1), stack.raw_bytes[1, :, 34:])
    whole = experts.dequantise("one")
    np.testing.assert_array_equal(rank.dequantise("rows"), whole[4:])
    np.testing.assert_array_equal(rank.dequantise("columns"), whole[:, 32:])
    np.testing.assert_array_equal(rank.dequantise_rows("columns", 2, 5), whole[2:5, 32:])
    assert experts.is_finite("one")


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        (Place(0, 2, 1, True), {"n_routed_experts": 5}, "tensor_parallel_size 2 .* and 5 experts"),
        (
            Place(0, 2, 1, False),
            {"moe_intermediate_size": 33, "n_shared_experts": 2},
            "tensor_parallel_size 2 .* and experts of 33",
        ),
        (Place(0, 2, 1, True), {"intermediate_size": 97}, "tensor_parallel_size 2 .* an MLP of 97"),
        (Place(num_expert_ranks=7), {}, "data_parallel_size 7 must be at most 6"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(place: Place, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_divisible(from_config(CONFIG | changes), place)


def test_there_must_be_experts_to_spread() -> None:
    spec = from_config(CONFIG)
    spec = replace(spec, layers=spec.layers[:1])
    assert spec.layers[0].mlp == MLPSpec(96)
    for place in (Place(0, 2, 1, True), Place(num_expert_ranks=2)):
        with pytest.raises(
            ConfigError, match="enable_expert_parallel: this model has no experts; leave it out"
        ):
            check_divisible(spec, place)
