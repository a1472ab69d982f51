"""Reading the vocabulary that a GGUF file carries.

`tokenizer.ggml.model` says what kind it is: "gpt2" is byte-level BPE, "llama" SentencePiece's BPE, "t5" its
unigram model, "bert" WordPiece. Keys that are not there have the meaning that converters rely on when they
leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.quoting import quoted
from mainspring.frontend.tokenization import library, pieces
from mainspring.frontend.tokenization.parts import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Parts,
    ids_of_types,
    numbered,
)
from mainspring.frontend.tokenization.pre_tokenizers import kind_of
from mainspring.frontend.tokenization.spelling import (
    CONTINUES,
    SPACE,
    ByteLevel,
    WordPieces,
    lost_characters,
)

END_KEYS = ("eos", "eot", "eom")  # tokenizer.ggml.<...>_token_id; each of them ends an answer
ID_KEYS = ("bos", *END_KEYS)  # not "padding": in some files it names an ordinary word
TOKENS_KEY = "key 'tokenizer.ggml.tokens'"
SEPARATOR_KEY = "seperator"  # as the format spells it


def read_gguf(file: GGUFFile) -> Parts:
    """Raises `CheckpointError` naming the key that is missing, contradictory or not supported."""
    try:
        return _read(_Keys(file.metadata))
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None


def _read(keys: _Keys) -> Parts:
    readers = {"gpt2": _gpt2, "llama": _llama, "t5": _t5, "bert": _bert}
    model = keys.one("ggml.model", str)
    if model not in readers:
        raise CheckpointError(
            f"tokenizer {quoted(model)} (key 'tokenizer.ggml.model') is not supported; "
            f"supported: {', '.join(readers)}"
        )
    return readers[model](keys)


class _Keys:
    """The keys that begin with "tokenizer.", judged as they are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def one(self, name: str, kind: type, default: Any = ...) -> Any:
        key = f"tokenizer.{name}"
        value = self.metadata.get(key)
        if value is None and default is not ...:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise CheckpointError(f"key {key!r} {found}, expected a {kind.__name__}")
        return value

    def many(self, name: str, kind: type, default: Any = ...) -> Any:
        values = self.one(name, list, default)
        if values and not all(map(kind.__instancecheck__, values)):
            raise CheckpointError(f"key 'tokenizer.{name}' has elements that are no {kind.__name__}")
        return values

    def for_each(self, name: str, kind: type, num_tokens: int, default: Any = ...) -> Any:
        values = self.many(name, kind, default)
        if values is not default and len(values) != num_tokens:
            raise CheckpointError(
                f"key 'tokenizer.{name}' has {len(values)} elements, "
                f"expected {num_tokens}, one for each token"
            )
        return values

    def token_id(self, name: str, num_tokens: int) -> int | None:
        found: int | None = self.one(f"ggml.{name}_token_id", int, None)
        if found is not None and not 0 <= found < num_tokens:
            raise CheckpointError(
                f"key 'tokenizer.ggml.{name}_token_id' is {found}, expected 0 to {num_tokens - 1}"
            )
        return found

    def named_ids(self, num_tokens: int) -> dict[str, int]:
        ids = {name: self.token_id(name, num_tokens) for name in ID_KEYS}
        return {name: i for name, i in ids.items() if i is not None}

    def flag(self, name: str, default: bool) -> bool:
        found: bool = self.one(f"ggml.{name}", bool, default)
        return found

    @property
    def chat_template(self) -> str | None:
        found: str | None = self.one("chat_template", str, None)
        return found


def _gpt2(keys: _Keys) -> Parts:
    tokens = keys.many("ggml.tokens", str)
    types = keys.for_each("ggml.token_type", int, len(tokens), None)
    return byte_level_parts(
        tokens,
        _pairs(keys.many("ggml.merges", str)),
        kind=keys.one("ggml.pre", str),
        token_types=types,
        token_ids=keys.named_ids(len(tokens)),
        add_bos=keys.one("ggml.add_bos_token", bool, None),
        add_eos=keys.flag("add_eos_token", False),
        chat_template=keys.chat_template,
    )


def byte_level_parts(
    tokens: list[str],
    merges: library.Merges,
    *,
    kind: str,
    token_types: list[int] | None = None,
    token_ids: Mapping[str, int] | None = None,
    add_bos: bool | None = None,
    add_eos: bool = False,
    chat_template: str | None = None,
) -> Parts:
    """`tokens[id]` in byte-level spelling; `token_ids` has some of bos, eos, eot, eom. `add_bos` None: as is
    usual for `kind`.

    Raises `CheckpointError` for a vocabulary that contradicts itself or a `kind` that is not supported.
    """
    form = kind_of(kind)
    types, named = token_types or [], token_ids or {}
    special = ids_of_types(types, UNKNOWN, CONTROL) | frozenset(named.values())
    literal = special | ids_of_types(types, USER_DEFINED)
    unused = ids_of_types(types, UNUSED) - special
    encoder = library.byte_level(
        numbered(tokens, unused, TOKENS_KEY),
        merges,
        form,
        special_ids=special,
        user_defined=[tokens[i] for i in sorted(literal - special)],
    )
    return Parts(
        tokens=tokens,
        spelling=ByteLevel(),
        encoder=encoder,
        special_ids=special,
        literal_ids=literal,
        unused_ids=unused,
        lost=lost_characters(tokens),
        **_ends(named, form.add_bos if add_bos is None else add_bos, add_eos),
        chat_template=chat_template,
    )


