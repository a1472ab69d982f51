"""One prompt, n answers: n requests to the core, and one thing to the caller.

Every request has a `ParentRequest`, also the usual one with a single answer, so nothing else asks how many
there are. Child i samples with seed + i, which makes it the request a caller would have sent alone with
that seed; at temperature 0 all n answers are equal. Log-probabilities of the prompt are the same for all,
so only the first child computes them.
"""

from __future__ import annotations

import copy

import msgspec

from mainspring.base.messages import EngineCoreRequest
from mainspring.base.outputs import CompletionOutput, PromptLogprobs, RequestMetrics, RequestOutput
from mainspring.base.params import MAX_SEED, RequestOutputKind, StructuredOutputsParams
from mainspring.frontend.stats import RequestTally


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The `n` requests, n = 1 each, that `request` stands for. They share what does not change."""
    n = request.sampling_params.n
    return [request] if n == 1 else [_child(request, i) for i in range(n)]


def _child(request: EngineCoreRequest, i: int) -> EngineCoreRequest:
    params = copy.copy(request.sampling_params)
    assert params.seed is not None, "intake gives every request a seed"
    params.n, params.seed = 1, _wrapped(params.seed + i)
    if i > 0:
        params.prompt_logprobs = None
    return msgspec.structs.replace(
        request,
        request_id=f"{i}_{request.request_id}",
        sampling_params=params,
        output_token_ids=list(request.output_token_ids),  # each goes on from its own
    )


def _wrapped(seed: int) -> int:
    """Seeds are 64-bit: after the largest comes the smallest."""
    return seed - 2 * (MAX_SEED + 1) if seed > MAX_SEED else seed


class ParentRequest:
    """What a caller's request has in common, and the answers that are ready."""

    __slots__ = (
        "_finished",
        "kind",
        "metrics",
        "num_cached_tokens",
        "num_running",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "tally",
        "warnings",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        request: EngineCoreRequest,
        n: int,
        tally: RequestTally | None = None,
    ) -> None:
        """With a `tally`, statistics are kept, and the caller sees its `RequestMetrics`."""
        self.request_id = request_id  # the caller's
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.kind = request.sampling_params.output_kind
        self.num_running = n
        self.num_cached_tokens: int | None = None  # of the first child that reported it
        # A prompt of one token has no position that could be judged, so the core has nothing to say of it.
        has_none = request.sampling_params.prompt_logprobs is not None and len(request.prompt_token_ids) == 1
        self.prompt_logprobs: PromptLogprobs | None = [None] if has_none else None
        self.tally = tally
        self.metrics = None if tally is None else RequestMetrics(request.arrival_time_s)
        self.warnings = _not_enforced(request.structured_outputs)
        self._finished: list[CompletionOutput] = []  # FINAL_ONLY: ready, waiting for the others

    def collect(self, completion: CompletionOutput) -> RequestOutput | None:
        """What the caller gets now that `completion` is there; None while a FINAL_ONLY caller has to wait."""
        if completion.finish_reason is not None:
            self.num_running -= 1
        outputs = [completion]
        if self.kind == RequestOutputKind.FINAL_ONLY:
            self._finished.append(completion)
            if self.num_running:
                return None
            outputs = sorted(self._finished, key=lambda answer: answer.index)
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            self.num_running == 0,
            self.prompt_logprobs,
            self.num_cached_tokens,
            _as_it_is(self.metrics),
            self.warnings,
        )
        if self.kind == RequestOutputKind.DELTA:
            self.prompt_logprobs = None  # said once
        return output


def _not_enforced(structure: StructuredOutputsParams | None) -> list[str] | None:
    """Its verdict is known: what is not judged does not come here."""
    if structure is None or not structure.lenient:
        return None
    from mainspring.grammar.check import check_structured_outputs

    return list(check_structured_outputs(structure)) or None


def _as_it_is(metrics: RequestMetrics | None) -> RequestMetrics | None:
    """What is given out does not change later. Once per output: `copy.copy` takes ten times as long."""
    if metrics is None:
        return None
    return RequestMetrics(
        metrics.arrival_time_s,
        metrics.time_to_first_token_s,
        metrics.e2e_latency_s,
        metrics.queue_time_s,
        metrics.num_preemptions,
    )
