"""Reading the tokenizer of a folder as Hugging Face writes it.

`tokenizer.json` is taken as it is, but for what cuts or fills texts to a length. What it puts around a text
is found by trying; `add_bos_token` and `add_eos_token` of `tokenizer_config.json` go before that. A folder
without it may have a `tokenizer.model` of SentencePiece.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import tokenizers

from mainspring.base.errors import CheckpointError
from mainspring.base.log import get_logger
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.quoting import quoted
from mainspring.frontend.tokenization import pieces
from mainspring.frontend.tokenization.library import JSONEncoder, refusing
from mainspring.frontend.tokenization.parts import CONTROL, USER_DEFINED, Parts
from mainspring.frontend.tokenization.sentencepiece_model import BPE, parse_model
from mainspring.frontend.tokenization.spelling import (
    CONTINUES,
    SPACE,
    ByteLevel,
    SentencePieces,
    Spelling,
    WordPieces,
    lost_characters,
)

logger = get_logger(__name__)

MODEL_FILE: Final = "tokenizer.model"
MOST_ADDED = 1 << 20  # the highest id of an added token
_PROBE = "a"


def read_folder(folder: ModelFolder) -> Parts:
    """Raises `CheckpointError` naming the file that is missing, wrong or not supported."""
    if (path := folder.tokenizer_json) is not None:
        return _named(path, lambda: _from_json(path, folder))
    if (path := folder.path / MODEL_FILE).is_file():
        return _named(path, lambda: _from_model(path, folder))
    found = "a vocab.json or vocab.txt alone is not read: " if _has_words(folder.path) else ""
    raise CheckpointError(
        f"{folder.path}: has no tokenizer.json and no {MODEL_FILE}; {found}save the model's tokenizer as "
        "tokenizer.json (a 'fast' one is), or set skip_tokenizer_init to send token ids"
    )


def _has_words(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("vocab.json", "vocab.txt"))


def _named(path: Path, read: Any) -> Parts:
    try:
        found: Parts = read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return found


# ---- tokenizer.json ----------------------------------------------------------------------------------------


class _Model(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None


class _Added(msgspec.Struct):
    id: int
    content: str


class _File(msgspec.Struct):
    """What is asked of the file beside what the library makes of it."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[_Added] = []


def _from_json(path: Path, folder: ModelFolder) -> Parts:
    data = path.read_bytes()
    with refusing("is no tokenizer"):
        file = msgspec.json.decode(data, type=_File)
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    for given in file.added_tokens:  # the library numbers them anew where ids have gaps or occur twice
        if (found := tokenizer.token_to_id(given.content)) != given.id:
            raise CheckpointError(
                f"added token {quoted(given.content)} has id {given.id}, and would become {found}; "
                "expected ids without gaps after the vocabulary's, each once"
            )
    if file.model.dropout:  # of training: merges left out at random
        logger.warning(
            "%s: model.dropout %s has no effect: a text has one spelling", path, file.model.dropout
        )
        tokenizer.model.dropout = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        tokens[i] = token
    added = tokenizer.get_added_tokens_decoder()
    bos, eos = (_id_of(folder, f"{name}_token", vocabulary) for name in ("bos", "eos"))
    special = frozenset(i for i, token in added.items() if token.special)
    special |= frozenset(i for i in (bos, eos) if i is not None)
    strips_left = frozenset(i for i, token in added.items() if token.lstrip)
    strips_right = frozenset(i for i, token in added.items() if token.rstrip)
    encoder = JSONEncoder(tokenizer)
    prefix, suffix = _around(tokenizer)
    return Parts(
        tokens=tokens,
        spelling=_spelling(file.decoder),
        encoder=encoder,
        encode_whole=encoder.encode_whole,
        special_ids=special,
        literal_ids=special | frozenset(added),
        unused_ids=frozenset(i for i, token in enumerate(tokens) if not token),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        prefix_ids=_asked(prefix, folder, "add_bos_token", bos),
        suffix_ids=_asked(suffix, folder, "add_eos_token", eos),
        strip_left_ids=strips_left & special,
        strip_right_ids=strips_right & special,
        lost=lost_characters(tokens) if _cuts_only(file) and not strips_left | strips_right else None,
        chat_template=folder.chat_template,
    )


