"""Text to token ids and back, from the vocabulary that a model's files carry.

What kinds of vocabularies there are, and how text becomes ids in each, is in `frontend/tokenization/`. Here
is what they have in common: special tokens, what goes around a text, and decoding.

A text in which nothing may become a special token (what users wrote, inside a chat) is encoded by an encoder
that knows none. Where special tokens' texts are to become them, text is cut there first.

Decoding is a table: a token *is* bytes, and text is their concatenation read as UTF-8 with U+FFFD for what is
not. So `decode(ids, skip_special_tokens=False)` is always the concatenation of `token_bytes`, decoded with
errors="replace", and a detokenizer may work with one token's bytes at a time. The one exception is the space
that some vocabularies put in front of every text: decoding takes it away from the beginning (`adds_space`).

An id that the vocabulary lacks, or that only fills it up to a round number, is empty text: models may have
more output rows than there are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from mainspring.base.errors import RequestError
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.checkpoint.opening import Checkpoint
from mainspring.frontend.tokenization.from_folder import read_folder
from mainspring.frontend.tokenization.from_gguf import read_gguf
from mainspring.frontend.tokenization.literals import pattern_of
from mainspring.frontend.tokenization.parts import Parts
from mainspring.frontend.tokenization.spelling import SPACE

READ_AT_ONCE = 1 << 16  # characters of a text that are tokens in no time
_WHITE_SPACE = "".join(chr(i) for i in range(0x3001) if chr(i).isspace()) + SPACE


class Tokenizer:
    """Encodes and decodes. Immutable after construction, safe to use from several threads."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.vocab_size = len(parts.tokens)  # ids of the vocabulary; a model may have more rows
        self.bos_token_id = parts.bos_token_id
        self.eos_token_id = next(iter(parts.eos_token_ids), None)
        self.eos_token_ids = parts.eos_token_ids
        self.special_ids = parts.special_ids
        self.chat_template = parts.chat_template
        self.adds_space = parts.spelling.adds_space  # decoding takes a space off the beginning
        self.add_bos_token = parts.bos_token_id is not None and parts.bos_token_id in parts.prefix_ids
        self._bytes: dict[int, bytes] = {}  # filled as ids are met
        self._special_of = {parts.tokens[i]: i for i in parts.special_ids}
        self._specials = pattern_of(self._special_of)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Of a model's open files, whatever their form.

        Raises `CheckpointError` naming what is missing, contradictory or not supported.
        """
        return cls(read_gguf(checkpoint) if isinstance(checkpoint, GGUFFile) else read_folder(checkpoint))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Raises `CheckpointError` naming the key that is missing, contradictory or not supported."""
        return cls(read_gguf(file))

    # Text to ids.

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. What the file asks for goes around it if `add_special_tokens` (BOS in front,
        say), unless it is there already; the text of a special token becomes that token if `parse_special`.

        Bytes for which the vocabulary has no token are dropped. Raises `RequestError` for text that is not
        Unicode (half of a surrogate pair).
        """
        _check(text)
        if not parse_special:
            ids = self._parts.encoder.encode(text, True)
        elif self._parts.encode_whole is not None:
            ids = self._parts.encode_whole(text)
        else:
            ids = self._cut_at_specials(text, "")
        if not add_special_tokens:
            return ids
        ids, suffix = self._with_prefix(ids), list(self._parts.suffix_ids)
        return ids if not suffix or ids[-len(suffix) :] == suffix else [*ids, *suffix]

    def fewest_tokens(self, text: str) -> int:
        """So many it has at least, known without reading it; 0 for a text that is short, or of a vocabulary
        that may lose a part of a text."""
        lost = self._parts.lost
        if len(text) < READ_AT_ONCE or lost is None:
            return 0
        num_kept = len(text) - sum(map(text.count, lost))
        return num_kept // 2 // self._longest_token_bytes  # NFC leaves two bytes of three characters

    @cached_property
    def _longest_token_bytes(self) -> int:
        """At most: of some spellings a character stands for a byte."""
        return max(len(token.encode()) for token in self._parts.tokens)

    def encode_chat(self, rendered: str, mark: str = "") -> list[int]:
        """Token ids of a rendered chat. Special tokens are those that the template wrote: text that
        `mark_specials` marked with the character `mark` is encoded as text, without its marks. What the file
        asks for after a text is left out: the answer follows."""
        _check(rendered)
        if self._parts.encode_whole is not None and not (mark and mark in rendered):
            return self._with_prefix(self._parts.encode_whole(rendered))
        return self._with_prefix(self._cut_at_specials(rendered, mark))

    def mark_specials(self, text: str, mark: str) -> str:
        """`text` with `mark` before every character of a special token's text.

        Every character, so that no part of it can become another special token together with its neighbours.
        """
        return self._specials.sub(lambda match: "".join(mark + c for c in match[0]), text)

    def _cut_at_specials(self, text: str, mark: str) -> list[int]:
        """Ids of `text`: special tokens where their texts are, but for those that are marked."""
        ids: list[int] = []
        before: int | None = None  # the special token that a piece follows
        start = look_from = 0
        while found := self._specials.search(text, look_from):
            if mark and text.endswith(mark, 0, found.start()):
                look_from = found.start() + 1
                continue
            special = self._special_of[found[0]]
            ids += self._between(before, text[start : found.start()], special, mark)
            ids.append(special)
            before, start = special, found.end()
            look_from = start
        return ids + self._between(before, text[start:], None, mark)

    def _between(self, before: int | None, text: str, after: int | None, mark: str) -> list[int]:
        """Ids of the text between two special tokens, or none of them."""
        if before in self._parts.strip_right_ids:
            text = text.lstrip(_WHITE_SPACE)
        if after in self._parts.strip_left_ids:
            text = text.rstrip(_WHITE_SPACE)
        if mark:
            text = text.replace(mark, "")
        return self._parts.encoder.encode(text, before is None) if text else []

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self._parts.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    # Ids to text.

    def decode(
        self,
        ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `ids`. `spaces_between_special_tokens` has no effect: there is a space where a token
        has one."""
        if skip_special_tokens:
            ids = (i for i in ids if i not in self.special_ids)
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.adds_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, maybe part of a character; empty for what is no token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def all_token_bytes(self) -> list[bytes]:
        """`token_bytes` of every id, in a fraction of the time."""
        found = self._parts.spelling.spell_all(self._parts.tokens)
        for token_id in self._parts.literal_ids | self._parts.unused_ids:
            found[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size or token_id in self._parts.unused_ids:
            return b""
        token, spelling = self._parts.tokens[token_id], self._parts.spelling
        return spelling.spell_literal(token) if token_id in self._parts.literal_ids else spelling.spell(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that it lacks."""
        return self._parts.tokens[token_id] if 0 <= token_id < self.vocab_size else None


def _check(text: str) -> None:
    """Raises `RequestError` for what is not Unicode text."""
    if not isinstance(text, str):
        raise RequestError(f"the prompt is a {type(text).__name__}, expected text", "prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise RequestError(
            f"the text is not Unicode: character {at} is U+{ord(text[at]):04X}, half of a surrogate pair",
            "prompt",
        ) from None
