"""How byte-level vocabularies cut text before merging starts: what `tokenizer.ggml.pre` stands for.

A kind that is not known is refused: another one's cuts would give ids that the model was not trained on, and
nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted

# ---- the words that patterns are made of ------------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"  # with the mark or space before it
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Words by their capitals: "fooBar" is two.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s",
)
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _any(*patterns: str) -> str:
    return "|".join(patterns)


_LLAMA = _any(_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES)
_QWEN = _any(_CONTRACTIONS, _WORD, r"\p{N}", _MARKS, _SPACES)
_QWEN_MARKED = _any(  # accents belong to letters
    _CONTRACTIONS,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _SPACES,
)
_TEKKEN = _any(*(word % "" for word in _CASED), r"\p{N}", _MARKS_AND_SLASHES, _SPACES)
_GPT4O = _any(*(word % f"{_CONTRACTIONS}?" for word in _CASED), r"\p{N}{1,3}", _MARKS_AND_SLASHES, _SPACES)
_KANJI_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    # Letters with case, but for the mathematical ones.
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{1D400}-\x{1D7FF}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _KANJI_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _KANJI_AND_HANGUL, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _any(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    ),
)


# ---- kinds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of cutting, and what comes with it."""

    patterns: tuple[str, ...]  # each cuts what the one before it left
    ignore_merges: bool = False  # a piece that is a token stays one, whatever the merges say
    nfc: bool = False  # text is composed first
    add_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


def _kinds() -> dict[str, Kind]:
    gpt2, digits, three_digits = Kind((_GPT2,)), Kind((r"\p{N}", _GPT2)), Kind((_LLAMA,))
    llama = Kind((_LLAMA,), ignore_merges=True, add_bos=True)
    gpt4o = Kind((_GPT4O,))
    return {
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "granite-docling"), gpt2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), digits),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), llama),
        **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), three_digits),
        "qwen2": Kind((_QWEN,), nfc=True),
        **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), Kind((_QWEN,))),
        "qwen35": Kind((_QWEN_MARKED,), nfc=True),
        "tekken": Kind((_TEKKEN,), ignore_merges=True, add_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4"), gpt4o),
        "deepseek-llm": Kind(_DEEPSEEK_LLM),
        "deepseek-coder": Kind(_DEEPSEEK_CODER),
        "deepseek-v3": Kind(_DEEPSEEK_V3),
    }


KINDS = _kinds()


def kind_of(name: str) -> Kind:
    """Raises `CheckpointError` for a name that is not known."""
    if name not in KINDS:
        raise CheckpointError(
            f"pre-tokenizer {quoted(name)} (key 'tokenizer.ggml.pre') is not supported; "
            f"supported: {', '.join(KINDS)}"
        )
    return KINDS[name]
