"""Vocabularies of other forms than byte-level BPE in GGUF: SentencePiece and WordPiece, and folders."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parity_tools import write_vocabulary
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from mainspring.base.errors import CheckpointError, RequestError
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.chat_template import ChatTemplate
from mainspring.frontend.tokenization import sentencepiece
from mainspring.frontend.tokenization.literals import pattern_of
from mainspring.frontend.tokenization.sentencepiece_model import parse_model
from mainspring.frontend.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]"]
USER_DEFINED = ["<b>", "\u2581\u2581"]
PIECES = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "\u2581ab", "abc", "x", "xx", "xxx", "\u20ac"]
TOKENS = [*SPECIALS, *BYTES, *USER_DEFINED, *PIECES]
TYPES = dict.fromkeys(SPECIALS, 3) | {"<unk>": 2} | dict.fromkeys(BYTES, 6) | dict.fromkeys(USER_DEFINED, 4)
MARK = "\U000f0000"


def pieces(tokens: list[str] = TOKENS, **changes: Any) -> dict[str, Any]:
    """A vocabulary whose pieces are better the earlier they stand."""
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": [-float(i) for i in range(len(tokens))],
        "ggml.token_type": [TYPES.get(token, 1) for token in tokens],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    } | {name.replace("__", "."): value for name, value in changes.items()}


def read(folder: Path, metadata: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    with GGUFFile(write_vocabulary(folder / "m.gguf", metadata, architecture)) as file:
        return Tokenizer.from_gguf(file)


def spelled(tokenizer: Tokenizer, text: str, **options: Any) -> list[str | None]:
    options = {"add_special_tokens": False} | options
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options)]


@pytest.fixture
def llama(tmp_path: Path) -> Tokenizer:
    return read(tmp_path, pieces())


# ---- SentencePiece -----------------------------------------------------------------------------------------


def test_neighbours_are_joined_by_score(llama: Tokenizer) -> None:
    """The best pair first, wherever it is; the leftmost of equals; bytes for what is no piece."""
    assert spelled(llama, "abc") == ["\u2581ab", "c"]  # "ab" is better than "bc"
    assert spelled(llama, "bc") == ["\u2581", "bc"]
    assert spelled(llama, "xxxxx") == ["\u2581", "xx", "xxx"]  # and not by which pair it is made of
    assert spelled(llama, "é€") == ["\u2581", "<0xC3>", "<0xA9>", "\u20ac"]
    assert spelled(llama, "") == []


def test_a_space_in_front(llama: Tokenizer, tmp_path: Path) -> None:
    """Every text gets one, also after a special token; decoding takes it from the beginning alone."""
    assert spelled(llama, "a a") == ["\u2581a", "\u2581a"]
    assert spelled(llama, "a[INST]a") == ["\u2581a", "[INST]", "\u2581a"]
    assert llama.decode(llama.encode("a a")) == "a a"
    assert llama.decode(llama.encode(" a")) == " a"
    assert llama.decode(llama.encode("a"), skip_special_tokens=False) == "<s> a"
    without = read(tmp_path, pieces(ggml__add_space_prefix=False))
    assert spelled(without, "a a") == ["a", "\u2581a"]
    assert without.decode(without.encode(" a")) == " a"


def test_extra_spaces_go_if_the_file_says_so(tmp_path: Path) -> None:
    t = read(tmp_path, pieces(ggml__remove_extra_whitespaces=True))
    assert t.encode("  a   a ") == t.encode("a a")


def test_user_defined_texts_come_first_and_special_ones_if_asked(llama: Tokenizer) -> None:
    """Case B151: with and without special tokens, by the longest text at a place."""
    assert spelled(llama, "b<b>b") == ["\u2581", "b", "<b>", "b"]
    assert spelled(llama, "a  a") == ["\u2581a", "\u2581\u2581", "a"]
    assert spelled(llama, "[INST]") == ["[INST]"]
    plain = llama.encode("[INST]<s>", parse_special=False, add_special_tokens=False)
    assert llama.special_ids.isdisjoint(plain)
    assert llama.decode(plain) == "[INST]<s>"
    assert "<0x61>" not in spelled(llama, "<0x61>")  # the text of a byte's token is a text


def test_what_goes_around(llama: Tokenizer, tmp_path: Path) -> None:
    """Case B149: BOS by default, once; EOS if the file asks, but not in a chat that goes on."""
    assert llama.encode("a") == llama.encode("<s>a") == llama.encode_chat("<s>a")
    assert llama.encode("a")[0] == llama.bos_token_id == 1
    with_eos = read(tmp_path, pieces(ggml__add_eos_token=True))
    assert with_eos.encode("a") == with_eos.encode("a</s>") == [*llama.encode("a"), 2]
    assert with_eos.encode_chat("a") == llama.encode_chat("a")
    assert read(tmp_path, pieces(ggml__add_bos_token=False)).encode("a") == llama.encode("a")[1:]


def test_phi_3_takes_white_space_after_its_special_tokens(tmp_path: Path) -> None:
    t = read(tmp_path, pieces(), architecture="phi3")
    assert spelled(t, "[INST] \n a") == spelled(t, "[INST]a")
    assert spelled(t, "<s> a") == ["<s>", "\u2581\u2581", "a"]
    marked = t.encode_chat(f"[INST] {MARK}[{MARK}INST]", MARK)
    assert t.decode(marked) == "[INST]"


def test_without_bytes_there_is_an_unknown_token(tmp_path: Path) -> None:
    """One for a run, whatever words it spans."""
    tokens = [token for token in TOKENS if token not in BYTES]
    t = read(tmp_path, pieces(tokens))
    assert spelled(t, "aéèa") == ["\u2581a", "<unk>", "a"]
    assert spelled(t, "é è") == ["\u2581", "<unk>", "\u2581", "<unk>"]


def naive(t: Tokenizer, text: str) -> list[str]:
    """The rule as it is said, without words and without a heap."""
    score = {token: -i for i, token in enumerate(TOKENS) if token in PIECES}
    found = list("\u2581" + text.replace(" ", "\u2581"))
    while pairs := [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(found)) if a + b in score]:
        i = min(pairs)[1]
        found[i : i + 2] = [found[i] + found[i + 1]]
    return found


@settings(max_examples=200, deadline=None)
@example("xx xxxx xxx")
@given(st.text(st.sampled_from("abcx "), max_size=30))
def test_the_rule_as_it_is_said(once_read: Tokenizer, text: str) -> None:
    text = " ".join(text.split())
    assert spelled(once_read, text) == (naive(once_read, text) if text else [])


@pytest.fixture(scope="module")
def once_read(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read(tmp_path_factory.mktemp("pieces"), pieces())


def test_words_are_cut_only_where_no_piece_spans_the_cut(tmp_path: Path) -> None:
    tokens = [*TOKENS, "b\u2581", "b\u2581a"]
    t = read(tmp_path, pieces(tokens, ggml__scores=[0.0] * 262 + [-1.0] * 13 + [-0.1, -0.05]))
    assert spelled(t, "b a") == ["\u2581", "b\u2581a"]


def test_long_words_and_many_words(llama: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded, and forgetting changes nothing."""
    monkeypatch.setattr(sentencepiece, "MOST_REMEMBERED", 4)
    for text in ("x" * 3001, " ".join("abc"[i % 3] * (i % 7 + 1) for i in range(500))):
        ids = llama.encode(text, add_special_tokens=False)
        assert llama.decode(ids) == text
        assert llama.encode(text, add_special_tokens=False) == ids
    assert len(llama._parts.encoder._cutter._words) <= 4  # type: ignore[attr-defined]


