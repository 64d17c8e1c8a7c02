"""Damaged bytes from sockets, files and engines are decoded or refused with the right error."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixd.client.wire import messages as client_messages
from prefixd.client.wire.messages import understanding
from prefixd.proto import arena_header, frames, index
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.errors import MalformedMessage, PrefixdError, RecordError
from prefixd.proto.index import packed_rows
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.api.data_streams import DataFrames, HungUp
from prefixd.server.api.messages import fields_of, parse
from prefixd.server.runtime.quota import Quota
from prefixd.server.sharing.engine_record import HEADER_BYTES, decode_header, encode_header
from prefixd.server.sharing.engine_store import SharedEntry
from prefixd.server.sharing.resp import (
    RedisConnection,
    RedisRefused,
    RedisRequest,
    Result,
    exchange,
)
from prefixd.tiers import lmdb_wire
from prefixd.tiers.records import Survivors, decode_usage, encode_usage
from prefixd.tiers.rows import ROW_BYTES, RowRefused, decode_entry, encode_rows

from .messages import damaged, messages, pieces

FUZZ = settings.get_profile("fuzz")
SLAB = 4096
KEY = Key(bytes(range(32)))
ENTRY = EntryRecord(
    key=KEY,
    tier=Tier.DISK,
    reason=SaveReason.EVICT,
    generation=3,
    created_ns=5,
    content=Content(3 * SLAB, 16),
    location=(2 * SLAB, 3 * SLAB),
    payload_crc32c=77,
)


def entries() -> st.SearchStrategy[EntryRecord]:
    """Entries with one extent, or with so many that they need more than one row."""

    def scattered(extents: int) -> EntryRecord:
        location = tuple(part for n in range(extents) for part in ((2 + 2 * n) * SLAB, SLAB))
        return replace(ENTRY, location=location, content=Content(extents * SLAB, 16))

    return st.one_of(st.just(ENTRY), st.integers(2, 30).map(scattered))


# ---- frames


class Pieces:
    """A stream that brings these bytes, and then hangs up."""

    process = None

    def __init__(self, pieces: list[bytes]) -> None:
        self._left = [piece for piece in pieces if piece]

    def receive(self, buffers: list[memoryview]) -> int:
        if not self._left:
            return 0
        came, rest = self._left[0][: len(buffers[0])], self._left[0][len(buffers[0]) :]
        self._left[:1] = [rest] if rest else []
        buffers[0][: len(came)] = came
        return len(came)


def taken(pieces: list[bytes]) -> list[pb.FramedRequest]:
    """The requests that the daemon takes out of a stream. Raises MalformedMessage."""

    async def take() -> list[pb.FramedRequest]:
        stream: Any = Pieces(pieces)
        requests = DataFrames(stream, 60.0, Quota("requests", 2**30, 60.0))
        found = []
        async with AsyncExitStack() as rooms:
            with contextlib.suppress(HungUp):
                while True:
                    found.append(await requests.next(rooms))
        return found

    return asyncio.run(take())


@FUZZ
@given(st.data(), st.lists(messages(pb.FramedRequest.DESCRIPTOR, 2), max_size=3))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    draw: st.DataObject, sent: list[Any]
) -> None:
    stream = b"".join(map(frames.frame, sent))
    found = taken(draw.draw(pieces(stream)))
    assert found == [pb.FramedRequest.FromString(one.SerializeToString()) for one in sent]


@FUZZ
@given(st.data(), messages(pb.FramedRequest.DESCRIPTOR, 2))
def test_damaged_frames_are_messages_or_malformed(draw: st.DataObject, sent: Any) -> None:
    stream = draw.draw(damaged(frames.frame(sent)))
    with contextlib.suppress(MalformedMessage):
        assert len(taken([stream[at : at + 1] for at in range(len(stream))])) <= len(stream)


@FUZZ
@given(st.data(), messages(pb.FramedRequest.DESCRIPTOR, 2))
def test_damaged_requests_are_requests_or_malformed(draw: st.DataObject, sent: Any) -> None:
    raw = draw.draw(damaged(sent.SerializeToString()))
    with contextlib.suppress(MalformedMessage):
        parse(pb.FramedRequest, raw)
    with contextlib.suppress(MalformedMessage):
        frames.response_of(raw)


@FUZZ
@given(st.data(), st.sampled_from((pb.SaveRequest, pb.FramedRequest, pb.SessionRequest)))
def test_all_parsed_objects_are_counted_before_parsing(draw: st.DataObject, kind: Any) -> None:
    whole = draw.draw(messages(kind.DESCRIPTOR, 2)).SerializeToString()
    assert objects_in(parse(kind, whole)) <= fields_of(kind, whole)
    raw = draw.draw(damaged(whole))
    with contextlib.suppress(MalformedMessage):
        made = objects_in(parse(kind, raw))
        with contextlib.suppress(DecodeError):  # long messages are refused
            assert made <= fields_of(kind, raw)


def objects_in(message: Any) -> int:
    """The number of objects that a message consists of, without columns."""
    made = 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            inner = [value] if isinstance(value, Message) else list(value)
            made += len(inner) + sum(map(objects_in, inner))
        elif isinstance(value, str | bytes):
            made += 1
        elif field.cpp_type == field.CPPTYPE_STRING:
            made += len(value)
    return made


# ---- responses to clients


@FUZZ
@given(st.data())
def test_any_response_of_a_daemon_is_a_result_or_an_error(draw: st.DataObject) -> None:
    """Even responses of other versions or with bugs become results or errors of the library."""
    kinds: list[tuple[Any, Any]] = [
        (pb.EntryInfo, lambda response: client_messages.entry_of(KEY, response)),
        (pb.LookupResult, lambda response: client_messages.found_of(KEY, response)),
        (pb.LookupResponse, lambda response: client_messages.present_of([KEY] * 3, response)),
        (pb.SaveResult, lambda response: client_messages.outcome_of(KEY, response)),
        (pb.SaveStagedResponse, client_messages.results_of),
    ]
    kind, understand = draw.draw(st.sampled_from(kinds))
    response = draw.draw(messages(kind.DESCRIPTOR))
    try:
        with understanding():
            understand(response)
    except PrefixdError:
        pass


# ---- records


@FUZZ
@given(st.data(), entries())
def test_a_damaged_record_is_refused(draw: st.DataObject, entry: EntryRecord) -> None:
    rows = dict(encode_rows(entry, SLAB))
    good = decode_entry(rows[2], 2, SLAB, lambda slab: rows.get(slab, b""))
    assert good == entry
    slab = draw.draw(st.sampled_from(sorted(rows)))
    # A table always returns rows of the full length.
    rows[slab] = draw.draw(damaged(rows[slab]))[:ROW_BYTES].ljust(ROW_BYTES, b"\0")
    try:
        found = decode_entry(rows[2], 2, SLAB, lambda slab: rows.get(slab, b""))
    except RowRefused:
        return
    assert found == entry


@FUZZ
@given(
    st.lists(
        st.tuples(st.integers(0, 63), st.binary(min_size=ROW_BYTES, max_size=ROW_BYTES)),
        max_size=6,
        unique_by=lambda row: row[0],
    ),
    st.data(),
    entries(),
)
def test_a_table_with_random_rows_is_recovered(
    noise: list[tuple[int, bytes]], draw: st.DataObject, entry: EntryRecord
) -> None:
    rows = dict(encode_rows(entry, SLAB))
    for slab, row in noise:
        rows[slab] = draw.draw(st.sampled_from([row, b"PFXE\1" + row[5:], b"PFXC\1" + row[5:]]))
    survivors = Survivors(Tier.DISK, 64, SLAB, 64, lambda slab: rows.get(slab, b""))
    survivors.read(sorted(rows.items()), lambda _slab, _generation: None)
    survivors.settle()
    found = [one.record for batch in survivors.batches(4) for one in batch]
    assert found in ([], [entry])


@FUZZ
@given(st.data())
def test_a_damaged_cell_or_usage_row_is_intact_or_refused(draw: st.DataObject) -> None:
    row = encode_rows(ENTRY, SLAB)[0][1]
    cell = lmdb_wire.encode_cell(9, 2, row)
    assert lmdb_wire.whole_cell(draw.draw(damaged(cell))) in (cell, None)
    usage = encode_usage(3, 11, 12)
    assert decode_usage(draw.draw(damaged(usage)), 3) in ((11, 12), None)


@FUZZ
@given(st.data())
def test_a_damaged_arena_header_is_intact_or_refused(draw: st.DataObject) -> None:
    header = arena_header.encode_arena_header(bytes(range(16)), SLAB)
    raw = draw.draw(damaged(header))
    with contextlib.suppress(RecordError):
        assert arena_header.decode_arena_header(raw) == (bytes(range(16)), SLAB)


# ---- rows of the index


@FUZZ
@given(st.data(), entries())
def test_a_damaged_index_row_is_decoded_or_refused(draw: st.DataObject, entry: EntryRecord) -> None:
    """The checksum of a row is checked where rows are found (proto/test_index.py)."""
    row = index.pack_row(entry, entry.location)
    with contextlib.suppress(RecordError):
        found = index.unpack_row(draw.draw(damaged(row)))
        assert index.unpack_row(row).key == KEY
        assert len(found.key) == len(KEY)


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=4), st.integers(0, 3), st.data())
def test_rows_that_are_unpacked_together_are_all_good_or_none(
    noise: list[bytes], good: int, draw: st.DataObject
) -> None:
    rows = [index.pack_row(ENTRY, ENTRY.location)] * good + noise
    rows = draw.draw(st.permutations(rows))
    packed = packed_rows(list(enumerate(rows)))
    if packed is not None:
        assert [row for _, row in packed] == rows
        assert len(packed.keys) == len(packed.tiers) == len(rows)


# ---- a shared engine


@FUZZ
@given(st.data())
def test_a_damaged_shared_header_is_intact_or_refused(draw: st.DataObject) -> None:
    entry = SharedEntry(KEY, Content(4096, 16, layer_count=4), 77)
    raw = draw.draw(damaged(encode_header(entry)))
    assert len(encode_header(entry)) == HEADER_BYTES
    assert decode_header(KEY, raw) in (entry, None)
    assert decode_header(Key(bytes(32)), raw) is None


REPLY = b"$5\r\nhello\r\n:7\r\n+OK\r\n-ERR no\r\n$-1\r\n"


@FUZZ
@given(st.data())
@example(draw=None)
def test_an_engine_may_answer_anything(draw: st.DataObject | None) -> None:
    """Valid replies are accepted until the first invalid one or the end."""
    raw = REPLY if draw is None else draw.draw(st.one_of(damaged(REPLY), st.binary(max_size=99)))
    parts = [REPLY] if draw is None else draw.draw(pieces(raw))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = RedisConnection(ours)
        for part in parts:
            theirs.sendall(part)
        theirs.shutdown(socket.SHUT_WR)
        room = bytearray(5)
        filled = RedisRequest(b"GET", b"0", into=[memoryview(room)])
        requests = [filled, *(RedisRequest(b"GET", b"0") for _ in range(4))]
        exchange([(connection, requests)], time.monotonic() + 30)
        if raw == REPLY:
            assert bytes(room) == b"hello"
            assert [one.result for one in requests[:3]] == [Result.FILLED, 7, b"OK"]
            assert isinstance(requests[3].result, RedisRefused)
            assert requests[4].result is Result.NOTHING
        for one in requests:
            assert isinstance(one.result, Result | RedisRefused | bytes | int)
        assert connection.broken or all(r.result is not Result.UNANSWERED for r in requests)


def test_a_flipped_bit_is_refused() -> None:
    """Damage is really refused: the tests above also accept intact values."""
    row = encode_rows(ENTRY, SLAB)[0][1]
    flipped = bytes([row[0] ^ 1]) + row[1:]
    with pytest.raises(RowRefused):
        decode_entry(flipped, 2, SLAB, lambda _: b"")
