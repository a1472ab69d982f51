"""`/v1/completions` over a socket, with a core that says what it is told to say."""

from __future__ import annotations

import itertools
import re

import pytest
from server_toys import TOY, fake, is_idle, scripted, text_script, wait_until

ANSWER = "12345678"


@pytest.fixture(scope="module")
def server():
    with scripted(text_script(ANSWER, end=False)) as found:
        yield found


def streamed(events) -> dict[int, dict]:
    """The choices of a stream, put together as a reply in one piece has them."""
    found: dict[int, dict] = {}
    for event in events:
        for part in event["choices"]:
            whole = found.setdefault(part["index"], {"text": "", "logprobs": None})
            assert "finish_reason" not in whole, "something comes after the end"
            whole["text"] += part["text"]
            if part["logprobs"] is not None:
                joined = whole["logprobs"] or {key: [] for key in part["logprobs"]}
                whole["logprobs"] = {key: joined[key] + part["logprobs"][key] for key in joined}
            if part["finish_reason"] is not None:
                whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
    return found


def test_reply(server):
    body = server.complete().json
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER[:5], "length")
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["prompt_tokens"] == 1, "hello is one token"
    by_default = server.post("/v1/completions", {"prompt": "hello"}).json
    assert by_default["usage"]["completion_tokens"] == 16, "the API's default"


