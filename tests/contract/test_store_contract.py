"""The contract of every store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from harness import (
    ALL,
    KINDS,
    SIZES,
    SLAB,
    SURVIVING,
    Harness,
    key,
    new_harnesses,
    noise,
    opened,
)

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers.arena_stores import DiskStore
from prefixd.tiers.store import Damaged, StoreError, Usage

new = pytest.fixture(new_harnesses)
store = pytest.fixture(opened, params=ALL)
surviving = pytest.fixture(opened, params=SURVIVING, name="surviving")
faulty = pytest.fixture(opened, params=[f"faulty-{kind}" for kind in KINDS], name="faulty")


# ---- bytes


@pytest.mark.parametrize("payload_bytes", SIZES)
@pytest.mark.parametrize("kind", ALL)
def test_a_payload_is_read_as_it_was_saved(
    new: Callable[..., Harness], kind: str, payload_bytes: int
) -> None:
    harness = new(kind, slabs=2048)
    payload = noise(payload_bytes)
    saved = harness.save(key(1), payload, token_ids=b"abcd" * 300)
    for offset in {0, min(1, payload_bytes - 1), payload_bytes // 2, payload_bytes - 1}:
        for length in {0, 1, payload_bytes // 3, payload_bytes - offset}:
            length = min(length, payload_bytes - offset)
            assert harness.read(saved, offset, length) == payload[offset : offset + length]


@pytest.mark.parametrize("pieces", [(1,), (SLAB,), (SLAB - 1, SLAB + 1), (0, 0, 70, 9 * SLAB)])
def test_a_payload_may_come_in_any_pieces(store: Harness, pieces: tuple[int, ...]) -> None:
    store.save(key(1), noise(10 * SLAB), pieces=pieces)


def test_a_payload_may_come_from_any_buffer(store: Harness) -> None:
    payload = noise(3 * SLAB)
    for number, data in enumerate((payload, bytearray(payload), memoryview(payload).cast("I"))):
        writer = store.begin(key(number), payload)
        writer.write(data)  # type: ignore[arg-type]
        assert writer.seal() == crc32c(payload)
        store.store.apply([writer])
        store.remember(writer, payload)


def test_a_later_change_of_the_callers_buffer_has_no_effect(store: Harness) -> None:
    payload = noise(3 * SLAB)
    buffer = bytearray(payload)
    writer = store.begin(key(1), payload)
    writer.write(buffer)
    crc = writer.seal()
    buffer[:] = bytes(len(buffer))
    store.store.apply([writer])
    saved = store.remember(writer, payload)
    assert crc == crc32c(store.read(saved))


def test_views_are_read_only(store: Harness) -> None:
    saved = store.save(key(1), noise(3 * SLAB))
    for view in store.store.read(saved.entry, 5, 2 * SLAB):
        assert view.readonly
        assert view.format == "B"
        with pytest.raises(TypeError):
            view[0] = 1


def test_views_of_a_store_that_copies_outlive_the_entry(new: Callable[..., Harness]) -> None:
    harness = new("disk")
    payload = noise(3 * SLAB)
    saved = harness.save(key(1), payload)
    views = harness.store.read(saved.entry, 0, len(payload))
    harness.erase(key(1))
    harness.save(key(2), noise(3 * SLAB, 2))
    assert b"".join(views) == payload


def test_an_entry_may_lie_in_many_extents(store: Harness) -> None:
    for number in range(64):
        store.save(key(number), noise(SLAB - 200, number))
    store.erase(*(key(number) for number in range(0, 64, 2)))
    payload = noise(20 * SLAB)
    saved = store.save(key(100), payload, token_ids=b"wxyz" * 500, pieces=(3, 5 * SLAB + 1))
    # More extents than a row and its first continuation have room for.
    assert len(saved.entry.location) > 2 * (5 + 12)
    for offset in range(0, len(payload), 1_234):
        assert store.read(saved, offset, 1) == payload[offset : offset + 1]
    store.check()
    assert not store.reopen().dropped


@pytest.mark.parametrize("most_bytes", [700, SLAB, 100 * SLAB])
def test_bytes_may_be_written_where_they_belong(store: Harness, most_bytes: int) -> None:
    """The caller writes into the store's memory, or calls `write` if the store has none."""
    for number in range(64):
        store.save(key(number), noise(SLAB - 200, number))
    store.erase(*(key(number) for number in range(0, 64, 2)))
    payload = noise(9 * SLAB + 7)
    writer = store.begin(key(100), payload, b"wxyz" * 50)
    while left := payload[writer.written_bytes :]:
        before_bytes = writer.written_bytes
        room = writer.room(most_bytes)
        if room is None:
            writer.write(left[:most_bytes])
            continue
        assert 0 < len(room) <= min(most_bytes, len(left))
        # The caller may fill only a part of the room, and ask for the rest again.
        filled_bytes = -(-len(room) // 2)
        room[:filled_bytes] = left[:filled_bytes]
        writer.filled(filled_bytes)
        assert writer.written_bytes == before_bytes + filled_bytes
    assert writer.seal() == crc32c(payload)
    store.store.apply([writer])
    saved = store.remember(writer, payload, b"wxyz" * 50)
    assert len(saved.entry.location) > 2
    assert store.read(saved) == payload
    store.check()


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_costs_its_bytes_in_whole_slabs(new: Callable[..., Harness], kind: str) -> None:
    store = new(kind).store
    for payload_bytes, token_ids_bytes in product(SIZES, [0, 4, 4000]):
        stored_bytes = store.stored_bytes(payload_bytes, token_ids_bytes)
        assert stored_bytes % SLAB == 0
        assert 0 <= stored_bytes - payload_bytes - token_ids_bytes < SLAB + 4
        if not token_ids_bytes:
            assert stored_bytes - payload_bytes < SLAB


# ---- mistakes


def test_too_many_bytes_are_refused(store: Harness) -> None:
    writer = store.begin(key(1), noise(SLAB))
    writer.write(noise(SLAB - 1))
    with pytest.raises(ValueError, match=f"{SLAB + 1} bytes for a payload of {SLAB}"):
        writer.write(b"ab")
    assert writer.written_bytes == SLAB - 1
    store.give_up(writer)


def test_too_few_bytes_are_not_sealed(store: Harness) -> None:
    payload = noise(SLAB)
    writer = store.begin(key(1), payload)
    writer.write(payload[:-1])
    with pytest.raises(ValueError, match=f"{SLAB - 1} bytes of {SLAB}"):
        writer.seal()
    writer.write(payload[-1:])
    assert writer.seal() == crc32c(payload)
    store.store.apply([writer])
    store.remember(writer, payload)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, SLAB + 1), (SLAB, 1), (SLAB + 1, 0)])
