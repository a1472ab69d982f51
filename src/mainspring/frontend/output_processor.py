"""What the core says of tokens, to what a caller reads. And the journal: what another core would have to
know.

Rules.
1. One state per internal id, from `add_request` to the output that finishes it, which is the only finished
   one. An output for an id that has no state is old news (the request was aborted meanwhile) and is passed
   over.
2. `process_outputs` returns everything; it queues nothing. Who wants streams routes what it returns.
3. Whatever goes wrong in here for one request ends that request, with finish reason "error" and the cause,
   and is told to the core as an abort. The others do not notice (case B008).
4. The text ends at a stop string, which only this floor can see; the core is told by an abort.
5. A state keeps its request and every token received, so the core can be thrown away: see `journal`.
6. Whatever ends a state is counted where it is forgotten, in one place (`stats.py`, rule 3). A fault of the
   counting is logged, and hurts nobody's answer there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mainspring.base.errors import innermost
from mainspring.base.log import get_logger
from mainspring.base.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from mainspring.base.outputs import CompletionOutput, Floats, RequestOutput, SampleLogprobs
from mainspring.base.params import RequestOutputKind
from mainspring.base.protocols import Clock
from mainspring.frontend.detokenizer import Detokenizer, TokenBytes, special_texts
from mainspring.frontend.logprobs import TokenTexts, sum_of_chosen, to_positions, to_prompt_positions
from mainspring.frontend.parallel_sampling import ParentRequest
from mainspring.frontend.stats import FinishedRequest, FrontendStats, RequestTally, Times

if TYPE_CHECKING:
    from mainspring.frontend.tokenizer import Tokenizer

logger = get_logger(__name__)


class ProcessedOutputs(NamedTuple):
    request_outputs: list[RequestOutput]
    ids_to_abort: list[str]  # internal ids: ended here, still running in the core


class RequestState:
    """One sequence: what came, what of it was given out, and how it ended."""

    __slots__ = (
        "cumulative_logprob",
        "detokenizer",
        "error",
        "finish_reason",
        "index",
        "logprobs",
        "num_sent",
        "parent",
        "pooled",
        "prompt_logprobs_received",
        "request",
        "stop_reason",
        "text",
        "times",
        "token_ids",
    )

    def __init__(
        self, request: EngineCoreRequest, parent: ParentRequest, index: int, detokenizer: Detokenizer | None
    ) -> None:
        params = request.sampling_params
        self.request = request
        self.parent = parent
        self.index = index
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []  # all of the answer so far
        self.text = ""  # all that was given out (CUMULATIVE)
        # DELTA: what was not given out yet; else all.
        self.logprobs: SampleLogprobs | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.num_sent = 0  # tokens given out
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.pooled: Floats | None = None
        self.prompt_logprobs_received = False
        self.times = Times()

    def is_due(self) -> bool:
        """Whether the caller gets something now: see `SamplingParams.output_kind` and `stream_interval`."""
        if self.finish_reason is not None:
            return True
        num_new = len(self.token_ids) - self.num_sent
        if self.parent.kind == RequestOutputKind.FINAL_ONLY or not num_new:
            return False
        return self.num_sent == 0 or num_new >= self.request.sampling_params.stream_interval

    def ends_on(self, token_id: int) -> bool:
        return token_id == self.request.eos_token_id or token_id in self.request.stop_token_ids

    def completion(self) -> CompletionOutput:
        """What is due, by output kind. Lists that go on growing are not given away."""
        text = "" if self.detokenizer is None else self.detokenizer.take()
        token_ids, logprobs = self.token_ids, self.logprobs
        if self.parent.kind == RequestOutputKind.DELTA:
            token_ids = token_ids[self.num_sent :]
            if logprobs is not None:
                self.logprobs = []
        else:
            text = self.text = self.text + text
            if self.finish_reason is None:
                token_ids, logprobs = token_ids.copy(), None if logprobs is None else logprobs.copy()
        self.num_sent = len(self.token_ids)
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            None if self.finish_reason is None else str(self.finish_reason),
            self.stop_reason,
            self.error,
            self.pooled,
        )


class OutputProcessor:
    """The states of all live requests. Not thread-safe; whoever owns it calls from one thread at a time."""

    def __init__(
        self, tokenizer: Tokenizer | None, *, clock: Clock = time.monotonic, log_stats: bool = False
    ) -> None:
        """With `log_stats` everything is counted, and outputs carry `RequestMetrics`."""
        self.stats: FrontendStats | None = FrontendStats() if log_stats else None
        self.on_finished: Callable[[FinishedRequest], None] | None = None  # called if there are statistics
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._ids_of: dict[str, set[str]] = {}  # the caller's id -> internal ids of live requests
        self._special_texts: dict[str, int] = {}
        self._token_bytes: dict[bool, TokenBytes] = {}  # by skip_special_tokens
        self._texts: TokenTexts | None = None
        if tokenizer is not None:
            self._token_bytes = {skip: TokenBytes(tokenizer, skip) for skip in (False, True)}
            self._texts = TokenTexts(self._token_bytes[False])
            self._special_texts = special_texts(tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        children: list[EngineCoreRequest],
        label: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Expect outputs for `children`, the sequences that answer the caller's `request_id`. A trace shows
        it under `label`, if that is another."""
        tally = None
        if self.stats is not None:
            tally = RequestTally(label or request_id, children[0], len(children), trace_headers or {})
            self.stats.num_begun += len(children)
        parent = ParentRequest(request_id, prompt, children[0], len(children), tally)
        for index, request in enumerate(children):
            state = RequestState(request, parent, index, self._make_detokenizer(request))
            self._states[request.request_id] = state
        self._ids_of.setdefault(request_id, set()).update(child.request_id for child in children)

    @property
    def num_unfinished(self) -> int:
        """Sequences, not callers' requests."""
        return len(self._states)

    def process_outputs(
        self, outputs: Iterable[EngineCoreOutput], timestamp_s: float = 0.0
    ) -> ProcessedOutputs:
        """`timestamp_s`: when the core said them, by its clock; 0: it did not say, so now."""
        timestamp_s = timestamp_s or self._clock()
        processed = ProcessedOutputs([], [])
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            try:
                self._receive(state, output, timestamp_s)
                given = state.parent.collect(state.completion()) if state.is_due() else None
            except Exception as error:
                logger.exception("request %s failed in the front end", output.request_id)
                given = self._fail(state, innermost(error))
            if given is not None:
                processed.request_outputs.append(given)
            if state.finish_reason is not None:
                self._forget(state)
                if output.finish_reason is None:
                    processed.ids_to_abort.append(output.request_id)
        return processed

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Forget everything under these ids of the caller; returns the internal ids the core must abort.

        Ids that are not live are passed over: an abort may cross the end of its request.
        """
        internal = [child for request_id in request_ids for child in sorted(self._ids_of.get(request_id, ()))]
        for child in internal:
            if (state := self._states.get(child)) is not None:
                self._forget(state)
        return internal

    def forget_all(self, reason: FinishReason = FinishReason.ERROR) -> None:
        """The core is gone and nobody will go on; `reason` is what their callers are told."""
        for state in list(self._states.values()):
            state.finish_reason = reason
            self._forget(state)
        if self.stats is not None:
            self.stats.core_ended()

    def journal(self) -> list[EngineCoreRequest]:
        """What another core must be given to go on with every live request, in order of arrival.

        Tokens received so far travel as `output_token_ids`; that core does not send them again.
        Log-probabilities of the prompt that were received are not asked for a second time.
        """
        return [_as_continued(state) for state in self._states.values()]

    def _make_detokenizer(self, request: EngineCoreRequest) -> Detokenizer | None:
        params = request.sampling_params
        if self._texts is None or not params.detokenize:
            return None
        table = self._token_bytes[params.skip_special_tokens]
        return Detokenizer(table, request.prompt_token_ids, params, table.adds_space)

    def _receive(self, state: RequestState, output: EngineCoreOutput, timestamp_s: float) -> None:
        """Book what came, up to where it ends. Order matters: the end decides how many tokens count."""
        parent = state.parent
        if output.num_cached_tokens is not None and parent.num_cached_tokens is None:
            parent.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and not state.prompt_logprobs_received:
            state.prompt_logprobs_received = True
            parent.prompt_logprobs = to_prompt_positions(output.prompt_logprobs, self._texts)
        state.finish_reason, state.stop_reason = output.finish_reason, output.stop_reason
        state.error, state.pooled = output.error, output.pooled
        token_ids = self._read(state, output.new_token_ids)
        state.token_ids += token_ids
        if self.stats is not None:
            self._measure(self.stats, state, output, len(token_ids), timestamp_s)
        if state.logprobs is not None and output.new_logprobs is not None:
            new = output.new_logprobs
            state.logprobs += to_positions(new, self._texts, len(token_ids))
            state.cumulative_logprob = (state.cumulative_logprob or 0.0) + sum_of_chosen(new, len(token_ids))

    def _read(self, state: RequestState, token_ids: list[int]) -> list[int]:
        """Tokens to text. Returns those that belong to the answer: a stop string may end it sooner."""
        detokenizer = state.detokenizer
        if detokenizer is None:
            return token_ids
        params = state.request.sampling_params
        readable = token_ids
        if state.finish_reason == FinishReason.STOP and token_ids and state.ends_on(token_ids[-1]):
            if not params.include_stop_str_in_output:
                readable = token_ids[:-1]
            state.stop_reason = self._named(params.stop, token_ids[-1]) or state.stop_reason
        hit = detokenizer.update(readable)
        if hit is not None:
            state.finish_reason, state.stop_reason = FinishReason.STOP, hit.stop
            return token_ids[: hit.num_tokens]
        if state.finish_reason is not None:
            detokenizer.flush()
        return token_ids

    def _named(self, stop: str | list[str] | None, token_id: int) -> str | None:
        """The stop string that is this special token, if one is (case B080)."""
        return next((text for text in stop or () if self._special_texts.get(text) == token_id), None)

    def _measure(
        self,
        stats: FrontendStats,
        state: RequestState,
        output: EngineCoreOutput,
        num_tokens: int,
        timestamp_s: float,
    ) -> None:
        """Count what came, of which `num_tokens` belong to the answer, and write the caller's figures."""
        parent, times = state.parent, state.times
        assert parent.tally is not None
        assert parent.metrics is not None
        since_arrival_s = self._since_arrival_s(state)
        if output.events:
            num_before = times.num_preemptions
            times.note(output.events)
            parent.metrics.num_preemptions += times.num_preemptions - num_before
        if parent.metrics.queue_time_s is None:
            parent.metrics.queue_time_s = times.queue_s
        if output.new_token_ids or output.pooled is not None:
            if parent.metrics.time_to_first_token_s is None:
                parent.metrics.time_to_first_token_s = since_arrival_s
                stats.prompt_read(parent.tally, parent.num_cached_tokens or 0, since_arrival_s)
            if output.new_token_ids:
                stats.tokens_came(times, num_tokens, timestamp_s, since_arrival_s)
        if state.finish_reason is not None:
            parent.metrics.e2e_latency_s = since_arrival_s  # of several answers the last one's stays

    def _since_arrival_s(self, state: RequestState) -> float:
        return max(0.0, self._clock() - state.request.arrival_time_s)

    def _fail(self, state: RequestState, cause: str) -> RequestOutput | None:
        """End one request after a fault of ours: with the tokens it has, without reading any text again."""
        state.finish_reason = FinishReason.ERROR
        delta = state.parent.kind == RequestOutputKind.DELTA
        token_ids = state.token_ids[state.num_sent :] if delta else state.token_ids
        completion = CompletionOutput(
            state.index, "" if delta else state.text, token_ids, finish_reason="error", error=cause
        )
        return state.parent.collect(completion)

    def _forget(self, state: RequestState) -> None:
        """The one end of every state. Without a finish reason its caller has left."""
        del self._states[state.request.request_id]
        siblings = self._ids_of[state.parent.request_id]
        siblings.discard(state.request.request_id)
        if not siblings:
            del self._ids_of[state.parent.request_id]
        try:
            self._count_end(state)
        except Exception:
            logger.exception("the end of request %s is not counted", state.request.request_id)

    def _count_end(self, state: RequestState) -> None:
        tally = state.parent.tally
        if self.stats is None or tally is None:
            return
        reason = FinishReason.ABORT if state.finish_reason is None else state.finish_reason
        since_arrival_s, num_tokens = self._since_arrival_s(state), len(state.token_ids)
        self.stats.answer_ended(reason, state.times, num_tokens, since_arrival_s)
        tally.add_end(reason, state.times, num_tokens)
        if tally.is_over:
            self.stats.request_ended(tally)
            if self.on_finished is not None:
                self.on_finished(tally.finished(since_arrival_s))


def _as_continued(state: RequestState) -> EngineCoreRequest:
    params = state.request.sampling_params
    if state.prompt_logprobs_received:
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    received = state.request.output_token_ids + state.token_ids
    return msgspec.structs.replace(state.request, sampling_params=params, output_token_ids=received)
