"""What a front end must know of a model beside its vocabulary, whatever form its files have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from mainspring.base.config import ModelFacts
from mainspring.base.errors import CheckpointError, RequestError
from mainspring.base.log import get_logger
from mainspring.base.params import SamplingParams
from mainspring.checkpoint.architectures import ENCODERS, check_architecture
from mainspring.checkpoint.folder import CONFIG_FILE, ModelFolder
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.hf_config import GENERATION
from mainspring.checkpoint.opening import Checkpoint
from mainspring.checkpoint.pooling import folder_pooling, gguf_pooling, longest_text
from mainspring.checkpoint.quoting import quoted

logger = get_logger(__name__)

END_KEYS: Final = ("eos", "eot", "eom")  # tokenizer.ggml.<...>_token_id; the first there is *the* EOS
MOST: Final = 2**31 - 1  # of anything that is counted here
POSITION_KEYS: Final = ("max_position_embeddings", "n_positions")  # the second is GPT-2's


class Description(NamedTuple):
    facts: ModelFacts
    sampling_defaults: Mapping[str, Any]  # what the model's makers advise, by the names of `SamplingParams`


def describe(checkpoint: Checkpoint) -> Description:
    """Raises `CheckpointError` naming the key that is missing or wrong."""
    if isinstance(checkpoint, GGUFFile):
        return Description(gguf_facts(checkpoint), {})
    return Description(folder_facts(checkpoint), sampling_defaults(checkpoint))


def gguf_facts(file: GGUFFile) -> ModelFacts:
    def read(key: str) -> object:
        if key not in file.metadata:
            raise CheckpointError(f"{file.path}: the key {key!r} is missing; is this a language model?")
        return file.metadata[key]

    try:
        architecture = check_architecture(file.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    vocab_size = file.info("token_embd.weight").shape[0]

    def token_ids(name: str) -> tuple[int, ...]:
        return _token_ids(file.metadata, f"tokenizer.ggml.{name}_token_id", vocab_size, str(file.path))

    return ModelFacts(
        path=str(file.path),
        architecture=architecture,
        max_position_embeddings=int(str(read(f"{architecture}.context_length"))),
        vocab_size=vocab_size,
        bos_token_id=next(iter(token_ids("bos")), None),
        eos_token_ids=tuple(dict.fromkeys(i for name in END_KEYS for i in token_ids(name))),
        can_generate=architecture not in ENCODERS,
        pooling=gguf_pooling(file, architecture),
    )


def folder_facts(folder: ModelFolder) -> ModelFacts:
    facts = config_facts(str(folder.path), folder.config, str(folder.path / CONFIG_FILE))
    generation = folder.generation_config
    where = str(folder.path / "generation_config.json")
    ends = _token_ids(generation, "eos_token_id", facts.vocab_size, where) or facts.eos_token_ids
    eos, bos = (_special_id(folder, name, facts.vocab_size) for name in ("eos_token", "bos_token"))
    first = () if eos is None else (eos,)
    most = facts.max_position_embeddings
    return replace(
        facts,
        max_position_embeddings=min(most, longest_text(folder) or most),
        bos_token_id=facts.bos_token_id if bos is None else bos,
        eos_token_ids=tuple(dict.fromkeys((*first, *ends))),
        pooling=folder_pooling(folder),
    )


def config_facts(model: str, config: Mapping[str, Any], shown: str = "the config") -> ModelFacts:
    """Of a config alone (`checkpoint/hf_config.py`). shown: what it is called in errors."""
    text = config.get("text_config")  # of a model that reads more than text
    inner = text if isinstance(text, Mapping) else config

    def read(*keys: str) -> int:
        key = next((key for key in keys if key in inner), keys[0])
        value = inner.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise CheckpointError(f"{shown}'s {key} is {quoted(value)}; expected a positive integer")
        return value

    most, vocab_size = _positions(inner, read(*POSITION_KEYS)), read("vocab_size")

    def token_ids(key: str) -> tuple[int, ...]:
        return _token_ids(config if config.get(key) is not None else inner, key, vocab_size, shown)

    return ModelFacts(
        path=model,
        architecture=str(config.get("model_type")),
        max_position_embeddings=most,
        vocab_size=vocab_size,
        bos_token_id=next(iter(token_ids("bos_token_id")), None),
        eos_token_ids=token_ids("eos_token_id"),
        can_generate=config.get("model_type") not in ENCODERS,
    )


def sampling_defaults(folder: ModelFolder) -> Mapping[str, Any]:
    """What `generation_config.json` advises, judged."""
    given = folder.generation_config
    found = {ours: given[name] for name, ours in GENERATION.items() if given.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise CheckpointError(f"{folder.path / 'generation_config.json'}: {error}") from None
    return found


def _positions(config: Mapping[str, Any], most: int) -> int:
    """YaRN's configs say the context before it was stretched, and by how much."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return most
    original, factor = scaling.get("original_max_position_embeddings", most), scaling.get("factor", 1.0)
    if not isinstance(original, int) or not isinstance(factor, int | float) or not 1.0 <= factor <= 1024.0:
        return most  # whoever computes with it refuses it by name
    return max(most, int(original * factor))


def _token_ids(settings: Mapping[str, Any], key: str, vocab_size: int, shown: str) -> tuple[int, ...]:
    """Those that there are: a model cannot say others, and is usable without."""
    value = settings.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MOST for i in ids):
        raise CheckpointError(f"{shown}'s {key} is {quoted(value)}; expected a token's id, or a list of them")
    return tuple(i for i in ids if _is_known(i, vocab_size, f"{shown}'s {key}"))


def _is_known(token_id: int, vocab_size: int, shown: str) -> bool:
    if token_id < vocab_size:
        return True
    logger.warning("%s %d is beyond the vocabulary of %d, and has no effect", shown, token_id, vocab_size)
    return False


class _AddedToken(msgspec.Struct, gc=False):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _special_id(folder: ModelFolder, name: str, vocab_size: int) -> int | None:
    """The id of the tokenizer's own "bos_token" or "eos_token"."""
    text, path = folder.special_token(name), folder.tokenizer_json
    if text is None or path is None:
        return None
    ids = (i for i, content in _added_tokens(path) if content == text)
    return next((i for i in ids if _is_known(i, vocab_size, f"{path}'s {name}")), None)


def _added_tokens(path: Path) -> list[tuple[int, str]]:
    """The tokens that are added to a vocabulary, special ones among them; the rest of the file is skipped."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_AddedTokens)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no tokenizer: {' '.join(str(error).split())}") from None
    return [(token.id, token.content) for token in found.added_tokens]
