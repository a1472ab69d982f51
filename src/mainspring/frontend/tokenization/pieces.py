"""Vocabularies of SentencePiece, whether a GGUF file or a model of its own carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted
from mainspring.frontend.tokenization import library
from mainspring.frontend.tokenization.parts import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Parts,
    ids_of_types,
    numbered,
)
from mainspring.frontend.tokenization.sentencepiece import SentencePieceEncoder
from mainspring.frontend.tokenization.spelling import SPACE, SentencePieces

# What Phi-3's special tokens take white space after them along; these do not.
_STRIP_NOTHING = frozenset(("<unk>", "<s>", "<|endoftext|>"))


@dataclass(frozen=True, kw_only=True)
class PieceVocabulary:
    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    named: Mapping[str, int]  # some of bos, eos, eot, eom
    unknown_id: int | None
    add_space_prefix: bool
    remove_extra_spaces: bool
    charsmap: bytes = b""
    strips_after_specials: bool = False
    key: str  # what the list of tokens is called in errors
    ends: Mapping[str, Any] = field(default_factory=dict)  # what `Parts` says of beginnings and ends
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(np.asarray(self.scores, np.float64)).all():
            raise CheckpointError(f"the scores of {self.key} are not all finite")

    @property
    def special_ids(self) -> frozenset[int]:
        unknown = frozenset(() if self.unknown_id is None else (self.unknown_id,))
        return ids_of_types(self.types, UNKNOWN, CONTROL) | frozenset(self.named.values()) | unknown

    def parts(self, encoder: Any) -> Parts:
        special = self.special_ids
        strips = (i for i in special if self.tokens[i] not in _STRIP_NOTHING)
        return Parts(
            tokens=self.tokens,
            spelling=SentencePieces(adds_space=self.add_space_prefix),
            encoder=encoder,
            special_ids=special,
            literal_ids=special | ids_of_types(self.types, USER_DEFINED),
            unused_ids=ids_of_types(self.types, UNUSED) - special,
            strip_right_ids=frozenset(strips if self.strips_after_specials else ()),
            **self.ends,
            chat_template=self.chat_template,
        )


def bpe_parts(vocabulary: PieceVocabulary) -> Parts:
    """Raises `CheckpointError` for a vocabulary that contradicts itself."""
    tokens, scores, types = vocabulary.tokens, vocabulary.scores, vocabulary.types
    special = vocabulary.special_ids
    hidden = special | ids_of_types(types, USER_DEFINED, UNUSED, BYTE)
    ids = numbered(tokens, hidden, vocabulary.key)
    return vocabulary.parts(
        SentencePieceEncoder(
            ids,
            {token: -scores[i] for token, i in ids.items()},
            user_defined={tokens[i]: i for i in ids_of_types(types, USER_DEFINED) - special},
            byte_ids=_byte_ids(vocabulary),
            unknown_id=vocabulary.unknown_id,
            add_space_prefix=vocabulary.add_space_prefix,
            remove_extra_spaces=vocabulary.remove_extra_spaces,
            normalise=library.charsmap_normaliser(vocabulary.charsmap) if vocabulary.charsmap else None,
        )
    )


def unigram_parts(vocabulary: PieceVocabulary) -> Parts:
    """Raises `CheckpointError` for a vocabulary that contradicts itself."""
    tokens, special = vocabulary.tokens, vocabulary.special_ids
    numbered(tokens, ids_of_types(vocabulary.types, UNUSED), vocabulary.key)
    if vocabulary.unknown_id is None:
        raise CheckpointError(f"{vocabulary.key} has no token for what is unknown")
    user_defined = ids_of_types(vocabulary.types, USER_DEFINED) - special
    return vocabulary.parts(
        library.unigram(
            list(zip(tokens, vocabulary.scores, strict=True)),
            vocabulary.unknown_id,
            special_ids=special | ids_of_types(vocabulary.types, UNUSED),
            byte_fallback=bool(_byte_ids(vocabulary)),
            user_defined=[tokens[i].replace(SPACE, " ") for i in sorted(user_defined)],
            add_space_prefix=vocabulary.add_space_prefix,
            remove_extra_spaces=vocabulary.remove_extra_spaces,
            charsmap=vocabulary.charsmap,
        )
    )


def _byte_ids(vocabulary: PieceVocabulary) -> dict[int, int]:
    """Byte -> id; empty for a vocabulary without them."""
    found: dict[int, int] = {}
    for i in ids_of_types(vocabulary.types, BYTE):
        token = vocabulary.tokens[i]
        spelled = SentencePieces(False).spell(token)
        if len(spelled) != 1 or not token.startswith("<0x"):
            raise CheckpointError(
                f"token {i} of {vocabulary.key} is {quoted(token)}, expected a byte as <0xE2>"
            )
        found[spelled[0]] = i
    if found and len(found) != 256:
        raise CheckpointError(f"{vocabulary.key} has tokens for {len(found)} bytes, expected all 256 or none")
    return found
