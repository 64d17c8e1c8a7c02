"""Frames of the local socket: messages out of bytes, however they are cut."""

from __future__ import annotations

import pytest

from prefixd.proto import local
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidSize, MalformedMessage
from prefixd.proto.limits import MAX_MESSAGE_BYTES

MESSAGES = [
    pb.LocalRequest(lookup=pb.LookupRequest(keys=[bytes(32)], wait_ms=7)),
    pb.LocalRequest(cancel=pb.CancelRequest(tokens=[1, 2])),
    pb.LocalRequest(give_back=pb.ReleaseRequest(claim_ids=[3])),
]


def frames() -> local.Frames[pb.LocalRequest]:
    return local.Frames(pb.LocalRequest.FromString)


def everything(of: local.Frames[pb.LocalRequest]) -> list[pb.LocalRequest]:
    messages = []
    while (message := of.next()) is not None:
        messages.append(message)
    return messages


def length(length_bytes: int) -> bytes:
    return length_bytes.to_bytes(4, "little")


def test_a_frame_is_a_length_and_a_message() -> None:
    (message, *_) = MESSAGES
    data = message.SerializeToString()
    assert local.frame(message) == length(len(data)) + data


def test_messages_come_in_order_wherever_the_bytes_are_cut() -> None:
    data = b"".join(map(local.frame, MESSAGES))
    for cut in range(len(data) + 1):
        cutting = frames()
        cutting.feed(data[:cut])
        came = everything(cutting)
        assert came == MESSAGES[: len(came)]
        cutting.feed(data[cut:])
        assert came + everything(cutting) == MESSAGES


def test_a_message_is_given_with_its_last_byte_and_not_before() -> None:
    (message, *_) = MESSAGES
    slowly = frames()
    for byte in local.frame(message):
        assert slowly.next() is None
        slowly.feed(bytes([byte]))
    assert everything(slowly) == [message]


def test_a_message_of_no_bytes_is_one() -> None:
    empty = frames()
    empty.feed(length(0))
    assert everything(empty) == [pb.LocalRequest()]


def test_a_length_above_the_most_is_refused_before_its_bytes_come() -> None:
    largest = frames()
    largest.feed(length(MAX_MESSAGE_BYTES))
    assert largest.next() is None
    too_large = frames()
    too_large.feed(length(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MalformedMessage, match=f"of {MAX_MESSAGE_BYTES + 1} bytes"):
        too_large.next()


def test_a_message_above_the_most_is_not_made() -> None:
    def of(payload_bytes: int) -> pb.LocalRequest:
        return pb.LocalRequest(lookup=pb.LookupRequest(keys=[bytes(payload_bytes)]))

    around_bytes = of(MAX_MESSAGE_BYTES).ByteSize() - MAX_MESSAGE_BYTES
    largest = of(MAX_MESSAGE_BYTES - around_bytes)
    there = frames()
    there.feed(local.frame(largest))
    assert there.next() == largest
    with pytest.raises(InvalidSize, match=f"of {MAX_MESSAGE_BYTES + 1} bytes"):
        local.frame(of(MAX_MESSAGE_BYTES - around_bytes + 1))


def test_bytes_that_are_no_message_are_refused() -> None:
    rubbish = frames()
    rubbish.feed(length(3) + b"\xff\xff\xff")
    with pytest.raises(MalformedMessage, match="3 bytes that are no message"):
        rubbish.next()


def test_whatever_is_asked_is_answered_in_kind() -> None:
    """But for what is not answered; and only an answer can be a failure."""

    def kinds(message: type[pb.LocalRequest] | type[pb.LocalResponse]) -> dict[str, int]:
        return {each.name: each.number for each in message.DESCRIPTOR.oneofs_by_name["kind"].fields}

    asked, answered = kinds(pb.LocalRequest), kinds(pb.LocalResponse)
    assert asked.keys() - answered.keys() == {"give_back", "attach"}
    assert answered.keys() - asked.keys() == {"failure"}
    assert all(asked[name] == answered[name] for name in asked.keys() & answered.keys())


def test_descriptors_of_a_whole_hand_over_fit_into_it() -> None:
    assert len(set(local.FEATURES)) == len(local.FEATURES) <= local.MAX_DESCRIPTORS
