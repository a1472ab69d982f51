"""Text to token ids and back, from the vocabulary that a GGUF file carries.

Encoding is the `tokenizers` library's: byte-level BPE, assembled from the file's tokens and merges. Two
encoders share one model: `_full` knows the special tokens, `_plain` does not, so text can be encoded in such
a way that nothing in it becomes a special token (what users wrote, inside a chat).

Decoding is ours, because it is a table: a token *is* bytes, and text is their concatenation read as UTF-8
with U+FFFD for what is not. So `decode(ids, skip_special_tokens=False)` is always the concatenation of
`token_bytes`, decoded with errors="replace", and a detokenizer may work with one token's bytes at a time.

An id that the vocabulary lacks, or that only fills it up to a round number, is empty text: models may have
more output rows than there are tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mainspring.base.errors import CheckpointError, RequestError
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.opening import Checkpoint
from mainspring.checkpoint.quoting import quoted

# Token types of the file. What is not named here is ordinary.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5

_END_KEYS = ("eos", "eot", "eom")  # tokenizer.ggml.<...>_token_id; each of them ends an answer
_ID_KEYS = ("bos", *_END_KEYS)  # not "unknown" and "padding": in some files they name ordinary words


# ---- pre-tokenizers: how text is cut before merging starts -------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """What `tokenizer.ggml.pre` stands for."""

    splits: tuple[pre_tokenizers.PreTokenizer, ...]
    ignore_merges: bool = False  # a piece that is a token stays one, whatever the merges say
    nfc: bool = False  # text is composed first
    add_bos: bool = False  # where the file does not say


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """Contractions, words with the mark before them, digits as given, punctuation, line ends, spaces."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    spaces = r"\s*[\r\n]+|\s+(?!\S)|\s+"
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    marks = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    pattern = f"{contractions}|{words}|{digits}|{marks}|{spaces}"
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


_KINDS = {
    "gpt-2": lambda: _Kind((_byte_level(use_regex=True),)),
    "smollm": lambda: _Kind((pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True))),
    "llama-bpe": lambda: _Kind(
        (_words(r"\p{N}{1,3}"), _byte_level(use_regex=False)), ignore_merges=True, add_bos=True
    ),
    "qwen2": lambda: _Kind((_words(r"\p{N}"), _byte_level(use_regex=False)), nfc=True),
}


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible character; this is the way back.

    A byte that is a visible Latin-1 character stands for itself; the others are, in order, U+0100 and on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_BYTE_VALUES = np.array([_BYTE_OF.get(chr(i), -1) for i in range(max(map(ord, _BYTE_OF)) + 2)])


# ---- the tokenizer -----------------------------------------------------------------------------------------