def test_half_a_character_is_refused(llama: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"character 1 is U\+D83D"):
        llama.encode("a\ud83d")


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"ggml__scores": None}, r"'tokenizer\.ggml\.scores' is missing"),
        ({"ggml__scores": [1.0]}, r"'tokenizer\.ggml\.scores' has 1 elements, expected 275"),
        (
            {"ggml__scores": [float("nan")] * 275},
            r"scores of key 'tokenizer\.ggml\.tokens' are not all finite",
        ),
        ({"ggml__token_type": None}, r"'tokenizer\.ggml\.token_type' is missing"),
        ({"ggml__tokens": [*TOKENS[:-1], "a"]}, r"tokens 263 and 274 .* are both 'a'"),
        ({"ggml__tokens": [*TOKENS[:4], "<0x1>", *TOKENS[5:]]}, r"token 4 .* is '<0x1>', expected a byte"),
        (
            {"ggml__tokens": [*TOKENS[:4], "<0x01>", *TOKENS[5:]]},
            r"has tokens for 255 bytes, expected all 256",
        ),
        ({"ggml__unknown_token_id": 275}, r"'tokenizer\.ggml\.unknown_token_id' is 275, expected 0 to 274"),
        ({"ggml__precompiled_charsmap": [1, 2]}, "precompiled_charsmap cannot be read"),
        ({"ggml__precompiled_charsmap": [300]}, "precompiled_charsmap' has elements that are no bytes"),
    ],
)
def test_a_wrong_vocabulary_of_pieces(tmp_path: Path, changes: dict[str, Any], culprit: str) -> None:
    """Case B178."""
    with pytest.raises(CheckpointError, match=culprit) as caught:
        read(tmp_path, pieces(**changes))
    assert "\n" not in str(caught.value)


