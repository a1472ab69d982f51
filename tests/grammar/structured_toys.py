"""A small vocabulary, engines around a fake model, random texts of a grammar, and a judge of documents.

The random texts are as nasty as the grammar lets them be: besides random bytes they hold, wherever they fit,
the names and values of the schema, spelled plainly and escaped, numbers in odd forms, and names said twice.
After a budget of bytes they close whatever can be closed. A text that is not at its end by then is cut:
nothing is said of it but that the grammar has gone along so far.
"""

from __future__ import annotations

import decimal
import json
import random
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
from msgspec import structs

from mainspring.base.config import EngineArgs, ModelFacts, Vocabulary, resolve
from mainspring.base.messages import EngineCoreOutput, EngineCoreRequest, ResetPrefixCache
from mainspring.base.params import SamplingParams, StructuredOutputsParams
from mainspring.engine.build import build_engine
from mainspring.engine.core import EngineCore
from mainspring.grammar.library import make_matcher, make_tokenizer
from mainspring.grammar.matcher import Matcher
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_model import FakeModel

PIECES = [b'{"', b'":', b'": ', b'",', b'"}', b"true", b"null", b"  ", b"name", b"\xe5\x8c\x97", b"12", b"}]"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *PIECES, b"<eos>", b"<end>"]
EOS, END = len(TOKENS) - 2, len(TOKENS) - 1
VOCAB_SIZE = len(TOKENS) + 6  # a model has more rows than there are tokens
VOCABULARY = Vocabulary(TOKENS, [EOS, END], [EOS, END])
TOKENIZER = make_tokenizer(TOKENS, [EOS, END], [EOS, END], VOCAB_SIZE)
NUM_WORDS = -(-VOCAB_SIZE // 32)
FACTS = ModelFacts(
    path="",
    architecture="fake",
    max_position_embeddings=2048,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS, END),
)
# A random model closes what it has opened now and then.
CLOSING = {ord('"'): 4.0, ord("}"): 4.0, ord("]"): 3.0, ord(","): 2.0, EOS: 4.0}
MAX_STEPS = 20_000


def asked(**kind: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind)


def matcher(ends: tuple[int, ...] = (EOS, END), **kind: Any) -> Matcher:
    return Matcher(make_matcher(TOKENIZER, asked(**kind)).matcher, [EOS, END], ends)


def allowed(grammar: Matcher) -> set[int]:
    row = np.full(NUM_WORDS, 0x5A5A5A5A, dtype=np.int32)
    grammar.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def feed(grammar: Matcher, text: str) -> bool:
    """Byte by byte; False where it is not taken."""
    return all(grammar.accept(byte) for byte in text.encode())


def fits(text: str, **kind: Any) -> bool:
    """The whole text, and it may end there."""
    grammar = matcher(**kind)
    return feed(grammar, text) and (grammar.is_finished() or EOS in allowed(grammar))


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENS[i] for i in token_ids if i not in (EOS, END)).decode(errors="replace")


# -- engines -------------------------------------------------------------------------------------------------


def make_core(**settings: Any) -> tuple[EngineCore, FakeExecutor]:
    """A real core and compiler; the model is a hash of the text, so its logits are random."""
    given = {"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks_override": 400, "block_size": 16}
    config = resolve(EngineArgs(**given | settings), FACTS)
    executor = FakeExecutor(
        FakeModel(VOCAB_SIZE), num_blocks=config.num_gpu_blocks_override, block_size=config.block_size
    )
    config = structs.replace(config, vocabulary=VOCABULARY)
    return build_engine(config, executor).core, executor


def request(request_id: str, structure: StructuredOutputsParams | None, **given: Any) -> EngineCoreRequest:
    """`given` are fields of the request, or of its parameters."""
    fields = {"eos_token_id": EOS, "stop_token_ids": [END], "prompt_token_ids": [1, 2, 3]}
    fields |= {name: given.pop(name) for name in list(given) if name in EngineCoreRequest.__struct_fields__}
    params = SamplingParams(
        **{"max_tokens": 300, "seed": sum(request_id.encode()), "logit_bias": CLOSING} | given
    )
    return EngineCoreRequest(request_id, sampling_params=params, structured_outputs=structure, **fields)


class Ended(EngineCoreOutput, kw_only=True):
    """All that was said of a request, and how it ended."""


def run(
    core: EngineCore, requests: list[EngineCoreRequest], preempt_every: int | None = None
) -> dict[str, Ended]:
    """Add them all and step until everything has ended; perhaps take all KV away every so many steps."""
    for one in requests:
        core.add_request(one)
    return finish(core, [one.request_id for one in requests], preempt_every)


