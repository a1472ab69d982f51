from __future__ import annotations

from itertools import pairwise

import pytest
from frontend_toys import END, TOY
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mainspring.base.params import SamplingParams
from mainspring.frontend.detokenizer import Detokenizer, TokenBytes

REPLACEMENT = "\ufffd"
BYTES = TokenBytes(TOY, skip_special_tokens=True)
WORLD = "👩‍👩‍👧‍👦 नमस्ते 你好 ďábel שלום 🇨🇭 e\u0301"


def detokenizer(prompt=(), **params) -> Detokenizer:
    return Detokenizer(BYTES, prompt, SamplingParams(**params))


def deltas(it: Detokenizer, outputs, *, flush=True) -> tuple[list[str], object]:
    """What is given out after each of `outputs` (lists of tokens) and at the end; and the hit that ended
    it."""
    pieces, hit = [], None
    for tokens in outputs:
        hit = it.update(tokens)
        pieces.append(it.take())
        if hit:
            break
    if flush and not hit:
        it.flush()
        pieces.append(it.take())
    return pieces, hit


def split(tokens, size):
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_stream_is_one_decode_for_every_length(size):
    """Case B086: the pieces join to one decode; U+FFFD comes only for an end that is really unfinished."""
    ids = list(WORLD.encode())
    for end in range(len(ids) + 1):
        pieces, _ = deltas(detokenizer(), split(ids[:end], size))
        whole = TOY.decode(ids[:end])
        assert "".join(pieces) == whole
        assert REPLACEMENT not in "".join(pieces[:-1])
        assert whole.count(REPLACEMENT) <= 1


def after_what_is_shared(before: str, both: str) -> str:
    num_shared = 0
    while num_shared < min(len(before), len(both)) and before[num_shared] == both[num_shared]:
        num_shared += 1
    return both[num_shared:]


leads = [0xE0, 0xED, 0xF0, 0xF4, 0xC3, 0xEF, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xBD, 0x61]
tokens = st.lists(st.sampled_from(leads) | st.integers(0, TOY.vocab_size + 4), max_size=12)


@settings(max_examples=300, deadline=None)
@example([], [0xED, 0xA0], None)  # held by the codec as unfinished, though nothing can complete it
@example([0xED, 0xA0], [0x61], None)
@example([0xED], [0xA0], None)
@given(tokens, tokens, st.data())
def test_any_bytes_any_split_any_prompt(prompt, ids, data):
    """Cases B086, B089, B106: text is decode(prompt + answer) after what it shares with decode(prompt),
    whatever the bytes; ids that the tokenizer lacks are empty."""
    cuts = sorted((data.draw(st.sets(st.integers(0, len(ids)))) if data else set()) | {0, len(ids)})
    pieces, _ = deltas(detokenizer(prompt), [ids[a:b] for a, b in pairwise(cuts)])
    known = [i for i in prompt if i < TOY.vocab_size]
    both = TOY.decode(known + [i for i in ids if i < TOY.vocab_size])
    assert "".join(pieces) == after_what_is_shared(TOY.decode(known), both)


@pytest.mark.parametrize("before", ["Hello world ", ""])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_prompt_ends_inside_a_character(before, num_bytes):
    """Case B085: no prompt text in the first delta; the completed character comes once; an uncompleted one
    never."""
    pepper = "🌶".encode()
    prompt = [*before.encode(), *pepper[:num_bytes]]
    completed, _ = deltas(detokenizer(prompt), split([*pepper[num_bytes:], ord("!")], 1))
    assert "".join(completed) == "🌶!"
    dropped, _ = deltas(detokenizer(prompt), split(list(b" no"), 1))
    assert "".join(dropped) == " no"
    nothing, _ = deltas(detokenizer(prompt), [])
    assert nothing == [""]


