"""Vocabularies of SentencePiece, whether a GGUF file or a model of its own carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted
from mainspring.frontend.tokenization import library
from mainspring.frontend.tokenization.parts import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Parts,
    ids_of_types,
    numbered,
)
from mainspring.frontend.tokenization.sentencepiece import BytePairs, Cutter, SentencePieceEncoder
from mainspring.frontend.tokenization.spelling import SPACE, SentencePieces

# What Phi-3's special tokens take white space after them along; these do not.
_STRIP_NOTHING = frozenset(("<unk>", "<s>", "<|endoftext|>"))


@dataclass(frozen=True, kw_only=True)
class PieceVocabulary:
    tokens: Sequence[str]
    scores: npt.NDArray[np.float64]  # by id, as all lists here
    types: npt.NDArray[Any]
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
        if not np.isfinite(self.scores).all():
            raise CheckpointError(f"the scores of {self.key} are not all finite")

    @property
    def special_ids(self) -> frozenset[int]:
        unknown = frozenset(() if self.unknown_id is None else (self.unknown_id,))
        return ids_of_types(self.types, UNKNOWN, CONTROL) | frozenset(self.named.values()) | unknown

    def parts(self, cutter: Cutter, cuts_user_defined: bool) -> Parts:
        """cuts_user_defined: texts that users defined are taken out before `cutter` sees what is between."""
        special = self.special_ids
        user_defined = ids_of_types(self.types, USER_DEFINED) - special
        strips = (i for i in special if self.tokens[i] not in _STRIP_NOTHING)
        return Parts(
            tokens=self.tokens,
            spelling=SentencePieces(adds_space=self.add_space_prefix or self.remove_extra_spaces),
            encoder=SentencePieceEncoder(
                cutter,
                user_defined={self.tokens[i]: i for i in user_defined if cuts_user_defined},
                add_space_prefix=self.add_space_prefix,
                remove_extra_spaces=self.remove_extra_spaces,
                normalise=library.charsmap_normaliser(self.charsmap) if self.charsmap else None,
            ),
            special_ids=special,
            literal_ids=special | user_defined,
            unused_ids=ids_of_types(self.types, UNUSED) - special,
            strip_right_ids=frozenset(strips if self.strips_after_specials else ()),
            lost="" if self.byte_ids() and not self._drops_text() else None,
            **self.ends,
            chat_template=self.chat_template,
        )

    def _drops_text(self) -> bool:
        return self.remove_extra_spaces or bool(self.charsmap) or self.strips_after_specials

    def byte_ids(self) -> dict[int, int]:
        """Byte -> id; empty for a vocabulary without them."""
        found: dict[int, int] = {}
        for i in ids_of_types(self.types, BYTE):
            token = self.tokens[i]
            spelled = SentencePieces(False).spell(token)
            if len(spelled) != 1 or not token.startswith("<0x"):
                raise CheckpointError(
                    f"token {i} of {self.key} is {quoted(token)}, expected a byte as <0xE2>"
                )
            found[spelled[0]] = i
        if found and len(found) != 256:
            raise CheckpointError(f"{self.key} has tokens for {len(found)} bytes, expected all 256 or none")
        return found


def bpe_parts(vocabulary: PieceVocabulary) -> Parts:
    """Raises `CheckpointError` for a vocabulary that contradicts itself."""
    hidden = vocabulary.special_ids | ids_of_types(vocabulary.types, USER_DEFINED, UNUSED, BYTE)
    return vocabulary.parts(
        BytePairs(
            numbered(vocabulary.tokens, hidden, vocabulary.key),
            (-vocabulary.scores).tolist(),
            byte_ids=vocabulary.byte_ids(),
            unknown_id=vocabulary.unknown_id,
        ),
        cuts_user_defined=True,
    )


def unigram_parts(vocabulary: PieceVocabulary) -> Parts:
    """Raises `CheckpointError` for a vocabulary that contradicts itself."""
    tokens, types = vocabulary.tokens, vocabulary.types
    special = vocabulary.special_ids
    hidden = special | ids_of_types(types, UNUSED, BYTE)
    numbered(tokens, hidden, vocabulary.key)
    if vocabulary.unknown_id is None:
        raise CheckpointError(f"{vocabulary.key} has no token for what is unknown")
    # Texts that users defined compete with other cuts here, at a score by which they nearly always win.
    best = float(vocabulary.scores[types == NORMAL].max(initial=0.0))
    scores = vocabulary.scores.tolist()
    for i in ids_of_types(types, USER_DEFINED) - special:
        scores[i] = len(tokens[i].replace(" ", SPACE).encode()) * best - 0.1
    cutter = library.Unigram(
        [(token.replace(" ", SPACE), score) for token, score in zip(tokens, scores, strict=True)],
        hidden_ids=hidden,
        byte_ids=vocabulary.byte_ids(),
        unknown_id=vocabulary.unknown_id,
    )
    return vocabulary.parts(cutter, cuts_user_defined=False)
