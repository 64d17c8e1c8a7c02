"""Reads over the data socket: claimed in the same call, and never of entries that were lost
meanwhile."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import data_transfers
from prefixd.server.api.data_streams import Stream
from prefixd.tiers.store import Damaged, StoreError
from tests.contract.faulty import FaultyStore
from tests.support.data_client import (
    LARGE,
    MIB,
    DataConnection,
    daemon_for_large,
    data_connection,
    fetch_of,
    generation_of,
)
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Refused, item, key, payload, running

DATA = payload(1)
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


@TIERS
@in_loop
async def test_a_fetch_claims_reads_and_releases(tmp_path: Path, tier: Tier) -> None:
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): DATA, key(2): LARGE[: 3 * MIB]}, tier)
        generations = [(of, await generation_of(daemon, of)) for of in (key(1), key(2))]
        async with data_connection(daemon, session) as line:
            await line.send(fetch=fetch_of(session, *generations))
            assert await line.parts(2) == [DATA, LARGE[: 3 * MIB]]
            assert not daemon.tables.claims
            for wrong in (
                fetch_of(session, (key(1), 1)),
                fetch_of(session, generations[0], (key(9), 1)),
            ):
                with pytest.raises(Refused) as refused:
                    await line.ask(fetch=wrong)
                assert refused.value.name == "unknown_entry"
                assert not daemon.tables.claims
            beyond = fetch_of(session, generations[0])
            beyond.ranges[0].offset_bytes = 10**6
            with pytest.raises(Refused, match="invalid_size"):
                await line.ask(fetch=beyond)
            beyond.generations.append(1)
            with pytest.raises(Refused, match="invalid_batch"):
                await line.ask(fetch=beyond)
            # The connection is still usable.
            await line.send(fetch=fetch_of(session, *generations))
            assert await line.parts(2) == [DATA, LARGE[: 3 * MIB]]
        await daemon.assert_idle()


def found_of(session: OpenSession, rooms: dict[Key, int], **fields: Any) -> pb.FetchRequest:
    """A fetch of those of these keys that are cached, each with the size of its buffer."""
    fields = {"mode": pb.CLAIM_MODE_RUN} | fields
    return pb.FetchRequest(
        session=session.ref, keys=[*rooms], room_bytes=[*rooms.values()], **fields
    )


@TIERS
@in_loop
async def test_a_fetch_of_what_is_there_says_what_that_is_and_sends_it(
    tmp_path: Path, tier: Tier
) -> None:
    """In one round trip: each payload that has exactly the size of its buffer."""
    large = LARGE[: 3 * MIB]
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): DATA, key(2): large, key(4): DATA}, tier)
        await session.granted([item(key(5), DATA)])
        rooms = {key(n): len(DATA) for n in (1, 2, 3, 4, 5)} | {key(2): len(large)}
        async with data_connection(daemon, session) as line:
            for mode, number, found, sent in (
                (pb.CLAIM_MODE_RUN, 5, [1, 2], [DATA, large]),
                (pb.CLAIM_MODE_ANY, 5, [1, 2, 4], [DATA, large, DATA]),
                (pb.CLAIM_MODE_FIRST, 5, [1], [DATA]),
                (pb.CLAIM_MODE_RUN, 1, [1], [DATA]),
            ):
                asked = dict([*rooms.items()][:number])
                await line.send(fetch=found_of(session, asked, mode=mode))
                claimed = (await line.response()).claim
                assert not claimed.claim_id, "there is nothing to release"
                entries = [each.entry for each in claimed.results if each.claimed]
                assert [each.payload_bytes for each in entries] == [len(each) for each in sent]
                names = [n for n, each in enumerate(claimed.results, 1) if each.claimed]
                assert names == found
                assert await line.parts(len(found)) == sent
                assert not daemon.tables.claims
            assert claimed.results[0].entry.generation == await generation_of(daemon, key(1))
            # An entry that does not fit is named, and not sent.
            await line.send(fetch=found_of(session, {key(1): len(DATA) + 1, key(2): len(large)}))
            assert [each.claimed for each in (await line.response()).claim.results] == [True] * 2
            assert await line.parts(2) == [b"", large]
            await line.send(fetch=found_of(session, {key(5): 1, key(3): 1}, mode=pb.CLAIM_MODE_ANY))
            assert [each.presence for each in (await line.response()).claim.results] == [
                pb.PRESENCE_IN_FLIGHT,
                pb.PRESENCE_ABSENT,
            ]
            assert await line.parts(0) == []
        assert not daemon.tables.claims
        assert not daemon.front.service.reads.used_bytes


@in_loop
async def test_a_fetch_that_makes_no_sense_claims_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        await session.save({key(1): DATA})
        good = found_of(session, {key(1): len(DATA)})
        async with data_connection(daemon, session) as line:
            for error, fields in (
                ("invalid_batch", pb.FetchRequest(room_bytes=[1])),
                ("invalid_batch", pb.FetchRequest(keys=[key(2)])),
                ("invalid_batch", pb.FetchRequest(generations=[1])),
                ("invalid_batch", pb.FetchRequest(keys=[key(2)] * 4096, room_bytes=[1] * 4096)),
                ("invalid_key", pb.FetchRequest(keys=[b"short"], room_bytes=[1])),
                ("malformed_message", pb.FetchRequest(mode=7)),  # type: ignore[arg-type]
                ("unknown_session", pb.FetchRequest(session=other.ref)),
                ("unknown_session", pb.FetchRequest(session=pb.SessionRef(secret=b"wrong"))),
            ):
                asked = pb.FetchRequest()
                asked.CopyFrom(good)
                asked.MergeFrom(fields)
                with pytest.raises(Refused) as refused:
                    await line.ask(fetch=asked)
                assert refused.value.name == error
                assert not daemon.tables.claims
            await line.ask(fetch=good)
            assert await line.parts(1) == [DATA]
        await daemon.assert_idle()


@in_loop
async def test_a_fetch_ends_with_its_client(tmp_path: Path) -> None:
    """A client that stops reading, and one that hangs up: neither keeps a claim, or memory."""
    async with daemon_for_large(tmp_path, "--server.stall_timeout=300ms") as (daemon, session):
        large = LARGE[: 12 * MIB]
        await session.save({key(1): large})
        asked = found_of(session, {key(1): len(large)})
        async with data_connection(daemon, session, receive_bytes=2**16) as stopped:
            await stopped.send(fetch=asked)
            assert (await stopped.response()).claim.results[0].claimed
            assert daemon.tables.claims
            await daemon.until(lambda: not daemon.tables.claims)
            await daemon.until(lambda: not daemon.front.data.connections)
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await stopped.parts(1)
        async with data_connection(daemon, session, receive_bytes=2**16) as leaving:
            await leaving.send(fetch=asked)
            await leaving.response()
            assert daemon.tables.claims
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.until(lambda: not daemon.front.service.reads.used_bytes)
        await daemon.assert_idle()


@in_loop
async def test_what_is_lost_while_it_is_sent_never_counts(tmp_path: Path) -> None:
    """The client reads nothing until its claim has ended. It must not be told that all is well."""
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): LARGE[: 2 * MIB], key(2): LARGE[: 12 * MIB]})
        claim = (await session.claim([key(1), key(2)])).claim_id
        async with data_connection(daemon, session, receive_bytes=2**16) as line:
            read = pb.ReadRequest(
                session=session.ref, claim_id=claim, ranges=[pb.ReadRange(index=i) for i in (0, 1)]
            )
            await line.send(read=read)
            await line.part()
            assert await session.release(claim) == [pb.RELEASE_STATUS_RELEASED]
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await line.parts(2, begun=True)
        await daemon.until(lambda: not daemon.front.service.reads.used_bytes)
        await daemon.assert_idle()


@pytest.mark.parametrize("by_room", [False, True])
@in_loop
async def test_a_fetch_whose_claim_is_lost_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_room: bool
) -> None:
    """All bytes have been sent by the time the daemon notices."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        run = data_transfers.Sending.run

        def release_then_end(
            self: data_transfers.Sending, patience_ms: int = 1
        ) -> data_transfers.Progress:
            ended = run(self, patience_ms)
            daemon.forward(3600.0)  # the lease is over
            return ended

        monkeypatch.setattr(data_transfers.Sending, "run", release_then_end)
        async with data_connection(daemon, session) as line:
            generation = await generation_of(daemon, key(1))
            known, found = fetch_of(session, (key(1), generation)), {key(1): len(DATA)}
            await line.send(fetch=found_of(session, found) if by_room else known)
            assert not by_room or (await line.response()).claim.results[0].claimed
            assert await line.part()
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await line.part()


