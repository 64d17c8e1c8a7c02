"""Splits the bytes of a socket into messages, for tests that hold one end of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import MalformedMessage
from prefixd.proto.frames import HEAD, MAX_MESSAGE_BYTES

M = TypeVar("M", pb.FramedRequest, pb.FramedResponse)


class Frames(Generic[M]):
    """Splits the bytes that a socket delivers into messages."""

    def __init__(self, parse: Callable[[bytes], M]) -> None:
        """`parse`: `FromString` of the expected message type."""
        self._parse: Callable[[bytes], M] = parse
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were fed and that `next` has not returned yet."""
        return len(self._buffer)

    @property
    def next_bytes(self) -> int:
        """The size of the next frame; 0 until its length has arrived. Raises MalformedMessage if
        its message is too long."""
        if len(self._buffer) < HEAD.size:
            return 0
        (length_bytes,) = HEAD.unpack_from(self._buffer)
        if length_bytes > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a message of {length_bytes} bytes, {MAX_MESSAGE_BYTES} is the most"
            )
        return HEAD.size + int(length_bytes)

    def next(self) -> M | None:
        """The next complete message. Raises MalformedMessage for bytes that are no message."""
        end = self.next_bytes
        buffer = self._buffer
        if not end or len(buffer) < end:
            return None
        data = bytes(memoryview(buffer)[HEAD.size : end])
        del buffer[:end]
        try:
            return self._parse(data)
        except DecodeError as problem:
            raise MalformedMessage(f"{len(data)} bytes that are no message: {problem}") from None

    def clear(self) -> None:
        """Forget what was fed."""
        self._buffer.clear()
