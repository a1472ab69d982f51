"""Tokenizers from GGUF metadata: the real one against recorded ids, toys for every rule."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.base.errors import CheckpointError, RequestError
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.tokenization.from_gguf import byte_level_parts
from mainspring.frontend.tokenization.parts import CONTROL, UNUSED, USER_DEFINED
from mainspring.frontend.tokenization.pre_tokenizers import KINDS
from mainspring.frontend.tokenization.spelling import BYTE_OF
from mainspring.frontend.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m_greedy.json").read_text())
ALPHABET = list(BYTE_OF)  # one token for each byte


def toy(kind: str = "gpt-2", *more: str | tuple[str, int], merges: str = "", **options: Any) -> Tokenizer:
    """All bytes, then `more` tokens; `merges` as "a+b c+d"."""
    extra = [item if isinstance(item, tuple) else (item, 1) for item in more]
    pairs = [(pair.split("+")[0], pair.split("+")[1]) for pair in merges.split()]
    return Tokenizer(
        byte_level_parts(
            ALPHABET + [token for token, _ in extra],
            pairs,
            kind=kind,
            token_types=[1] * 256 + [type_ for _, type_ in extra],
            **options,
        )
    )


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer._parts.tokens.index(token) for token in tokens]


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    with GGUFFile(smollm2) as file:
        return Tokenizer.from_gguf(file)


# ---- the real one ------------------------------------------------------------------------------------------


def test_recorded_ids(real: Tokenizer) -> None:
    """Case B178: ids rebuilt from the file's metadata are those of the model's own tokenizer."""
    for chat in GOLDEN["chat"]:
        assert real.encode(chat["rendered"]) == chat["prompt_ids"]
        assert real.encode_chat(chat["rendered"], "\uf8ff") == chat["prompt_ids"]
    for raw in GOLDEN["raw"]:
        assert real.encode(raw["prompt"]) == raw["prompt_ids"]


def test_every_digit_is_split_first(real: Tokenizer) -> None:
    assert real.encode("\n\n   1.") == [1004, 33, 30]
    assert real.encode("  12") == [256, 33, 34]


def test_facts_of_the_file(real: Tokenizer) -> None:
    assert real.vocab_size == 49_152
    assert (real.bos_token_id, real.eos_token_id, real.eos_token_ids) == (1, 2, (2,))
    assert real.special_ids == frozenset(range(17))
    assert real.id_to_token(2) == "<|im_end|>"
    assert real.chat_template is not None
    assert "<|im_start|>" in real.chat_template
    assert not real.add_bos_token


def test_others_run_while_a_long_text_is_encoded(real: Tokenizer) -> None:
    """A server's event loop is in another thread than long texts."""
    text, ends, num_turns = "A word, and more of them. " * 20_000, threading.Event(), 0

    def take_turns() -> None:
        nonlocal num_turns
        while not ends.is_set():
            num_turns += 1
            time.sleep(0.001)

    other = threading.Thread(target=take_turns)
    other.start()
    before = num_turns
    found = real._parts.encoder.encode(text, True)
    after = num_turns
    ends.set()
    other.join()
    assert after - before > 10  # none or one, where the encoder lets nobody else run
    assert real.decode(found) == text


def test_round_trip(real: Tokenizer) -> None:
    """Any text comes back, but for the bytes that this vocabulary has no token for: those are dropped."""
    known = {byte for i in range(real.vocab_size) for byte in real.token_bytes(i)}
    assert len(known) == 235

    @settings(max_examples=300, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        kept = "".join(c for c in text if known >= set(c.encode()))
        found = real.encode(kept, parse_special=False)
        assert real.decode(found, skip_special_tokens=False) == kept
        assert real.special_ids.isdisjoint(found)

    check()


def test_bytes_without_a_token_are_dropped(real: Tokenizer) -> None:
    """Known of the library: whoever asks whether a prompt is empty must look at ids."""
    assert real.encode("\x04") == []


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_decoding_is_the_concatenation_of_bytes(real: Tokenizer, data: st.DataObject) -> None:
    """Also where characters are cut in the middle."""
    some = data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=20))
    text = real.decode(some, skip_special_tokens=False)
    assert text == b"".join(map(real.token_bytes, some)).decode(errors="replace")
    shown = [i for i in some if i not in real.special_ids]
    assert real.decode(some) == real.decode(shown, skip_special_tokens=False)