PROMPTS = {
    "text": "hello",
    "ids": [104, 105],
    "texts": ["hello", "the other"],
    "lists of ids": [[104, 105], [65]],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_streams_say_the_same(server, prompt, echo, logprobs, max_tokens):
    """Case B098: every way to ask, whole and streamed; offsets follow the text, a prompt is echoed once."""
    if max_tokens == 0 and not echo:
        assert server.complete(prompt, max_tokens=0).error["param"] == "max_tokens"
        return
    fields = {"echo": echo, "logprobs": logprobs, "max_tokens": max_tokens, "n": 2}
    body = server.complete(prompt, **fields).json
    events = server.complete(prompt, **fields, stream=True, stream_options={"include_usage": True}).events
    whole = {choice["index"]: choice for choice in body["choices"]}
    parts = streamed(events)
    many = isinstance(prompt[0], (list, str)) and not isinstance(prompt, str)
    prompts = prompt if many else [prompt]
    assert whole.keys() == parts.keys() == set(range(2 * len(prompts)))
    for index, choice in whole.items():
        for key, value in parts[index].items():
            assert choice[key] == value, key
        given = prompts[index // 2]
        ids = TOY.encode(given) if isinstance(given, str) else given
        begun = TOY.decode(ids) if echo else ""
        assert choice["text"] == begun + ANSWER[:max_tokens]
        assert choice["finish_reason"] == "length"
        if logprobs is not None:
            check_logprobs(choice, len(ids) if echo else 0, max_tokens, logprobs)
        else:
            assert choice["logprobs"] is None
    usage = {key: value for key, value in body["usage"].items() if value is not None}
    assert events[-1]["usage"] == usage
    assert usage["completion_tokens"] == 2 * len(prompts) * max_tokens


def check_logprobs(choice, num_prompt: int, num_answer: int, num_top: int) -> None:
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {num_prompt + num_answer}
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(itertools.accumulate(map(len, found["tokens"]), initial=0))[:-1]
    is_first = [i == 0 and num_prompt > 0 for i in range(num_prompt + num_answer)]
    assert [value is None for value in found["token_logprobs"]] == is_first
    assert [value is None for value in found["top_logprobs"]] == is_first
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert top is None or (token in top and len(top) <= num_top + 1)
        assert top is None or len(top) >= max(num_top, 1)


def test_tokens_that_read_alike():
    """Case B088: bytes that are no character have keys of their own; nothing is lost."""
    with scripted([0xF0, 0x9F, 0x98, 0x80, 65]) as server:
        body = server.complete(logprobs=3, max_tokens=5).json["choices"][0]
        assert body["text"] == "😀A"
        for token_id, top in zip([0xF0, 0x9F, 0x98, 0x80], body["logprobs"]["top_logprobs"], strict=False):
            assert f"bytes:\\x{token_id:02x}" in top
            assert len(top) == 4, "the sampled one and three that are likelier"


def test_the_best_of_several():
    """More are made than shown, the likeliest first; all of them cost."""
    texts = {0: "bbbb", 1: "aaaa", 2: "zzzz"}  # a lower id has a higher probability here

    def script(request):
        return text_script(texts[int(request.request_id[0])], end=False)

    with scripted(script) as server:
        body = server.complete(best_of=3, n=2, max_tokens=4).json
        assert [choice["text"] for choice in body["choices"]] == ["aaaa", "bbbb"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == 12


def test_beam_search():
    """The best `n` of all continuations, by an exhaustive count; a beam that ends is an answer."""
    with fake() as server:

        def logprobs(ids: list[int]) -> dict[int, float]:
            fields = {"max_tokens": 1, "logprobs": 20, "temperature": 0, "return_tokens_as_token_ids": True}
            body = server.complete(ids, ignore_eos=True, **fields).json["choices"][0]
            return {
                int(k.removeprefix("token_id:")): v for k, v in body["logprobs"]["top_logprobs"][0].items()
            }

        prompt, width = [104, 105], 2
        beams = [([], 0.0)]
        for _ in range(3):
            grown = [
                ([*ids, t], lp + more) for ids, lp in beams for t, more in logprobs(prompt + ids).items()
            ]
            beams = sorted(grown, key=lambda beam: beam[1], reverse=True)[:width]
        fields = {"use_beam_search": True, "n": width, "max_tokens": 3, "ignore_eos": True}
        body = server.complete(prompt, return_token_ids=True, **fields).json
        assert [choice["token_ids"] for choice in body["choices"]] == [ids for ids, _ in beams]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * width
        assert body["usage"]["completion_tokens"] == 3 * width
        ended = server.complete([104, 105], use_beam_search=True, n=3, max_tokens=4, length_penalty=0.5)
        assert len(ended.json["choices"]) == 3
        body = {"prompt": prompt, **fields}
        elsewhere = server.post("/v1/completions", body, **{"x-data-parallel-rank": "1"})
        assert elsewhere.error["param"] == "data_parallel_rank"
        wait_until(lambda: is_idle(server))


def test_ids_are_reported(server):
    body = server.complete(return_token_ids=True, max_tokens=2).json["choices"][0]
    assert (body["prompt_token_ids"], body["token_ids"]) == (TOY.encode("hello"), text_script(ANSWER)[:2])
    events = server.complete(return_token_ids=True, max_tokens=2, stream=True).events
    choices = [event["choices"][0] for event in events]
    assert [choice["prompt_token_ids"] for choice in choices] == [TOY.encode("hello"), None]
    assert [choice["token_ids"] for choice in choices] == [[i] for i in text_script(ANSWER)[:2]]
    named = server.complete(logprobs=1, return_tokens_as_token_ids=True, max_tokens=2).json["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{i}" for i in text_script(ANSWER)[:2]]


def test_prompt_logprobs(server):
    body = server.complete([104, 105, 106], prompt_logprobs=1, max_tokens=1).json["choices"][0]
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert [next(iter(position)) for position in others] == ["105", "106"]
    assert {*others[0]["105"]} == {"logprob", "rank", "decoded_token"}
    assert server.complete(prompt_logprobs=-1).error["param"] == "prompt_logprobs"
    assert server.complete(prompt_logprobs=1, stream=True).error["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], [[]], None, 5, True, {}, [5, "a"], ["a", 5], [[5, "a"]], [[[5]]]),
        *([1.5], [-1], [[-1]], [10**6], [10**30], [True], [None], ["a"] * 1025),
    ],
)
def test_prompts_that_are_none(server, prompt):
    reply = server.complete(prompt)
    assert reply.status == 400
    assert reply.error["param"] in ("prompt", "prompt_token_ids")
    assert len(reply.body) < 400


def test_prompt_is_needed(server):
    assert server.post("/v1/completions", {"max_tokens": 1}).error["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt_embeds": "aa"}, "prompt_embeds"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": 10_000, "prompt": ["a", "b"]}, "n"),
        ({"n": 1, "best_of": 10_000, "prompt": ["a", "b"]}, "n"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"max_tokens": None, "min_tokens": 17}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "n": 11}, "logprobs"),
    ],
)
def test_what_is_refused(server, fields, param):
    """Cases B064, B095, B100: by name, before the engine hears of it."""
    reply = server.complete(**{"prompt": "hello"} | fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_what_is_far_too_long_is_not_read_to_its_end(server, monkeypatch):
    """Unless it is to be cut."""
    monkeypatch.setattr(TOY, "encode", lambda *given: [120] * 1000)
    monkeypatch.setattr(TOY, "encode_chat", lambda *given: [120] * 1000)
    for ask in (
        server.complete,
        lambda text, **fields: server.chat([{"role": "user", "content": text}], **fields),
    ):
        error = ask("x" * 200_000).error
        assert re.search(r"has at least \d{4,5}, which leaves no room", error["message"])
        assert "has 1000" in ask("x" * 600).error["message"]
        assert ask("x" * 200_000, truncate_prompt_tokens=-1).status == 200


@pytest.mark.parametrize("max_tokens", [None, 1, 2, 100])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("length", [510, 511, 512, 513])
def test_prompts_at_the_limit(server, length, as_ids, max_tokens):
    """Cases B062 and B065: a limit on the answer is cut to what is left; a prompt that leaves nothing is
    refused with both numbers."""
    prompt = [120] * length if as_ids else "x" * length
    reply = server.complete(prompt, max_tokens=max_tokens)
    if length < 512:
        assert reply.json["usage"]["completion_tokens"] == min(max_tokens or 16, 512 - length)
        assert reply.json["choices"][0]["finish_reason"] == "length"
    else:
        assert reply.status == 400
        assert str(length) in reply.error["message"]
        assert "512" in reply.error["message"]


def test_long_texts_are_read_off_the_loop(server):
    long = "hello " * 2000
    assert server.complete(long, truncate_prompt_tokens=7).json["usage"]["prompt_tokens"] == 7
