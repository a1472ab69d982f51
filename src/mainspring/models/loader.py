"""From an `EngineConfig` to a model that computes: `load_model` is what a worker calls."""

from __future__ import annotations

from mainspring.base.config import EngineConfig
from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.base.log import get_logger
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.hf_config import is_config, read_config
from mainspring.checkpoint.opening import Checkpoint, open_checkpoint
from mainspring.kernels.collectives import Collectives
from mainspring.kernels.native import (
    KV_TILE,
    MOST_HEAD_SIZE,
    MOST_SHARING,
    NativeOps,
    library,
    why_not,
)
from mainspring.kernels.ref import RefOps
from mainspring.kernels.threads import set_blas_threads
from mainspring.models.classifier import read_classifier
from mainspring.models.decoder import Decoder
from mainspring.models.families import Model, from_config, from_folder, from_gguf
from mainspring.models.packing import Progress, pack_weights
from mainspring.models.parallel import ALONE, Place, share_of
from mainspring.models.spec import ModelSpec
from mainspring.models.views import TensorSource
from mainspring.models.weights import (
    check_memory,
    load_vectors,
    load_weights,
    random_model,
    tensors_of,
)

logger = get_logger(__name__)


def load_model(
    config: EngineConfig,
    progress: Progress | None = None,
    place: Place = ALONE,
    collectives: Collectives | None = None,
    expert_ranks: Collectives | None = None,
) -> Decoder:
    """Read the GGUF file or the folder `config.model`; for dummy weights also a config: a .json file, or its
    text. place, collectives: of this rank, where several share the model.

    Raises `CheckpointError` for what is wrong with the file, `ConfigError` for kernels that are not there.
    """
    if config.load_format == "dummy":
        model, tensors = random_model(_checked_dummy_spec(config.model), config.seed)
        return _load(config, model, tensors, progress, place, collectives, expert_ranks)
    source = open_checkpoint(config.model)
    try:
        model = read_model(source, config.scheduler.max_model_len)
        # Checked before anything of the announced sizes is made.
        decoder = _load(config, model, tensors_of(model, source), progress, place, collectives, expert_ranks)
        decoder.classifier = read_classifier(source, model.spec.hidden_size)
    except CheckpointError as error:
        source.close()
        raise CheckpointError(f"{config.model}: {error}") from error
    if decoder.weights_form != "by layer":
        source.close()
    return decoder


def _load(
    config: EngineConfig,
    model: Model,
    source: TensorSource,
    progress: Progress | None,
    place: Place,
    collectives: Collectives | None,
    expert_ranks: Collectives | None,
) -> Decoder:
    """source: what `tensors_of` gave for the whole model."""
    if place.is_shared:
        model = share_of(model, place)
        source = tensors_of(model, source)
    if wants_native(config, model.spec):
        return _load_native(config, model, source, progress, place, collectives)
    if config.num_threads is not None:
        set_blas_threads(config.num_threads)
    decoder = Decoder(model.spec, RefOps(config.scheduler.max_num_batched_tokens, collectives, expert_ranks))
    decoder.weights_form = load_weights(model, source, decoder.ops)
    return decoder


def read_model(source: Checkpoint, max_model_len: int | None = None) -> Model:
    """What an open file or folder says of its network. Raises `CheckpointError` naming the key at fault."""
    if isinstance(source, GGUFFile):
        return from_gguf(source.metadata, source, max_model_len)
    return from_folder(source.config, source, max_model_len)


def wants_native(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether the native kernels are used; says why not where they could have been expected.

    Raises `ConfigError` where they were asked for, or something was that only they can do.
    """
    if config.kernels == "numpy":
        needs = _native_only(config)
        if needs:
            raise ConfigError(f"{needs} needs native kernels, and kernels is numpy; leave out one of them")
        return False
    why = why_not() if library() is None else _unfit(config, spec)
    if why is None:
        return True
    if config.kernels == "native":
        raise ConfigError(f"kernels native: {why}; or use kernels numpy, or auto")
    needs = _native_only(config)
    if needs:
        raise ConfigError(f"{needs} needs native kernels: {why}")
    logger.info("kernels: numpy, for %s", why)
    return False


def _unfit(config: EngineConfig, spec: ModelSpec) -> str | None:
    """What the native kernels have no form for."""
    if config.block_size % KV_TILE:
        return f"block_size {config.block_size} is no multiple of {KV_TILE}"
    if config.data_parallel is not None:
        return "experts for the rows of other ranks have no native form yet"
    for layer in spec.layers:
        size = layer.attn.head_size
        if size % KV_TILE or size > MOST_HEAD_SIZE:
            return f"heads of {size} are no multiple of {KV_TILE} up to {MOST_HEAD_SIZE}"
        sharing = layer.attn.num_heads // layer.attn.num_kv_heads
        if sharing > MOST_SHARING:
            return f"{sharing} query heads on a KV head are more than {MOST_SHARING}"
    return None


def _native_only(config: EngineConfig) -> str | None:
    """The first setting that numpy has no answer to."""
    if config.quantization is not None:
        return f"quantization {config.quantization}"
    if config.kv_cache_dtype not in ("auto", "float32"):
        return f"kv_cache_dtype {config.kv_cache_dtype}"
    if config.instruction_set != "auto":
        return f"instruction_set {config.instruction_set}"
    return None


def native_ops(config: EngineConfig, collectives: Collectives | None = None) -> NativeOps:
    return NativeOps(
        config.scheduler.max_num_batched_tokens,
        num_threads=config.num_threads,
        variant=config.instruction_set,
        activations=config.activations,  # type: ignore[arg-type]
        kv_type=config.kv_cache_dtype,  # type: ignore[arg-type]
        collectives=collectives,
    )


def _load_native(
    config: EngineConfig,
    model: Model,
    source: TensorSource,
    progress: Progress | None,
    place: Place,
    collectives: Collectives | None,
) -> Decoder:
    ops = native_ops(config, collectives)
    decoder = Decoder(model.spec, ops)
    is_random = config.load_format == "dummy"
    quantization = config.quantization or ("f16" if is_random else None)
    path = None if is_random else config.model
    share = f", rank {place.rank} of {place.tensor_parallel_size} x {place.pipeline_parallel_size}"
    decoder.weights_form = pack_weights(
        model, source, ops, path, quantization, progress, share if place.world_size > 1 else ""
    )
    load_vectors(model, source, ops)
    return decoder


def _checked_dummy_spec(model: str) -> ModelSpec:
    spec = dummy_spec(model)
    check_memory(spec)
    return spec


def dummy_spec(model: str) -> ModelSpec:
    """Of a config's JSON text, a .json file, or of a model's files, whose weights are not read."""
    if is_config(model):
        return from_config(read_config(model))
    with open_checkpoint(model) as source:
        try:
            found = read_model(source)
            tensors_of(found, source)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from None
        return found.spec
