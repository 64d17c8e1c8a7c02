"""Packing payloads into messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.wire.packing import pack
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.payload import crc32c
from tests.support.fakes import payloads


def packed(
    sizes_bytes: list[int], chunk_bytes: int, max_message_bytes: int, opening: pb.SaveRequest
) -> tuple[list[bytes], list[bytes]]:
    data = payloads(sizes_bytes)
    labels = [pb.WritePart(item=item) for item in range(len(data))]
    messages = pack(
        opening.SerializeToString(),
        labels,
        [memoryview(payload) for payload in data],
        chunk_bytes=chunk_bytes,
        max_message_bytes=max_message_bytes,
    )
    return data, list(messages)


@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=12),
    st.integers(1, 3_000),
    st.integers(300, 4_000),
)
def test_protobuf_reads_what_was_packed(
    sizes_bytes: list[int], chunk_bytes: int, max_message_bytes: int
) -> None:
    opening = pb.SaveRequest(header=pb.SaveHeader(tier=pb.TIER_SHM, wait_ms=5))
    data, messages = packed(sizes_bytes, chunk_bytes, max_message_bytes, opening)
    assert all(len(message) <= max_message_bytes for message in messages)
    requests = [pb.SaveRequest.FromString(message) for message in messages]
    assert requests[0].header == opening.header
    assert not any(request.HasField("header") for request in requests[1:])
    received = dict.fromkeys(range(len(data)), b"")
    last: dict[int, int] = {}
    for part in (part for request in requests for part in request.parts):
        assert part.item not in last, "nothing comes after the last part"
        assert part.offset_bytes == len(received[part.item])
        assert 0 < len(part.data) <= chunk_bytes
        received[part.item] += part.data
        if part.last:
            last[part.item] = part.payload_crc32c
    assert list(received.values()) == data
    assert last == {item: crc32c(payload) for item, payload in enumerate(data)}


def test_small_payloads_share_a_message() -> None:
    _, messages = packed([100] * 64, 1 << 20, 16 << 20, pb.SaveRequest(header=pb.SaveHeader()))
    assert len(messages) == 1


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=50),
    st.integers(1, 2_000),
    st.integers(300, 4_000),
)
def test_a_message_has_one_part_of_a_payload_at_most(
    sizes_bytes: list[int], chunk_bytes: int, max_message_bytes: int
) -> None:
    """The daemon takes as many parts in a message as there are payloads in a batch, so that no
    batch can be cut into too many."""
    opening = pb.SaveRequest(header=pb.SaveHeader())
    _, messages = packed(sizes_bytes, chunk_bytes, max_message_bytes, opening)
    for message in messages:
        items = [part.item for part in pb.SaveRequest.FromString(message).parts]
        assert len(items) == len(set(items))


def test_a_message_holds_about_a_chunk() -> None:
    _, messages = packed([10_000] * 5, 4_000, 1 << 20, pb.SaveRequest(header=pb.SaveHeader()))
    sizes = [len(pb.SaveRequest.FromString(message).parts) for message in messages]
    # 4,000 + 4,000 + 2,000 of each: the short rest takes the beginning of the next along.
    assert sum(sizes) == 15
    assert max(len(message) for message in messages) < 4_000 + 4_000


def test_a_large_opening_goes_alone() -> None:
    opening = pb.SaveRequest(header=pb.SaveHeader(keys=[b""], token_ids=[bytes(5_000)]))
    _, messages = packed([100], 1_000, 6_000, opening)
    first, second = (pb.SaveRequest.FromString(message) for message in messages)
    assert first == opening
    assert len(second.parts) == 1


def test_write_streams_are_packed_alike() -> None:
    opening = pb.WriteRequest(session=pb.SessionRef(session_id=4)).SerializeToString()
    (message,) = pack(
        opening,
        [pb.WritePart(token=77)],
        [memoryview(b"abc")],
        chunk_bytes=1 << 20,
        max_message_bytes=16 << 20,
    )
    request = pb.WriteRequest.FromString(message)
    assert request.session.session_id == 4
    assert request.parts == [
        pb.WritePart(token=77, data=b"abc", last=True, payload_crc32c=crc32c(b"abc"))
    ]