def test_special_tokens_are_shown_or_not():
    """Case B089: two special tokens in a row, hidden or shown; nothing is put between them."""
    ids = [TOY.id(" Paris"), TOY.id(END), TOY.id(END), TOY.id(" the")]
    assert "".join(deltas(detokenizer(), split(ids, 1))[0]) == " Paris the"
    shown = Detokenizer(TokenBytes(TOY, False), [], SamplingParams(skip_special_tokens=False))
    assert "".join(deltas(shown, split(ids, 1))[0]) == " Paris<end><end> the"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("pieces", "stop", "text", "ended_by", "num_tokens"),
    [
        ("ab|cST|OPde", ["STOP"], "abc", "STOP", 3),  # across tokens, and not at the edge of one
        ("xSTOPy|z", ["STOP"], "x", "STOP", 1),  # inside one token
        ("q|S|T|O|P|r", ["STOP"], "q", "STOP", 5),
        ("abcd", ["abc", "ab"], "", "ab", 1),  # the one complete first
        ("xabc", ["bc", "abc"], "xa", "bc", 1),  # complete at the same character: the first of the list
        ("xabc", ["abc", "bc"], "x", "abc", 1),
        ("aaab", ["aab"], "a", "aab", 1),  # overlaps itself
        ("aa|ab|c", ["aab", "b"], "a", "aab", 2),
    ],
)
def test_stop_strings(pieces, stop, text, ended_by, num_tokens, include):
    """Case B070: the text ends before (or after) the first match; pieces joined are the text; tokens are
    counted."""
    table = dict(enumerate(piece.encode() for piece in pieces.split("|")))
    it = Detokenizer(table, [], SamplingParams(stop=stop, include_stop_str_in_output=include))
    given, hit = deltas(it, split(list(table), 1))
    assert (hit.stop, it.num_tokens) == (ended_by, num_tokens)
    assert "".join(given) == text + (ended_by if include else "")
    again = Detokenizer(table, [], SamplingParams(stop=stop, include_stop_str_in_output=include))
    assert deltas(again, [list(table)])[1] == (num_tokens, ended_by)  # all tokens in one output: the same end


def test_beginning_of_a_stop_string_is_held_back():
    """Case B071: nothing leaks while a match may come; all is given when it does not, or when the answer
    ends."""
    for pieces, expected in [
        (["DEF", "G", "HI", "J"], ["", "", "", ""]),
        (["DEF", "G", "X"], ["", "", "DEFGX", ""]),
        (["DEF"], ["", "DEF"]),
        (["..DE", "FGD", "E"], ["..", "DEFG", "", "DE"]),
    ]:
        table = dict(enumerate(piece.encode() for piece in pieces))
        it = Detokenizer(table, [], SamplingParams(stop=["DEFGHIJ"]))
        assert deltas(it, split(list(table), 1))[0] == expected


def test_min_tokens_and_stop_strings():
    """Case B074: no match within the first min_tokens counts, then or later; the next one does."""
    script = [ord("a")] * 30
    script[1] = script[24] = ord("\n")
    it = detokenizer(stop=["\n"], min_tokens=20, max_tokens=40)
    pieces, hit = deltas(it, split(script, 1))
    assert (hit.stop, it.num_tokens, "".join(pieces)) == ("\n", 25, "a\n" + "a" * 22)
    at_the_limit = detokenizer(stop=["b"], min_tokens=2)
    assert deltas(at_the_limit, split(list(b"abb"), 1))[1].stop == "b"
    assert at_the_limit.num_tokens == 3
    across = detokenizer(stop=["ab"], min_tokens=1)  # begins before the limit, is complete after it
    assert "".join(deltas(across, split(list(b"ab"), 1))[0]) == ""


letters = st.text("abc", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(letters, min_size=1, max_size=5),
    st.lists(st.text("abcd", max_size=5), max_size=12),
    st.integers(0, 4),
    st.booleans(),
    st.data(),
)
def test_stop_search_against_the_plain_rule(stops, pieces, min_tokens, include, data):
    """Cases B070, B071, B074: the rules of the module, written plainly, for random strings, tokens and
    outputs."""
    table = dict(enumerate(piece.encode() for piece in pieces))
    params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(pieces)))) | {0, len(pieces)})
    outputs = [list(table)[a:b] for a, b in pairwise(cuts)]

    expected, text = None, ""
    for count, char in ((n, c) for n, piece in enumerate(pieces, 1) for c in piece):
        text += char
        found = next((s for s in stops if count > min_tokens and text.endswith(s)), None)
        if found:
            expected = (count, found)
            text = text if include else text.removesuffix(found)
            break

    it = Detokenizer(table, [], params)
    given, hit = deltas(it, outputs, flush=False)
    if expected is None:
        held = max(k for s in stops for k in range(len(s)) if text.endswith(s[:k]))
        assert "".join(given) == text[: len(text) - held]  # neither more nor less than may begin one
        it.flush()
        given.append(it.take())
    else:
        assert (it.num_tokens, hit.stop) == expected
    assert "".join(given) == text
