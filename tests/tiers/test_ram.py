"""What only the RAM store does; the rest is in the contract suite."""

from __future__ import annotations

import pytest

from prefixd.proto.entry import EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ram import RamStore
from prefixd.tiers.store import StoreError


def test_a_budget_holds_exactly_its_blocks() -> None:
    """4,096 blocks of 4 KiB in 16 MiB: no header takes a byte of it."""
    store = RamStore(4096 * 4096, slab_bytes=4096)
    store.arena.secure()
    extents = ExtentAllocator(store.arena.secured_bytes, 4096, store.header_bytes)
    entries = []
    for number in range(4096):
        key = Key(number.to_bytes(32, "big"))
        location = extents.allocate(store.stored_bytes(4096, 0))
        entries.append(
            EntryRecord(key, Tier.RAM, SaveReason.COLD, number, 0, 4096, 512, 0, 0, location)
        )
        writer = store.writer(entries[-1])
        writer.write(key * 128)
        writer.seal()
    assert extents.free_bytes == 0
    for entry in entries:
        (view,) = store.read(entry, 0, 4096)
        assert view == entry.key * 128
    store.close()


def test_a_budget_is_rounded_down_to_whole_slabs() -> None:
    store = RamStore(3 * 65536 + 100)
    assert store.arena.size_bytes == 3 * 65536
    assert store.stored_bytes(65536, 0) == 65536
    assert store.stored_bytes(65536, 4) == 2 * 65536
    store.close()


def test_what_can_be_no_arena_is_refused() -> None:
    with pytest.raises(StoreError, match="whole pages"):
        RamStore(4095, slab_bytes=4096)
    with pytest.raises(ValueError, match="power of two"):
        RamStore(2**20, slab_bytes=1024)
