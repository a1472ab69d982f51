"""How an engine is put together: block pools, lengths, groups, and refusals that say what to change."""

from typing import Any

import pytest
from msgspec import structs

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import ConfigError
from mainspring.base.messages import EngineCoreRequest, FinishReason, GetStats, KVCacheSpec
from mainspring.base.params import SamplingParams
from mainspring.engine.build import build_engine, group_layers
from mainspring.engine.client import EngineCoreClient
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_model import FakeModel, reference

FULL, WINDOW = KVCacheSpec(1, 1), KVCacheSpec(1, 1, sliding_window=8)


def config(
    *, max_model_len: int = 64, num_blocks: int | None = None, depth: int = 1, **more: Any
) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=max_model_len)
    return EngineConfig(
        model="",
        vocab_size=64,
        executor="mainspring.testing.fake_executor:make_fake",
        scheduler=scheduler,
        block_size=8,
        depth=depth,
        seed=0,
        num_gpu_blocks_override=num_blocks,
        **more,
    )


class Layers(FakeExecutor):
    """Reports the layers it is given."""

    def __init__(self, specs: list[KVCacheSpec], **options: Any) -> None:
        super().__init__(FakeModel(windows=[spec.sliding_window for spec in specs]), **options)
        self.specs = specs
        self.closed = False

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.specs

    def close(self) -> None:
        self.closed = True


def test_the_pool_is_as_big_as_the_memory():
    built = build_engine(config(), FakeExecutor(num_blocks=20, block_size=8))
    assert built.kv_config.num_blocks == 20
    assert built.max_model_len == 64


def test_blocks_may_be_counted_by_hand():
    assert build_engine(config(num_blocks=9)).kv_config.num_blocks == 9


def test_a_pool_too_small_for_one_sequence_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"7 usable blocks.* 64 takes 8 .*max_model_len to 56 or less"):
        build_engine(config(num_blocks=8))


def test_the_length_is_fitted_to_the_pool_where_that_is_allowed():
    assert build_engine(config(num_blocks=8, fit_max_model_len=True)).max_model_len == 56


def test_a_window_takes_fewer_blocks():
    """A longest sequence is bounded by the window, what is in flight and a block that both share."""
    windowed = Layers([WINDOW])
    assert build_engine(config(max_model_len=512, num_blocks=5), windowed).max_model_len == 512
    with pytest.raises(ConfigError, match="512 takes 6 "):
        build_engine(config(max_model_len=512, num_blocks=5, depth=2), Layers([WINDOW]))


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ([FULL, FULL], [(0, 1)]),
        ([FULL, WINDOW], [(0,), (1,)]),
        ([WINDOW, FULL, WINDOW, WINDOW, FULL, WINDOW], [(0, 2), (3, 5), (1, 4)]),
    ],
)
def test_layers_share_tables_in_groups_of_one_size(specs, groups):
    assert [group.layers for group in group_layers(specs)] == groups


def test_layers_of_several_sizes_are_refused():
    with pytest.raises(ConfigError, match="one size"):
        group_layers([FULL, KVCacheSpec(2, 1)])


def test_layers_that_look_ahead_turn_chunks_and_sharing_off():
    seeing = [structs.replace(FULL, causal=False)]
    wide = structs.replace(config(), scheduler=structs.replace(config().scheduler, max_num_batched_tokens=64))
    built = build_engine(wide, Layers(seeing))
    assert not built.enable_chunked_prefill
    assert not built.enable_prefix_caching
    with pytest.raises(ConfigError, match="not causal"):
        build_engine(config(), Layers(seeing))


def test_what_was_built_is_closed_when_the_rest_fails():
    executor = Layers([FULL])
    with pytest.raises(ConfigError):
        build_engine(config(num_blocks=3), executor)
    assert executor.closed


@pytest.mark.parametrize("name", ["nothing", "nowhere:Class", "mainspring.testing.fake_executor:Nothing"])
def test_an_executor_that_is_not_there_is_named(name: str):
    with pytest.raises(ConfigError, match=name):
        build_engine(structs.replace(config(), executor=name))


@pytest.mark.parametrize("depth", [1, 2])
def test_an_assembled_engine_says_what_the_model_says(depth: int):
    """Through `EngineCoreClient.make_client`, with the executor found by its name."""
    client = EngineCoreClient.make_client(config(depth=depth), in_process=True)
    request = EngineCoreRequest("a", list(range(40)), SamplingParams(temperature=1.0, seed=3, max_tokens=12))
    client.add_request(request)
    said: list[int] = []
    last = None
    while last is None or last.finish_reason is None:
        for output in client.get_output().outputs:
            said += output.new_token_ids
            last = output
    wanted = reference(request, FakeModel(64), client.max_model_len)
    assert said == wanted.token_ids
    assert last is not None
    assert last.finish_reason is FinishReason.LENGTH
    client.shutdown()
    client.shutdown()


def test_a_client_passes_aborts_and_commands_on():
    client = EngineCoreClient.make_client(config(), in_process=True)
    client.add_request(EngineCoreRequest("a", [1, 2, 3], SamplingParams(seed=1, max_tokens=30)))
    client.get_output()
    assert client.call(GetStats()).num_running == 1
    client.abort_requests(["a"])
    assert client.call(GetStats()).num_running == 0
    assert not client._core.has_work()
