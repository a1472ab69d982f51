"""When a request ends, by token: EOS, then stop tokens, then length. Stop strings are the front end's.

min_tokens is enforced by masking in the sampler; here it is kept too, so that an end token that came through
all the same does not end the request early (case B077).
"""

from __future__ import annotations

from typing import NamedTuple

from mainspring.base.messages import FinishReason
from mainspring.core.request import Request


class Stop(NamedTuple):
    reason: FinishReason
    stop_reason: int | None = None  # the stop token; None for EOS and for length


def check_stop(request: Request) -> Stop | None:
    """Whether the last token of `request`, just appended, is its last."""
    num_tokens, token = len(request.token_ids), request.token_ids[-1]
    if token in request.stop_token_ids and num_tokens > request.min_total_tokens:
        return Stop(FinishReason.STOP, None if token == request.eos_token_id else token)
    if num_tokens >= request.max_total_tokens:
        return Stop(FinishReason.LENGTH)
    return None
