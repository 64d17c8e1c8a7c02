"""Messages of the contract to values of the client, and back; payloads into messages."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.wire import messages
from prefixd.client.wire.messages import pack
from prefixd.client.wire.transport import Item, SaveTerms
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import PrefixdError
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import Presence, SaveReason, SaveStatus, Tier
from tests.support.columns import items_of
from tests.support.fakes import keys, payloads

KEY, OTHER = keys(2)
INFO = pb.EntryInfo(
    tier=pb.TIER_SHM,
    generation=7,
    payload_bytes=5000,
    token_count=16,
    payload_crc32c=99,
    layer_count=4,
    token_ids_bytes=64,
    reason=pb.SAVE_REASON_FINISH,
)


def test_an_entry_keeps_every_field() -> None:
    entry = messages.entry_of(KEY, INFO)
    assert (entry.key, entry.tier, entry.reason) == (KEY, Tier.SHM, SaveReason.FINISH)
    for field in INFO.DESCRIPTOR.fields:
        assert getattr(entry, field.name) == getattr(INFO, field.name), field.name


def test_what_is_found_is_there_or_on_its_way_or_not() -> None:
    present = pb.LookupResult(presence=pb.PRESENCE_PRESENT, entry=INFO)
    assert messages.found_of(KEY, present).entry == messages.entry_of(KEY, INFO)
    flight = pb.InFlight(owner="somebody", age_ms=5)
    in_flight = messages.found_of(
        KEY, pb.LookupResult(presence=pb.PRESENCE_IN_FLIGHT, in_flight=flight)
    )
    assert in_flight.presence is Presence.IN_FLIGHT
    assert (in_flight.owner, in_flight.age_ms) == ("somebody", 5)
    assert messages.found_of(KEY, pb.LookupResult()).presence is Presence.ABSENT


def test_a_header_says_everything_of_a_save() -> None:
    items = [Item(KEY, Content(5000, 16, 4, 4), b"ids4"), Item(OTHER, Content(1))]
    terms = SaveTerms(Tier.DISK, SaveReason.COLD, [OTHER], 5, 6, [KEY])
    header = messages.header_of(items, terms)
    assert (header.tier, header.reason) == (pb.TIER_DISK, pb.SAVE_REASON_COLD)
    on_the_wire = [(KEY, 5000, 16, 4, b"ids4"), (OTHER, 1, 0, 0, b"")]
    assert [astuple(item) for item in items_of(header)] == on_the_wire
    assert (list(header.ancestors), list(header.touched)) == ([OTHER], [KEY])
    assert (header.wait_ms, header.ttl_ms) == (5, 6)


def test_a_column_of_nothing_is_not_sent() -> None:
    terms = SaveTerms(Tier.RAM, SaveReason.COLD)
    header = messages.header_of([Item(KEY, Content(1, 2)), Item(OTHER, Content(2))], terms)
    assert list(header.token_counts) == [2, 0]
    assert not header.layer_counts
    assert not header.token_ids


@pytest.mark.parametrize("status", range(1, 11))
def test_every_status_of_a_save_is_known(status: int) -> None:
    result = pb.SaveResult(status=pb.SaveStatus.ValueType(status), message="why")
    outcome = messages.outcome_of(KEY, result)
    assert (outcome.key, outcome.status, outcome.message) == (KEY, SaveStatus(status), "why")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: messages.entry_of(KEY, pb.EntryInfo(tier=pb.TIER_RAM, reason=0)),
        lambda: messages.outcome_of(KEY, pb.SaveResult()),
        lambda: [][0],
    ],
)
def test_an_answer_outside_the_contract_is_a_failed_call(answer: object) -> None:
    assert callable(answer)
    with (
        pytest.raises(PrefixdError, match="does not follow the contract"),
        messages.understanding(),
    ):
        answer()


# ---- payloads


def packed(
    sizes_bytes: list[int], chunk_bytes: int, max_message_bytes: int, opening: pb.SaveRequest
) -> tuple[list[bytes], list[bytes]]:
    data = payloads(sizes_bytes)
    messages = pack(
        opening.SerializeToString(),
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
    """The daemon accepts as many parts in a message as a batch has payloads, so no batch can be
    cut into too many."""
    opening = pb.SaveRequest(header=pb.SaveHeader())
    _, messages = packed(sizes_bytes, chunk_bytes, max_message_bytes, opening)
    for message in messages:
        items = [part.item for part in pb.SaveRequest.FromString(message).parts]
        assert len(items) == len(set(items))


def test_a_message_holds_about_a_chunk() -> None:
    _, messages = packed([10_000] * 5, 4_000, 1 << 20, pb.SaveRequest(header=pb.SaveHeader()))
    sizes = [len(pb.SaveRequest.FromString(message).parts) for message in messages]
    # 4,000 + 4,000 + 2,000 of each: the short rest shares a message with the next payload.
    assert sum(sizes) == 15
    assert max(len(message) for message in messages) < 4_000 + 4_000


def test_a_large_opening_goes_alone() -> None:
    opening = pb.SaveRequest(header=pb.SaveHeader(keys=[b""], token_ids=[bytes(5_000)]))
    _, messages = packed([100], 1_000, 6_000, opening)
    first, second = (pb.SaveRequest.FromString(message) for message in messages)
    assert first == opening
    assert len(second.parts) == 1