def test_a_charsmap_that_points_outside_itself(tmp_path: Path) -> None:
    """Case B178: the library's panic is a refusal."""
    t = read(tmp_path, pieces(ggml__precompiled_charsmap=[8, 0, 0, 0, 0, 0, 255, 0, 0, 0, 0, 255, 0]))
    with pytest.raises(CheckpointError, match="precompiled_charsmap is damaged: index out of bounds"):
        t.encode("abc")


def test_six_thousand_special_tokens() -> None:
    """Of which the longest at a place is found; patterns that begin each other without end are refused."""
    texts = ["<unused>", *(f"<unused{i}>" for i in range(6000)), "\n" * 31, "\n", "+.*", ""]
    pattern = pattern_of(texts)
    assert pattern.findall("a<unused12><unused><unused6000>\n+.*+") == ["<unused12>", "<unused>", "\n", "+.*"]
    assert not pattern_of([]).findall("anything")
    with pytest.raises(CheckpointError, match="begin each other"):
        pattern_of(["a" * i for i in range(1, 3000)])


# ---- WordPiece ---------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581un", "aff", "able", "\u2581café", "\u2581cafe", "\u2581,"]


def words(**changes: Any) -> dict[str, Any]:
    return {
        "ggml.model": "bert",
        "ggml.tokens": WORDS,
        "ggml.token_type": [3, 3, 3, 3, *[1] * 6],
        "ggml.unknown_token_id": 1,
        "ggml.cls_token_id": 2,
        "ggml.seperator_token_id": 3,
    } | changes


def test_word_pieces(tmp_path: Path) -> None:
    """Longest first; lower case without accents by default; [CLS] and [SEP] around."""
    t = read(tmp_path, words())
    assert spelled(t, "Unaffable, CAFÉ xyz") == ["un", "##aff", "##able", ",", "cafe", "[UNK]"]
    assert t.encode("un") == [2, 4, 3]
    assert t.decode(t.encode("unaffable, un")) == "unaffable , un"
    assert spelled(t, "un[SEP]un") == ["un", "[SEP]", "un"]
    kept = read(tmp_path, words() | {"ggml.normalizer.strip_accents": False})
    assert spelled(kept, "Café") == ["café"]
    cased = read(tmp_path, words() | {"ggml.normalizer.lowercase": False})
    assert spelled(cased, "Un un") == ["[UNK]", "un"]


# ---- folders -----------------------------------------------------------------------------------------------


def folder(path: Path, library: tokenizers.Tokenizer | None, **config: Any) -> ModelFolder:
    (path / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    if library is not None:
        library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFolder(path)


def byte_level(**model: Any) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {"en": 256, "end": 257}
    t = tokenizers.Tokenizer(models.BPE(vocabulary, [("e", "n"), ("en", "d")], **model))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True, rstrip=True)]
    )
    t.add_tokens([AddedToken("<think>", normalized=False)])
    return t


def test_a_tokenizer_json(tmp_path: Path) -> None:
    """Ids beyond the model's own vocabulary, special and not, white space that goes along, BOS as asked."""
    source = folder(
        tmp_path, byte_level(), bos_token="<s>", eos_token={"content": "<|im_end|>"}, chat_template="x"
    )
    t = Tokenizer.from_checkpoint(source)
    assert (t.vocab_size, t.bos_token_id, t.eos_token_id, t.special_ids) == (261, 258, 259, {258, 259})
    assert spelled(t, "end<think><|im_end|> \nen") == ["end", "<think>", "<|im_end|>", "en"]
    plain = t.encode("<s>é<think>", parse_special=False)
    assert t.decode(plain) == "<s>é<think>"
    assert plain[-1] == 260
    assert t.special_ids.isdisjoint(plain)
    assert t.all_token_bytes() == [t.token_bytes(i) for i in range(t.vocab_size)]
    assert t.chat_template == "x"
    assert not t.add_bos_token