class Tokenizer:
    """Encodes and decodes. Immutable after construction, safe to use from several threads."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[tuple[str, str]],
        *,
        kind: str,
        token_types: list[int] | None = None,
        token_ids: dict[str, int] | None = None,
        add_bos_token: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`tokens[id]` in byte-level spelling; `token_ids` has some of bos, eos, eot, eom.

        Raises `CheckpointError` for a vocabulary that contradicts itself or a `kind` that is not supported.
        """
        if kind not in _KINDS:
            raise CheckpointError(
                f"pre-tokenizer {quoted(kind)} (key 'tokenizer.ggml.pre') is not supported; "
                f"supported: {', '.join(_KINDS)}"
            )
        form = _KINDS[kind]()
        types = token_types or [1] * len(tokens)
        named = token_ids or {}
        self.vocab_size = len(tokens)  # ids of the vocabulary; a model may have more rows
        self.bos_token_id = named.get("bos")
        self.eos_token_id = named.get("eos")
        self.eos_token_ids = tuple(dict.fromkeys(named[key] for key in _END_KEYS if key in named))
        self.special_ids = frozenset(
            [i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)] + list(named.values())
        )
        self.chat_template = chat_template
        self.add_bos_token = self.bos_token_id is not None and (
            form.add_bos if add_bos_token is None else add_bos_token
        )
        self._tokens = tokens
        self._literal_ids = self.special_ids | {i for i, kind in enumerate(types) if kind == USER_DEFINED}
        self._unused_ids = frozenset(i for i, kind in enumerate(types) if kind == UNUSED) - self.special_ids
        self._bytes: dict[int, bytes] = {}  # filled as ids are met

        specials = [tokens[i] for i in sorted(self.special_ids)]
        user_defined = [tokens[i] for i in sorted(self._literal_ids - self.special_ids)]
        vocabulary = {token: i for i, token in enumerate(tokens) if i not in self._unused_ids}
        if len(vocabulary) != len(tokens) - len(self._unused_ids):
            raise CheckpointError(_first_duplicate(tokens, self._unused_ids))
        model = _bpe(vocabulary, merges, form)
        self._full = _encoder(model, form, specials, user_defined)
        self._plain = _encoder(model, form, [], user_defined)
        if any(self.special_ids.intersection(self._plain.encode(text).ids) for text in specials):
            # Plain words can be special here, by merges or as whole pieces: take them out of the model.
            without = {token: i for token, i in vocabulary.items() if i not in self.special_ids}
            kept = [(a, b) for a, b in merges if a in without and b in without and a + b in without]
            self._plain = _encoder(_bpe(without, kept, form), form, [], user_defined)
        longest_first = sorted(specials, key=len, reverse=True)
        self._special_pattern = "|".join(map(re.escape, longest_first)) or "(?!)"

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Of a model's files, whatever their form. Raises `CheckpointError` naming what is wrong there."""
        if isinstance(checkpoint, GGUFFile):
            return cls.from_gguf(checkpoint)
        raise CheckpointError(
            f"{checkpoint.path}: tokenizers of folders are not read yet; set skip_tokenizer_init, and give "
            "token ids"
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Raises `CheckpointError` naming the key that is missing, contradictory or not supported."""
        try:
            return cls._from_metadata(file)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from None

    @classmethod
    def _from_metadata(cls, file: GGUFFile) -> Tokenizer:
        def read(name: str, kind: type, default: Any = ...) -> Any:
            key = f"tokenizer.{name}"
            value = file.metadata.get(key)
            if value is None and default is not ...:
                return default
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                found = "is missing" if value is None else f"is a {type(value).__name__}"
                raise CheckpointError(f"key {key!r} {found}, expected a {kind.__name__}")
            return value

        def read_list(name: str, kind: type, default: Any = ...) -> Any:
            values = read(name, list, default)
            if values and not all(map(kind.__instancecheck__, values)):
                raise CheckpointError(f"key 'tokenizer.{name}' has elements that are no {kind.__name__}")
            return values

        model = read("ggml.model", str)
        if model != "gpt2":
            raise CheckpointError(
                f"tokenizer {quoted(model)} (key 'tokenizer.ggml.model') is not supported; "
                "supported: gpt2 (byte-level BPE)"
            )
        tokens = read_list("ggml.tokens", str)
        types = read_list("ggml.token_type", int, None)
        if types is not None and len(types) != len(tokens):
            raise CheckpointError(
                f"key 'tokenizer.ggml.token_type' has {len(types)} elements, "
                f"expected {len(tokens)}, one for each token"
            )
        ids = {}
        for name in _ID_KEYS:
            token_id = read(f"ggml.{name}_token_id", int, None)
            if token_id is None:
                continue
            if not 0 <= token_id < len(tokens):
                raise CheckpointError(
                    f"key 'tokenizer.ggml.{name}_token_id' is {token_id}, expected 0 to {len(tokens) - 1}"
                )
            ids[name] = token_id
        return cls(
            tokens,
            _pairs(read_list("ggml.merges", str)),
            kind=read("ggml.pre", str),
            token_types=types,
            token_ids=ids,
            add_bos_token=read("ggml.add_bos_token", bool, None),
            chat_template=read("chat_template", str, None),
        )

    # Text to ids.

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. BOS goes in front if `add_special_tokens` and the file asks for it, unless it
        is there already; the text of a special token becomes that token if `parse_special`.

        Bytes for which the vocabulary has no token are dropped. Raises `RequestError` for text that is not
        Unicode (half of a surrogate pair).
        """
        ids = _encode(self._full if parse_special else self._plain, text)
        return self._with_bos(ids) if add_special_tokens else ids

    def encode_chat(self, rendered: str, mark: str = "") -> list[int]:
        """Token ids of a rendered chat. Special tokens are those that the template wrote: text that
        `mark_specials` marked with the character `mark` is encoded as text, without its marks."""
        if not mark:
            return self.encode(rendered)
        ids: list[int] = []
        # The groups make `split` return text and special tokens in turn.
        for i, piece in enumerate(re.split(f"(?<!{re.escape(mark)})({self._special_pattern})", rendered)):
            ids += _encode(self._full, piece) if i % 2 else _encode(self._plain, piece.replace(mark, ""))
        return self._with_bos(ids)

    def mark_specials(self, text: str, mark: str) -> str:
        """`text` with `mark` before every character of a special token's text.

        Every character, so that no part of it can become another special token together with its neighbours.
        """
        return re.sub(self._special_pattern, lambda match: "".join(mark + c for c in match[0]), text)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.add_bos_token and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    # Ids to text.

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `ids`. `spaces_between_special_tokens` has no effect on byte-level vocabularies: there
        is a space where a token has one."""
        if skip_special_tokens:
            ids = (i for i in ids if i not in self.special_ids)
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, maybe part of a character; empty for what is no token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, in a fraction of the time."""
        text = "".join(self._tokens).encode("utf-32-le", "surrogatepass")
        characters = np.frombuffer(text, dtype="<u4")
        values = _BYTE_VALUES[np.minimum(characters, len(_BYTE_VALUES) - 1)]
        ends = np.cumsum([len(token) for token in self._tokens])
        spelled = values.astype(np.uint8).tobytes()
        start, found = 0, []
        for end in ends.tolist():
            found.append(spelled[start:end])
            start = end
        others = np.searchsorted(ends, np.flatnonzero(values < 0), side="right")  # not in the byte alphabet
        for token_id in {*others.tolist(), *self._literal_ids, *self._unused_ids}:
            found[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size or token_id in self._unused_ids:
            return b""
        token = self._tokens[token_id]
        if token_id in self._literal_ids or not _BYTE_OF.keys() >= set(token):
            return token.encode()
        return bytes(map(_BYTE_OF.__getitem__, token))

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that it lacks."""
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else None

    @cached_property
    def json(self) -> str:
        """The vocabulary as data: the text of a tokenizer.json."""
        return self._full.to_str()


# ---- parts -------------------------------------------------------------------------------------------------


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], form: _Kind) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, ignore_merges=form.ignore_merges)
    except Exception as error:  # the library has no narrower type
        raise CheckpointError(f"key 'tokenizer.ggml.merges' does not fit the tokens: {error}") from None


def _encoder(
    model: models.BPE, form: _Kind, specials: list[str], user_defined: list[str]
) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer(model)
    if form.nfc:
        encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = pre_tokenizers.Sequence(list(form.splits))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens([AddedToken(text, normalized=False) for text in user_defined])
    encoder.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    return encoder


def _encode(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return encoder.encode(text, add_special_tokens=False).ids
    except TypeError:
        if not isinstance(text, str):
            raise RequestError(f"the prompt is a {type(text).__name__}, expected text", "prompt") from None
        at = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
        raise RequestError(
            f"the text is not Unicode: character {at} is U+{ord(text[at]):04X}, half of a surrogate pair",
            "prompt",
        ) from None


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


def _first_duplicate(tokens: list[str], unused: frozenset[int]) -> str:
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if i not in unused and seen.setdefault(token, i) != i:
            return f"tokens {seen[token]} and {i} of key 'tokenizer.ggml.tokens' are both {quoted(token)}"
    raise AssertionError("there is none")
