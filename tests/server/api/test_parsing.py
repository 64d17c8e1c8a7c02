"""Requests with more in them than their bytes: refused before they are made."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import frames, limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import MalformedMessage
from prefixd.server.api.parsing import LOOKED_THROUGH_BYTES, MOST_FIELDS, fields_of, parse
from tests.support.bare import bare, frame
from tests.support.data_client import data_connection
from tests.support.running import Refused, answer, in_loop, key, payload, running, stream

EMPTIES = 2 * MOST_FIELDS


def varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def nested(kind: Any, *names: str, empties: int = EMPTIES) -> bytes:
    """A message with very many of the last of these fields, each empty, in the ones before."""
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
    (pb.WriteRequest, ["parts"]),
    (pb.ReserveRequest, ["header", "keys"]),
    (pb.SaveRequest, ["header", "token_ids"]),
    (pb.LocalRequest, ["lookup", "keys"]),
    (pb.LocalRequest, ["save_staged", "header", "ancestors"]),
    (pb.DataRequest, ["read", "ranges"]),
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
        pb.WritePart(
            token=2**63, item=n, offset_bytes=1, data=bytes(1024), last=True, payload_crc32c=1
        )
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
        b"\x0a\x7f",  # a length, and nothing behind it
        b"\x12\x02\x22\x7f",  # a field that is longer than its part
    ],
)
def test_what_is_looked_through_and_no_message_is_refused(rest: bytes) -> None:
    large = pb.SaveRequest(parts=[pb.WritePart(data=bytes(LOOKED_THROUGH_BYTES))])
    with pytest.raises(MalformedMessage, match="bytes that are no SaveRequest"):
        parse(pb.SaveRequest, large.SerializeToString() + rest)


@in_loop
async def test_every_transport_refuses_them(tmp_path: Path) -> None:
    """And goes on with everybody else."""
    why = "bytes with more than 65536 fields"
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): payload(1)})
        request = nested(pb.SaveRequest.DESCRIPTOR, "parts", empties=200_000)
        save = daemon.channel.stream_unary("/prefixd.v1.Cache/Save")
        with pytest.raises(Refused, match=f"malformed_message .*{why}"):
            await answer(save(stream([request])))
        request = nested(pb.LocalRequest.DESCRIPTOR, "lookup", "keys", empties=200_000)
        with bare(daemon) as connection:
            await connection.send(frame(attach=session.ref))
            await connection.send(struct.pack("<I", len(request)) + request)
            (told,) = await connection.rest()
            assert why in told.failure.message
        request = nested(pb.DataRequest.DESCRIPTOR, "read", "ranges", empties=200_000)
        async with data_connection(daemon, session) as far:
            await far.send_bytes(frames.HEAD.pack(len(request)) + request)
            with pytest.raises(Refused, match=why):
                await far.response()
        assert await session.restore(key(1)) == payload(1)
        await daemon.assert_idle()