@in_loop
async def test_an_entry_that_left_the_table_is_not_read_any_further(tmp_path: Path) -> None:
    """Within one turn, before the loop knows: its place may belong to another entry."""
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): LARGE[: 3 * MIB]})
        entry = daemon.tables.entries[key(1)]
        here, there = socket.socketpair()
        with here, there:
            ranges = [data_transfers.SentRange(0, entry, False, 0, 3 * MIB)]
            sending = data_transfers.Sending(daemon.core, Stream(here), ranges)
            assert sending.run(0) is data_transfers.Progress.WAITING
            assert not sending.between_parts
            entry.published = False
            line = DataConnection(there)
            there.setblocking(False)
            reading = asyncio.ensure_future(line.part())
            while sending.run(0) is not data_transfers.Progress.DONE:
                await asyncio.sleep(0)
            first = await reading
            assert first is not None
            assert first[1] == LARGE[:MIB], "what was begun"
            second = await line.part()
            assert second is not None
            assert (second[0].status, second[1]) == (pb.READ_STATUS_UNREADABLE, b"")
            assert sending.between_parts
            assert [each for each, _ in sending.failures.unreadable.values()] == [entry]
        entry.published = True


@in_loop
async def test_a_client_that_reads_nothing_is_cut_off_and_holds_up_nobody(tmp_path: Path) -> None:
    async with daemon_for_large(tmp_path, "--server.stall_timeout=300ms") as (daemon, session):
        await session.save({key(1): LARGE[: 12 * MIB], key(2): DATA})
        generation = await generation_of(daemon, key(1))
        async with (
            data_connection(daemon, session, receive_bytes=2**16) as slow,
            data_connection(daemon, session) as other,
        ):
            await slow.send(fetch=fetch_of(session, (key(1), generation)))
            await daemon.until(lambda: daemon.front.service.reads.used_bytes)
            claimed = pb.ClaimRequest(session=session.ref, keys=[key(2)], mode=pb.CLAIM_MODE_RUN)
            number = (await other.ask(claim=claimed)).claim.claim_id
            await other.send(
                read=pb.ReadRequest(session=session.ref, claim_id=number, ranges=[pb.ReadRange()])
            )
            assert await other.parts(1) == [DATA]
            await daemon.until(lambda: not daemon.front.service.reads.used_bytes)
            assert [*daemon.tables.claims] == [number]
            with pytest.raises((EOFError, ConnectionError)):
                await slow.parts(1)


