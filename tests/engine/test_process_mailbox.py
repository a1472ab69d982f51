"""The post itself: two threads and real sockets, without a loop or a process."""

from __future__ import annotations

import ast
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from process_tools import DEATH_BOUND_S, PATIENCE_S, in_thread, request, wait_until

import mainspring
from mainspring.base.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GetStats,
    TokenLogprobs,
    UtilityOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.engine import mailbox
from mainspring.engine.conversation import CommandFailed, Conversation
from mainspring.engine.mailbox import SEND_LINGER_S, ClientGone, ClientStalled, Item, Refused, ZmqMailbox
from mainspring.engine.outbox import MAX_QUEUED_OUTPUTS
from mainspring.engine.wire import ENGINE_CORE_DEAD, Codec, RequestType, Utility

NUM_CLIENTS = 2


class PostOffice:
    """A mailbox, and sockets to it as its front ends have them."""

    def __init__(self, directory: str, num_clients: int = NUM_CLIENTS) -> None:
        self.context = zmq.Context()
        self.aborts_queue: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.aborted: list[str] = []
        addresses = [f"ipc://{directory}/output-{i}" for i in range(num_clients)]
        self.outputs = [self.context.socket(zmq.PULL) for _ in addresses]
        for socket, address in zip(self.outputs, addresses, strict=True):
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.bind(address)
        self.mailbox = ZmqMailbox(
            f"ipc://{directory}/input", addresses, self.aborts_queue, self.process_aborts
        )
        self.requests = self.context.socket(zmq.PUSH)
        self.requests.setsockopt(zmq.SNDHWM, 0)
        self.requests.connect(f"ipc://{directory}/input")

    def process_aborts(self) -> None:
        while not self.aborts_queue.empty():
            self.aborted += self.aborts_queue.get()

    def send(self, *frames: bytes) -> None:
        self.requests.send_multipart(frames)

    def receive(self, count: int) -> list[Item]:
        """The next `count` items."""
        items: list[Item] = []
        wait_until(lambda: items.extend(self.mailbox.receive(wait=False)) or len(items) >= count)
        return items

    def hear(self, client_index: int = 0) -> list[bytes]:
        assert self.outputs[client_index].poll(int(PATIENCE_S * 1000)), "nothing comes"
        return self.outputs[client_index].recv_multipart()

    def is_full(self, client_index: int = 0) -> bool:
        return self.mailbox._outboxes[client_index].is_full

    def close(self) -> None:
        self.mailbox.close()
        self.context.destroy(linger=0)


@pytest.fixture
def office() -> Iterator[PostOffice]:
    with tempfile.TemporaryDirectory(prefix="ms-") as directory:
        office = PostOffice(directory)
        yield office
        office.close()


@pytest.fixture
def lone_office() -> Iterator[PostOffice]:
    """Of a core with one front end."""
    with tempfile.TemporaryDirectory(prefix="ms-") as directory:
        office = PostOffice(directory, num_clients=1)
        yield office
        office.close()


def news(request_id: str, num_tokens: int = 1) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [1] * num_tokens)])


def add(message: EngineCoreRequest) -> list[bytes]:
    return [RequestType.ADD.value, Codec().encode(message)]


# -- what does not decode ------------------------------------------------------------------------------------


def test_a_request_of_the_wrong_shape_is_refused_to_its_sender(office: PostOffice):
    raw = msgspec.msgpack.decode(Codec().encode(request("bad", client_index=1)))
    raw[1] = ["not", "tokens"]
    office.send(RequestType.ADD.value, msgspec.msgpack.encode(raw))
    office.send(*add(request("good")))
    (_, refused), (_, good) = office.receive(2)
    assert isinstance(refused, Refused)
    assert refused.client_index == 1
    [output] = refused.answer.outputs
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert "malformed" in output.error
    assert good.request_id == "good"


def test_parameters_that_can_never_be_right_are_refused_to_their_sender(office: PostOffice):
    """What a front end should have refused: it is judged again where it is decoded."""
    params = SamplingParams(seed=0)
    params.temperature = float("nan")
    office.send(*add(msgspec.structs.replace(request("bad"), sampling_params=params)))
    [(_, refused)] = office.receive(1)
    assert "temperature" in refused.answer.outputs[0].error