def finish(core: EngineCore, request_ids: list[str], preempt_every: int | None = None) -> dict[str, Ended]:
    said: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
    ended: dict[str, Ended] = {}
    for step in range(MAX_STEPS):
        if preempt_every is not None and step % preempt_every == 0:
            core.call(ResetPrefixCache(reset_running_requests=True))
        for outputs in core.step().values():
            for output in outputs.outputs:
                said[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    ended[output.request_id] = Ended(
                        output.request_id,
                        said[output.request_id],
                        output.finish_reason,
                        output.stop_reason,
                        error=output.error,
                    )
        core.check()
        if len(ended) == len(said):
            return ended
    raise AssertionError(f"{said.keys() - ended.keys()} did not end")


# What a refusal must name.
KEYWORDS = re.compile(
    r"\$\w+|\b(additionalItems|additionalProperties|allOf|anyOf|const|contains|content\w+|dependen\w+|else|enum"
    r"|exclusive\w+|format|if|items|max\w+|min\w+|multipleOf|not|oneOf|pattern\w*|prefixItems|propert\w+"
    r"|propertyNames|required|then|type|unevaluated\w+|uniqueItems|False|false)\b"
)

# -- random texts and their judge ----------------------------------------------------------------------------

SNIPPETS = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n  ", b'""', b"{}", b"[]", b'"x":1', b'"a":'),
    *(b"-0", b"0", b"1", b"10", b"100", b"-1.5", b"1.0", b"12.5", b"0.1", b"1e3", b"1E+2", b"e-2", b"-"),
    *(b"null", b"true", b"false", rb"\n", rb"\"", rb"\\", rb"\u0061", rb"\u00e9", rb"\ud83d", rb"\/"),
    *(b"2024-02-29", b"2023-02-29", b"T10:11:12Z", b"T23:59:60Z"),
]
CLOSERS, QUIET = list(b'}]"'), set(b"0123456789,:ntfabc")


def words_of(schema: Any) -> Iterator[str]:
    """Every name and text in a schema."""
    match schema:
        case str():
            yield schema
        case dict():
            for name, part in schema.items():
                yield name
                yield from words_of(part)
        case list():
            for part in schema:
                yield from words_of(part)


def snippets_of(schema: Any) -> list[bytes]:
    words = {word for word in words_of(schema) if 0 < len(word) < 60}
    escaped = ['"' + "".join(f"\\u{ord(c):04x}" for c in word if ord(c) < 65536) + '"' for word in words]
    spelled = [*words, *(json.dumps(w) for w in words), *(json.dumps(w, ensure_ascii=False) for w in words)]
    return [*SNIPPETS, *(text.encode(errors="replace") for text in [*spelled, *escaped])]


def random_text(
    kind: dict[str, Any], dice: random.Random, snippets: list[bytes], budget: int, limit: int = 3000
) -> tuple[bytes, bool]:
    """A text that the grammar lets through, and whether it may end there. Asserts that there is always a way
    on."""
    grammar = make_matcher(TOKENIZER, asked(**kind)).matcher
    said = bytearray()
    while len(said) < limit:
        is_over_budget = len(said) > budget
        if grammar.is_stopped() or (grammar.is_accepting() and (is_over_budget or dice.random() < 0.15)):
            return bytes(said), True
        if not is_over_budget and dice.random() < 0.5:
            snippet = dice.choice(snippets)
            count = grammar.validate_tokens(list(snippet))
            assert grammar.consume_tokens(list(snippet[:count]))
            said += snippet[:count]
            if count:
                continue
        bits = np.unpackbits(np.frombuffer(grammar.compute_bitmask(), np.uint8), bitorder="little")
        open_ids = np.flatnonzero(bits[:EOS]).tolist()
        assert not grammar.is_error(), (said, grammar.get_error())
        if not open_ids:
            assert grammar.is_accepting(), f"no way on after {bytes(said)!r}"
            return bytes(said), True
        choices = open_ids
        if is_over_budget:
            closers = [byte for byte in CLOSERS if byte in open_ids]
            choices = closers[:1] or [i for i in open_ids if i in QUIET] or open_ids
        token = dice.choice(choices)
        assert grammar.consume_token(token), (said, token)
        said += TOKENS[token]
    return bytes(said), False


def judge(schema: Any) -> jsonschema.protocols.Validator:
    """By the draft that the schema names; numbers are exact."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    checker = kind.TYPE_CHECKER.redefine(
        "integer",
        lambda _, value: (
            not isinstance(value, bool)
            and (
                isinstance(value, int) or (isinstance(value, Decimal) and value == value.to_integral_value())
            )
        ),
    )
    return jsonschema.validators.extend(kind, type_checker=checker)(exact)


def fault_of(validator: jsonschema.protocols.Validator, text: bytes | str) -> str | None:
    """What is wrong with a document, if anything. Not JSON at all raises."""
    sys.set_int_max_str_digits(0)  # a random number may be long
    with decimal.localcontext(prec=1000, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN):
        try:
            fault = next(validator.iter_errors(json.loads(text, parse_float=Decimal)), None)
        except decimal.InvalidOperation:  # 1e5000 modulo 0.01: beyond what is counted here
            return None
    return None if fault is None else fault.message
