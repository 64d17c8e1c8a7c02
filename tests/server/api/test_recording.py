"""Recordings of look-ups: who is asked, what the operator gets, and what is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.server.api import recording
from prefixd.server.api.access import Role
from prefixd.server.core.shares import Holder
from tests.support.certificates import Authority
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Outside, Refused, in_ram, next_of
from tests.support.tenants import shared, writer


def lookup(*ids: int, **more: Any) -> pb.RecordedLookup:
    return pb.RecordedLookup(
        **{"at_unix_ns": 1, "ids": ids, "prompt_tokens": 16 * len(ids), **more}
    )


def begin(daemon: Outside, permille: int = 1000) -> Any:
    return daemon.admin.Record(pb.RecordRequest(sample_permille=permille))


async def asked(session: OpenSession) -> pb.Record:
    """What the session is asked for next."""
    while True:
        event = await session.event()
        if event.WhichOneof("kind") == "record":
            return event.record


async def read(call: Any, enough: int = 1) -> pb.RecordResponse:
    """Messages until there are so many look-ups, as one."""
    whole = pb.RecordResponse()
    while len(whole.lookups) < enough:
        response = await next_of(call)
        whole.lookups.extend(response.lookups)
        whole.dropped += response.dropped
        whole.unnamed += response.unnamed
        whole.sessions, whole.recording = response.sessions, response.recording
    return whole


@in_loop
async def test_clients_are_asked_while_an_operator_records_and_not_before_or_after(
    tmp_path: Path,
) -> None:
    async with in_ram(tmp_path) as daemon:
        early = await daemon.open(label="a")
        assert not early.welcome.HasField("record")
        # What nobody asked for is ignored.
        await early.send(looked_up=pb.LookedUp(lookups=[lookup(7)]))
        call = begin(daemon, 250)
        first = await next_of(call)
        assert (first.sessions, first.recording, len(first.lookups)) == (1, 0, 0)
        record = await asked(early)
        late = await daemon.open()
        assert late.welcome.record == record
        assert (len(record.secret), record.sample_permille) == (limits.RECORD_SECRET_BYTES, 250)
        await early.send(looked_up=pb.LookedUp(lookups=[lookup(1, 2, hit_blocks=1, label="x")]))
        await late.send(looked_up=pb.LookedUp(unnamed=3, dropped=2))
        await late.send(looked_up=pb.LookedUp(lookups=[lookup(3)]))
        got = await read(call, 2)
        found = sorted((tuple(each.ids), each.label, each.hit_blocks) for each in got.lookups)
        assert found == [((1, 2), "a", 1), ((3,), "default", 0)]
        assert (got.unnamed, got.dropped, got.sessions, got.recording) == (3, 2, 2, 2)
        with pytest.raises(Refused, match="recorded already"):
            await next_of(begin(daemon))
        call.cancel()
        assert await asked(early) == pb.Record()
        assert await asked(late) == pb.Record()
        assert not daemon.front.sessions.recording.active
        again = begin(daemon)
        assert (await next_of(again)).recording == 0
        assert (await asked(early)).secret != record.secret
        again.cancel()
        await early.close()
        await late.close()


@in_loop
async def test_what_an_operator_does_not_take_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MAX_WAITING_BYTES", 3 * recording._MESSAGE_BYTES)
    monkeypatch.setattr(recording, "_SEND_EVERY_S", 3600.0)
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        call = begin(daemon)
        await next_of(call)
        for number in range(4):
            await session.send(looked_up=pb.LookedUp(lookups=[lookup(number), lookup(100)]))
        await session.beat()
        waiting = daemon.front.sessions.recording
        # A session leaves as much as it takes to others.
        assert (waiting._shares.used, waiting._dropped) == (recording._MESSAGE_BYTES, 6)
        await session.close()
        assert not waiting._answered, "a session that has ended records nothing"
        call.cancel()
        await daemon.until(lambda: not waiting.active)
        assert (waiting._shares.used, waiting._dropped, len(waiting._waiting)) == (0, 0, 0)


@in_loop
async def test_all_that_a_message_has_counts_and_a_tenant_leaves_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, and fields that this version does not know, are memory as ids are."""
    monkeypatch.setattr(recording, "_SEND_EVERY_S", 3600.0)
    async with in_ram(tmp_path) as daemon:
        call = begin(daemon)
        await next_of(call)
        waiting = daemon.front.sessions.recording
        unknown = pb.LookedUp(lookups=[lookup(1, label="x" * 500_000)])
        unknown.MergeFromString(b"\xba\x3e" + b"\xa0\xc2\x1e" + bytes(500_000))  # field 999
        assert unknown.ByteSize() > 1_000_000
        for number in range(100):
            waiting.take(Holder("greedy", 1 + number % 3), "", unknown)
        kept_bytes = sum(each.message.ByteSize() for each in waiting._waiting)
        assert 0 < kept_bytes <= waiting._shares.used <= recording._MAX_WAITING_BYTES / 2
        assert waiting._dropped == 100 - len(waiting._waiting)
        waiting.take(Holder("honest", 9), "", pb.LookedUp(lookups=[lookup(1)]))
        assert waiting._waiting[-1].holder.tenant == "honest"
        many = [lookup(1)] * limits.MAX_RECORDED_LOOKUPS
        for _ in range(3):
            waiting.take(Holder("labelled", 10), "y" * 64, pb.LookedUp(lookups=many))
        while waiting._waiting:
            assert waiting._response().ByteSize() <= 3 * recording._ENOUGH_BYTES
        assert waiting._shares.used == 0
        call.cancel()