def test_a_read_beyond_the_payload_is_an_error(store: Harness, offset: int, length: int) -> None:
    saved = store.save(key(1), noise(SLAB))
    with pytest.raises(ValueError, match="of a payload of"):
        store.store.read(saved.entry, offset, length)


def test_token_ids_have_the_length_that_the_entry_says(store: Harness) -> None:
    entry = store.entry(key(1), SLAB, b"abcd")
    with pytest.raises(ValueError, match="8 bytes of token ids, not 4"):
        store.store.writer(entry, b"abcdabcd")
    store.extents.free(entry.location)


def test_failure_and_damage_are_never_the_same() -> None:
    assert not issubclass(Damaged, StoreError)
    assert not issubclass(StoreError, Damaged)
    assert not issubclass(Damaged, OSError | ValueError)


def test_bytes_that_differ_from_the_saved_ones_are_damage(store: Harness) -> None:
    saved = store.save(key(1), noise(5 * SLAB))
    store.store.verify(saved.entry, saved.crc)
    with pytest.raises(Damaged, match="was saved"):
        store.store.verify(saved.entry, saved.crc ^ 1)


def test_token_ids_of_another_entry_are_damage(store: Harness) -> None:
    saved = store.save(key(1), noise(SLAB), token_ids=b"abcd" * 10)
    other = store.save(key(2), noise(SLAB), token_ids=b"wxyz" * 9)
    with pytest.raises(Damaged, match="token ids"):
        store.store.token_ids(replace(saved.entry, location=other.entry.location))


def test_a_dropped_writer_leaves_nothing(store: Harness) -> None:
    store.save(key(1), noise(SLAB))
    writer = store.begin(key(2), noise(SLAB))
    store.write(writer, noise(SLAB))
    store.give_up(writer)
    del writer
    store.check()


# ---- erasing


def test_erasing_an_absent_entry_is_no_error(store: Harness) -> None:
    gone = store.save(key(1), noise(100)).entry
    store.erase(key(1))
    store.store.forget([gone, gone])
    store.store.apply([])
    assert store.store.unerased == 0


def test_a_late_forget_of_an_old_entry_spares_the_one_in_its_place(store: Harness) -> None:
    gone = store.save(key(1), noise(SLAB)).entry
    store.erase(key(1))
    for number in range(2, 2 + 64):
        store.save(key(number), noise(SLAB, number))
    assert gone.location in [saved.entry.location for saved in store.saved.values()]
    store.store.forget([gone])
    store.store.apply([])
    if store.kind in SURVIVING:
        assert len(store.reopen().entries) == 64


def test_room_is_not_written_before_its_old_record_is_erased(surviving: Harness) -> None:
    """The process ends after the first bytes of the new entry were written."""
    for number in range(64):
        surviving.save(key(number), noise(SLAB, number))
    surviving.forget(key(7))
    writer = surviving.begin(key(100), noise(SLAB, 100))
    writer.write(noise(SLAB, 100)[:100])
    assert surviving.store.unerased == 0
    surviving.give_up(writer)
    surviving.forget(key(9))
    writer = surviving.begin(key(101), noise(SLAB, 101))
    writer.room(100)
    assert surviving.store.unerased == 0, "room is given out only after the erasure"
    surviving.give_up(writer)
    recovery = surviving.reopen()
    assert not recovery.dropped
    assert key(9) not in {entry.record.key for entry in recovery.entries}
    assert key(7) not in {entry.record.key for entry in recovery.entries}
    assert len(recovery.entries) == 62


