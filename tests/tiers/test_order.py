"""The order of a tier. Its LRU equals the LRU of the replay, step by step."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.proto.keys import Key
from prefixd.tiers.eviction import POLICIES, make_policy
from prefixd.tiers.order import Order, OrderOfKeys, Recency, Resident, order_by

CAPACITY = 1 << 40
STEPS = ("enter", "unpin", "pin", "hit", "refresh", "remove", "evict")
#: Of several at once.
TOGETHER = ("unpin_all", "pin_all", "hit_all", "refresh_all", "evict_all")

steps = st.lists(st.tuples(st.sampled_from(STEPS + TOGETHER), st.integers(0, 9)), max_size=150)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def resident(number: int, stored_bytes: int = 1) -> Resident:
    return Resident(key=key(number), stored_bytes=stored_bytes, place=())


class Both:
    """The order of a tier, and the same policy by keys. Both take the same steps."""

    def __init__(self) -> None:
        policy = make_policy("lru", CAPACITY)
        self.tier: Order = order_by(policy)
        self.keys: Order = OrderOfKeys(policy)
        self.residents: dict[int, Resident] = {}
        self.pinned: set[int] = set()

    def step(self, what: str, number: int) -> None:
        """Take a step, if it is valid."""
        match what:
            case "enter":
                if number not in self.residents:
                    self.residents[number] = resident(number)
                    self.pinned.add(number)
                    self.both(what, number)
            case "evict":
                victim = self.tier.evict(None)
                assert victim == self.keys.evict(None)
                if victim is not None:
                    del self.residents[int.from_bytes(victim, "big")]
            case _ if number not in self.residents:
                pass
            case "pin" if number not in self.pinned:
                self.pinned.add(number)
                self.both(what, number)
            case "unpin" if number in self.pinned:
                self.pinned.remove(number)
                self.both(what, number)
            case "hit" | "refresh":
                self.both(what, number)
            case "remove":
                self.both(what, number)
                self.pinned.discard(number)
                del self.residents[number]
            case "pin_all" | "unpin_all":
                chosen = self.pinned if what == "unpin_all" else self.residents.keys() - self.pinned
                together = sorted(chosen, key=lambda other: other * number % 7)[: number + 1]
                self.all(what, together)
                self.pinned.symmetric_difference_update(together)
            case "hit_all" | "refresh_all":
                some = [other for other in self.residents if other % 3 == number % 3]
                self.all(what, [*some, *some[:1], number])  # also one that comes twice
            case "evict_all":
                self.evict_all(number, most=4)

    def all(self, what: str, numbers: list[int]) -> None:
        """A step of several by the tier's order, and by the keys one after the other."""
        getattr(self.tier, what)([self.residents[number] for number in numbers])
        for number in numbers:
            getattr(self.keys, what.removesuffix("_all"))(self.residents[number])

    def evict_all(self, stored_bytes: int, most: int) -> None:
        """Each takes one byte."""
        there = list(self.tier.victims())
        victims = self.tier.evict_all(stored_bytes, most)
        if stored_bytes > min(len(there), most):
            assert not victims, "it takes more than that"
            return
        assert [victim.key for victim in victims] == there[:stored_bytes]
        assert [self.keys.evict(None) for _ in victims] == there[:stored_bytes]
        assert not any(self.tier.holds(victim) for victim in victims)
        for victim in victims:
            del self.residents[int.from_bytes(victim.key, "big")]

    def both(self, what: str, number: int) -> None:
        for order in (self.tier, self.keys):
            getattr(order, what)(self.residents[number])

    def compare(self) -> None:
        assert list(self.tier.victims()) == list(self.keys.victims())
        unpinned = {key(number) for number in self.residents.keys() - self.pinned}
        assert set(self.tier.keys()) == unpinned
        assert set(self.keys.keys()) == {key(number) for number in self.residents}


@given(steps)
@settings(deadline=None)
def test_it_is_the_lru_of_the_replay(steps: list[tuple[str, int]]) -> None:
    both = Both()
    for what, number in steps:
        both.step(what, number)
        both.compare()


def test_it_is_so_in_the_long_run() -> None:
    both, chance = Both(), random.Random(1)
    for _ in range(20_000):
        both.step(chance.choice(STEPS), chance.randrange(200))
    for _ in range(200):
        both.step(chance.choice(TOGETHER), chance.choice([*both.residents]))
        both.compare()
    both.compare()
    while both.residents.keys() - both.pinned:
        both.step("evict", 0)
    assert both.tier.evict(None) is None


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_orders_a_tier(name: str) -> None:
    """Every call reaches the policy: the victim is the oldest resident, or the unused one."""
    order = order_by(make_policy(name, 30))
    assert order.name == name
    assert isinstance(order, Recency) == (name == "lru")
    held = [resident(number) for number in range(3)]
    for one in held:
        order.prepare(one)
        order.enter(one)
    assert list(order.victims()) == []
    assert len(set(order.keys())) == (3 if order.keeps_pinned else 0)
    order.unpin_all(held)
    order.hit_all(held[:1])
    order.pin_all(held[1:2])
    order.unpin(held[1])
    order.remove(held[2])
    used = {"lru": [0, 1], "fifo": [0, 1], "arc": [1, 0], "lfu": [1, 0], "s3fifo": [1, 0]}[name]
    assert list(order.victims()) == [key(number) for number in used]
    assert [order.evict(held[2]) for _ in used] == [key(number) for number in used]
    assert order.evict(None) is None


def test_shares_and_ghosts_are_those_of_the_policy() -> None:
    """S3FIFO has a small queue of a tenth for new keys, and remembers what left it."""
    order = order_by(make_policy("s3fifo", 100))
    first, second, again, third = (resident(*one) for one in ((1, 8), (2, 5), (1, 8), (3, 7)))
    _enter(order, first)
    order.prepare(second)
    assert order.evict(second) == first.key
    _enter(order, second)
    order.prepare(again)
    _enter(order, again)  # a ghost: it goes to the main queue
    order.prepare(third)
    assert order.evict(third) == second.key, "room is made where it is wanted"


def _enter(order: Order, one: Resident) -> None:
    order.prepare(one)
    order.enter(one)
    order.unpin(one)


class Watched(Resident):
    """A resident that supports weak references."""

    __slots__ = ("__weakref__",)


def test_who_left_is_freed_at_once_and_keeps_nobody_alive() -> None:
    """Without the cycle collector, which does not track residents."""
    order = order_by(make_policy("lru", CAPACITY))
    held = [Watched(key=key(number), stored_bytes=1, place=()) for number in range(4)]
    for one in held:
        order.enter(one)
        order.unpin(one)
    watched = [weakref.ref(one) for one in held]
    gc.disable()
    try:
        order.remove(held[1])
        assert order.evict(None) == key(0)
        order.pin(held[3])
        del held[3], held[1], held[0], one
        assert [one() is None for one in watched] == [True, True, False, True]
    finally:
        gc.enable()


def test_a_place_in_the_order_takes_no_memory() -> None:
    order = order_by(make_policy("lru", CAPACITY))
    held = [resident(number) for number in range(10_000)]
    gc.collect()
    tracemalloc.start()
    for one in held:
        order.enter(one)
        order.unpin(one)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocated < 10_000
    assert sum(1 for _ in order.victims()) == len(held)