@pytest.mark.parametrize("fetched", [False, True], ids=["read", "fetch"])
@pytest.mark.parametrize("fault", [Damaged("bad"), StoreError("broken")], ids=["bad", "broken"])
@in_loop
async def test_an_entry_that_cannot_be_read_says_so_and_the_others_go_on(
    tmp_path: Path, fault: Exception, fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, wrap={Tier.DISK: FaultyStore}) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA}, Tier.DISK)
        store = daemon.core.stores[Tier.DISK]
        read = store.read

        def failing(entry: object, offset_bytes: int, length_bytes: int) -> list[memoryview]:
            if getattr(entry, "key", None) == key(1):
                raise fault
            return read(entry, offset_bytes, length_bytes)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "read", failing)
        claim = 0 if fetched else (await session.claim([key(1), key(2)])).claim_id
        async with data_connection(daemon, session) as line:
            if fetched:
                await line.send(fetch=found_of(session, dict.fromkeys([key(1), key(2)], len(DATA))))
                assert all(each.claimed for each in (await line.response()).claim.results)
            else:
                await line.send(
                    read=pb.ReadRequest(
                        session=session.ref,
                        claim_id=claim,
                        ranges=[pb.ReadRange(index=0), pb.ReadRange(index=1)],
                    )
                )
            first, second = await line.part(), await line.part()
            assert first is not None
            assert second is not None
            damaged = isinstance(fault, Damaged)
            expected = pb.READ_STATUS_DAMAGED if damaged else pb.READ_STATUS_UNREADABLE
            assert (first[0].status, first[1]) == (expected, b"")
            assert (second[0].range, second[1]) == (1, DATA)
            assert await line.part() is None
            if damaged:
                await daemon.until(lambda: key(1) not in daemon.tables.entries)
