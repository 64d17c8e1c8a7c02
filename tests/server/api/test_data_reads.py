"""Reads over the data socket: claimed in the same call, and never of what was lost meanwhile."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import raw_bytes
from prefixd.server.api.streams import Stream
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
from tests.support.running import (
    Refused,
    in_loop,
    key,
    payload,
    running,
)

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
            # The connection is as good as it was.
            await line.send(fetch=fetch_of(session, *generations))
            assert await line.parts(2) == [DATA, LARGE[: 3 * MIB]]
        await daemon.assert_idle()


@in_loop
async def test_what_is_lost_while_it_is_sent_never_counts(tmp_path: Path) -> None:
    """The client reads nothing until its claim has ended: it must not be told that all is well."""
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


@in_loop
async def test_a_fetch_whose_claim_is_lost_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything has left when it turns out."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        run = raw_bytes.Sending.run

        def release_then_end(self: raw_bytes.Sending, patience_ms: int = 1) -> raw_bytes.Progress:
            ended = run(self, patience_ms)
            daemon.forward(3600.0)  # the lease is over
            return ended

        monkeypatch.setattr(raw_bytes.Sending, "run", release_then_end)
        async with data_connection(daemon, session) as line:
            await line.send(fetch=fetch_of(session, (key(1), await generation_of(daemon, key(1)))))
            assert await line.part()
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await line.part()


@in_loop
async def test_an_entry_that_left_the_table_is_not_read_any_further(tmp_path: Path) -> None:
    """Within one turn, before the loop knows: its room may be another's."""
    async with daemon_for_large(tmp_path) as (daemon, session):
        await session.save({key(1): LARGE[: 3 * MIB]})
        entry = daemon.tables.entries[key(1)]
        here, there = socket.socketpair()
        with here, there:
            ranges = [raw_bytes.SentRange(0, entry, False, 0, 3 * MIB)]
            sending = raw_bytes.Sending(daemon.core, Stream(here), ranges)
            assert sending.run(0) is raw_bytes.Progress.WAITING
            assert not sending.between_parts
            entry.published = False
            line = DataConnection(there)
            there.setblocking(False)
            reading = asyncio.ensure_future(line.part())
            while sending.run(0) is not raw_bytes.Progress.DONE:
                await asyncio.sleep(0)
            first = await reading
            assert first is not None
            assert first[1] == LARGE[:MIB], "what was begun"
            second = await line.part()
            assert second is not None
            assert (second[0].status, second[1]) == (pb.READ_STATUS_UNREADABLE, b"")
            assert sending.between_parts
            assert [each for each, _ in sending.unreadable] == [entry]
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
            claimed = pb.ClaimRequest(session=session.ref, keys=[key(2)])
            number = (await other.ask(claim=claimed)).claim.claim_id
            await other.send(
                read=pb.ReadRequest(session=session.ref, claim_id=number, ranges=[pb.ReadRange()])
            )
            assert await other.parts(1) == [DATA]
            await daemon.until(lambda: not daemon.front.service.reads.used_bytes)
            assert [*daemon.tables.claims] == [number]
            with pytest.raises((EOFError, ConnectionError)):
                await slow.parts(1)


@pytest.mark.parametrize("fault", [Damaged("bad"), StoreError("broken")], ids=["bad", "broken"])
@in_loop
async def test_an_entry_that_cannot_be_read_says_so_and_the_others_go_on(
    tmp_path: Path, fault: Exception, monkeypatch: pytest.MonkeyPatch
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
        claim = (await session.claim([key(1), key(2)])).claim_id
        async with data_connection(daemon, session) as line:
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