def test_dropout_is_for_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Merges that are left out at random would make the same text another prompt each time."""
    t = Tokenizer.from_checkpoint(folder(tmp_path, byte_level(dropout=0.9)))
    assert all(spelled(t, "end") == ["end"] for _ in range(20))
    (told,) = caplog.messages
    assert told == f"{tmp_path / 'tokenizer.json'}: model.dropout 0.9 has no effect: a text has one spelling"
    caplog.clear()
    Tokenizer.from_checkpoint(folder(tmp_path, byte_level()))
    assert not caplog.messages


@pytest.mark.parametrize("wrong_id", [258, 300], ids=["twice", "gap"])
def test_an_added_token_whose_id_cannot_be_kept(tmp_path: Path, wrong_id: int) -> None:
    """The library would number it anew, and the model would read another token."""
    form = json.loads(byte_level().to_str())
    assert form["added_tokens"][2]["content"] == "<think>"
    form["added_tokens"][2]["id"] = wrong_id
    source = folder(tmp_path, tokenizers.Tokenizer.from_str(json.dumps(form)))
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    with pytest.raises(
        CheckpointError, match=rf"added token '<think>' has id {wrong_id}, and would become 2\d\d"
    ):
        Tokenizer.from_checkpoint(source)


def test_a_text_that_a_regular_expression_gives_up_on(tmp_path: Path) -> None:
    """The library panics, which is no exception of Python's: a server would answer 500."""
    library = byte_level()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t = Tokenizer.from_checkpoint(folder(tmp_path, library))
    for parse_special in (True, False):
        with pytest.raises(RequestError, match=r"^the text cannot be cut into tokens: .*retry-limit"):
            t.encode("a" * 40 + "b", parse_special=parse_special)
    assert t.decode(t.encode("aab")) == "aab"


def test_user_text_in_a_chat_of_a_tokenizer_json(tmp_path: Path) -> None:
    """Case B151: only what the template writes is special, and text around it is cut as it always is."""
    t = Tokenizer.from_checkpoint(folder(tmp_path, byte_level(), bos_token="<s>"))
    template = ChatTemplate("<s>{{ messages[0].content }}<|im_end|> \nen", "<s>")
    content = "<|im_end|> end <s>"
    ids = template.encode(t, [{"role": "user", "content": content}])
    assert [i for i in ids if i in t.special_ids] == [258, 259]
    assert t.decode(ids, skip_special_tokens=False) == f"<s>{content}<|im_end|>en"


def test_words_that_are_special_do_not_come_from_plain_text(tmp_path: Path) -> None:
    """Case B151: where the model's own merges would make one."""
    library = byte_level()
    library.add_special_tokens([AddedToken("end", special=True)])
    t = Tokenizer.from_checkpoint(folder(tmp_path, library))
    assert spelled(t, "end") == ["end"]
    assert spelled(t, "end<think>", parse_special=False) == ["en", "d", "<think>"]


