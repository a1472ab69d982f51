"""What happened, in numbers: counters and histograms of one front end, and what the core says of itself.

Rules.
1. Plain data, and counters only grow. Who wants a rate takes the difference of two looks; who wants a page of
   metrics reads it (`metrics.py`). Nothing in here knows who looks.
2. A *request* is the caller's, an *answer* one of its `n` sequences. The prompt is a request's: counted once,
   when its first token comes. First tokens, gaps, ends and generated tokens are an answer's.
3. Every answer that was begun ends here exactly once, with the reason its caller saw; aborts, faults of ours
   and the core's death are ends too. At rest the ends are as many as the answers, and the tokens of all
   answers are the tokens generated: those that reached the caller, without what a stop string cut away.
4. Times between what the core did are by its clock, times since arrival by ours. None is negative.
5. The numbers of several front ends add up to the whole (`merged`). `SchedulerStats` are the core's: each
   front end hears all of them, so of several the latest counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from mainspring.base.messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    EventType,
    FinishReason,
    SchedulerStats,
)
from mainspring.base.params import SamplingParams


def series_1_2_5(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `largest`."""
    values = (digit * 10**power for power in range(len(str(largest))) for digit in (1, 2, 5))
    return tuple(float(value) for value in values if value <= largest)


# Upper ends of buckets, vLLM's, so that its users' dashboards go on. Whoever shows a histogram of tokens
# leaves out those beyond the model's length.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))
TOKENS = series_1_2_5(10**7)
ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Histogram(msgspec.Struct):
    """How often values fell into buckets. `counts[i]` is of those in (bounds[i - 1], bounds[i]]; the last is
    of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Upper ends, infinity the last, each with how many values were at most that."""
        return zip((*self.bounds, math.inf), accumulate(self.counts), strict=True)

    def __add__(self, other: Histogram) -> Histogram:
        assert self.bounds == other.bounds, "histograms of different things"
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum + other.sum)


# -- one answer, one request ---------------------------------------------------------------------------------


class Times:
    """When the core did what, by its clock; None: not yet."""

    __slots__ = ("first_token_s", "last_token_s", "num_preemptions", "queued_s", "scheduled_s")

    def __init__(self) -> None:
        self.queued_s: float | None = None
        self.scheduled_s: float | None = None  # first: what comes after a preemption is no queueing
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_preemptions = 0

    def note(self, events: Iterable[EngineCoreEvent]) -> None:
        for event in events:
            if event.type == EventType.PREEMPTED:
                self.num_preemptions += 1
            elif event.type == EventType.SCHEDULED:
                self.scheduled_s = _first(self.scheduled_s, event.timestamp_s)
            elif event.type == EventType.QUEUED:
                self.queued_s = _first(self.queued_s, event.timestamp_s)

    def absorb(self, other: Times) -> None:
        """Of one answer, into those of its request: the first of each beginning, the last end."""
        for name in ("queued_s", "scheduled_s", "first_token_s"):
            pair = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            setattr(self, name, min(pair, default=None))
        ends = [value for value in (self.last_token_s, other.last_token_s) if value is not None]
        self.last_token_s = max(ends, default=None)
        self.num_preemptions += other.num_preemptions

    @property
    def queue_s(self) -> float | None:
        return _between(self.queued_s, self.scheduled_s)

    @property
    def prefill_s(self) -> float | None:
        return _between(self.scheduled_s, self.first_token_s)

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_token_s, self.last_token_s)

    @property
    def inference_s(self) -> float | None:
        return _between(self.scheduled_s, self.last_token_s)


def _first(known_s: float | None, now_s: float) -> float:
    return now_s if known_s is None else known_s


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


@dataclass(slots=True)
class FinishedRequest:
    """A caller's request whose last answer has ended: what a trace says of it."""

    request_id: str
    params: SamplingParams  # of the first answer
    n: int
    num_prompt_tokens: int
    num_generation_tokens: int  # of all answers
    finish_reasons: list[FinishReason]  # in the order of the ends
    times: Times
    time_to_first_token_s: float | None
    e2e_latency_s: float
    trace_headers: Mapping[str, str]


class RequestTally:
    """What the answers of a caller's request add up to while it lives."""

    __slots__ = (
        "ends",
        "longest",
        "n",
        "num_generation_tokens",
        "request",
        "request_id",
        "time_to_first_token_s",
        "times",
        "trace_headers",
    )

    def __init__(
        self, request_id: str, request: EngineCoreRequest, n: int, trace_headers: Mapping[str, str]
    ) -> None:
        self.request_id = request_id
        self.request = request  # of the first answer
        self.n = n
        self.trace_headers = trace_headers
        self.ends: list[FinishReason] = []
        self.times = Times()
        self.time_to_first_token_s: float | None = None
        self.num_generation_tokens = 0
        self.longest = 0  # answer, in tokens

    def add_end(self, reason: FinishReason, times: Times, num_tokens: int) -> None:
        self.ends.append(reason)
        self.times.absorb(times)
        self.num_generation_tokens += num_tokens
        self.longest = max(self.longest, num_tokens)

    @property
    def is_over(self) -> bool:
        return len(self.ends) == self.n

    def finished(self, e2e_latency_s: float) -> FinishedRequest:
        return FinishedRequest(
            self.request_id,
            self.request.sampling_params,
            self.n,
            len(self.request.prompt_token_ids),
            self.num_generation_tokens,
            self.ends,
            self.times,
            self.time_to_first_token_s,
            e2e_latency_s,
            self.trace_headers,
        )


