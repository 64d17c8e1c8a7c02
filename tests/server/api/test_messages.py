"""Messages: bytes with too much in them are refused before they are parsed, what is wrong in a
request is named, and the numbers of the wire and of the core mean the same."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import frames, limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.errors import (
    InvalidBatch,
    InvalidKey,
    InvalidSize,
    MalformedMessage,
    UnknownReason,
    UnknownTier,
)
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.api import messages
from prefixd.server.api.messages import LOOKED_THROUGH_BYTES, MOST_FIELDS, fields_of, parse
from prefixd.server.api.service import _CLAIM_MODES
from prefixd.server.core.effects import ClaimAnswer, FlightInfo, LookupAnswer, SaveEnded, WriteOrder
from prefixd.server.core.entries import EntryState
from prefixd.server.core.events import KeyToSave
from tests.support.bare import bare
from tests.support.columns import Item, StagedPart, columns, staged
from tests.support.data_client import data_connection
from tests.support.event_loop import in_loop
from tests.support.running import Refused, answer, key, payload, running, stream
from tests.support.unseen import Unseen

TIERS = {Tier.RAM, Tier.DISK}
FLIGHT = FlightInfo("alice", 2_500_000)


def entry() -> EntryState:
    return EntryState(
        key=key(1),
        tier=Tier.SHM,
        reason=SaveReason.EVICT,
        generation=11,
        last_used_ns=12,
        content=Content(13, 14, 16, 1),
        stored_bytes=4096,
        payload_crc32c=15,
        place=(4096, 4096),
        hits=17,
        pins=2,
    )


# ---- the words are those of the wire

#: The results that a daemon gives a save; clients have others of their own.
ENDINGS = [status for status in SaveStatus if status < 100]


def labels(prefix: str, numbers: dict[str, int]) -> dict[str, int]:
    names = {name.removeprefix(prefix): number for name, number in numbers.items()}
    return {name: number for name, number in names.items() if name != "UNSPECIFIED"}


def test_the_enums_are_those_of_the_contract() -> None:
    assert {t.name: t.value for t in Tier} == labels("TIER_", dict(pb.Tier.items()))
    reasons = labels("SAVE_REASON_", dict(pb.SaveReason.items()))
    assert {reason.name: reason.value for reason in SaveReason} == reasons
    modes = labels("CLAIM_MODE_", dict(pb.ClaimMode.items()))
    assert {mode.name: mode.value for mode in ClaimMode} == modes
    assert {number: mode.value for number, mode in _CLAIM_MODES.items()} == {
        number: number for number in modes.values()
    }
    outcomes = labels("SAVE_STATUS_", dict(pb.SaveStatus.items()))
    assert {outcome.name: outcome.value for outcome in SaveStatus} == outcomes


@pytest.mark.parametrize("outcome", ENDINGS, ids=lambda outcome: outcome.name)
def test_every_outcome_of_a_save_has_its_status_and_a_sentence(outcome: SaveStatus) -> None:
    ended = messages.ended_save(SaveEnded((1,), outcome, "something happened"))
    assert ended.status == outcome.value
    assert ended.message.startswith("something happened")
    tells_what_to_do = "; " in ended.message
    granted = outcome not in (
        SaveStatus.SAVED,
        SaveStatus.PRESENT,
        SaveStatus.IN_FLIGHT,
        SaveStatus.TOO_LARGE,
        SaveStatus.NO_ROOM,
    )
    assert tells_what_to_do == granted


@pytest.mark.parametrize(
    ("refused", "reserve", "save", "words"),
    [
        (SaveStatus.PRESENT, pb.RESERVE_STATUS_PRESENT, pb.SAVE_STATUS_PRESENT, "already"),
        (SaveStatus.TOO_LARGE, pb.RESERVE_STATUS_TOO_LARGE, pb.SAVE_STATUS_TOO_LARGE, "can't"),
        (SaveStatus.NO_ROOM, pb.RESERVE_STATUS_NO_ROOM, pb.SAVE_STATUS_NO_ROOM, "may help"),
        (FLIGHT, pb.RESERVE_STATUS_IN_FLIGHT, pb.SAVE_STATUS_IN_FLIGHT, "alice is saving it"),
    ],
    ids=["present", "too large", "no room", "in flight"],
)
def test_what_is_not_granted_says_why(
    refused: SaveStatus | FlightInfo, reserve: int, save: int, words: str
) -> None:
    reserved, saved = messages.reserve_result(refused), messages.refused_save(refused)
    assert (reserved.status, reserved.token) == (reserve, 0)
    assert saved.status == save
    assert words in saved.message
    if refused is FLIGHT:
        assert reserved.in_flight == saved.in_flight == pb.InFlight(owner="alice", age_ms=2)


def test_a_save_that_began_before_the_daemon_was_late_is_not_younger_than_nothing() -> None:
    assert messages.flight_of(FlightInfo("alice", -500_000_000)).age_ms == 0


def test_what_is_granted_has_its_token() -> None:
    granted = messages.reserve_result(WriteOrder(7, entry(), b""))
    assert (granted.status, granted.token) == (pb.RESERVE_STATUS_GRANTED, 7)


# ---- answers


def test_an_entry_is_described_whole() -> None:
    info = messages.info_of(entry())
    assert (info.tier, info.reason, info.generation) == (Tier.SHM, SaveReason.EVICT, 11)
    assert (info.payload_bytes, info.token_count, info.payload_crc32c) == (13, 14, 15)
    assert (info.layer_count, info.token_ids_bytes) == (1, 16)
    detail = messages.entry_detail(entry())
    assert detail.info == info
    assert (detail.key, detail.stored_bytes) == (key(1), 4096)
    assert (detail.created_unix_ns, detail.last_used_unix_ns) == (11, 12)
    assert (detail.hits, detail.pins, list(detail.extents)) == (17, 2, [4096, 4096])


def test_a_lookup_tells_what_is_what() -> None:
    answer = LookupAnswer((entry(), FLIGHT, None))
    response = messages.lookup_response(answer, b"incarnation", brief=False)
    assert response.incarnation == b"incarnation"
    present, in_flight, absent = response.results
    assert (present.presence, present.entry.generation) == (pb.PRESENCE_PRESENT, 11)
    assert in_flight.presence == pb.PRESENCE_IN_FLIGHT
    assert (in_flight.in_flight.owner, in_flight.in_flight.age_ms) == ("alice", 2)
    assert absent == pb.LookupResult(presence=pb.PRESENCE_ABSENT)


def test_a_claim_tells_what_it_holds() -> None:
    answer = ClaimAnswer(5, 60_000_000_000, (entry(), entry(), FLIGHT, None), (True, *[False] * 3))
    response = messages.claim_response(answer, brief=False)
    assert (response.claim_id, response.lease_ms) == (5, 60_000)
    assert [result.claimed for result in response.results] == [True, False, False, False]
    assert [result.presence for result in response.results] == [
        pb.PRESENCE_PRESENT,
        pb.PRESENCE_PRESENT,
        pb.PRESENCE_IN_FLIGHT,
        pb.PRESENCE_ABSENT,
    ]
    assert response.results[1].entry.generation == 11
    brief = messages.claim_response(answer, brief=True)
    assert (brief.claim_id, brief.lease_ms, list(brief.generations)) == (5, 60_000, [11, 0, 0, 0])
    assert not brief.results


# ---- requests


def test_batches_have_one_to_4096_elements() -> None:
    messages.batch_of("keys", [1])
    messages.batch_of("keys", range(limits.MAX_BATCH_KEYS))
    with pytest.raises(InvalidBatch, match="keys is empty; name at least one"):
        messages.batch_of("keys", [])
    with pytest.raises(InvalidBatch, match="keys has 4097 elements, at most 4096"):
        messages.batch_of("keys", range(4097))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_key_has_32_bytes(length: int) -> None:
    with pytest.raises(InvalidKey, match=rf"keys\[1\] has {length} bytes; a key has 32"):
        messages.keys_of("keys", [key(1), bytes(length)])


def test_keys_keep_their_order() -> None:
    assert messages.keys_of("keys", [key(2), key(1), key(2)]) == (key(2), key(1), key(2))
    assert messages.keys_of("ancestors", [], may_be_empty=True) == ()


def test_tiers_are_those_of_this_daemon() -> None:
    assert messages.tier_of(1, TIERS) is Tier.RAM
    assert messages.tiers_of([3, 1, 3], TIERS) == (Tier.DISK, Tier.RAM)
    assert messages.tiers_of([], TIERS) == ()
    with pytest.raises(UnknownTier, match=r"the shm tier is not configured; this daemon has"):
        messages.tier_of(2, TIERS)
    for number in (0, 4, -1):
        with pytest.raises(UnknownTier, match=f"tier {number} does not exist; this daemon has"):
            messages.tier_of(number, TIERS)


def test_more_tiers_than_there_are_are_not_looked_at() -> None:
    with pytest.raises(InvalidBatch, match="tiers has 4 elements, and there are 3 tiers"):
        messages.tiers_of(Unseen(len(Tier) + 1), TIERS)


def test_reasons_are_five() -> None:
    assert [messages.reason_of(number) for number in range(1, 6)] == list(SaveReason)
    for number in (0, 6, -1):
        with pytest.raises(UnknownReason, match="there are cold, continued, finish, evict"):
            messages.reason_of(number)


def test_times_have_a_default_and_a_bound() -> None:
    assert messages.milliseconds("ttl_ms", 5, 7, 10) == 5_000_000
    assert messages.milliseconds("ttl_ms", 0, 7, 10) == 7_000_000
    assert messages.milliseconds("ttl_ms", 10, 7, 10) == 10_000_000
    with pytest.raises(InvalidSize, match="ttl_ms is 11, at most 10 ms are allowed"):
        messages.milliseconds("ttl_ms", 11, 7, 10)


def header(*items: Item) -> pb.SaveHeader:
    return pb.SaveHeader(**columns(items))


def test_items_are_taken_as_they_are() -> None:
    item = Item(key(1), 12, 3, 4, b"12345678")
    assert messages.items_of(header(item)) == (
        KeyToSave(key(1), Content(12, 3, 8, 4), b"12345678"),
    )
    largest = Item(key(1), limits.MAX_PAYLOAD_BYTES)
    assert messages.items_of(header(largest))[0].content.payload_bytes == limits.MAX_PAYLOAD_BYTES


def test_a_column_that_is_left_out_says_nothing() -> None:
    bare = pb.SaveHeader(keys=[key(1), key(2)], payload_bytes=[12, 13])
    assert messages.items_of(bare) == (
        KeyToSave(key(1), Content(12)),
        KeyToSave(key(2), Content(13)),
    )


@pytest.mark.parametrize("column", ["payload_bytes", "token_counts", "layer_counts", "token_ids"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_column_has_a_value_for_each_key(column: str, change: int) -> None:
    request = header(*(Item(key(number), 12, 3, 4, b"1234") for number in range(3)))
    values = getattr(request, column)
    values.append(values[0]) if change > 0 else values.pop()
    with pytest.raises(InvalidBatch, match=f"{column} has {3 + change} elements for 3 keys"):
        messages.items_of(request)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"payload_bytes": 0}, "payload_bytes[1] is 0, allowed are 1 to"),
        ({"payload_bytes": limits.MAX_PAYLOAD_BYTES + 1}, "allowed are 1 to"),
        ({"layer_count": 5}, "layer_counts[1]: 12 bytes are no 5 layers of one size"),
        ({"layer_count": limits.MAX_LAYERS + 1}, "layers of one size"),
        ({"token_ids": b"12345"}, "token_ids[1] has 5 bytes; they are 4 bytes each"),
        ({"token_ids": bytes(limits.MAX_TOKEN_IDS_BYTES + 4)}, "at most 4194304"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_items_of_a_size_that_cannot_be_are_refused(fields: dict[str, Any], words: str) -> None:
    bad = Item(**({"key": key(2), "payload_bytes": 12} | fields))
    with pytest.raises(InvalidSize) as refused:
        messages.items_of(header(Item(key(1), 12), bad))
    assert words in str(refused.value)


def test_a_key_is_named_once_in_a_save() -> None:
    item = Item(key(1), 12)
    with pytest.raises(InvalidBatch, match="twice"):
        messages.items_of(header(item, item))


# ---- parts in staging memory


def test_parts_come_in_columns() -> None:
    parts = [StagedPart(0, 7, 8, True, 9), StagedPart(1, 15, 3)]
    request = pb.SaveStagedRequest(**staged(parts))
    assert messages.parts_of(request) == ([0, 1], [7, 15], [8, 3], [True, False], [9, 0])
    assert messages.parts_of(pb.SaveStagedRequest()) == ([], [], [], [], [])


@pytest.mark.parametrize(
    "column", ["items", "staging_offset_bytes", "length_bytes", "last_parts", "payload_crc32c"]
)
def test_columns_of_parts_are_of_one_length(column: str) -> None:
    for change in (lambda values: values.append(1), lambda values: values.pop()):
        request = pb.SaveStagedRequest(**staged([StagedPart(), StagedPart(1)]))
        change(getattr(request, column))
        with pytest.raises(MalformedMessage, match="the columns of"):
            messages.parts_of(request)


def test_parts_in_one_message_are_bounded() -> None:
    request = pb.SaveStagedRequest(**staged([StagedPart()] * (limits.MAX_BATCH_KEYS + 1)))
    with pytest.raises(InvalidBatch, match="4097 parts in one message"):
        messages.parts_of(request)


# ---- bytes

EMPTIES = 2 * MOST_FIELDS


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def nested(kind: Any, *names: str, empties: int = EMPTIES) -> bytes:
    """A message with very many empty fields: the last of `names`, nested in those before it."""
    fields = []
    for name in names:
        fields.append(kind.fields_by_name[name])
        kind = fields[-1].message_type
    encoded = varint(fields.pop().number << 3 | 2) + b"\0"
    encoded *= empties
    for field in reversed(fields):
        encoded = varint(field.number << 3 | 2) + varint(len(encoded)) + encoded
    return encoded


FLOODS = [
    (pb.SaveRequest, ["parts"]),
    (pb.SaveRequest, ["reserved", "tokens"]),
    (pb.ReserveRequest, ["header", "keys"]),
    (pb.SaveRequest, ["header", "token_ids"]),
    (pb.FramedRequest, ["lookup", "keys"]),
    (pb.FramedRequest, ["save_staged", "header", "ancestors"]),
    (pb.FramedRequest, ["read", "ranges"]),
]


@pytest.mark.parametrize(("kind", "names"), FLOODS, ids=lambda value: str(value)[-40:])
def test_very_many_empty_fields_are_counted_wherever_they_are(kind: Any, names: list[str]) -> None:
    few = nested(kind.DESCRIPTOR, *names, empties=1000)
    assert 1000 <= fields_of(kind, few) <= 1002
    assert parse(kind, few) == kind.FromString(few)
    many = nested(kind.DESCRIPTOR, *names, empties=EMPTIES + LOOKED_THROUGH_BYTES // 2)
    with pytest.raises(MalformedMessage, match="bytes with more than 65536 fields"):
        parse(kind, many)


def test_a_column_counts_by_its_length() -> None:
    column = pb.SaveHeader(payload_bytes=[1] * 8_000)
    request = pb.ReserveRequest(header=column).SerializeToString()
    assert fields_of(pb.ReserveRequest, request) == 2 + 1_000
    column.payload_bytes.extend([1] * (16 * MOST_FIELDS))
    with pytest.raises(MalformedMessage, match="fields"):
        parse(pb.ReserveRequest, pb.ReserveRequest(header=column).SerializeToString())


def test_the_largest_save_that_may_be_is_no_flood() -> None:
    most = limits.MAX_BATCH_KEYS
    keys = [number.to_bytes(limits.KEY_BYTES, "big") for number in range(most)]
    header = pb.SaveHeader(
        session=pb.SessionRef(incarnation=bytes(16), session_id=2**63, secret=bytes(32)),
        keys=keys,
        payload_bytes=[2**40] * most,
        token_counts=[2**31] * most,
        layer_counts=[2**31] * most,
        token_ids=[bytes(1024)] * most,
        ancestors=keys,
        touched=keys,
        wait_ms=1,
        ttl_ms=1,
    )
    parts = [
        pb.WritePart(item=n, offset_bytes=1, data=bytes(1024), last=True, payload_crc32c=1)
        for n in range(most)
    ]
    request = pb.SaveRequest(header=header, parts=parts)
    encoded = request.SerializeToString()
    assert LOOKED_THROUGH_BYTES < len(encoded) <= limits.MAX_MESSAGE_BYTES
    assert parse(pb.SaveRequest, encoded) == request


@pytest.mark.parametrize(
    "rest",
    [
        b"\xff" * 12,  # a number that never ends
        b"\x0b",  # a group
        b"\x0a\x7f",  # a length without bytes
        b"\x12\x02\x22\x7f",  # a field that is longer than the message around it
    ],
)
def test_what_is_looked_through_and_no_message_is_refused(rest: bytes) -> None:
    large = pb.SaveRequest(parts=[pb.WritePart(data=bytes(LOOKED_THROUGH_BYTES))])
    with pytest.raises(MalformedMessage, match="bytes that are no SaveRequest"):
        parse(pb.SaveRequest, large.SerializeToString() + rest)


@in_loop
async def test_every_transport_refuses_too_many_fields(tmp_path: Path) -> None:
    """And other calls go on."""
    why = "bytes with more than 65536 fields"
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): payload(1)})
        request = nested(pb.SaveRequest.DESCRIPTOR, "parts", empties=200_000)
        save = daemon.channel.stream_unary("/prefixd.v1.Cache/Save")
        with pytest.raises(Refused, match=f"malformed_message .*{why}"):
            await answer(save(stream([request])))
        request = nested(pb.FramedRequest.DESCRIPTOR, "lookup", "keys", empties=200_000)
        with bare(daemon) as connection:
            await connection.send(struct.pack("<I", len(request)) + request)
            (told,) = await connection.rest()
            assert why in told.failure.message
        request = nested(pb.FramedRequest.DESCRIPTOR, "read", "ranges", empties=200_000)
        async with data_connection(daemon, session) as far:
            await far.send_bytes(frames.HEAD.pack(len(request)) + request)
            with pytest.raises(Refused, match=why):
                await far.response()
        assert await session.restore(key(1)) == payload(1)
        await daemon.assert_idle()
