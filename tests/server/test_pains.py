"""Problems that users of other caches reported (see RELIABILITY.md) and that no other test here
covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from tests.support.event_loop import in_loop
from tests.support.running import key, payload, running

PAYLOAD_BYTES = 20_000


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK])
@in_loop
async def test_recovered_entries_count_against_the_budget(tmp_path: Path, tier: Tier) -> None:
    """LMCache#4564: after a restart usage started at zero, and the disk exceeded its budget."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        number = 0
        while not daemon.tables.tier_counters[tier].evictions:
            number += 1
            await session.save({key(number): payload(number, PAYLOAD_BYTES)}, tier)
        before = daemon.tables.ledgers[tier].published_bytes
        assert before > 0
    async with running(tmp_path) as daemon:
        ledger = daemon.tables.ledgers[tier]
        assert ledger.published_bytes == before
        session = await daemon.open()
        (status,) = await session.save({key(1000): payload(1, PAYLOAD_BYTES)}, tier)
        assert status == pb.SAVE_STATUS_SAVED
        assert daemon.tables.tier_counters[tier].evictions == 1, (
            "the recovered entries were not counted"
        )
        assert ledger.published_bytes <= ledger.limit_bytes
        await daemon.assert_sound()


@in_loop
async def test_entries_are_counted_as_well_as_their_bytes(tmp_path: Path) -> None:
    """Mooncake#3452: payloads had a budget, but their metadata had none."""
    async with running(tmp_path, "--ram.max_entries=4", tiers=(Tier.RAM,)) as daemon:
        session = await daemon.open()
        for number in range(10):
            (status,) = await session.save({key(number): payload(number, 100)})
            assert status == pb.SAVE_STATUS_SAVED
            assert len(daemon.tables.entries) <= 4
        presence = await daemon.presence(*(key(number) for number in range(10)))
        assert presence == [pb.PRESENCE_ABSENT] * 6 + [pb.PRESENCE_PRESENT] * 4
        await daemon.assert_sound()


@in_loop
async def test_probes_keep_no_entry_from_eviction(tmp_path: Path) -> None:
    """Mooncake#2187: probes renewed leases, so nothing could be evicted during probing."""
    async with running(tmp_path, tiers=(Tier.RAM,)) as daemon:
        session = await daemon.open()
        number = 0
        while not daemon.tables.tier_counters[Tier.RAM].evictions:
            number += 1
            await session.save({key(number): payload(number, PAYLOAD_BYTES)})
        oldest = [key(2), key(3)]
        for _ in range(5):
            assert await daemon.presence(*oldest) == [pb.PRESENCE_PRESENT] * 2
        for more in (1001, 1002):
            await session.save({key(more): payload(more, PAYLOAD_BYTES)})
        assert await daemon.presence(*oldest) == [pb.PRESENCE_ABSENT] * 2
        await daemon.assert_sound()