def test_a_command_that_is_unknown_is_refused_to_its_caller(office: PostOffice):
    """Its answer is an error, so nobody waits for ever."""
    talk, answer = Conversation(), Future()
    kind, body = talk.call(GetStats(), answer)
    raw = msgspec.msgpack.decode(body)
    raw[2] = ["MakeCoffee"]
    office.send(kind, msgspec.msgpack.encode(raw))
    [(_, refused)] = office.receive(1)
    office.mailbox.deliver({refused.client_index: refused.answer})
    assert talk.hear(office.hear()) is None
    with pytest.raises(CommandFailed, match="malformed"):
        answer.result(0)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00"],
        [b"\x09", b"\x90"],
        [b"\x00", b"\xc1"],
        [b"\x00", b"\x90"],
        [b"\x00", b"\x81\x01\x02"],
        [b"\x00", msgspec.msgpack.encode(["id"])],
        [b"\x01", msgspec.msgpack.encode([1, 2])],
        [b"\x03", msgspec.msgpack.encode(["no", "numbers", 1])],
        [b"\x04", b"\x90"],
        [b"\x05", b"\x90", b"one frame too many"],
        [b"\x00", pickle.dumps({"request_id": "a"})],
    ],
    ids=repr,
)
def test_noise_hurts_nobody(office: PostOffice, frames: list[bytes]):
    office.send(*frames)
    office.send(*add(request("good")))
    items = office.receive(1)
    while not isinstance(items[-1][1], EngineCoreRequest):
        items += office.receive(1)
    assert items[-1][1].request_id == "good"
    assert all(isinstance(payload, Refused) for _, payload in items[:-1])


@pytest.mark.parametrize("client_index", [-1, NUM_CLIENTS, 10**6])
def test_a_message_of_a_client_that_there_is_not_is_dropped(office: PostOffice, client_index: int):
    """Answering it would end the output thread, and with it the engine."""
    office.send(*add(request("nobody's", client_index=client_index)))
    office.send(RequestType.UTILITY.value, Codec().encode(Utility(client_index, 0, GetStats())))
    office.send(*add(request("good")))
    [(_, good)] = office.receive(1)
    assert good.request_id == "good"


# -- back pressure -------------------------------------------------------------------------------------------


def test_the_output_queue_is_bounded_and_aborts_drain_while_it_is_full(lone_office: PostOffice):
    """Case B166: who does not read stops the loop and does not fill memory; nothing is lost by it."""
    body = 1000  # tokens: so that the sockets' own buffers fill soon
    delivered: list[int] = []

    def deliver_all() -> None:
        for i in range(2000):
            lone_office.mailbox.deliver({0: news(str(i), body)})
            delivered.append(i)

    delivering = in_thread(deliver_all)
    wait_until(lone_office.is_full, what="that the queue is full")
    lone_office.send(RequestType.ABORT.value, Codec().encode(["x", "y"]))
    wait_until(lambda: lone_office.aborted == ["x", "y"], what="that the aborts are seen")
    assert not delivering.done()
    codec = Codec()
    heard = [codec.decode_outputs(lone_office.hear()[0]).outputs[0].request_id for _ in range(2000)]
    assert heard == [str(i) for i in range(2000)]
    delivering.result(PATIENCE_S)


def test_a_malformed_message_does_not_wait_for_room(lone_office: PostOffice):
    """The thread that takes messages must go on while the output queue is full, or no abort comes through."""
    delivering = in_thread(lambda: [lone_office.mailbox.deliver({0: news("a", 1000)}) for _ in range(2000)])
    wait_until(lone_office.is_full, what="that the queue is full")
    lone_office.send(RequestType.ADD.value, msgspec.msgpack.encode(["bad", "not tokens"]))
    lone_office.send(RequestType.ABORT.value, Codec().encode(["x"]))
    wait_until(lambda: lone_office.aborted == ["x"], what="that the abort is seen")
    for _ in range(2000):
        lone_office.hear()
    delivering.result(PATIENCE_S)


def test_messages_wait_for_a_loop_that_is_busy_and_none_is_lost(office: PostOffice):
    """Case B166: five thousand requests and half as many aborts, before the loop looks for the first time."""
    codec = Codec()
    for i in range(5000):
        office.send(RequestType.ADD.value, codec.encode(request(str(i))))
        if i % 2:
            office.send(RequestType.ABORT.value, codec.encode([str(i)]))
    items = office.receive(7500)
    ids = [p.request_id for _, p in items if isinstance(p, EngineCoreRequest)]
    assert ids == [str(i) for i in range(5000)]
    assert [p for kind, p in items if kind is RequestType.ABORT] == [[str(i)] for i in range(1, 5000, 2)]
    office.process_aborts()
    assert len(office.aborted) == 2500