def test_all_bytes_at_once(real: Tokenizer) -> None:
    assert real.all_token_bytes() == [real.token_bytes(i) for i in range(real.vocab_size)]


# ---- special tokens ----------------------------------------------------------------------------------------


def test_special_text_is_special_if_asked(real: Tokenizer) -> None:
    assert real.encode("<|im_end|>") == [2]
    assert real.encode("a<|im_end|>b") == [*real.encode("a"), 2, *real.encode("b")]
    as_text = real.encode("<|im_end|>", parse_special=False)
    assert 2 not in as_text
    assert real.decode(as_text) == "<|im_end|>"


def test_special_tokens_are_skipped_if_asked(real: Tokenizer) -> None:
    found = real.encode("<|im_start|>hi<|im_end|>")
    assert real.decode(found) == "hi"
    assert real.decode(found, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert real.decode(found, False, spaces_between_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_user_defined_tokens_are_text_that_is_one_token() -> None:
    """Found in what users write, too, and never skipped."""
    t = toy("gpt-2", ("<think>", USER_DEFINED), ("<|end|>", CONTROL))
    assert t.encode("a<think>", parse_special=False) == ids(t, "a", "<think>")
    assert t.decode(ids(t, "<think>", "<|end|>")) == "<think>"


def test_a_special_token_is_its_text_as_written() -> None:
    """Not byte-level spelling: what a special token shows is what the template has to write."""
    t = toy("gpt-2", ("<\uff5ctool é Ġ\uff5c>", CONTROL))
    assert t.encode("<\uff5ctool é Ġ\uff5c>") == [256]
    assert t.decode([256], skip_special_tokens=False) == "<\uff5ctool é Ġ\uff5c>"


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe"])
def test_words_that_are_special_do_not_come_from_plain_text(kind: str) -> None:
    """Case B151: where merges, or whole pieces, would make a special token of an ordinary word."""
    t = toy(kind, "en", ("end", CONTROL), "endi", merges="e+n en+d end+i")
    assert t.encode("end", add_special_tokens=False) == ids(t, "end")
    assert t.encode("end", add_special_tokens=False, parse_special=False) == ids(t, "en", "d")


def test_the_longest_special_token_wins() -> None:
    """Marked or not, as in the library."""
    t = toy("gpt-2", ("<a>", CONTROL), ("<a><b>", CONTROL))
    for text in ("<a><b>", "<a><a><b>", "<<a>b"):
        assert t.encode_chat(text, "\uf8ff") == t.encode_chat(text) == t.encode(text)
    assert t.encode("<a><b>") == ids(t, "<a><b>")


def test_the_end_has_several_names() -> None:
    named = {"bos": 0, "eos": 5, "eot": 7, "eom": 5}
    t = toy(token_ids=named)
    assert t.eos_token_ids == (5, 7)
    assert t.special_ids == {0, 5, 7}  # named tokens are special even if the file types them as ordinary


# ---- BOS ---------------------------------------------------------------------------------------------------


def with_bos(kind: str = "gpt-2", add_bos_token: bool | None = True) -> Tokenizer:
    return toy(kind, ("<s>", CONTROL), token_ids={"bos": 256}, add_bos=add_bos_token)


def test_bos_once() -> None:
    """Case B149: text that begins with BOS gets no second one, on every way in; it can be switched off."""
    t = with_bos()
    assert t.encode("ab") == t.encode("<s>ab") == ids(t, "<s>", "a", "b")
    assert t.encode_chat("ab") == t.encode_chat("<s>ab") == t.encode_chat("<s>ab", "\uf8ff") == t.encode("ab")
    assert t.encode("ab", add_special_tokens=False) == ids(t, "a", "b")
    assert t.encode("<s>", parse_special=False) == ids(t, "<s>", "<", "s", ">")
    assert t.encode("") == ids(t, "<s>")


def test_bos_only_where_the_file_asks() -> None:
    assert with_bos(add_bos_token=False).encode("a") == with_bos(add_bos_token=None).encode("a")
    assert 256 not in with_bos(add_bos_token=None).encode("a")
    assert with_bos("llama-bpe", None).encode("a")[0] == 256
    assert with_bos("llama-bpe", False).encode("a")[0] != 256
    assert toy("llama-bpe").encode("a") == ids(toy(), "a")  # there is no BOS to add


# ---- pre-tokenizers ----------------------------------------------------------------------------------------


def pieces(kind: str, text: str) -> list[str]:
    cut = KINDS[kind].pre_tokenizer().pre_tokenize_str(text)
    return [bytes(BYTE_OF[c] for c in piece).decode(errors="replace") for piece, _ in cut]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "$!", "\n\n ", " YOU", "'", "LL"]),
        ("smollm", ["I", "'ll", " pay", " ", *"12345", "$!", "\n\n ", " YOU", "'", "LL"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "$!\n\n", " ", " YOU", "'LL"]),
        ("qwen2", ["I", "'ll", " pay", " ", *"12345", "$!\n\n", " ", " YOU", "'LL"]),
    ],
)
def test_kinds_cut_text_differently(kind: str, expected: list[str]) -> None:
    assert pieces(kind, "I'll pay 12345$!\n\n  YOU'LL") == expected


