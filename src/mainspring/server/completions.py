"""`/v1/completions`: outputs of the engine, as an OpenAI client reads them.

Of prompt p the answer i is choice p * n + i. With `echo` a choice begins with its prompt, and with `logprobs`
besides, with the prompt's log-probabilities; in a stream that is the choice's first chunk, which waits until
these are there. `max_tokens` 0 asks for the echo alone: the engine makes one token, which nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import UNSET

from mainspring.base.outputs import CompletionOutput, LogprobsOnePosition, PromptLogprobs, RequestOutput
from mainspring.server.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs
from mainspring.server.prompts import TokenPrompt
from mainspring.server.replies import (
    CachedTokens,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionReply,
)
from mainspring.server.requests import CompletionRequest
from mainspring.server.writing import Head, Reporting, Tally, best, check_no_error, fingerprint_at_end

Decode = Callable[[list[int]], str]


class CompletionWriter:
    """Fits `writing.Writer`. Several prompts, `n` answers each."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[TokenPrompt],
        head: Head,
        names: TokenNames,
        reporting: Reporting,
        decode: Decode,
    ) -> None:
        self._head = head
        self._names = names
        self._reporting = reporting
        self._n = body.n or 1
        self._logprobs = body.logprobs  # None: not asked for; else how many of the likeliest
        self._with_ids = bool(body.return_token_ids)
        self._echo = bool(body.echo)
        self._only_echo = self._echo and body.max_tokens == 0
        self._prompt_logprobs = body.prompt_logprobs is not None or self._echoes_logprobs
        self._texts = [_text(prompt, decode) for prompt in prompts] if self._echo else []
        self._tally = Tally()
        self._choices: dict[int, CompletionLogprobsWriter] = {}  # that have begun, by index
        self._held: dict[int, list[RequestOutput]] = {}  # waiting for their prompt's log-probabilities
        self._known: dict[int, PromptLogprobs] = {}  # those that came

    @property
    def _echoes_logprobs(self) -> bool:
        return self._echo and self._logprobs is not None

    # --- whole ----------------------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> CompletionReply:
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._count(prompt_index, output)
            shown = best(output.outputs, self._n)
            choices += [self._choice(prompt_index, output, answer) for answer in shown]
        head = self._head
        num_cached = self._tally.num_cached_tokens if self._reporting.cached_tokens else None
        cached = None if num_cached is None else CachedTokens(num_cached, None)
        return CompletionReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            system_fingerprint=head.fingerprint,
            usage=self._tally.usage(cached),
            warnings=next((output.warnings for output in outputs if output.warnings), UNSET),
        )

    def _choice(self, prompt_index: int, output: RequestOutput, answer: CompletionOutput) -> CompletionChoice:
        check_no_error(answer)
        index = prompt_index * self._n + answer.index
        return CompletionChoice(
            index,
            self._begun_text(prompt_index) + answer.text,
            self._logprobs_of(index, answer, output.prompt_token_ids, output.prompt_logprobs),
            answer.finish_reason,
            answer.stop_reason,
            answer.token_ids if self._with_ids else None,
            prompt_logprobs(output.prompt_logprobs) if self._prompt_logprobs else None,
            output.prompt_token_ids if self._with_ids else None,
        )

    # --- stream ---------------------------------------------------------------------------------------------

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[CompletionChunk]:
        for answer in output.outputs:
            check_no_error(answer)
        if output.prompt_logprobs is not None:
            self._known[prompt_index] = output.prompt_logprobs
        held = self._held.setdefault(prompt_index, [])
        held.append(output)
        if self._echoes_logprobs and prompt_index not in self._known:
            return
        self._held[prompt_index] = []
        for ready in held:
            self._count(prompt_index, ready)
            for answer in ready.outputs:
                chunk = self._chunk_of(prompt_index, ready, answer)
                if chunk is not None:
                    yield chunk

    def last(self) -> Iterator[CompletionChunk]:
        if not self._reporting.usage_at_end:
            return
        cached = CachedTokens(self._tally.num_cached_tokens, None, UNSET)
        chunk = self._chunk()
        chunk.usage = self._tally.usage(cached if self._reporting.cached_tokens else UNSET, UNSET)
        chunk.system_fingerprint = self._head.fingerprint
        yield chunk

    def _chunk_of(
        self, prompt_index: int, output: RequestOutput, answer: CompletionOutput
    ) -> CompletionChunk | None:
        """None where there is nothing to say: a token whose text is held back."""
        index = prompt_index * self._n + answer.index
        is_first = index not in self._choices
        says_tokens = (self._with_ids or self._logprobs is not None) and answer.token_ids
        begun = self._begun_text(prompt_index) if is_first else ""
        if not (begun or answer.text or says_tokens or answer.finish_reason):
            return None
        logprobs = self._logprobs_of(index, answer, output.prompt_token_ids, self._known.get(prompt_index))
        self._choices.setdefault(index, CompletionLogprobsWriter(self._names))
        chunk = self._chunk(
            CompletionChunkChoice(
                index,
                begun + answer.text,
                logprobs,
                answer.finish_reason,
                answer.stop_reason,
                output.prompt_token_ids if is_first and (self._with_ids or self._echo) else None,
                answer.token_ids if self._with_ids else None,
            )
        )
        if answer.finish_reason is not None:
            chunk.system_fingerprint = fingerprint_at_end(self._head, self._reporting)
            chunk.warnings = output.warnings or UNSET
        return chunk

    def _chunk(self, *choices: CompletionChunkChoice) -> CompletionChunk:
        head = self._head
        return CompletionChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=list(choices),
            usage=self._tally.usage() if self._reporting.usage_always else UNSET,
        )

    # --- both -----------------------------------------------------------------------------------------------

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        if self._only_echo:
            for answer in output.outputs:
                answer.text, answer.token_ids, answer.logprobs = "", [], answer.logprobs and []
                answer.finish_reason = answer.finish_reason and "length"
                answer.stop_reason = None
        self._tally.add(prompt_index, output)

    def _begun_text(self, prompt_index: int) -> str:
        return self._texts[prompt_index] if self._echo else ""

    def _logprobs_of(
        self,
        index: int,
        answer: CompletionOutput,
        prompt_token_ids: list[int],
        given: PromptLogprobs | None,
    ) -> CompletionLogprobs | None:
        """What is new; a choice's first has the echoed prompt's in front."""
        if self._logprobs is None:
            return None
        positions: list[LogprobsOnePosition | None] = list(answer.logprobs or ())
        token_ids = answer.token_ids
        if index not in self._choices:
            self._choices[index] = CompletionLogprobsWriter(self._names)
            if self._echo:
                positions = [*(given or ()), *positions]
                token_ids = [*prompt_token_ids, *token_ids]
        return self._choices[index].write(positions, token_ids, self._logprobs)


def _text(prompt: TokenPrompt, decode: Decode) -> str:
    return decode(prompt.token_ids) if prompt.text is None else prompt.text