def test_the_first_write_erases_what_was_forgotten(new: Callable[..., Harness]) -> None:
    harness = new("disk")
    harness.save(key(1), noise(SLAB))
    harness.forget(key(1))
    assert harness.store.unerased == 1, "a call from the event loop does no I/O"
    writer = harness.begin(key(2), noise(2 * SLAB))
    assert harness.store.unerased == 1
    writer.write(noise(1))
    assert harness.store.unerased == 0
    harness.give_up(writer)
    assert harness.reopen().entries == []


def test_a_forgotten_entry_is_whole_until_it_is_overwritten(new: Callable[..., Harness]) -> None:
    """The process ends before anything is erased."""
    harness = new("disk")
    saved = harness.save(key(1), noise(SLAB))
    harness.store.forget([saved.entry])
    assert [entry.record for entry in harness.reopen().entries] == [saved.entry]


def test_an_entry_can_be_replaced(store: Harness) -> None:
    store.save(key(1), noise(5 * SLAB))
    store.save(key(1), noise(2 * SLAB, 1))
    store.save(key(1), noise(7 * SLAB, 2))
    store.check()
    store.erase(key(1))
    store.save(key(1), noise(1, 3))


def test_a_batch_is_saved_and_erased_at_once(store: Harness) -> None:
    for number in range(6):
        store.save(key(number), noise(SLAB, number))
    writers = []
    for number in range(4, 10):
        writer = store.begin(key(number), noise(2 * SLAB, 100 + number))
        store.write(writer, noise(2 * SLAB, 100 + number))
        writers.append(writer)
    store.store.forget([store.saved[key(number)].entry for number in (0, 1, 4, 5)])
    store.store.apply(writers)
    for number in (0, 1):
        store.free(key(number))
    for number, writer in zip(range(4, 10), writers, strict=True):
        store.remember(writer, noise(2 * SLAB, 100 + number))


def test_a_writer_of_another_kind_or_unsealed_is_refused(surviving: Harness) -> None:
    writer = surviving.begin(key(1), noise(10))
    with pytest.raises(ValueError, match="sealed"):
        surviving.store.apply([writer])
    surviving.give_up(writer)


def test_nothing_is_written_before_the_incarnation(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 200 * SLAB, SLAB)
    with pytest.raises(ValueError, match="set_incarnation"):
        store.writer(
            EntryRecord(key(1), Tier.DISK, SaveReason.COLD, 1, 1, Content(1), (SLAB, SLAB))
        )
    store.close()


def test_a_probe_changes_nothing(store: Harness) -> None:
    store.save(key(1), noise(SLAB))
    for _ in range(3):
        store.store.probe()


# ---- what survives


def test_the_ram_tier_survives_nothing(new: Callable[..., Harness]) -> None:
    harness = new("ram")
    harness.save(key(1), noise(SLAB))
    recovery = harness.reopen()
    assert not recovery.entries
    assert not recovery.dropped


def test_entries_come_back_as_they_were(surviving: Harness) -> None:
    for number in range(8):
        surviving.save(key(number), noise(number * 2000 + 1), token_ids=b"abcd" * 50 * number)
    surviving.erase(key(3))
    before = dict(surviving.saved)
    recovery = surviving.reopen()
    assert not recovery.dropped
    assert {entry.record.key: entry.record for entry in recovery.entries} == {
        key: saved.entry for key, saved in before.items()
    }
    for entry in recovery.entries:
        assert entry.record.payload_crc32c == before[entry.record.key].crc
        assert (entry.last_used_ns, entry.hits) == (entry.record.created_ns, 0)


def test_usage_survives_and_gives_the_order(surviving: Harness) -> None:
    for number in range(5):
        surviving.save(key(number), noise(100))
    uses = {key(0): (9_000, 3), key(2): (8_000, 1), key(4): (2**62, 2**63)}
    entries = {name: saved.entry for name, saved in surviving.saved.items()}
    surviving.store.record_usage([Usage(entries[k], 1, 1) for k in uses])
    surviving.store.record_usage([Usage(entries[k], ns, hits) for k, (ns, hits) in uses.items()])
    found = {
        entry.record.key: (entry.last_used_ns, entry.hits) for entry in surviving.reopen().entries
    }
    assert list(found) == [key(1), key(3), key(2), key(0), key(4)]
    assert {k: found[k] for k in uses} == uses
    surviving.reopen()
    surviving.erase(key(0))
    surviving.save(key(0), noise(100))
    again = {entry.record.key: entry.hits for entry in surviving.reopen().entries}
    assert again[key(0)] == 0, "a new entry does not inherit the usage of an erased one"


def test_recording_the_usage_of_an_erased_entry_leaves_nothing(surviving: Harness) -> None:
    gone = surviving.save(key(1), noise(100)).entry
    surviving.erase(key(1))
    surviving.store.record_usage([Usage(gone, 5, 5)])
    assert surviving.reopen().entries == []
    surviving.save(key(1), noise(100))
    assert [entry.hits for entry in surviving.reopen().entries] == [0]
