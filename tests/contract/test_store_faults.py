"""Every store with faults of its device, and with its calls in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faulty import Crash, Fault
from harness import (
    ALL,
    KINDS,
    SLAB,
    SURVIVING,
    Harness,
    key,
    new_harnesses,
    noise,
    opened,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.tiers.store import Damaged, StoreError, StoreFull, Usage
from tests.support.lengths import times

new = pytest.fixture(new_harnesses)
store = pytest.fixture(opened, params=ALL)
surviving = pytest.fixture(opened, params=SURVIVING, name="surviving")
faulty = pytest.fixture(opened, params=[f"faulty-{kind}" for kind in KINDS], name="faulty")


# ---- faults


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.WRITE_ERROR])
def test_a_failed_apply_changes_nothing_and_can_be_repeated(faulty: Harness, fault: Fault) -> None:
    faulty.save(key(1), noise(SLAB, 1))
    faulty.save(key(2), noise(SLAB, 2))
    writer = faulty.begin(key(1), noise(3 * SLAB))
    faulty.write(writer, noise(3 * SLAB))
    faulty.faulty.arm(fault)
    with pytest.raises(StoreFull if fault is Fault.FULL else StoreError):
        faulty.store.apply([writer])
    faulty.give_up(writer)
    faulty.check()
    writer = faulty.begin(key(1), noise(3 * SLAB))
    faulty.write(writer, noise(3 * SLAB))
    faulty.store.forget([faulty.saved[key(number)].entry for number in (1, 2)])
    faulty.store.apply([writer])
    faulty.free(key(2))
    faulty.remember(writer, noise(3 * SLAB))


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
def test_after_a_crash_a_batch_is_there_whole_or_not_at_all(
    new: Callable[..., Harness], fault: Fault
) -> None:
    harness = new("faulty-disk")
    harness.save(key(1), noise(SLAB, 1))
    writers = []
    for number in (2, 3):
        writer = harness.begin(key(number), noise(5 * SLAB, number))
        harness.write(writer, noise(5 * SLAB, number))
        writers.append(writer)
    harness.faulty.arm(fault)
    harness.store.forget([harness.saved[key(1)].entry])
    with pytest.raises(Crash):
        harness.store.apply(writers)
    if fault is Fault.CRASH_AFTER:
        harness.free(key(1))
        for number, writer in zip((2, 3), writers, strict=True):
            harness.remember(writer, noise(5 * SLAB, number))
    else:
        for writer in writers:
            harness.give_up(writer)
    recovery = harness.reopen()
    assert not recovery.dropped
    assert {entry.record.key for entry in recovery.entries} == set(harness.saved)


def test_a_bit_that_flips_on_the_way_in_shows_in_the_checksum(faulty: Harness) -> None:
    payload = noise(3 * SLAB)
    faulty.faulty.arm(Fault.FLIPPED_WRITE)
    writer = faulty.begin(key(1), payload)
    assert faulty.write(writer, payload) != crc32c(payload)
    faulty.give_up(writer)


def test_a_faulty_read_is_noticed(faulty: Harness) -> None:
    saved = faulty.save(key(1), noise(3 * SLAB))
    faulty.faulty.arm(Fault.FLIPPED_READ)
    assert crc32c(faulty.read(saved)) != saved.crc
    faulty.faulty.arm(Fault.SHORT_READ)
    assert len(faulty.read(saved)) < len(saved.payload)
    faulty.faulty.arm(Fault.READ_ERROR)
    with pytest.raises(StoreError):
        faulty.read(saved)
    faulty.faulty.arm(Fault.FLIPPED_READ)
    with pytest.raises(Damaged):
        faulty.store.verify(saved.entry, saved.crc)
    faulty.faulty.arm(Fault.READ_ERROR)
    with pytest.raises(StoreError):
        faulty.store.verify(saved.entry, saved.crc)
    assert faulty.faulty.happened == [
        *(Fault.FLIPPED_READ, Fault.SHORT_READ, Fault.READ_ERROR),
        *(Fault.FLIPPED_READ, Fault.READ_ERROR),
    ]


def test_the_same_seed_has_the_same_faults(new: Callable[..., Harness]) -> None:
    happened = []
    for _ in range(2):
        harness = new("faulty-ram")
        saved = harness.save(key(1), noise(100))
        harness.faulty._rates = {Fault.READ_ERROR: 0.3, Fault.SHORT_READ: 0.3}
        run = []
        for _ in range(50):
            try:
                run.append(harness.read(saved))
            except StoreError:
                run.append(b"")
        happened.append((run, list(harness.faulty.happened)))
        harness.faulty._rates = {}
    assert happened[0] == happened[1]
    assert set(happened[0][1]) == {Fault.READ_ERROR, Fault.SHORT_READ}


def test_every_call_is_announced(faulty: Harness) -> None:
    calls: list[str] = []
    faulty.faulty.on_call = calls.append
    saved = faulty.save(key(1), noise(100), pieces=(10,))
    faulty.read(saved)
    assert calls == ["write", "write", "apply", "read"]


# ---- anything in any order


class Interleavings(RuleBasedStateMachine):
    kind: str
    KEYS = st.integers(0, 7).map(key)
    SIZES = st.one_of(st.integers(1, 3 * SLAB), st.just(SLAB), st.just(9 * SLAB))

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(f"faulty-{self.kind}")
        self.uses: dict[Key, tuple[int, int]] = {}

    def teardown(self) -> None:
        self.harness.close()

    @rule(
        batch=st.dictionaries(KEYS, st.tuples(SIZES, st.integers(0, 40)), max_size=3),
        erased=st.sets(KEYS, max_size=3),
        seed=st.integers(0, 1000),
        pieces=st.lists(st.integers(0, SLAB), max_size=3),
        fault=st.sampled_from([None, None, None, Fault.FULL, Fault.WRITE_ERROR]),
    )
    def apply(
        self,
        batch: dict[Key, tuple[int, int]],
        erased: set[Key],
        seed: int,
        pieces: list[int],
        fault: Fault | None,
    ) -> None:
        harness = self.harness
        writers = []
        for name, (size, tokens) in batch.items():
            payload = noise(size, seed)
            token_ids = b"abcd" * tokens
            if harness.store.stored_bytes(size, len(token_ids)) > harness.extents.free_bytes:
                continue
            writer = harness.begin(name, payload, token_ids)
            harness.write(writer, payload, [cut for cut in pieces if cut <= size])
            writers.append((writer, payload, token_ids))
        if fault is not None:
            harness.faulty.arm(fault)
            with pytest.raises(StoreError):
                harness.store.apply([writer for writer, _, _ in writers])
            for writer, _, _ in writers:
                harness.give_up(writer)
        gone = (erased | set(batch)) & set(harness.saved)
        harness.forget(*gone)
        for name in gone:
            self.uses.pop(name, None)
        if fault is not None:
            return
        harness.store.apply([writer for writer, _, _ in writers])
        for writer, payload, token_ids in writers:
            harness.remember(writer, payload, token_ids)

    @precondition(lambda self: self.harness.saved)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        saved = data.draw(st.sampled_from(sorted(self.harness.saved.items())))[1]
        offset = data.draw(st.integers(0, len(saved.payload)))
        length = data.draw(st.integers(0, len(saved.payload) - offset))
        assert self.harness.read(saved, offset, length) == saved.payload[offset : offset + length]

    @precondition(lambda self: self.harness.saved)
    @rule(data=st.data(), last_used_ns=st.integers(0, 2**63 - 1), hits=st.integers(0, 2**64 - 1))
    def use(self, data: st.DataObject, last_used_ns: int, hits: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.harness.saved)))
        self.harness.store.record_usage([Usage(self.harness.saved[name].entry, last_used_ns, hits)])
        self.uses[name] = (last_used_ns, hits)

    @rule()
    def restart(self) -> None:
        expected = dict(self.harness.saved)
        self.harness.store.apply([])
        recovery = self.harness.reopen()
        assert not recovery.dropped
        if self.kind == "ram":
            assert not recovery.entries
            self.uses = {}
            return
        assert [entry.record for entry in recovery.entries] == sorted(
            (saved.entry for saved in expected.values()),
            key=lambda entry: (self._last_used(entry.key, entry.created_ns), entry.created_ns),
        )
        for entry in recovery.entries:
            use = self.uses.get(entry.record.key, (entry.record.created_ns, 0))
            assert (entry.last_used_ns, entry.hits) == use

    def _last_used(self, name: Key, created_ns: int) -> int:
        return self.uses.get(name, (created_ns, 0))[0]

    @invariant()
    def agrees(self) -> None:
        self.harness.check()


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_calls(kind: str) -> None:
    machine = type(f"Interleavings_{kind}", (Interleavings,), {"kind": kind})
    case = machine.TestCase
    # Each restart of the disk store starts a process.
    examples = times(8, 100) if kind == "disk" else 25
    case.settings = settings(max_examples=examples, stateful_step_count=25, deadline=None)
    case("runTest").runTest()
