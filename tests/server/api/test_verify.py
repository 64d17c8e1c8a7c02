"""`Verify`: what its client hears, and what becomes of the reading when it no longer listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import admin
from prefixd.tiers.store import Damaged, Store
from tests.contract.faulty import FaultyStore
from tests.support.incoming import Gate
from tests.support.running import PATIENCE_S, Refused, in_loop, key, next_of, payload, running


@in_loop
async def test_a_client_hears_of_the_daemon_while_a_device_takes_its_time(tmp_path: Path) -> None:
    gate = Gate("read")
    async with running(tmp_path, wrap={Tier.DISK: gate.wrap}) as daemon:
        session = await daemon.open()
        for tier in Tier:
            await session.save({key(tier * 10 + n): payload(n) for n in range(3)}, tier)
        call = daemon.admin.Verify(pb.VerifyRequest())
        message = await next_of(call)
        while message.entries < 6:
            message = await next_of(call)
        assert not message.done
        assert message.progress_permille == 666
        for _ in range(2):
            again = await next_of(call)
            assert (again.entries, again.done) == (6, False)
        # Nobody else is kept from anything meanwhile, another Verify least of all.
        assert (await daemon.verify(Tier.RAM, Tier.SHM)).entries == 6
        assert await session.restore(key(10)) == payload(0)
        gate.open()
        while not message.done:
            message = await next_of(call)
        assert (message.entries, message.payload_bytes) == (9, 9 * len(payload(0)))
        assert message.progress_permille == 1_000
        await daemon.assert_idle()


@in_loop
async def test_a_client_that_hangs_up_ends_it(tmp_path: Path) -> None:
    """In the middle of a payload, too."""
    reads = 0
    may_go_on = threading.Event()

    def read(operation: str) -> None:
        nonlocal reads
        if operation == "read":
            reads += 1
            assert may_go_on.wait(PATIENCE_S)

    def wrap(store: Store) -> Store:
        return FaultyStore(store, on_call=read)

    async with running(tmp_path, "--ram.budget=16MiB", wrap={Tier.RAM: wrap}) as daemon:
        session = await daemon.open()
        await session.save({key(1): bytes(12 * 2**20)})
        call = daemon.admin.Verify(pb.VerifyRequest())
        await next_of(call)
        call.cancel()
        # What counts is what the daemon has noticed: its tasks of this call are gone.
        while any("verify" in repr(task).lower() for task in asyncio.all_tasks()):
            await daemon.presence(key(1))
        may_go_on.set()
        daemon.core.verifications.close()
        assert 0 < reads <= 4, "4 MiB at a time"


@in_loop
async def test_problems_are_told_once_and_the_first_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(FaultyStore):
        def verify_steps(self, *_args: object) -> Iterator[int]:
            raise Damaged("a flipped bit")

    monkeypatch.setattr(admin, "MAX_PROBLEMS", 7)
    async with running(tmp_path, wrap={Tier.RAM: Spoilt}) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in range(20)})
        found = await daemon.verify()
        assert found.damaged_entries == 20
        assert len(set(found.problems)) == len(found.problems) == 7
        assert daemon.tables.entries == {}
        again = await daemon.verify()
        assert (again.entries, list(again.problems), again.progress_permille) == (0, [], 1_000)


@in_loop
async def test_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        with pytest.raises(Refused, match="unknown_tier"):
            await daemon.verify(Tier.DISK)
        assert (await daemon.verify()).done