def _llama(keys: _Keys) -> Parts:
    return pieces.bpe_parts(_vocabulary(keys, add_bos=True, add_eos=False))


def _t5(keys: _Keys) -> Parts:
    return pieces.unigram_parts(_vocabulary(keys, add_bos=False, add_eos=True))


def _vocabulary(keys: _Keys, *, add_bos: bool, add_eos: bool) -> pieces.PieceVocabulary:
    tokens = keys.many("ggml.tokens", str)
    named = keys.named_ids(len(tokens))
    return pieces.PieceVocabulary(
        tokens=tokens,
        scores=np.array(keys.for_each("ggml.scores", float, len(tokens)), np.float64),
        types=np.array(keys.for_each("ggml.token_type", int, len(tokens))),
        named=named,
        unknown_id=keys.token_id("unknown", len(tokens)),
        add_space_prefix=keys.flag("add_space_prefix", True),
        remove_extra_spaces=keys.flag("remove_extra_whitespaces", False),
        charsmap=_bytes(keys.many("ggml.precompiled_charsmap", int, [])),
        strips_after_specials=keys.metadata.get("general.architecture") == "phi3",
        key=TOKENS_KEY,
        ends=_ends(named, keys.flag("add_bos_token", add_bos), keys.flag("add_eos_token", add_eos)),
        chat_template=keys.chat_template,
    )


def _bert(keys: _Keys) -> Parts:
    written = keys.many("ggml.tokens", str)
    types = keys.for_each("ggml.token_type", int, len(written), [NORMAL] * len(written))
    special = ids_of_types(types, UNKNOWN, CONTROL)
    tokens = [token if i in special else _word_piece(token) for i, token in enumerate(written)]
    unknown = keys.token_id("unknown", len(tokens))
    if unknown is None:
        unknown = next((i for i, token in enumerate(written) if token == "[UNK]"), None)
    if unknown is None:
        raise CheckpointError("key 'tokenizer.ggml.unknown_token_id' is missing")
    first, last = keys.token_id("cls", len(tokens)), keys.token_id(SEPARATOR_KEY, len(tokens))
    named = keys.named_ids(len(tokens))
    first, last = named.get("bos", first), last if last is not None else named.get("eos")
    lowercase = keys.flag("normalizer.lowercase", True)
    special |= frozenset(i for i in (unknown, first, last) if i is not None)
    ids = {token: i for token, i in numbered(tokens, frozenset(), TOKENS_KEY).items() if i not in special}
    return Parts(
        tokens=tokens,
        spelling=WordPieces(),
        encoder=library.word_pieces(
            {**ids, tokens[unknown]: unknown},
            tokens[unknown],
            lowercase=lowercase,
            strip_accents=keys.flag("normalizer.strip_accents", lowercase),
        ),
        special_ids=special,
        literal_ids=special,
        bos_token_id=first,
        eos_token_ids=tuple(dict.fromkeys(named[key] for key in END_KEYS if key in named)),
        prefix_ids=() if first is None or not keys.flag("add_bos_token", True) else (first,),
        suffix_ids=() if last is None or not keys.flag("add_sep_token", True) else (last,),
        chat_template=keys.chat_template,
    )


def _word_piece(written: str) -> str:
    """As BERT spells it: converters mark the beginnings of words instead of what continues them."""
    return written[1:] if written.startswith(SPACE) else f"{CONTINUES}{written}"


def _ends(named: Mapping[str, int], add_bos: bool, add_eos: bool) -> dict[str, Any]:
    """What `Parts` says of beginnings and ends."""
    bos, eos = named.get("bos"), named.get("eos")
    return {
        "bos_token_id": bos,
        "eos_token_ids": tuple(dict.fromkeys(named[key] for key in END_KEYS if key in named)),
        "prefix_ids": (bos,) if add_bos and bos is not None else (),
        "suffix_ids": (eos,) if add_eos and eos is not None else (),
    }


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"element {index} of key 'tokenizer.ggml.merges' is {quoted(merge)}, "
                "expected two tokens with a space between"
            )
        pairs.append((left, right))
    return pairs


def _bytes(values: list[int]) -> bytes:
    """Written as int8 by some."""
    try:
        return bytes(value % 256 if -128 <= value < 256 else value for value in values)
    except ValueError:
        raise CheckpointError(
            "key 'tokenizer.ggml.precompiled_charsmap' has elements that are no bytes"
        ) from None