@in_loop
async def test_a_recording_ends_with_the_daemon(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        call = begin(daemon)
        await next_of(call)
        daemon.front.sessions.recording.close()
        with pytest.raises(Refused) as refused:
            await read(call)
        assert refused.value.name == "draining"


@pytest.mark.parametrize(
    "message",
    [
        pb.LookedUp(lookups=[lookup()]),
        pb.LookedUp(lookups=[lookup(1, hit_blocks=2)]),
        pb.LookedUp(lookups=[lookup(1, prompt_tokens=2**63)]),
        pb.LookedUp(lookups=[lookup(*range(limits.MAX_RECORDED_IDS // 2))] * 2 + [lookup(1)]),
        pb.LookedUp(lookups=[lookup(1)] * (limits.MAX_RECORDED_LOOKUPS + 1)),
        pb.LookedUp(dropped=2**63),
        pb.LookedUp(unnamed=2**63),
    ],
    ids=["no ids", "hits", "tokens", "many ids", "many", "dropped", "unnamed"],
)
@in_loop
async def test_numbers_that_cannot_be_end_the_session(tmp_path: Path, message: pb.LookedUp) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await session.send(looked_up=message)
        with pytest.raises(Refused) as refused:
            await asked(session)
        assert refused.value.name == "malformed_message"


@in_loop
async def test_tenants_get_secrets_of_their_own(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    """Equal keys of two namespaces are different entries, so they have different ids."""
    async with shared(tmp_path, authority, flags) as (daemon, clients):
        before = await writer(clients, "a")
        call = begin(daemon)
        await next_of(call)
        secrets = {(await asked(before)).secret}
        for name in ("a", "b", ""):
            secrets.add((await writer(clients, name)).welcome.record.secret)
        assert len(secrets) == 3
        call.cancel()


@in_loop
async def test_a_recording_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        waiting = daemon.front.sessions.recording
        call = begin(daemon)
        await next_of(call)
        waiting.end_revoked(frozenset())
        assert not waiting._revoked, "that of an operator on the host has none"
        waiting._access = recording.Access("x", Role.ADMIN)
        waiting.end_revoked(frozenset([waiting._access]))
        assert not waiting._revoked
        waiting.end_revoked(frozenset())
        with pytest.raises(Refused) as refused:
            await read(call)
        assert refused.value.name == "not_permitted"
