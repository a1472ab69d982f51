"""Refuse early what cannot be enforced: for front ends, which have no vocabulary in the library's form.

    warnings = check_structured_outputs(asked)              # may take tens of milliseconds, without the
    warnings = await check_structured_outputs_async(asked)  # interpreter's lock; never blocks the event loop

Both raise `RequestError` (param "structured_outputs") that names the keyword or the place at fault. They
return what is *not* enforced, a line each: always empty unless `asked.lenient`. It is the code that compiles
for the core, with bytes for tokens, so what passes here compiles there; verdicts are remembered, so asking
twice costs nothing.
"""

from __future__ import annotations

import asyncio
from functools import cache

from llguidance import LLTokenizer

from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.grammar.library import make_matcher, make_tokenizer
from mainspring.grammar.remember import Remembered, weight
from mainspring.grammar.words import GrammarError

MAX_REMEMBERED_BYTES = 8 << 20

_Verdict = tuple[str, ...] | GrammarError  # what is not enforced, or why nothing is
_verdicts: Remembered[StructuredOutputsParams, _Verdict] = Remembered(MAX_REMEMBERED_BYTES)


def check_structured_outputs(asked: StructuredOutputsParams) -> tuple[str, ...]:
    """See above."""
    verdict = _verdicts.get(asked)
    if verdict is None:
        verdict = _judge(asked)
        _verdicts.put(asked, verdict, weight(asked))
    if isinstance(verdict, GrammarError):
        raise RequestError(f"structured_outputs: {verdict}", "structured_outputs")
    return verdict


async def check_structured_outputs_async(asked: StructuredOutputsParams) -> tuple[str, ...]:
    """See above."""
    if _verdicts.get(asked) is not None:
        return check_structured_outputs(asked)
    return await asyncio.to_thread(check_structured_outputs, asked)


def _judge(asked: StructuredOutputsParams) -> _Verdict:
    try:
        return make_matcher(_byte_tokenizer(), asked).warnings
    except GrammarError as error:
        return error


@cache
def _byte_tokenizer() -> LLTokenizer:
    """A token for each byte, and one that ends."""
    end = 256
    return make_tokenizer([*(bytes([byte]) for byte in range(end)), b"<end>"], [end], [end], end + 1)
