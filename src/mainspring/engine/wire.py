"""Bytes on the sockets between a front end and an engine core.

front end -> core   [type: one byte] [body]
core -> front end   [body of EngineCoreOutputs], or [ENGINE_CORE_DEAD] [cause]

Bodies are msgpack of the structs in `base/messages.py`; arrays travel as (dtype, shape, bytes). Nothing is
pickled, and what does not decode to the type that is expected is refused.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from mainspring.base.arrays import decode_array, encode_array
from mainspring.base.messages import Command, EngineCoreOutputs, EngineCoreRequest

Frames = list[bytes]

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


class RequestType(Enum):
    """What an item of the core's input is. The first four cross the socket, the others are the core's
    own."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"


class Utility(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A command and who is waiting for its answer."""

    client_index: int
    call_id: int
    command: Command


class _NotPlain(Exception):
    pass


def _refuse(value: object) -> object:
    raise _NotPlain


class Codec:
    """Encoders and decoders of one thread; they are not to be shared between threads."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
        self._plain_encoder = msgspec.msgpack.Encoder(enc_hook=_refuse)
        self._add = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._abort = msgspec.msgpack.Decoder(list[str])
        self._wave = msgspec.msgpack.Decoder(int)
        self._utility = msgspec.msgpack.Decoder(Utility)
        self._outputs = msgspec.msgpack.Decoder(EngineCoreOutputs, dec_hook=decode_array)

    def encode(self, message: object) -> bytes:
        return self._encoder.encode(message)

    def encode_plain(self, message: object) -> bytes | None:
        """None if there is an array in it; that is found without looking for it."""
        try:
            return self._plain_encoder.encode(message)
        except _NotPlain:
            return None

    def decode_outputs(self, body: bytes) -> EngineCoreOutputs:
        return self._outputs.decode(body)

    def decode_request(
        self, kind: bytes, body: bytes
    ) -> tuple[RequestType, EngineCoreRequest | list[str] | int | Utility]:
        """Raises `msgspec.ValidationError` or `DecodeError` for a body of the wrong shape, `ValueError` for a
        type that does not cross the socket."""
        match RequestType(kind):
            case RequestType.ADD:
                return RequestType.ADD, self._add.decode(body)
            case RequestType.ABORT:
                return RequestType.ABORT, self._abort.decode(body)
            case RequestType.START_DP_WAVE:
                return RequestType.START_DP_WAVE, self._wave.decode(body)
            case RequestType.UTILITY:
                return RequestType.UTILITY, self._utility.decode(body)
            case internal:
                raise ValueError(f"{internal.name} does not come from a front end")
