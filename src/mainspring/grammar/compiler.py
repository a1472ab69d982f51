"""Compiles grammars off the core's loop. Fits `base.protocols.GrammarCompiler`.

Theory of operation. A request's grammar is compiled in a thread, without the interpreter's lock, while the
request is parked; what was compiled is remembered, and each request gets a copy, which costs next to nothing.
Requests that want the same at the same time wait for one compilation. Whatever goes wrong, in whatever way,
is the answer to those who wait for it and to nobody else.

Rules.
1. A future is resolved within `timeout_s`. A compilation cannot be interrupted, but the library's limits end
   it.
2. One whose requests have all gone before it was begun is not begun.
3. Copies share what the library has found out about their grammar, which grows with use, so a compiled
   grammar is given out a limited number of times, and not again after one of its copies has failed.
4. The library and its form of the vocabulary are made when they are first needed: engines should start
   quickly. That holds the interpreter's lock for a part of a second, so servers ask for it beforehand.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mainspring.base.config import Vocabulary, usable_cores
from mainspring.base.messages import EngineCoreRequest
from mainspring.base.params import StructuredOutputsParams
from mainspring.base.protocols import Grammar
from mainspring.grammar.remember import Remembered, weight
from mainspring.grammar.words import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from mainspring.grammar.structural_tag import Limit

TIMEOUT_S = 10.0
NUM_THREADS = max(1, min(4, usable_cores() // 2))  # the loop and the kernels need the others
MAX_REMEMBERED_BYTES = 4 << 20  # of schemas and patterns; what they compile to takes some ten times as much
MAX_USES = 64


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher  # at its beginning; only ever copied
    limit: Limit | None = None  # of the free text that it begins with
    num_uses: int = 0


@dataclass(slots=True)
class _Job:
    """One compilation and who waits for it."""

    waiting: list[tuple[EngineCoreRequest, Future[Grammar]]] = field(default_factory=list)
    timer: threading.Timer | None = None


class Compiler:
    """`compile` and `close` are for the loop's thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """`vocab_size`: rows of the model's output, at least as many as the vocabulary has tokens."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._compiled: Remembered[StructuredOutputsParams, _Compiled] = Remembered(MAX_REMEMBERED_BYTES)
        self._jobs: dict[StructuredOutputsParams, _Job] = {}
        self._lock = threading.Lock()  # around `_jobs`
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()  # around `_made`
        self._threads = ThreadPoolExecutor(NUM_THREADS, "mainspring-grammar")

    def compile(self, request: EngineCoreRequest) -> Future[Grammar]:
        asked = request.structured_outputs
        assert asked is not None, f"{request.request_id} has no grammar"
        future: Future[Grammar] = Future()
        with self._lock:
            job = self._jobs.get(asked)
            if job is None and (compiled := self._compiled.get(asked)) is not None:
                future.set_result(self._copy(asked, compiled, request))
                return future
            if job is None:
                job = self._jobs[asked] = _Job()
                job.timer = threading.Timer(self._timeout_s, self._finish, (asked, job, self._too_slow()))
                job.timer.daemon = True
                job.timer.start()
                self._threads.submit(self._run, asked, job)
            job.waiting.append((request, future))
        return future

    def prepare(self) -> Future[bool]:
        return self._threads.submit(lambda: self._tokenizer is not None)

    def close(self) -> None:
        """Idempotent. Who still waits is not answered: the engine has ended."""
        with self._lock:
            for job in self._jobs.values():
                if job.timer is not None:
                    job.timer.cancel()
            self._jobs.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, asked: StructuredOutputsParams, job: _Job) -> None:
        with self._lock:
            if all(future.cancelled() for _, future in job.waiting):
                self._forget(asked, job)
                return
        result: _Compiled | GrammarError
        try:
            from mainspring.grammar.library import make_matcher

            result = _Compiled(make_matcher(self._tokenizer, asked).matcher, _limit(asked))
        except GrammarError as error:
            result = error
        except BaseException as error:  # the library's panics are no `Exception`
            result = GrammarError(f"the grammar compiler has failed: {type(error).__name__}: {error}")
        self._finish(asked, job, result)

    def _finish(self, asked: StructuredOutputsParams, job: _Job, result: _Compiled | GrammarError) -> None:
        """The first result of a job counts, be it that time is up."""
        with self._lock:
            if isinstance(result, _Compiled):
                self._compiled.put(asked, result, weight(asked))
            if self._jobs.get(asked) is not job:
                return
            self._forget(asked, job)
            for request, future in job.waiting:
                if not future.set_running_or_notify_cancel():
                    continue
                if isinstance(result, _Compiled):
                    future.set_result(self._copy(asked, result, request))
                else:
                    future.set_exception(result)

    def _forget(self, asked: StructuredOutputsParams, job: _Job) -> None:
        if self._jobs.get(asked) is job:
            del self._jobs[asked]
        if job.timer is not None:
            job.timer.cancel()

    def _copy(
        self, asked: StructuredOutputsParams, compiled: _Compiled, request: EngineCoreRequest
    ) -> Grammar:
        compiled.num_uses += 1
        if compiled.num_uses >= MAX_USES:
            self._compiled.drop(asked)
        from mainspring.grammar.matcher import Matcher

        ends = set(request.stop_token_ids)
        if request.eos_token_id is not None:
            ends.add(request.eos_token_id)
        known = self._vocabulary.end_ids
        matcher = Matcher(compiled.matcher.deep_copy(), known, ends, lambda: self._compiled.drop(asked))
        if compiled.limit is None:
            return matcher
        from mainspring.grammar.limited import Limited

        return Limited(matcher, compiled.limit, self._vocabulary.tokens)

    @property
    def _tokenizer(self) -> LLTokenizer:
        """Made once; called in the threads."""
        from mainspring.grammar.library import make_tokenizer

        with self._making:
            if self._made is None:
                vocabulary = self._vocabulary
                self._made = make_tokenizer(
                    vocabulary.tokens, vocabulary.special_ids, vocabulary.end_ids, self._vocab_size
                )
            return self._made

    def _too_slow(self) -> GrammarError:
        return GrammarError(f"it takes longer than {self._timeout_s:g} s; simplify it")


def _limit(asked: StructuredOutputsParams) -> Limit | None:
    """Of what could be compiled."""
    from mainspring.grammar.structural_tag import limit_of

    tag = asked.structural_tag
    return limit_of(json.loads(tag)) if isinstance(tag, str) and '"limit"' in tag else None
