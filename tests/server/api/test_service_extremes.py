"""Every field of every request with its extreme values: each request is answered, or refused as the
contract says, and none harms the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import SaveReason, Tier
from tests.proto.test_contract import METHODS
from tests.server.api.test_grpc_adapter import raw_call
from tests.support.bad_input import DATA, ERRORS, PUBLISHED
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Refused, answer, item, key, next_of, part, running

BITS_32, BITS_64 = [1, 2**31, 2**32 - 1], [1, 2**40, 2**63, 2**64 - 1]
EXTREMES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_UINT32: BITS_32,
    FieldDescriptor.TYPE_FIXED32: BITS_32,
    FieldDescriptor.TYPE_UINT64: BITS_64,
    FieldDescriptor.TYPE_FIXED64: BITS_64,
    FieldDescriptor.TYPE_ENUM: [1, 9, 2**31 - 1, -1],
    FieldDescriptor.TYPE_BOOL: [True],
    FieldDescriptor.TYPE_BYTES: [bytes(31), bytes(32), bytes(33), bytes(2**20)],
    FieldDescriptor.TYPE_STRING: ["\0", "x" * 120, "x" * 121],
}


def extremes(message: Message) -> Iterator[Message]:
    """Copies of a message, each with one field missing, or with an extreme value."""
    for field in message.DESCRIPTOR.fields:
        inside = field.type == FieldDescriptor.TYPE_MESSAGE
        if inside and field.is_repeated:
            values = [
                [one] for first in getattr(message, field.name)[:1] for one in extremes(first)
            ]
        elif inside:
            there = message.HasField(field.name)
            values = list(extremes(getattr(message, field.name))) if there else []
        else:
            values = [[value] if field.is_repeated else value for value in EXTREMES[field.type]]
        for value in [None, *values]:
            copy = type(message)()
            copy.CopyFrom(message)
            copy.ClearField(field.name)
            if value is not None and field.is_repeated:
                getattr(copy, field.name).extend(value)
            elif value is not None and inside:
                getattr(copy, field.name).CopyFrom(value)
            elif value is not None:
                setattr(copy, field.name, value)
            yield copy


def _header(session: OpenSession) -> pb.SaveHeader:
    items = [item(key(1), DATA, layer_count=1, token_ids=bytes(4))]
    more = {"ancestors": [PUBLISHED], "touched": [PUBLISHED]}
    return session.header(items, Tier.RAM, SaveReason.COLD, **more)


#: For each rpc a valid request, and what it needs the session and a claim for.
GOOD: dict[str, Callable[[OpenSession, int], Message]] = {
    "Session": lambda *_: pb.SessionRequest(hello=pb.Hello(client_name="x", pid=1, host="y")),
    "Lookup": lambda *_: pb.LookupRequest(keys=[PUBLISHED]),
    "Claim": lambda session, _: pb.ClaimRequest(
        session=session.ref, keys=[PUBLISHED], mode=pb.CLAIM_MODE_RUN
    ),
    "Release": lambda session, claim: pb.ReleaseRequest(session=session.ref, claim_ids=[claim]),
    "Reserve": lambda session, _: pb.ReserveRequest(header=_header(session)),
    "Save": lambda session, _: pb.SaveRequest(header=_header(session), parts=[part(0, DATA)]),
    "Delete": lambda session, _: pb.DeleteRequest(session=session.ref, keys=[key(1)]),
    "Pull": lambda session, _: pb.PullRequest(
        session=session.ref, keys=[PUBLISHED], wait_ms=1, mode=pb.CLAIM_MODE_RUN
    ),
    "Cancel": lambda session, _: pb.CancelRequest(session=session.ref, tokens=[1]),
    "Read": lambda session, claim: pb.ReadRequest(
        session=session.ref, claim_id=claim, ranges=[pb.ReadRange()]
    ),
    "Stats": lambda *_: pb.StatsRequest(),
    "ListEntries": lambda *_: pb.ListEntriesRequest(tier=pb.TIER_RAM),
    "Inspect": lambda *_: pb.InspectRequest(key=PUBLISHED),
    "ListClaims": lambda *_: pb.ListClaimsRequest(),
    "ListReservations": lambda *_: pb.ListReservationsRequest(),
    "ListSessions": lambda *_: pb.ListSessionsRequest(),
    "ListIdentities": lambda *_: pb.ListIdentitiesRequest(digest=PUBLISHED),
    "Preview": lambda *_: pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=1),
    "Evict": lambda *_: pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_DISK]),
    "Curve": lambda *_: pb.CurveRequest(tier=pb.TIER_RAM, budget_bytes=[2**20]),
    "Drop": lambda *_: pb.DropRequest(keys=[key(1)]),
    "Kick": lambda session, _: pb.KickRequest(session_id=session.number),
    "Resize": lambda *_: pb.ResizeRequest(tier=pb.TIER_RAM, budget_bytes=2**20),
    # The last of the extreme values resumes service.
    "Drain": lambda *_: pb.DrainRequest(resume=True),
    "SetLogLevel": lambda *_: pb.SetLogLevelRequest(level=pb.LOG_LEVEL_DEBUG),
    "Why": lambda *_: pb.WhyRequest(key=PUBLISHED),
    "Clear": lambda *_: pb.ClearRequest(namespace="nobody"),
    "Configure": lambda *_: pb.ConfigureRequest(),
    "Gc": lambda *_: pb.GcRequest(),
    "Check": lambda *_: pb.CheckRequest(),
    "Verify": lambda *_: pb.VerifyRequest(tiers=[pb.TIER_RAM]),
    "Watch": lambda *_: pb.WatchRequest(tiers=[pb.TIER_RAM]),
    "Record": lambda *_: pb.RecordRequest(sample_permille=1),
}


def test_every_rpc_is_among_them() -> None:
    assert GOOD.keys() == {method.name for method in METHODS}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@in_loop
async def test_no_value_of_any_field_is_a_surprise(
    tmp_path: Path, method: MethodDescriptor
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({PUBLISHED: DATA})
        refused: list[tuple[Refused, Message]] = []
        good = GOOD[method.name](session, (await session.claim([PUBLISHED])).claim_id)
        for request in [good, *extremes(good)]:
            try:
                call = raw_call(daemon.channel_of(method), method, [request.SerializeToString()])
                if method.name in ("Watch", "Record"):  # they never end
                    await next_of(call)
                    call.cancel()
                else:
                    await answer(call)
            except Refused as refusal:
                refused.append((refusal, request))
            tokens = list(daemon.tables.reservations)
            if tokens:
                await daemon.cache.Cancel(pb.CancelRequest(session=session.ref, tokens=tokens))
        assert [one for one in refused if one[0].name not in ERRORS] == []
        if method.name == "Kick":  # one of the values named the session, which has ended
            assert len(refused) < 6
            assert session.number not in daemon.tables.sessions
            return
        assert good not in [request for _, request in refused]
        assert await session.restore(PUBLISHED) == DATA
        await session.close()
        await daemon.assert_idle()
