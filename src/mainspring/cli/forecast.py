"""What a model would take on this machine, reckoned before any of its weights is read.

The same functions decide here that decide when an engine starts: which kernels run, what every weight is
packed as, how large the KV pool is, how long a request may be. What differs is the moment: the pool is sized
by the memory that is free once the weights are there, and that is reckoned as what is free now without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from mainspring.base.config import EngineArgs, EngineConfig
from mainspring.base.errors import ConfigError
from mainspring.base.memory import free_memory_bytes
from mainspring.base.messages import KVCacheConfig, KVCacheSpec
from mainspring.checkpoint.catalog import resolve_model
from mainspring.checkpoint.hf_config import is_config
from mainspring.checkpoint.opening import open_checkpoint
from mainspring.engine.build import (
    adapt_to_model,
    blocks_for,
    fit_max_model_len,
    group_layers,
    size_kv_cache,
)
from mainspring.frontend.llm_engine import prepare
from mainspring.kernels.native import KV_BYTES, KV_SCALE_BYTES, KVType
from mainspring.models.families import Model
from mainspring.models.loader import dummy_spec, read_model, wants_native
from mainspring.models.packing import Placed, place_weights
from mainspring.models.parallel import Place, check_divisible
from mainspring.models.spec import ExpertsSpec, ModelSpec, weight_table
from mainspring.models.views import TensorSource
from mainspring.models.weights import MEMORY_SHARE, random_model, tensors_of
from mainspring.worker.worker import kv_pool_bytes

FLOAT_FORMS = ("F32", "F16", "BF16")  # of packed weights: multiplied as fp32


class Work(msgspec.Struct, kw_only=True):
    """What the native kernels do with weights for one token: with the experts that are chosen, not all."""

    num_parameters: int = 0  # that take part; of tables a row is looked up, which is as good as nothing
    read_bytes: int = 0  # for a token that is written alone
    byte_operations: int = 0  # for one of a prompt, on 8-bit integers; a product and its sum are two
    float_operations: int = 0  # likewise on fp32


class Forecast(msgspec.Struct, kw_only=True):
    """Of one model with the settings that were given. Bytes are of memory; on disk it is as its file is."""

    name: str
    path: str
    architecture: str
    num_parameters: int
    kernels: str  # "native" or "numpy"
    weights_form: str  # what the weights are held as
    weights_bytes: int
    work: Work | None = None  # None: by numpy
    can_generate: bool
    max_position_embeddings: int
    kv_cache_dtype: str
    kv_bytes_per_token: int  # of the layers that keep all of them; windows need less
    kv_pool_bytes: int
    num_kv_blocks: int = 0
    num_kv_tokens: int = 0  # that the pool holds
    max_model_len: int = 0  # that a request would be allowed
    max_concurrency: float = 0.0  # so many requests of that length fit at once
    is_causal: bool = True  # False: a token sees those behind it too, in some layers
    chunked_prefill: bool = True
    prefix_caching: bool = True
    problems: list[str] = []  # why it would be refused with these settings
    warnings: list[str] = []


class _Opened(NamedTuple):
    model: Model
    tensors: TensorSource
    config: EngineConfig
    can_generate: bool


def forecast(args: EngineArgs) -> Forecast:
    """Raises `CheckpointError` for a model that is not here, or that nothing can be made of."""
    name, problems = args.model, []
    args = replace(args, model=_place(args))
    try:
        prepared = prepare(args)
    except ConfigError as error:
        problems += str(error).splitlines()
        prepared = prepare(_plain(args))
    config, can_generate = prepared.config, prepared.facts.can_generate
    if args.load_format == "dummy" and is_config(args.model):
        found = _Opened(*random_model(dummy_spec(args.model), 0), config, can_generate)
        return _reckon(name, found, problems)
    with open_checkpoint(args.model) as source:
        model = read_model(source, config.scheduler.max_model_len)
        return _reckon(name, _Opened(model, tensors_of(model, source), config, can_generate), problems)


def _place(args: EngineArgs) -> str:
    """Where the model is; nothing is fetched."""
    if args.load_format == "dummy" and is_config(args.model):
        return args.model
    folder = None if args.download_dir is None else Path(args.download_dir)
    return str(resolve_model(args.model, cache_dir=folder, revision=args.revision, token=args.hf_token))


def _plain(args: EngineArgs) -> EngineArgs:
    """The model alone, with every other setting left to us."""
    return EngineArgs(
        model=args.model, load_format=args.load_format, skip_tokenizer_init=args.skip_tokenizer_init
    )


def _reckon(name: str, found: _Opened, problems: list[str]) -> Forecast:
    model, _, config, can_generate = found
    spec, free_bytes = model.spec, free_memory_bytes()
    try:
        is_native = wants_native(config, spec)
    except ConfigError as error:
        problems.append(str(error))
        is_native = False
    try:
        check_divisible(spec, Place(0, config.tensor_parallel_size, config.pipeline_parallel_size))
    except ConfigError as error:
        problems.append(str(error))
    form, weights_bytes, work = _packed(found) if is_native else (*_unpacked(found, free_bytes), None)
    kv_type, kv_specs = _kv(config, spec, is_native)
    result = Forecast(
        name=name,
        path=config.model,
        architecture=spec.architecture,
        num_parameters=_num_numbers(spec),
        kernels="native" if is_native else "numpy",
        weights_form=form,
        weights_bytes=weights_bytes,
        work=work,
        can_generate=can_generate,
        max_position_embeddings=spec.max_position_embeddings,
        kv_cache_dtype=kv_type,
        kv_bytes_per_token=sum(kv.bytes_per_token for kv in kv_specs if kv.sliding_window is None),
        is_causal=all(kv.causal for kv in kv_specs),
        kv_pool_bytes=kv_pool_bytes(config.kv_cache_memory_bytes, max(0, free_bytes - weights_bytes)),
        problems=problems,
    )
    if weights_bytes > free_bytes:
        result.warnings.append(
            "the weights are larger than the memory that is free: expect swapping, or its end"
        )
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        result.warnings.append("reckoned as if one worker held it all; of several, each holds its share")
    if form == "as the file":
        result.warnings.append("weights are dequantised again in every step, which is slow")
    _size(result, config, kv_specs)
    return result


def _packed(found: _Opened) -> tuple[str, int, Work]:
    """By the native kernels."""
    model, tensors, config, _ = found
    quantization = config.quantization or ("f16" if config.load_format == "dummy" else None)
    placed, num_bytes = place_weights(model, lambda tensor: tensors.info(tensor).type, quantization)
    forms = ", ".join(sorted({place.matrix.form for place in placed}))
    return forms, num_bytes + _vector_bytes(model.spec), _work(model.spec, placed)


def _work(spec: ModelSpec, placed: Sequence[Placed]) -> Work:
    """The head is for the last token of a prompt alone."""
    work = Work()
    is_tied = spec.has_head and spec.tied_embeddings
    for place in placed:
        if place.handle == "positions" or (place.handle == "embedding" and not is_tied):
            continue
        used = math.prod(place.part.shape) * _share_used(spec, place.handle)
        work.num_parameters += round(used)
        work.read_bytes += round(place.matrix.num_bytes * _share_used(spec, place.handle))
        if place.handle in ("embedding", "head"):
            continue
        if place.matrix.form in FLOAT_FORMS:
            work.float_operations += round(2 * used)
        else:
            work.byte_operations += round(2 * used)
    return work


def _share_used(spec: ModelSpec, handle: str) -> float:
    """Of a weight, for one token."""
    place, _, kind = handle.rpartition(".")
    if not kind.startswith("experts_"):
        return 1.0
    mlp = spec.layers[int(place.removeprefix("layers."))].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp.top_k / mlp.num_experts


def _unpacked(found: _Opened, free_bytes: int) -> tuple[str, int]:
    """By numpy: as float32 if that fits, else as they are in the file."""
    float32_bytes = 4 * _num_numbers(found.model.spec)
    if found.config.load_format == "dummy" or float32_bytes <= int(MEMORY_SHARE * free_bytes):
        return "float32", float32_bytes
    path = Path(found.config.model)
    files = path.iterdir() if path.is_dir() else [path]
    return "as the file", sum(file.stat().st_size for file in files if file.is_file())


def _num_numbers(spec: ModelSpec) -> int:
    return sum(math.prod(part.shape) for _, parts in weight_table(spec) for part in parts)


def _vector_bytes(spec: ModelSpec) -> int:
    shapes = [part.shape for _, parts in weight_table(spec) for part in parts]
    return 4 * sum(math.prod(shape) for shape in shapes if len(shape) == 1)


def _kv(config: EngineConfig, spec: ModelSpec, is_native: bool) -> tuple[str, list[KVCacheSpec]]:
    """In what type keys and values are kept, and what each layer keeps."""
    kv_type: KVType = "float32"
    if is_native:
        kv_type = "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype  # type: ignore[assignment]
    sizes = KV_BYTES[kv_type], KV_SCALE_BYTES[kv_type]
    return kv_type, [layer.attn.kv_cache_spec(*sizes) for layer in spec.layers]


def _size(result: Forecast, config: EngineConfig, kv_specs: list[KVCacheSpec]) -> None:
    """The pool and what fits into it, as `engine/build.py` decides."""
    try:
        scheduler = adapt_to_model(config.scheduler, kv_specs)
        in_flight_tokens = config.depth * scheduler.max_num_batched_tokens
        result.chunked_prefill = scheduler.enable_chunked_prefill
        result.prefix_caching = scheduler.enable_prefix_caching
        pool = size_kv_cache(config, group_layers(kv_specs), result.kv_pool_bytes)
        _fill(result, pool, config, in_flight_tokens)
        fit_max_model_len(config, pool, in_flight_tokens)
    except ConfigError as error:
        result.problems.append(str(error))


def _fill(result: Forecast, pool: KVCacheConfig, config: EngineConfig, in_flight_tokens: int) -> None:
    usable = pool.num_blocks - 1
    result.num_kv_blocks = pool.num_blocks
    result.kv_pool_bytes = pool.num_blocks * pool.bytes_per_block
    fitting = msgspec.structs.replace(config, fit_max_model_len=True)
    result.max_model_len = fit_max_model_len(fitting, pool, in_flight_tokens)
    each = blocks_for(pool, result.max_model_len, in_flight_tokens)
    result.max_concurrency = round(usable / each, 2)
    result.num_kv_tokens = usable * pool.block_size
    if len(pool.groups) > 1:  # with windows: of requests of that length
        result.num_kv_tokens = usable * result.max_model_len // each
