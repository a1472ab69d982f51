"""Reading a `tokenizer.model`: SentencePiece's own file, a Protocol Buffers message.

Of that format only what the message has is here: numbers of variable length, four bytes, and bytes with their
length in front. Fields that are not named are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted

UNIGRAM, BPE = 1, 2  # kinds of models
_KINDS: Final = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "char"}
# Numbers of fields.
_PIECES, _TRAINER, _NORMALISER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _UNKNOWN_ID, _BOS_ID, _EOS_ID = 3, 24, 40, 41, 42
_CHARSMAP, _ADD_PREFIX, _REMOVE_EXTRA, _ESCAPE = 2, 3, 4, 5


class SentencePieceModel(NamedTuple):
    model_type: int
    tokens: list[str]
    scores: list[float]
    types: list[int]
    unknown_id: int
    bos_id: int  # -1: there is none
    eos_id: int
    charsmap: bytes
    add_space_prefix: bool
    remove_extra_spaces: bool


def parse_model(data: bytes) -> SentencePieceModel:
    """Raises `CheckpointError` for what is no such file, or a model of a kind that is not supported."""
    try:
        return _parse(data)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise CheckpointError(f"is no SentencePiece model, or damaged: {error}") from None


def _parse(data: bytes) -> SentencePieceModel:
    tokens, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            piece = dict(_fields(value))
            tokens.append(piece.get(_PIECE_TEXT, b"").decode())
            scores.append(piece.get(_PIECE_SCORE, 0.0))
            types.append(piece.get(_PIECE_TYPE, 1))
        elif number == _TRAINER:
            trainer = dict(_fields(value))
        elif number == _NORMALISER:
            normaliser = dict(_fields(value))
    model_type = trainer.get(_MODEL_TYPE, UNIGRAM)
    if model_type not in (UNIGRAM, BPE):
        kind = _KINDS.get(model_type, str(model_type))
        raise CheckpointError(
            f"is a model of kind {quoted(kind)}, which is not supported; supported: BPE, unigram"
        )
    if trainer.get(_SPACE_AS_SUFFIX, 0) or not normaliser.get(_ESCAPE, 1):
        raise CheckpointError("writes spaces in a way that is not supported; expected one before each word")
    if not tokens:
        raise CheckpointError("has no pieces")
    return SentencePieceModel(
        model_type,
        tokens,
        scores,
        types,
        _signed(trainer.get(_UNKNOWN_ID, 0)),
        _signed(trainer.get(_BOS_ID, 1)),
        _signed(trainer.get(_EOS_ID, 2)),
        normaliser.get(_CHARSMAP, b""),
        bool(normaliser.get(_ADD_PREFIX, 1)),
        bool(normaliser.get(_REMOVE_EXTRA, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number of the field and its value: an int, a float or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        form = key & 7
        if form == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif form == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise IndexError("it ends early")
            yield key >> 3, data[at : at + length]
            at += length
        elif form == 5:
            yield key >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif form == 1:
            at += 8
        else:
            raise IndexError(f"a field of form {form}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