@pytest.mark.parametrize(
    ("config", "post_processor", "expected"),
    [
        ({}, False, "a"),
        ({}, True, "<s>a<|im_end|>"),
        ({"add_bos_token": True}, False, "<s>a"),
        ({"add_bos_token": False}, True, "a<|im_end|>"),
        ({"add_bos_token": True, "add_eos_token": False}, True, "<s>a"),
        ({"add_eos_token": True}, False, "a<|im_end|>"),
    ],
)
def test_what_goes_around_a_text_of_a_folder(
    tmp_path: Path, config: dict[str, Any], post_processor: bool, expected: str
) -> None:
    """Case B149: the post-processor says it, and tokenizer_config.json before it; never twice."""
    library = byte_level()
    if post_processor:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A <|im_end|>", special_tokens=[("<s>", 258), ("<|im_end|>", 259)]
        )
    source = folder(tmp_path, library, bos_token="<s>", eos_token="<|im_end|>", **config)
    t = Tokenizer.from_checkpoint(source)
    assert t.decode(t.encode("a"), skip_special_tokens=False) == expected
    assert t.encode(expected) == t.encode("a")


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}, [("\u2581", "a")]))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    t.decoder = decoders.Metaspace(prepend_scheme=scheme)
    t.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return t


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_at_the_beginning_alone(tmp_path: Path, scheme: str) -> None:
    """Text around a special token's text that is none is encoded as around one."""
    t = Tokenizer.from_checkpoint(folder(tmp_path, metaspace(scheme)))
    expected = {"first": "\u2581a<s>a", "always": "\u2581a<s>\u2581a", "never": "a<s>a"}[scheme]
    assert "".join(map(str, spelled(t, "a<s>a"))) == expected
    marked = t.encode_chat(f"a<s>a{MARK}<s", MARK)  # as if a part of it were of a user
    assert marked[: len(t.encode("a<s>a"))] == t.encode("a<s>a")
    assert t.decode(t.encode("a a")) == "a a"


def test_a_sentencepiece_vocabulary_as_tokenizer_json(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    t = Tokenizer.from_checkpoint(folder(tmp_path, library))
    assert t.decode(t.encode("a é€")) == "a é€"
    assert t.adds_space


def protobuf(*fields: tuple[int, Any]) -> bytes:
    found = b""
    for number, value in fields:
        if isinstance(value, float):
            found += bytes([number << 3 | 5]) + struct.pack("<f", value)
        elif isinstance(value, int):
            key = number << 3
            found += bytes([key & 0x7F | 0x80, key >> 7, value]) if key > 127 else bytes([key, value])
        else:
            found += bytes([number << 3 | 2]) + varint(len(value)) + value
    return found


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 0x7F | 0x80, value >> 7])


def model_file(model_type: int = 2, normaliser: bytes = b"", trainer: bytes = b"") -> bytes:
    made = [
        (1, protobuf((1, token.encode()), (2, -float(i)), (3, TYPES.get(token, 1))))
        for i, token in enumerate(TOKENS)
    ]
    return protobuf(*made, (2, protobuf((3, model_type)) + trainer), (3, normaliser + protobuf((4, 0))))


def test_a_tokenizer_model(tmp_path: Path, llama: Tokenizer) -> None:
    """SentencePiece's own file, and what tokenizer_config.json adds to it."""
    (tmp_path / "tokenizer.model").write_bytes(model_file())
    added = {"275": {"content": "<|end|>", "special": True}, "277": {"content": "<think>"}}
    source = folder(tmp_path, None, eos_token="<|end|>", added_tokens_decoder=added)
    t = Tokenizer.from_checkpoint(source)
    for text in ("abc é", "a[INST]a", "b<b>  b"):
        assert t.encode(text) == llama.encode(text)
    assert (t.vocab_size, t.bos_token_id, t.eos_token_id) == (278, 1, 275)
    assert spelled(t, "a<|end|>a<think>") == ["\u2581a", "<|end|>", "\u2581a", "<think>"]