# -- several front ends --------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_holds_no_other(office: PostOffice, monkeypatch: pytest.MonkeyPatch):
    """Case B166: what is said to it is stored; beyond the bound the loop is told, and still nothing
    that was said is lost."""
    monkeypatch.setattr(mailbox, "MAX_STORED_BYTES", 50_000)
    started_s = time.monotonic()
    for i in range(2000):
        office.mailbox.deliver({0: news(str(i), 1000), 1: news(str(i))})
        assert Codec().decode_outputs(office.hear(1)[0]).outputs[0].request_id == str(i)
    assert time.monotonic() - started_s < PATIENCE_S / 2
    stalled = office.receive(1)
    assert stalled[0] == (RequestType.ABORT, ClientStalled(0))
    heard = [Codec().decode_outputs(office.hear()[0]).outputs[0].request_id for _ in range(2000)]
    assert heard == [str(i) for i in range(2000)]
    wait_until(lambda: not office.is_full(0))
    office.mailbox.receive(wait=False)
    office.mailbox.deliver({0: news("after")})
    assert Codec().decode_outputs(office.hear()[0]).outputs[0].request_id == "after"
    assert office.mailbox.receive(wait=False) == []


# -- who encodes ---------------------------------------------------------------------------------------------


def test_log_probabilities_are_encoded_by_the_output_thread_and_order_is_kept(
    office: PostOffice, monkeypatch: pytest.MonkeyPatch
):
    """They may be long, and the loop goes on; what is said behind them must not overtake them."""
    encoders: set[str] = set()
    encode = Codec.encode

    def watched(codec: Codec, message: object) -> bytes:
        encoders.add(threading.current_thread().name)
        return encode(codec, message)

    monkeypatch.setattr(Codec, "encode", watched)
    one = TokenLogprobs(np.zeros((1, 50), np.int32), np.zeros((1, 50), np.float32), np.ones(1, np.int32))
    for i in range(100):
        office.mailbox.deliver({0: news(str(2 * i))})
        output = EngineCoreOutput(str(2 * i + 1), [1], new_logprobs=one)
        office.mailbox.deliver({0: EngineCoreOutputs(outputs=[output])})
    heard = [Codec().decode_outputs(office.hear()[0]).outputs[0].request_id for _ in range(200)]
    assert heard == [str(i) for i in range(200)]
    assert encoders == {"mainspring-output-0"}


# -- clients that are gone -----------------------------------------------------------------------------------


def test_a_client_that_is_gone_is_reported_and_holds_nobody(office: PostOffice):
    office.mailbox.deliver({0: news("a"), 1: news("b")})
    office.hear(0)
    office.hear(1)
    office.outputs[1].close()
    [item] = office.receive(1)
    assert item == (RequestType.ABORT, ClientGone(1))
    office.send(*add(request("late", client_index=1)))
    office.send(*add(request("ours")))
    for i in range(2 * MAX_QUEUED_OUTPUTS):
        office.mailbox.deliver({1: news("nobody reads this", 1000), 0: news(str(i))})
        office.hear(0)
    [(_, ours)] = office.receive(1)
    assert ours.request_id == "ours"


def test_a_client_that_does_not_read_does_not_keep_the_death_from_others(office: PostOffice):
    """Within the bound, although what was said to it before is still queued."""
    office.mailbox.deliver({1: news("b")})
    office.hear(1)
    filling = in_thread(lambda: [office.mailbox.deliver({0: news("a", 1000)}) for _ in range(2000)])
    wait_until(office.is_full, what="that the queue is full")
    died_s = time.monotonic()
    office.mailbox.announce_death("ValueError: planned")
    assert office.hear(1) == [ENGINE_CORE_DEAD, b"ValueError: planned"]
    assert time.monotonic() - died_s < DEATH_BOUND_S
    filling.result(PATIENCE_S)


def test_at_the_end_who_does_not_read_holds_nobody(lone_office: PostOffice):
    """The loop is let go on, to its own end."""
    filling = in_thread(lambda: [lone_office.mailbox.deliver({0: news("a", 1000)}) for _ in range(2000)])
    wait_until(lone_office.is_full, what="that the queue is full")
    lone_office.mailbox.hurry()
    filling.result(DEATH_BOUND_S)


def test_death_is_told_behind_everything_that_was_said(office: PostOffice):
    for i in range(50):
        office.mailbox.deliver({0: news(str(i))})
    office.mailbox.announce_death("ValueError: planned")
    heard = [office.hear() for _ in range(51)]
    assert heard[-1] == [ENGINE_CORE_DEAD, b"ValueError: planned"]
    assert [Codec().decode_outputs(frames[0]).outputs[0].request_id for frames in heard[:-1]] == [
        str(i) for i in range(50)
    ]


