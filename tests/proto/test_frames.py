"""Frames of the local and the data socket."""

from __future__ import annotations

import pytest

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidSize, MalformedMessage
from prefixd.proto.limits import MAX_MESSAGE_BYTES


def length(length_bytes: int) -> bytes:
    return length_bytes.to_bytes(4, "little")


def test_a_frame_is_a_length_and_a_message() -> None:
    message = pb.FramedRequest(lookup=pb.LookupRequest(keys=[bytes(32)], wait_ms=7))
    data = message.SerializeToString()
    assert frames.frame(message) == length(len(data)) + data


def test_a_message_above_the_most_is_not_made() -> None:
    def of(payload_bytes: int) -> pb.FramedRequest:
        return pb.FramedRequest(lookup=pb.LookupRequest(keys=[bytes(payload_bytes)]))

    around_bytes = of(MAX_MESSAGE_BYTES).ByteSize() - MAX_MESSAGE_BYTES
    largest = of(MAX_MESSAGE_BYTES - around_bytes)
    assert frames.frame(largest) == length(MAX_MESSAGE_BYTES) + largest.SerializeToString()
    with pytest.raises(InvalidSize, match=f"of {MAX_MESSAGE_BYTES + 1} bytes"):
        frames.frame(of(MAX_MESSAGE_BYTES - around_bytes + 1))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="3 bytes that are no response"):
        frames.response_of(b"\xff\xff\xff")


def test_descriptors_of_a_whole_hand_over_fit_into_it() -> None:
    assert len(set(frames.FEATURES)) == len(frames.FEATURES) <= frames.MAX_DESCRIPTORS
