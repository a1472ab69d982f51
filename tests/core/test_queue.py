"""Who is served next."""

import random

import pytest

from mainspring.base.messages import EngineCoreRequest, FinishReason
from mainspring.base.params import SamplingParams
from mainspring.core.queue import RequestQueue
from mainspring.core.request import Request, Status
from mainspring.core.stop import check_stop


def request(name: str, sequence: int, *, preempted: bool = False, **fields) -> Request:
    message = EngineCoreRequest(name, [1], SamplingParams(), **fields)
    made = Request(message, 64, [])
    made.sequence = sequence
    if preempted:
        made.status = Status.PREEMPTED
    return made


def served(queue: RequestQueue) -> list[str]:
    order = []
    while queue.peek() is not None:
        order.append(queue.pop().request_id)
    return order


def filled(policy, requests) -> RequestQueue:
    queue = RequestQueue(policy)
    for one in requests:
        queue.push(one)
    return queue


def test_first_come_first_served_with_the_preempted_in_front():
    """Case B173: the preempted come back in their old order, before those that never ran."""
    queue = filled(
        "fcfs",
        [request("c", 3), request("d", 4), request("b", 2, preempted=True), request("a", 1, preempted=True)],
    )
    assert served(queue) == ["a", "b", "c", "d"]


def test_priorities_first_then_arrival():
    """Case B173: among equals the one that has run before goes first; a better priority goes before all."""
    queue = filled(
        "priority",
        [
            request("late", 1, arrival_time_s=9.0),
            request("early", 2, arrival_time_s=1.0),
            request("urgent", 3, priority=-1, arrival_time_s=20.0),
            request("resumed", 4, arrival_time_s=30.0, preempted=True),
            request("idle", 5, priority=7, preempted=True),
        ],
    )
    assert served(queue) == ["urgent", "resumed", "early", "late", "idle"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_those_who_left_are_not_seen(policy):
    dice = random.Random(5)
    requests = [request(f"r{i}", i, priority=dice.randint(0, 3)) for i in range(400)]
    queue = filled(policy, requests)
    gone = set(dice.sample(requests, 300))
    for one in gone:
        one.status = Status.FINISHED
        queue.note_dead()
    left = [one for one in requests if one not in gone]
    assert len(queue) == 100
    assert set(queue) == set(left)
    key = {"fcfs": lambda r: r.sequence, "priority": lambda r: (r.message.priority, r.sequence)}[policy]
    assert served(queue) == [one.request_id for one in sorted(left, key=key)]
    assert len(queue) == 0


# -- when a request ends -------------------------------------------------------------------------------------


def ends(tokens: list[int], *, max_model_len: int = 100, eos: int | None = 2, stops=(7,), **params):
    message = EngineCoreRequest(
        "r", [1, 1], SamplingParams(**params), eos_token_id=eos, stop_token_ids=list(stops)
    )
    made = Request(message, max_model_len, [])
    made.token_ids += tokens
    return check_stop(made)


def test_eos_ends_without_a_stop_reason():
    assert ends([5, 2]) == (FinishReason.STOP, None)
    assert ends([5, 2], eos=None) is None


def test_a_stop_token_is_the_reason():
    assert ends([5, 7]) == (FinishReason.STOP, 7)


def test_stop_comes_before_length():
    assert ends([5, 7], max_tokens=2) == (FinishReason.STOP, 7)
    assert ends([5, 5], max_tokens=2) == (FinishReason.LENGTH, None)
    assert ends([5], max_tokens=2) is None
    assert ends([5, 5], max_model_len=4, max_tokens=None) == (FinishReason.LENGTH, None)


def test_no_end_token_counts_before_min_tokens():
    """Case B077: should one come through the mask, the answer goes on."""
    assert ends([7], min_tokens=1) is None
    assert ends([5, 7], min_tokens=1) == (FinishReason.STOP, 7)