def _id_of(folder: ModelFolder, name: str, vocabulary: Mapping[str, int]) -> int | None:
    text = folder.special_token(name)
    return None if text is None else vocabulary.get(text)


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that go before and after a text."""
    inner = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    raise CheckpointError("its post_processor changes a text's own tokens, which is not supported")


def _asked(around: tuple[int, ...], folder: ModelFolder, key: str, token_id: int | None) -> tuple[int, ...]:
    """`around`, or what `tokenizer_config.json` says instead."""
    asked = folder.tokenizer_config.get(key)
    if asked is None or token_id is None:
        return around
    if not isinstance(asked, bool):
        raise CheckpointError(f"tokenizer_config.json's {key} is {quoted(asked)}; expected true or false")
    if asked:
        return around if token_id in around else (token_id, *around)
    return tuple(i for i in around if i != token_id)


def _spelling(decoder: dict[str, Any] | None) -> Spelling:
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return ByteLevel()
    if "WordPiece" in kinds and steps[kinds.index("WordPiece")].get("prefix", CONTINUES) == CONTINUES:
        return WordPieces()
    if "Metaspace" in kinds:
        step = steps[kinds.index("Metaspace")]
        scheme = step.get("prepend_scheme", "always")
        return SentencePieces(adds_space=scheme != "never" and step.get("add_prefix_space", True))
    if any(step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE} for step in steps):
        return SentencePieces(
            adds_space=any(step.get("type") == "Strip" and step.get("start") for step in steps)
        )
    raise CheckpointError(
        f"decoder {quoted(', '.join(map(str, kinds)) or None)} is not supported; "
        "supported: ByteLevel, Metaspace, WordPiece, and Replace of \u2581 with ByteFallback"
    )


def _cuts_only(file: _File) -> bool:
    """Whether nothing is done to a text but to cut it, and to compose its characters."""
    kept = all(step.get("type") == "NFC" for step in _steps(file.normalizer, "normalizers"))
    cut = all(
        step.get("type") in ("ByteLevel", "Digits")
        or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in _steps(file.pre_tokenizer, "pretokenizers")
    )
    return kept and cut


def _steps(given: dict[str, Any] | None, inside: str = "decoders") -> list[dict[str, Any]]:
    if given is None:
        return []
    if given.get("type") != "Sequence":
        return [given]
    return [step for inner in given.get(inside, []) for step in _steps(inner, inside)]


# ---- tokenizer.model ---------------------------------------------------------------------------------------


def _from_model(path: Path, folder: ModelFolder) -> Parts:
    model = parse_model(path.read_bytes())
    tokens, scores, types = model.tokens, model.scores, model.types
    for i, (text, type_) in sorted(_added(folder, len(tokens)).items()):
        while len(tokens) <= i:
            tokens.append(f"[unused {len(tokens)}]")
            scores.append(0.0)
            types.append(CONTROL)
        tokens[i], types[i] = text, type_
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bos, eos = (_id_of(folder, f"{name}_token", vocabulary) for name in ("bos", "eos"))
    bos = model.bos_id if bos is None and model.bos_id >= 0 else bos
    eos = model.eos_id if eos is None and model.eos_id >= 0 else eos
    ids = {name: i for name, i in (("bos", bos), ("eos", eos)) if i is not None}
    if any(i >= len(tokens) for i in (*ids.values(), model.unknown_id)):
        raise CheckpointError(f"names a special token beyond its {len(tokens)} pieces")
    is_bpe = model.model_type == BPE
    return (pieces.bpe_parts if is_bpe else pieces.unigram_parts)(
        pieces.PieceVocabulary(
            tokens=tokens,
            scores=np.array(scores, np.float64),
            types=np.array(types, np.int64),
            named=ids,
            unknown_id=model.unknown_id if model.unknown_id >= 0 else None,
            add_space_prefix=model.add_space_prefix,
            remove_extra_spaces=model.remove_extra_spaces,
            charsmap=model.charsmap,
            key="the list of pieces",
            ends={
                "bos_token_id": bos,
                "eos_token_ids": () if eos is None else (eos,),
                "prefix_ids": _asked(
                    (bos,) if is_bpe and bos is not None else (), folder, "add_bos_token", bos
                ),
                "suffix_ids": _asked(
                    (eos,) if not is_bpe and eos is not None else (), folder, "add_eos_token", eos
                ),
            },
            chat_template=folder.chat_template,
        )
    )


def _added(folder: ModelFolder, num_pieces: int) -> dict[int, tuple[str, int]]:
    """Id -> text and type of what `tokenizer_config.json` adds to the pieces, or changes of them."""
    given = folder.tokenizer_config.get("added_tokens_decoder", {})
    found = {}
    try:
        for key, token in given.items():
            i, text = int(key), token["content"]
            if not isinstance(text, str) or not 0 <= i < num_pieces + MOST_ADDED:
                raise ValueError
            found[i] = text, CONTROL if token.get("special", False) else USER_DEFINED
    except (AttributeError, TypeError, KeyError, ValueError):
        raise CheckpointError(
            "tokenizer_config.json's added_tokens_decoder is no mapping of ids to tokens"
        ) from None
    return found