def test_a_thread_that_fails_ends_the_loop_with_its_cause(office: PostOffice):
    """What cannot be encoded is our own mistake: the loop is told, and raises it."""
    office.mailbox.deliver({0: EngineCoreOutputs(outputs=[object()])})
    [(kind, cause)] = office.receive(1)
    assert kind is RequestType.EXECUTOR_FAILED
    assert "a thread of the engine core failed" in cause
    assert "object does not travel" in cause


def test_closing_is_bounded_when_nobody_reads():
    with tempfile.TemporaryDirectory(prefix="ms-") as directory:
        office = PostOffice(directory)
        filling = in_thread(lambda: [office.mailbox.deliver({0: news("a", 1000)}) for _ in range(2000)])
        wait_until(office.is_full, what="that the queue is full")
        started_s = time.monotonic()
        office.mailbox.close()
        assert time.monotonic() - started_s < SEND_LINGER_S
        filling.result(PATIENCE_S)
        office.context.destroy(linger=0)


# -- the wire ------------------------------------------------------------------------------------------------


def test_everything_that_crosses_comes_back_as_it_went():
    logprobs = TokenLogprobs(
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.linspace(-3, 0, 6, dtype=np.float32).reshape(2, 3)[:, ::-1],
        np.array([1, 7], dtype=np.int32),
    )
    empty = TokenLogprobs(np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32))
    output = EngineCoreOutput("a", [1, 2], FinishReason.STOP, 2, logprobs, empty, None, 16, None)
    sent = EngineCoreOutputs(
        outputs=[output], timestamp_s=1.5, utility_output=UtilityOutput(3, b"\xc3", None)
    )
    codec = Codec()
    came = codec.decode_outputs(codec.encode(sent))
    [copy] = came.outputs
    for name in ("new_logprobs", "prompt_logprobs"):
        for a, b in zip(getattr(copy, name), getattr(output, name), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
            assert a.shape == b.shape
        setattr(copy, name, None)
        setattr(output, name, None)
    assert came == sent


PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
PICKLING_METHODS = {"send_pyobj", "recv_pyobj", "allow_pickle"}
CONNECTIONS = "multiprocessing.connection"  # carries bytes, too; its `send` and `recv` pickle


def names_used(node: ast.AST) -> set[str]:
    match node:
        case ast.Import():
            return {alias.name.split(".")[0] for alias in node.names}
        case ast.ImportFrom(module=module) if module != CONNECTIONS:
            return {(module or "").split(".")[0]}
        case ast.Attribute():
            return {node.attr}
        case ast.keyword():
            return {node.arg or ""}
    return set()


def pickles(node: ast.AST) -> bool:
    """Whether it may be a connection's method that does."""
    match node:
        case ast.Attribute(value=ast.Name(id="self")):
            return False
        case ast.Attribute(attr="send" | "recv"):
            return True
    return False


def test_no_room_that_talks_over_a_boundary_can_pickle():
    """Neither by name nor through a library's own way of it."""
    root = Path(mainspring.__file__).parent
    files = [
        path
        for room in ("base", "core", "engine", "executor", "kernels", "worker")
        for path in (root / room).rglob("*.py")
    ]
    assert len(files) > 20
    num_with_connections = 0
    for path in files:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        for node in nodes:
            names = names_used(node)
            assert not names & (PICKLERS | PICKLING_METHODS), f"{path.name}: {names}"
        if any(isinstance(node, ast.ImportFrom) and node.module == CONNECTIONS for node in nodes):
            num_with_connections += 1
            assert not [node.lineno for node in nodes if pickles(node)], path.name
    assert num_with_connections > 0


def test_the_bytes_of_a_conversation_are_messages_and_no_pickles(office: PostOffice):
    talk = Conversation()
    sent = [
        talk.add(request("a")),
        talk.abort(["a"]),
        talk.call(GetStats(), Future()),
    ]
    office.mailbox.deliver({0: news("a")})
    office.mailbox.deliver({0: EngineCoreOutputs(utility_output=UtilityOutput(0, b"\xc3", None))})
    bodies = [frames[1] for frames in sent] + [office.hear()[0] for _ in range(2)]
    assert all(len(frames) == 2 and len(frames[0]) == 1 for frames in sent)
    for body in bodies:
        assert isinstance(msgspec.msgpack.decode(body), list)
        assert body[:1] != pickle.dumps(None)[:1]
