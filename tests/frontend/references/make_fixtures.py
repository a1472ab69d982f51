"""Run in the environment of the references: small vocabularies and what the references make of strings.

    python make_fixtures.py TRAINING.txt < strings.json > tests/data/tokenizer_parity.json

The vocabularies are trained here, on the project's own documents. `pieces` has those of SentencePiece, each
in the form of `reference_tokenizers.py`; `byte_level` has one vocabulary, and ids for each way to cut text,
as tiktoken and the `regex` module make them from the published patterns.
"""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import regex
import sentencepiece
import tiktoken
from reference_tokenizers import byte_level, sentencepiece_model
from tiktoken._educational import bpe_train

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"


def llama(digits: str) -> str:
    return rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"


def cased(contractions: str, digits: str) -> str:
    words = f"{BEFORE}{UP}*{LOW}+{contractions}|{BEFORE}{UP}+{LOW}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"


PATTERNS: dict[str, list[str]] = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [llama(r"\p{N}{1,3}")],
    "qwen2": [llama(r"\p{N}")],
    "tekken": [cased("", r"\p{N}")],
    "gpt-4o": [cased(f"{CONTRACTIONS}?", r"\p{N}{1,3}")],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{END}",
    ],
}


def cut(pieces: list[str], pattern: str) -> list[str]:
    """Each piece in the parts that match and those between."""
    found = []
    for piece in pieces:
        end = 0
        for match in regex.finditer(pattern, piece):
            found += [piece[end : match.start()], match[0]]
            end = match.end()
        found.append(piece[end:])
    return [piece for piece in found if piece]


def byte_level_fixture(training: str, texts: list[str]) -> dict[str, Any]:
    ranks = bpe_train(training, 640, llama(r"\p{N}{1,3}"), visualise=None)
    encoding = tiktoken.Encoding("small", pat_str="(?s).+", mergeable_ranks=ranks, special_tokens={})
    ids = {}
    for kind, patterns in PATTERNS.items():
        ids[kind] = []
        for text in texts:
            pieces = [unicodedata.normalize("NFC", text) if kind == "qwen2" else text]
            for pattern in patterns:
                pieces = cut(pieces, pattern)
            ids[kind].append([i for piece in pieces for i in encoding._encode_single_piece(piece)])
    metadata = byte_level("", ranks, {"<|end|>": len(ranks)})
    return {"metadata": metadata, "ids": ids}


def pieces_fixture(training: Path, texts: list[str], **options: Any) -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input=str(training),
        model_writer=model,
        vocab_size=800,
        user_defined_symbols=["[IMG]", "</h1>", "\u2581\u2581"],
        control_symbols=["<|im_start|>", "<|im_end|>"],
        normalization_rule_name="identity",
        max_sentence_length=1 << 16,
        minloglevel=2,
        **options,
    )
    metadata, ask = sentencepiece_model(model.getvalue())
    answers = [ask(text) for text in texts]
    return {
        "metadata": metadata,
        "plain": [answer["plain"] for answer in answers],
        "texts": [answer["text"] for answer in answers],
    }


def main() -> None:
    training, texts = Path(sys.argv[1]), json.load(sys.stdin)
    kept = {"remove_extra_whitespaces": False}
    fixture = {
        "strings": texts,
        "byte_level": byte_level_fixture(training.read_text(), texts),
        "pieces": {
            "bpe": pieces_fixture(training, texts, model_type="bpe", byte_fallback=True, **kept),
            "bpe-no-prefix": pieces_fixture(
                training, texts, model_type="bpe", byte_fallback=True, add_dummy_prefix=False, **kept
            ),
            "bpe-unknown": pieces_fixture(training, texts, model_type="bpe", remove_extra_whitespaces=True),
            "unigram": pieces_fixture(training, texts, model_type="unigram", byte_fallback=True, **kept),
        },
    }
    json.dump(fixture, sys.stdout, separators=(",", ":"))


if __name__ == "__main__":
    main()