def test_whole_pieces_come_before_merges_in_llama() -> None:
    for kind, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["a", "bc"])):
        t = toy(kind, "bc", "abc", merges="b+c")
        assert t.encode("abc") == ids(t, *expected)


def test_qwen_composes_first() -> None:
    assert toy("qwen2").encode("e\u0301") == toy("qwen2").encode("é") == toy("gpt-2").encode("é")
    assert toy("gpt-2").encode("e\u0301") != toy("gpt-2").encode("é")


# ---- what is no token, what is no text ---------------------------------------------------------------------


def test_ids_that_are_no_tokens_are_empty_text() -> None:
    """Case B106: a model may have more rows than its tokenizer has tokens, and a file may fill up."""
    t = toy("gpt-2", ("[PAD256]", UNUSED), ("[PAD256]", UNUSED), ("", UNUSED))
    for token_id in (256, 257, 258, 259, 10**9, -1):  # unused, beyond the list, nonsense
        assert t.decode([token_id]) == ""
        assert t.token_bytes(token_id) == b""
    assert t.decode([*ids(t, "a"), 10**6, *ids(t, "b")]) == "ab"
    assert t.id_to_token(259) is None
    assert t.vocab_size == 259
    assert t.encode("[PAD256]") == [i for c in "[PAD256]" for i in ids(t, c)]


def test_a_vocabulary_that_is_no_multiple_of_anything() -> None:
    """Case B178: 49,155 tokens or 259, nothing is rounded."""
    t = toy("gpt-2", "aa", "ab", "ac", merges="a+a a+b a+c")
    assert t.vocab_size == 259
    assert t.encode("acab") == [258, 257]


@pytest.mark.parametrize("parse_special", [True, False])
def test_half_a_character_is_refused(parse_special: bool) -> None:
    with pytest.raises(RequestError, match=r"character 2 is U\+D83D, half of a surrogate pair"):
        toy().encode("ab\ud83d", parse_special=parse_special)


def test_text_must_be_text() -> None:
    with pytest.raises(RequestError, match="the prompt is a int, expected text"):
        toy().encode(3)  # type: ignore[arg-type]


# ---- files that are wrong ----------------------------------------------------------------------------------


def write(path: Path, **changes: Any) -> Path:
    """A file with a toy vocabulary; `changes` replaces keys, None leaves them out."""
    values: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": [*ALPHABET, "ab", "<s>"],
        "ggml.token_type": [1] * 257 + [3],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 257,
        "ggml.eos_token_id": 257,
        "ggml.add_bos_token": True,
        "chat_template": "{{ bos_token }}",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
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


def from_file(path: Path) -> Tokenizer:
    with GGUFFile(path) as file:
        return Tokenizer.from_gguf(file)


