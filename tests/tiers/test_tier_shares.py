"""A tier with shares against a model: a list of entries that is counted each time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.eviction import POLICIES, make_policy
from prefixd.tiers.ledger import Admission, Ledger
from prefixd.tiers.order import Resident
from prefixd.tiers.tier_shares import NamespaceShare
from tests.support.lengths import times
from tests.tiers.helpers import next_victim

BUDGET_BYTES = 100
STEPS = times(700, 10_000)
NAMES = ("", "a", "b", "c")
SPACES = {name: TenantNamespace(name) for name in NAMES if name}

EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


def key_in(name: str, number: int) -> Key:
    """A key of a namespace. Empty: of no namespace."""
    key = Key(number.to_bytes(32, "big"))
    return SPACES[name].stored([key])[0] if name else key


@dataclass(eq=False)
class Held:
    """The model of an entry."""

    name: str
    resident: Resident
    reserved: bool = True
    pinned: bool = False

    @property
    def fixed(self) -> bool:
        return self.reserved or self.pinned


class Model:
    """A ledger with shares, and a list from which everything is counted again."""

    def __init__(self, policy: str, shares: dict[str, int], max_entries: int = 0) -> None:
        self.shares = {"": 0} | shares
        self.held: list[Held] = []
        self.numbers = 0
        self.ledger = Ledger(
            Tier.RAM,
            BUDGET_BYTES,
            make_policy(policy, BUDGET_BYTES - sum(shares.values()), max_ghosts=50),
            max_entries=max_entries,
            shares=[
                NamespaceShare(n, size, make_policy(policy, size)) for n, size in shares.items()
            ],
        )

    # ---- counted again

    def sums(self, name: str, *, fixed: bool = False) -> tuple[int, int]:
        mine = [h for h in self.held if h.name == name and (h.fixed or not fixed)]
        return sum(h.resident.stored_bytes for h in mine), len(mine)

    def share(self, name: str) -> tuple[int, int]:
        return self.shares[name], self.ledger.max_entries * self.shares[name] // BUDGET_BYTES

    def within(self, name: str, dimension: int, more: int = 0) -> bool:
        if dimension and not self.ledger.max_entries:
            return True
        return self.sums(name)[dimension] + more <= self.share(name)[dimension]

    def free(self) -> tuple[int, int]:
        used = [self.sums(name) for name in self.shares]
        return (
            BUDGET_BYTES - sum(size for size, _ in used),
            (self.ledger.max_entries or 10**9) - sum(count for _, count in used),
        )

    def may_fix(self, name: str, size: int, count: int) -> bool:
        """Whether it fits beside everything that is guaranteed to others."""
        for dimension, whole in ((0, BUDGET_BYTES), (1, self.ledger.max_entries)):
            above = 0
            for each in self.shares:
                more = (size, count)[dimension] if each == name else 0
                fixed = self.sums(each, fixed=True)[dimension] + more
                above += max(0, fixed - self.share(each)[dimension])
            left = whole - sum(self.share(each)[dimension] for each in self.shares)
            if whole and above > left:
                return False
        return True

    # ---- what happens

    def reserve(self, name: str, size: int) -> tuple[Held, list[Key]] | None:
        """The new entry and its victims. None: it was refused."""
        self.numbers += 1
        coming = Resident(key_in(name, self.numbers), size, ())
        admission = self.ledger.admission(size, 1, coming.key)
        most = BUDGET_BYTES - sum(share for n, share in self.shares.items() if n != name)
        assert (admission is Admission.ABOVE_SHARES) == (most < size <= BUDGET_BYTES)
        if size <= most:
            assert (admission is Admission.OVER_SHARE) == (not self.may_fix(name, size, 1))
        if admission not in (Admission.FITS, Admission.AFTER_EVICTION):
            assert not (self.within(name, 0, size) and self.within(name, 1, 1) and size <= most), (
                "within its share there is always room"
            )
            return None
        gone = []
        self.ledger.prepare(coming)
        while not self.ledger.fits(size):
            victim = next_victim(self.ledger, coming)
            assert victim is not None, "the ledger promised room"
            self.left(victim, name, size)
            gone.append(victim)
        self.ledger.reserve(coming)
        held = Held(name, coming)
        self.held.append(held)
        return held, gone

    def left(self, victim: Key, for_name: str, size: int) -> None:
        """Check that the victim was of the right part."""
        (held,) = [h for h in self.held if h.resident.key == victim]
        assert not held.fixed
        dimension = 0 if self.free()[0] < size else 1
        assert self.free()[dimension] < (size, 1)[dimension], "there is room"
        over = {}
        for name in self.shares:
            if any(h.name == name and not h.fixed for h in self.held):
                more = (size, 1)[dimension] if name == for_name else 0
                over[name] = self.sums(name)[dimension] + more - self.share(name)[dimension]
        assert over[held.name] > 0, "it takes no more than its share"
        assert over[held.name] == max(over.values()), "another is further above its own"
        self.held.remove(held)
        self.ledger.forget(held.resident)

    def publish(self, held: Held) -> None:
        held.reserved = False
        self.ledger.publish([held.resident])

    def cancel(self, held: Held) -> None:
        self.ledger.withdraw(held.resident)
        self.ledger.cancel(held.resident)
        self.held.remove(held)

    def pin(self, held: Held) -> None:
        adding = {held.resident.key: held.resident.stored_bytes}
        may = self.may_fix(held.name, held.resident.stored_bytes, 1)
        assert self.ledger.may_pin(adding) == may
        if may:
            held.pinned = True
            self.ledger.pin([held.resident])

    def unpin(self, held: Held) -> None:
        held.pinned = False
        self.ledger.unpin([held.resident])

    def check(self) -> None:
        assert self.ledger.shares is not None
        for standing in self.ledger.shares.standings:
            used = standing.used_bytes, standing.used_entries
            assert used == self.sums(standing.namespace)
            fixed = standing.fixed_bytes, standing.fixed_entries
            assert fixed == self.sums(standing.namespace, fixed=True)


def act(model: Model, chance: random.Random) -> None:
    name = chance.choice(list(model.shares))
    some = [h for h in model.held if h.name == name]
    one = chance.choice(some) if some else None
    match chance.randint(0, 9):
        case 0 | 1 | 2 | 3:
            reserved = model.reserve(name, chance.choice([1, 1, 2, 3, 7, 15, 40, 70, 100]))
            if reserved is not None and chance.random() < 0.9:
                model.publish(reserved[0])
        case 4 if one is not None and one.reserved:
            model.publish(one)
        case 5 if one is not None and one.reserved:
            model.cancel(one)
        case 6 if one is not None and not one.fixed:
            model.pin(one)
        case 7 | 8 if one is not None and one.pinned:
            model.unpin(one)
        case _ if one is not None and not one.reserved:
            model.ledger.policy.hit(one.resident)
    model.check()


@EVERY_POLICY
@pytest.mark.parametrize(
    ("shares", "max_entries"),
    [
        ({"a": 40, "b": 20}, 0),
        ({"a": 30, "b": 30, "c": 40}, 0),
        ({"a": 50, "b": 25}, 12),
        ({"a": 1}, 5),
    ],
)
def test_nobody_pushes_another_below_its_share(
    policy: str, shares: dict[str, int], max_entries: int
) -> None:
    """Random saves, pins and unpins. The model fails at the step that breaks a rule."""
    chance = random.Random(f"{policy} {shares} {max_entries}")
    model = Model(policy, shares, max_entries)
    for _ in range(STEPS):
        act(model, chance)
    for held in list(model.held):
        if held.pinned:
            model.unpin(held)
        if held.reserved:
            model.cancel(held)
    for name, share in shares.items():
        for _ in range(share):
            if not model.within(name, 0, 1) or not model.within(name, 1, 1):
                break
            reserved = model.reserve(name, 1)
            assert reserved is not None, "nobody keeps it from its share"
            model.publish(reserved[0])


@EVERY_POLICY
def test_what_is_foretold_happens(policy: str) -> None:
    chance = random.Random(policy)
    model = Model(policy, {"a": 30, "b": 30})
    foretold_evictions = 0
    for _ in range(STEPS):
        act(model, chance)
        if chance.random() < 0.7:
            continue
        name, size = chance.choice(NAMES[:3]), chance.choice([1, 2, 7, 20])
        entries = chance.choice([1, 1, 2, 4, 12])
        key = key_in(name, 0)
        if model.ledger.admission(entries * size, entries, key) not in (
            Admission.FITS,
            Admission.AFTER_EVICTION,
        ):
            continue
        sizes = {h.resident.key: h.resident.stored_bytes for h in model.held}
        foretold = list(model.ledger.foretell(size, entries, sizes.__getitem__, key))
        assert foretold == list(model.ledger.foretell(size, entries, sizes.__getitem__, key))
        gone = []
        coming = []
        for _ in range(entries):
            reserved = model.reserve(name, size)
            assert reserved is not None
            coming.append(reserved[0])
            gone += reserved[1]
        assert gone == foretold
        foretold_evictions += len(gone)
        for held in coming:
            model.publish(held)
    assert foretold_evictions > STEPS / 20


@EVERY_POLICY
def test_the_order_without_a_comer_empties_the_tier(policy: str) -> None:
    """For an operator: first from parts above their shares, then from all others."""
    model = Model(policy, {"a": 30, "b": 30})
    for name, count in (("a", 50), ("b", 20), ("", 30)):
        for _ in range(count):
            reserved = model.reserve(name, 1)
            assert reserved is not None
            model.publish(reserved[0])
    sizes = {h.resident.key: h.resident.stored_bytes for h in model.held}
    order = list(model.ledger.victims(sizes.__getitem__))
    assert len(order) == 100
    names = {h.resident.key: h.name for h in model.held}
    assert [names[key] for key in order[:10]] == [""] * 10, "the furthest above its share"
    assert "b" not in [names[key] for key in order[:50]], "it is within its share"
    gone = []
    while (victim := next_victim(model.ledger, below_shares=True)) is not None:
        (held,) = [h for h in model.held if h.resident.key == victim]
        model.held.remove(held)
        model.ledger.forget(held.resident)
        gone.append(victim)
    assert gone == order


def test_what_shares_leave_is_divided_evenly() -> None:
    model = Model("lru", {"a": 20, "b": 40})
    for _ in range(500):
        for name in ("a", "b", ""):
            reserved = model.reserve(name, 1)
            assert reserved is not None
            model.publish(reserved[0])
    assert [model.sums(name)[0] for name in ("a", "b", "")] == [33, 54, 13]


def test_one_that_took_too_much_gives_what_another_is_sure_of() -> None:
    """In whole entries: it keeps as many as fit into its share."""
    model = Model("lru", {"a": 50, "b": 50})
    for size in (49, 49):
        reserved = model.reserve("a", size)
        assert reserved is not None
        model.publish(reserved[0])
    reserved = model.reserve("b", 10)
    assert reserved is not None
    assert model.sums("a") == (49, 1)
    model.publish(reserved[0])
    for _ in range(40):
        one = model.reserve("b", 1)
        assert one is not None
        model.publish(one[0])
    assert (model.sums("a")[0], model.sums("b")[0]) == (49, 50)


def test_while_the_memory_is_not_there_shares_are_smaller() -> None:
    model = Model("lru", {"a": 40, "b": 40})
    ledger = model.ledger
    ledger.limit_bytes = 40
    for name in ("a", "b"):
        for number in range(20):
            coming = Resident(key_in(name, number), 1, ())
            assert ledger.admission(1, 1, coming.key) is Admission.FITS
            ledger.prepare(coming)
            ledger.reserve(coming)
            ledger.publish([coming])
    coming = Resident(key_in("a", 99), 1, ())
    assert ledger.admission(1, 1, coming.key) is Admission.AFTER_EVICTION
    assert ledger.next_victim(coming) == key_in("a", 0), "b has no more than its half"


def test_entries_that_are_pinned_together_count_together() -> None:
    """At most ten entries. `a` is guaranteed five and uses none; others may pin five."""
    model = Model("lru", {"a": 50}, max_entries=10)
    keys = []
    for _ in range(6):
        reserved = model.reserve("", 1)
        assert reserved is not None
        model.publish(reserved[0])
        keys.append(reserved[0].resident.key)
    allowed = [model.ledger.may_pin(dict.fromkeys(keys[:count], 1)) for count in range(1, 7)]
    assert allowed == [True] * 5 + [False]