@pytest.mark.parametrize(
    ("data", "culprit"),
    [
        (b"\xff\xff", "is no SentencePiece model, or damaged"),
        (model_file()[:-3], "is no SentencePiece model, or damaged"),
        (b"", "has no pieces"),
        (model_file(3), "of kind 'word', which is not supported; supported: BPE, unigram"),
        (model_file(trainer=protobuf((24, 1))), "writes spaces in a way"),
        (model_file(normaliser=protobuf((5, 0))), "writes spaces in a way"),
    ],
)
def test_a_wrong_tokenizer_model(tmp_path: Path, data: bytes, culprit: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=culprit) as caught:
        Tokenizer.from_checkpoint(folder(tmp_path, None))
    assert str(caught.value).startswith(str(tmp_path / "tokenizer.model"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_models_are_refused_or_read(data: st.DataObject) -> None:
    damaged = bytearray(model_file())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CheckpointError):  # and nothing else
        parse_model(bytes(damaged))


@pytest.mark.parametrize(
    ("library", "config", "culprit"),
    [
        (None, {}, "has no tokenizer.json and no tokenizer.model; save the model's tokenizer"),
        ("{}", {}, r"tokenizer\.json: is no tokenizer: "),
        ("[", {}, r"tokenizer\.json: is no tokenizer: "),
        ("no decoder", {}, r"tokenizer\.json: decoder .* is not supported; supported: ByteLevel"),
        (
            "whole",
            {"add_bos_token": 1, "bos_token": "<s>"},
            r"add_bos_token is '?1'?; expected true or false",
        ),
    ],
)
def test_a_wrong_folder(tmp_path: Path, library: str | None, config: dict[str, Any], culprit: str) -> None:
    source = folder(tmp_path, None, **config)
    if library in ("no decoder", "whole"):
        made = byte_level()
        if library == "no decoder":
            made.decoder = decoders.CTC()
        made.save(str(tmp_path / "tokenizer.json"))
    elif library is not None:
        (tmp_path / "tokenizer.json").write_text(library)
    with pytest.raises(CheckpointError, match=culprit) as caught:
        Tokenizer.from_checkpoint(source)
    assert "\n" not in str(caught.value)
    (tmp_path / "vocab.txt").write_text("")
    if library is None:
        with pytest.raises(CheckpointError, match=r"a vocab.json or vocab.txt alone is not read"):
            Tokenizer.from_checkpoint(source)


# ---- lengths -----------------------------------------------------------------------------------------------


def keeping(normalizer: Any = None, rstrip: bool = False, without: str = "") -> tokenizers.Tokenizer:
    """Byte-level, of long tokens, perhaps without those of some bytes."""
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in without]
    pairs = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("\u0120", "\u0120")]
    tokens = [*alphabet, *(a + b for a, b in pairs)]
    t = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken("<|a special token|>", rstrip=rstrip)])
    if normalizer is not None:
        t.normalizer = normalizer
    return t


ENTER, LEAD_OF_ACCENTED = "\u010d", "\u00c3"  # the bytes 0D and C3, as such vocabularies spell them
ATOMS = [
    "a",
    "a" * 8,
    " ",
    "\r",
    "\n",
    "U\u0308\u0304",
    "e\u0301",
    "\u1100\u1161\u11a8",
    "\u4e16",
    "\U0001f389",
]
ATOMS += ["<|a special token|>", "\u2581", "abc", "xxx", "\u20ac", "\u0000"]


@pytest.mark.parametrize(
    ("make", "is_known"),
    [
        (lambda path: folder(path, keeping()), True),
        (lambda path: folder(path, keeping(normalizers.NFC())), True),
        (lambda path: folder(path, keeping(normalizers.Sequence([normalizers.NFC()]), without=ENTER)), True),
        (lambda path: folder(path, keeping(without=LEAD_OF_ACCENTED)), False),
        (lambda path: folder(path, keeping(normalizers.Lowercase())), False),
        (lambda path: folder(path, keeping(rstrip=True)), False),
        (lambda path: GGUFFile(write_vocabulary(path / "m.gguf", pieces(), "llama")), True),
        (
            lambda path: GGUFFile(
                write_vocabulary(path / "m.gguf", pieces(ggml__remove_extra_whitespaces=True), "llama")
            ),
            False,
        ),
        (lambda path: GGUFFile(write_vocabulary(path / "m.gguf", pieces(SPECIALS + PIECES), "llama")), False),
    ],
    ids=[
        "plain",
        "NFC",
        "no enter",
        "no accents",
        "lowercase",
        "strips",
        "pieces",
        "extra spaces",
        "no bytes",
    ],
)
def test_the_least_number_of_tokens_is_no_more_than_there_are(
    make: Any, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every atom alone, many times over, and of mixtures; where nothing is certain, nothing is said."""
    monkeypatch.setattr("mainspring.frontend.tokenizer.READ_AT_ONCE", 1)
    t = Tokenizer.from_checkpoint(make(tmp_path))
    assert (t.fewest_tokens("b" * 1000) > 0) is is_known

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from(ATOMS), max_size=9), st.integers(1, 40))
    def judge(atoms: list[str], times: int) -> None:
        text = "".join(atoms) * times
        assert t.fewest_tokens(text) <= len(t.encode(text, add_special_tokens=False))

    judge()
    for atom in ATOMS:
        assert t.fewest_tokens(atom * 500) <= len(t.encode(atom * 500, add_special_tokens=False))
