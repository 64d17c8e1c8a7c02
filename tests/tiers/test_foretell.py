"""Under every policy a tier evicts only what it has to, and can foretell the victims."""

from __future__ import annotations

import random

import pytest

from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.tiers import ledger
from prefixd.tiers.eviction import POLICIES, make_policy
from prefixd.tiers.ledger import Admission, Ledger
from prefixd.tiers.order import Resident
from tests.tiers.helpers import next_victim

BUDGET_BYTES = 100
CASES = 1000

EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


class _Tier:
    """A ledger and its entries, as the daemon has them."""

    def __init__(self, policy: str, max_entries: int = 0) -> None:
        order = make_policy(policy, BUDGET_BYTES, max_ghosts=50)
        self.ledger = Ledger(Tier.RAM, BUDGET_BYTES, order, max_entries=max_entries)
        self.entries: dict[Key, Resident] = {}
        self.pinned: list[Resident] = []

    def reserve(self, key: Key, stored_bytes: int) -> tuple[Resident, list[Key]]:
        """Save an entry, and return its victims."""
        coming = Resident(key, stored_bytes, ())
        gone = []
        self.ledger.prepare(coming)
        while not self.ledger.fits(stored_bytes):
            there = self.ledger.entries + self.ledger.reservations
            full = there == self.ledger.max_entries
            assert self.ledger.free_bytes < stored_bytes or full, "there is room"
            victim = next_victim(self.ledger, coming)
            assert victim is not None
            self.ledger.forget(self.entries.pop(victim))
            gone.append(victim)
        self.ledger.reserve(coming)
        return coming, gone

    def publish(self, resident: Resident) -> None:
        self.ledger.publish([resident])
        self.entries[resident.key] = resident

    def use(self, chance: random.Random) -> None:
        """Some entries are hit, pinned, unpinned."""
        for resident in chance.sample(list(self.entries.values()), len(self.entries) // 3):
            self.ledger.policy.hit(resident)
            if chance.random() < 0.2 and resident not in self.pinned and len(self.pinned) < 4:
                self.ledger.pin([resident])
                self.pinned.append(resident)
        while self.pinned and chance.random() < 0.5:
            self.ledger.unpin([self.pinned.pop(0)])


@EVERY_POLICY
@pytest.mark.parametrize("max_entries", [0, 15])
def test_what_is_foretold_happens(policy: str, max_entries: int) -> None:
    chance = random.Random(policy)
    tier = _Tier(policy, max_entries)
    foretold_evictions = 0
    for case in range(CASES):
        tier.use(chance)
        if chance.random() < 0.3:  # one that may have been evicted before
            key, stored_bytes = Key(b"again %d" % chance.randrange(60)), chance.randint(1, 15)
            if key not in tier.entries and tier.ledger.admission(stored_bytes) in _THERE_IS_ROOM:
                tier.publish(tier.reserve(key, stored_bytes)[0])
        stored_bytes, entries = chance.choice([1, 2, 7, 20]), chance.choice([1, 1, 2, 4, 12])
        if tier.ledger.admission(entries * stored_bytes, entries) not in _THERE_IS_ROOM:
            continue
        sizes = {key: resident.stored_bytes for key, resident in tier.entries.items()}
        foretold = list(tier.ledger.foretell(stored_bytes, entries, sizes.__getitem__))
        assert foretold == list(tier.ledger.foretell(stored_bytes, entries, sizes.__getitem__))
        gone, coming = [], []
        for number in range(entries):
            resident, left = tier.reserve(Key(b"new %d %d" % (case, number)), stored_bytes)
            coming.append(resident)
            gone += left
        assert gone == foretold
        foretold_evictions += len(gone)
        for resident in coming:
            tier.publish(resident)
    assert foretold_evictions > CASES / 4


def test_what_fits_is_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first victim and between two victims: they may be millions."""
    tier = _Tier("lru")
    for number in range(2):
        tier.publish(tier.reserve(Key(b"%d" % number), 40)[0])
    come: list[int] = []
    real = ledger._Alone.admit

    def noted(self: ledger._Alone, coming: Key, stored_bytes: int, entries: int) -> None:
        come.append(entries)
        real(self, coming, stored_bytes, entries)

    monkeypatch.setattr(ledger._Alone, "admit", noted)
    assert list(tier.ledger.foretell(1, 99, lambda _: 40)) == [b"0", b"1"]
    assert come == [20, 1, 39, 1, 38]


_THERE_IS_ROOM = (Admission.FITS, Admission.AFTER_EVICTION)


@EVERY_POLICY
def test_nothing_leaves_a_tier_that_has_room(policy: str) -> None:
    """S3FIFO's queues have shares, but a tier does not evict to keep them."""
    tier = _Tier(policy)
    for number in range(BUDGET_BYTES):
        resident, gone = tier.reserve(Key(b"%d" % number), 1)
        assert not gone
        tier.publish(resident)
        tier.ledger.policy.hit(resident)
    assert tier.ledger.free_bytes == 0
    assert tier.reserve(Key(b"one more"), 1)[1]