def test_from_a_file(tmp_path: Path) -> None:
    t = from_file(write(tmp_path / "m.gguf"))
    assert t.encode("ab") == [257, 256]
    assert (t.eos_token_ids, t.chat_template) == ((257,), "{{ bos_token }}")


def test_what_a_file_may_leave_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        ggml__token_type=None,
        ggml__bos_token_id=None,
        ggml__eos_token_id=None,
        ggml__add_bos_token=None,
        chat_template=None,
    )
    t = from_file(path)
    assert t.encode("ab<s>") == [256, *ids(t, "<", "s", ">")]
    assert (t.bos_token_id, t.eos_token_id, t.eos_token_ids, t.chat_template) == (None, None, (), None)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        (
            {"ggml__model": "rwkv"},
            r"tokenizer 'rwkv' \(key 'tokenizer.ggml.model'\) .* supported: gpt2, llama",
        ),
        ({"ggml__model": None}, r"'tokenizer\.ggml\.model' is missing"),
        ({"ggml__pre": "kimi-k2"}, r"pre-tokenizer 'kimi-k2' .* supported: gpt-2, .*smollm, .*llama-bpe"),
        ({"ggml__pre": None}, r"'tokenizer\.ggml\.pre' is missing"),
        ({"ggml__tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"ggml__tokens": 5}, r"'tokenizer\.ggml\.tokens' is a int, expected a list"),
        ({"ggml__tokens": list(range(258))}, r"'tokenizer\.ggml\.tokens' has elements that are no str"),
        ({"ggml__tokens": [*ALPHABET, "a", "<s>"]}, "tokens .* and 256 .* are both 'a'"),
        ({"ggml__merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
        ({"ggml__merges": ["a b", "ab"]}, "element 1 of key 'tokenizer.ggml.merges' is 'ab'"),
        ({"ggml__merges": ["a b c"]}, "element 0 of key 'tokenizer.ggml.merges' is 'a b c'"),
        ({"ggml__merges": ["a c"]}, r"'tokenizer\.ggml\.merges' does not fit the tokens: .*ac"),
        ({"ggml__token_type": [1] * 257}, r"'tokenizer\.ggml\.token_type' has 257 elements, expected 258"),
        ({"ggml__eos_token_id": 258}, r"'tokenizer\.ggml\.eos_token_id' is 258, expected 0 to 257"),
        ({"ggml__eos_token_id": "2"}, r"'tokenizer\.ggml\.eos_token_id' is a str, expected a int"),
        ({"ggml__bos_token_id": True}, r"'tokenizer\.ggml\.bos_token_id' is a bool, expected a int"),
        ({"ggml__add_bos_token": 1}, r"'tokenizer\.ggml\.add_bos_token' is a int, expected a bool"),
    ],
)
def test_a_wrong_vocabulary_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], culprit: str) -> None:
    """Case B178: missing merges, and all else that would give other ids than the model's."""
    path = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=culprit) as caught:
        from_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_mixed_scripts_are_encoded_alike_however_they_are_cut(real: Tokenizer) -> None:
    """Marks change where text is split for encoding, never what is encoded."""
    rng = random.Random(0)
    scripts = [
        "Hello, it's ",
        "Ünïcödé ",
        "世界",
        "Привет ",
        "123.45 ",
        "\n\n\t",
        "🎉",
        "def f(x):\n    ",
        "שלום ",
    ]
    for _ in range(200):
        text = "".join(rng.choices(scripts, k=12))
        around = f"<|im_start|>{text}<|im_end|>"
        assert real.encode_chat(around, "\uf8ff") == real.encode(around) == [1, *real.encode(text), 2]


def test_a_text_that_is_far_too_long_is_known_at_once(real: Tokenizer) -> None:
    """Some of this vocabulary's bytes have no token, and control characters are lost with them."""
    text = "Hello! " * 100_000
    assert 1000 < real.fewest_tokens(text) < len(real.encode(text))
    assert real.fewest_tokens("\x04\x06" * 100_000) == len(real.encode("\x04\x06" * 100_000)) == 0
    assert real.fewest_tokens("Hello! " * 100) == 0