# -- all of them ---------------------------------------------------------------------------------------------


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    return msgspec.field(default_factory=lambda: Histogram.of(bounds))


class FrontendStats(msgspec.Struct):
    """Since the start. See the rules above; `frontend/metrics.py` says under which names they are shown."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of those, found in the prefix cache at first admission
    num_generation_tokens: int = 0
    num_begun: int = 0  # answers
    ends: dict[FinishReason, int] = msgspec.field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    admission_rejections: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # by the limit that was reached

    time_to_first_token_s: Histogram = _histogram(FIRST_TOKEN_S)
    inter_token_latency_s: Histogram = _histogram(GAP_S)  # between two outputs with tokens of one answer
    time_per_output_token_s: Histogram = _histogram(GAP_S)  # the mean gap of an answer
    e2e_latency_s: Histogram = _histogram(REQUEST_S)
    queue_s: Histogram = _histogram(REQUEST_S)
    prefill_s: Histogram = _histogram(REQUEST_S)
    decode_s: Histogram = _histogram(REQUEST_S)
    inference_s: Histogram = _histogram(REQUEST_S)
    prompt_tokens: Histogram = _histogram(TOKENS)
    prefill_computed_tokens: Histogram = _histogram(TOKENS)
    generation_tokens: Histogram = _histogram(TOKENS)
    longest_answer_tokens: Histogram = _histogram(TOKENS)
    max_tokens: Histogram = _histogram(TOKENS)
    n: Histogram = _histogram(ANSWERS)
    num_preemptions: Histogram = _histogram(PREEMPTIONS)
    # What one message of the core brought: prompts whose first token came, and new tokens.
    iteration_tokens: Histogram = _histogram(ITERATION_TOKENS)

    scheduler: SchedulerStats = msgspec.field(default_factory=SchedulerStats)  # the latest that was heard
    tokens_of_iteration: int = 0  # of the message that is being read

    @property
    def num_live(self) -> int:
        """Answers that have begun and not ended."""
        return self.num_begun - sum(self.ends.values())

    # -- what the output processor reports -------------------------------------------------------------------

    def prompt_read(self, tally: RequestTally, num_cached_tokens: int, since_arrival_s: float) -> None:
        """A request's first token has come."""
        num_tokens = len(tally.request.prompt_token_ids)
        tally.time_to_first_token_s = since_arrival_s
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached_tokens
        self.tokens_of_iteration += num_tokens
        self.prompt_tokens.observe(num_tokens)
        self.prefill_computed_tokens.observe(max(0, num_tokens - num_cached_tokens))

    def tokens_came(self, times: Times, num_tokens: int, now_s: float, since_arrival_s: float) -> None:
        """An output with tokens, of which the answer got `num_tokens`. `now_s` is the core's clock."""
        if times.last_token_s is None:
            times.first_token_s = now_s
            self.time_to_first_token_s.observe(since_arrival_s)
        else:
            self.inter_token_latency_s.observe(max(0.0, now_s - times.last_token_s))
        times.last_token_s = now_s
        self.num_generation_tokens += num_tokens
        self.tokens_of_iteration += num_tokens

    def answer_ended(self, reason: FinishReason, times: Times, num_tokens: int, e2e_latency_s: float) -> None:
        self.ends[reason] += 1
        self.e2e_latency_s.observe(e2e_latency_s)
        self.generation_tokens.observe(num_tokens)
        self.num_preemptions.observe(times.num_preemptions)
        for histogram, duration_s in (
            (self.queue_s, times.queue_s),
            (self.prefill_s, times.prefill_s),
            (self.decode_s, times.decode_s),
            (self.inference_s, times.inference_s),
        ):
            if duration_s is not None:
                histogram.observe(duration_s)
        if num_tokens > 1 and (decode_s := times.decode_s) is not None:
            self.time_per_output_token_s.observe(decode_s / (num_tokens - 1))

    def request_ended(self, tally: RequestTally) -> None:
        self.n.observe(tally.n)
        self.longest_answer_tokens.observe(tally.longest)
        if (max_tokens := tally.request.sampling_params.max_tokens) is not None:
            self.max_tokens.observe(max_tokens)

    # -- what the engine's front reports ---------------------------------------------------------------------

    def message_read(self, scheduler: SchedulerStats | None) -> None:
        """All outputs of one message of the core have been reported."""
        if self.tokens_of_iteration:
            self.iteration_tokens.observe(self.tokens_of_iteration)
            self.tokens_of_iteration = 0
        if scheduler is not None:
            self.scheduler = scheduler

    def rejected(self, limit: str) -> None:
        self.admission_rejections[limit] = self.admission_rejections.get(limit, 0) + 1

    def core_ended(self) -> None:
        """Nothing runs any more. Counters stay."""
        self.scheduler = msgspec.structs.replace(
            self.scheduler, num_running=0, num_waiting=0, num_parked=0, kv_cache_usage=0.0
        )


def merged(parts: Iterable[FrontendStats]) -> FrontendStats:
    """Of all front ends of one core together."""
    total = FrontendStats()
    for part in parts:
        for name in FrontendStats.__struct_fields__:
            mine, theirs = getattr(total, name), getattr(part, name)
            if isinstance(theirs, SchedulerStats):
                total.scheduler = max(mine, theirs, key=lambda stats: stats.num_steps)
            elif isinstance(theirs, dict):
                setattr(total, name, {key: mine.get(key, 0) + theirs.get(key, 0) for key in mine | theirs})
            else:
                setattr(total, name, mine + theirs)
    return total
