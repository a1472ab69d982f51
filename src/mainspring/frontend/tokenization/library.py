"""Encoders of the `tokenizers` library, put together from a vocabulary or read from a `tokenizer.json`.

The library lets other threads run while it encodes a batch, and not while it encodes one text: so each text
is a batch of one. A server's event loop would stand still for a second per megabyte otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from mainspring.base.errors import CheckpointError, RequestError
from mainspring.frontend.tokenization.pre_tokenizers import Kind
from mainspring.frontend.tokenization.spelling import CONTINUES

Merges = Sequence[tuple[str, str]]
_GUARD = "\U0010ffff"  # no character: stands for a special token before a text
_RENAMED = "\U0010fffe"  # no character: what no text has


class LibraryEncoder:
    """One whose tokenizer knows no special tokens, and treats a text in the same way wherever it is."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, is_start: bool) -> list[int]:
        return _ids_of(self._tokenizer, text)


@contextmanager
def refusing(what: str, kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """The library's failures as errors of ours; it has no narrower types, and its panics are none of
    Python's exceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {' '.join(str(error).split())}") from None


def _ids_of(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Regular expressions give up on some texts: on ten million spaces, for one."""
    with refusing("the text cannot be cut into tokens", RequestError):
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


# ---- from a vocabulary -------------------------------------------------------------------------------------


def byte_level(
    ids: Mapping[str, int],
    merges: Merges,
    kind: Kind,
    *,
    special_ids: frozenset[int],
    user_defined: Iterable[str],
) -> LibraryEncoder:
    """Byte-level BPE. Raises `CheckpointError` for merges of what is no token."""

    def build(ids: Mapping[str, int], merges: Merges) -> tokenizers.Tokenizer:
        with refusing("key 'tokenizer.ggml.merges' does not fit the tokens"):
            model = models.BPE(dict(ids), list(merges), ignore_merges=kind.ignore_merges)
        tokenizer = tokenizers.Tokenizer(model)
        if kind.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = kind.pre_tokenizer()
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
        return tokenizer

    tokenizer = build(ids, merges)
    specials = [token for token, i in ids.items() if i in special_ids]
    if not special_ids.isdisjoint(_all_ids(tokenizer, specials)):
        # Plain words can be special here, by merges or as whole pieces: take them out of the model.
        ordinary = {token: i for token, i in ids.items() if i not in special_ids}
        kept = [(a, b) for a, b in merges if a in ordinary and b in ordinary and a + b in ordinary]
        tokenizer = build(ordinary, kept)
    return LibraryEncoder(tokenizer)


def word_pieces(
    ids: Mapping[str, int], unknown: str, *, lowercase: bool, strip_accents: bool
) -> LibraryEncoder:
    """BERT's words: the longest piece first. `ids` has no special tokens but the unknown one."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            dict(ids), unk_token=unknown, continuing_subword_prefix=CONTINUES, max_input_chars_per_word=100
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return LibraryEncoder(tokenizer)


class Unigram:
    """SentencePiece's unigram model: of all ways to cut a text, the one of the best sum of scores."""

    def __init__(
        self,
        pieces: Sequence[tuple[str, float]],
        *,
        hidden_ids: frozenset[int],
        byte_ids: Mapping[int, int],
        unknown_id: int,
    ) -> None:
        """`pieces[id]` is a piece and its score; `hidden_ids` are never a part of a text. What has no piece
        becomes bytes, if there are `byte_ids` (byte -> id)."""
        named = [
            (f"{_RENAMED}{i}" if i in hidden_ids else piece, score) for i, (piece, score) in enumerate(pieces)
        ]
        with refusing("the vocabulary does not fit itself"):
            self._tokenizer = tokenizers.Tokenizer(models.Unigram(named, unknown_id))
        self._bytes = byte_ids
        self._unknown_id = unknown_id

    def __call__(self, text: str) -> list[int]:
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)  # with offsets
        if not self._bytes or self._unknown_id not in encoding.ids:
            return encoding.ids
        found: list[int] = []
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if i == self._unknown_id:
                found += map(self._bytes.__getitem__, text[start:end].encode())
            else:
                found.append(i)
        return found


def charsmap_normaliser(charsmap: bytes) -> Callable[[str], str]:
    """What a SentencePiece model does to text before anything else. Raises `CheckpointError`."""
    with refusing("the precompiled_charsmap cannot be read"):
        precompiled = normalizers.Precompiled(charsmap)

    def normalise(text: str) -> str:
        with refusing("the precompiled_charsmap is damaged"):
            return precompiled.normalize_str(text)

    return normalise


# ---- from a tokenizer.json ---------------------------------------------------------------------------------


class JSONEncoder:
    """A tokenizer.json, and the same without special tokens, made when it is first needed.

    A text that follows a special token may be encoded in another way than at the beginning (Metaspace,
    "first" only). Where a special token's text is not to be one, pieces are encoded one by one, and a guard
    stands for the special token before them.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_whole(self, text: str) -> list[int]:
        return _ids_of(self._tokenizer, text)

    def encode(self, text: str, is_start: bool) -> list[int]:
        if is_start or _GUARD in text:
            return _ids_of(self._plain, text)
        return _ids_of(self._guarded, _GUARD + text)[1:]

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        found = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        found.encode_special_tokens = True
        specials = {
            token.content: i for i, token in found.get_added_tokens_decoder().items() if token.special
        }
        if not set(specials.values()).isdisjoint(_all_ids(found, specials)):
            found = tokenizers.Tokenizer.from_str(_without(self._tokenizer.to_str(), specials))
            found.encode_special_tokens = True
        return found

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        found = tokenizers.Tokenizer.from_str(self._plain.to_str())
        found.encode_special_tokens = True
        found.add_tokens([AddedToken(_GUARD, normalized=False)])
        return found


def _without(text: str, specials: Mapping[str, int]) -> str:
    """A tokenizer.json whose model makes none of `specials`: they keep their ids under names of no text."""
    file = json.loads(text)
    model = file["model"]

    def renamed(token: str) -> str:
        return f"{_RENAMED}{token}" if token in specials else token

    if isinstance(model["vocab"], list):  # unigram: pieces and scores
        model["vocab"] = [[renamed(token), score] for token, score in model["vocab"]]
    else:
        model["vocab"] = {renamed(token): i for token, i in model["vocab"].items()}
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if specials.keys().isdisjoint((a, b, a + b))]
    if model.get("unk_token") is not None:
        model["unk_token"] = renamed(model["unk_token"])
    for token in file["added_tokens"]:
        token["content"] = renamed(token["content"])
    file["post_processor"] = None  # it has names, too
    return json.dumps(file)


def _all_ids(tokenizer: tokenizers.Tokenizer, texts: Iterable[str]) -> set[int]:
    return {i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids}
