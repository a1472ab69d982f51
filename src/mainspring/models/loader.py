"""From an `EngineConfig` to a model that computes: `load_model` is what a worker calls."""

from __future__ import annotations

from mainspring.base.config import EngineConfig
from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.hf_config import is_config, read_config
from mainspring.kernels.ref import RefOps
from mainspring.kernels.threads import set_blas_threads
from mainspring.models.decoder import Decoder
from mainspring.models.families import from_config, from_gguf
from mainspring.models.spec import ModelSpec
from mainspring.models.weights import check_memory, check_tensors, dummy_weights, load_weights


def load_model(config: EngineConfig) -> Decoder:
    """Read the GGUF file `config.model`; for dummy weights also a config: a .json file, or its text.

    Raises `CheckpointError` for what is wrong with the file, `ConfigError` for kernels that are not there.
    """
    if config.kernels == "native":
        raise ConfigError("kernels native: there are no native kernels yet; use kernels numpy, or auto")
    if config.num_threads is not None:
        set_blas_threads(config.num_threads)
    ops = RefOps(max_rows=config.scheduler.max_num_batched_tokens)
    if config.load_format == "dummy":
        spec = dummy_spec(config.model)
        check_memory(spec)
        decoder = Decoder(spec, ops)
        dummy_weights(spec, ops, config.seed)
        return decoder
    source = GGUFFile(config.model)
    try:
        model = from_gguf(source.metadata, source)
        check_tensors(model, source)  # before anything of the announced sizes is made
        decoder = Decoder(model.spec, ops)
        decoder.weights_form = load_weights(model, source, ops)
    except CheckpointError as error:
        source.close()
        raise CheckpointError(f"{config.model}: {error}") from error
    if decoder.weights_form == "float32":
        source.close()
    return decoder


def dummy_spec(model: str) -> ModelSpec:
    """The shape of a model: a config's JSON text or .json file, or a GGUF file whose weights are not read."""
    if is_config(model):
        return from_config(read_config(model))
    with GGUFFile(model) as source:
        try:
            found = from_gguf(source.metadata, source)
            check_tensors(found, source)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from None
        return found.spec
