# ruff: noqa: ARG002 (the twins share signatures)
"""Every policy, hit by hit and eviction by eviction, against a slow twin that shares no code.

The twins are lists that are scanned from the front; a pinned key stays where it is and is
looked past. They know weights and pins, and the shares that S3-FIFO gives its queues.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction import POLICIES, EvictionPolicy, make_policy


class Twin:
    """A cache of weighted keys: who is resident, and who would leave for a new key."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.weight: dict[int, int] = {}
        self.pinned: set[int] = set()

    def used(self) -> int:
        return sum(self.weight.values())

    def total(self, keys: Iterable[int]) -> int:
        return sum(self.weight[key] for key in keys)

    def first_free(self, keys: Iterable[int]) -> int | None:
        return next((key for key in keys if key not in self.pinned), None)

    def access(self, key: int, weight: int) -> tuple[bool, list[int]]:
        """(was it a hit, who was evicted)."""
        evicted: list[int] = []
        if key in self.weight:
            self.hit(key)
            return True, evicted
        if weight > self.capacity:
            return False, evicted
        self.announce(key, weight)
        while self.is_short(key, weight):
            victim = self.evict(key, weight)
            if victim is None:
                return False, evicted
            evicted.append(victim)
        self.weight[key] = weight
        self.enter(key)
        return False, evicted

    def announce(self, key: int, weight: int) -> None: ...

    def is_short(self, key: int, weight: int) -> bool:
        return self.used() + weight > self.capacity

    def hit(self, key: int) -> None: ...

    def refresh(self, key: int) -> None: ...

    def enter(self, key: int) -> None: ...

    def forget(self, key: int) -> None:
        """The key leaves the cache; ghosts are the caller's business."""
        del self.weight[key]

    def evict(self, key: int | None, weight: int) -> int | None:
        raise NotImplementedError

    def remove(self, key: int) -> None:
        self.pinned.discard(key)
        self.forget(key)

    def pin(self, key: int) -> None:
        self.pinned.add(key)

    def unpin(self, key: int) -> None:
        self.pinned.remove(key)

    def ghosts(self) -> int:
        return 0


class TwinFIFO(Twin):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []

    def enter(self, key: int) -> None:
        self.queue.append(key)

    def forget(self, key: int) -> None:
        super().forget(key)
        self.queue.remove(key)

    def evict(self, key: int | None, weight: int) -> int | None:
        victim = self.first_free(self.queue)
        if victim is not None:
            self.forget(victim)
        return victim


class TwinLRU(TwinFIFO):
    def refresh(self, key: int) -> None:
        self.queue.remove(key)
        self.queue.append(key)

    hit = refresh

    def unpin(self, key: int) -> None:
        super().unpin(key)
        self.refresh(key)


class TwinLFU(TwinFIFO):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.count: dict[int, int] = {}

    def enter(self, key: int) -> None:
        super().enter(key)
        self.count[key] = 1

    def hit(self, key: int) -> None:
        self.count[key] += 1

    def evict(self, key: int | None, weight: int) -> int | None:
        victim = self.first_free(sorted(self.queue, key=lambda k: self.count[k]))
        if victim is not None:
            self.forget(victim)
        return victim


class TwinS3FIFO(Twin):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small_limit = max(1, round(capacity * 0.1))
        self.main_limit = max(0, capacity - self.small_limit)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[tuple[int, int]] = []
        self.count: dict[int, int] = {}

    def is_ghost(self, key: int | None) -> bool:
        return any(ghost == key for ghost, _ in self.ghost)

    def hit(self, key: int) -> None:
        self.count[key] = min(3, self.count[key] + 1)

    def forget(self, key: int) -> None:
        super().forget(key)
        del self.count[key]
        (self.small if key in self.small else self.main).remove(key)

    def enter(self, key: int) -> None:
        self.count[key] = 0
        (self.main if self.is_ghost(key) else self.small).append(key)
        self.ghost = [entry for entry in self.ghost if entry[0] != key]

    def over(self, queue: list[int], extra: int) -> bool:
        limit = self.small_limit if queue is self.small else self.main_limit
        return self.total(queue) + extra > limit

    def is_short(self, key: int, weight: int) -> bool:
        if super().is_short(key, weight):
            return True
        queue = self.main if self.is_ghost(key) else self.small
        return self.over(queue, weight) and self.first_free(queue) is not None

    def promote(self, weight: int) -> None:
        """Warm heads of a full S that fit into M go there without an eviction."""
        while self.over(self.small, weight):
            head = self.first_free(self.small)
            if head is None or not self.count[head] or self.over(self.main, self.weight[head]):
                return
            self.small.remove(head)
            self.main.append(head)

    def announce(self, key: int, weight: int) -> None:
        if not self.is_ghost(key):
            self.promote(weight)

    def from_main(self) -> int | None:
        while (head := self.first_free(self.main)) is not None and self.count[head]:
            self.count[head] -= 1
            self.main.remove(head)
            self.main.append(head)
        return head

    def from_small(self) -> int | None:
        head = self.first_free(self.small)
        if head is None:
            return self.from_main()
        if not self.count[head] or self.weight[head] > self.main_limit:
            return head
        if self.over(self.main, self.weight[head]):
            victim = self.from_main()
            return head if victim is None else victim
        self.small.remove(head)
        self.main.append(head)
        return self.from_small()

    def evict(self, key: int | None, weight: int) -> int | None:
        if returns := self.is_ghost(key):
            small_gives = self.over(self.small, 0) and not self.over(self.main, weight)
        else:
            small_gives = self.over(self.small, weight)
        victim = None if small_gives else self.from_main()
        if victim is None:
            victim = self.from_small()
        if victim is None:
            return None
        remembered = [entry for entry in self.ghost if not (returns and entry[0] == key)]
        waiting = [entry for entry in self.ghost if entry not in remembered]
        if self.weight[victim] <= self.main_limit:
            remembered.append((victim, self.weight[victim]))
        self.forget(victim)
        self.promote(0 if returns else weight)
        while sum(w for _, w in remembered) > self.main_limit:
            del remembered[0]
        self.ghost = remembered + waiting
        return victim

    def ghosts(self) -> int:
        return len(self.ghost)


class TwinARC(Twin):
    """T1 and T2 are lists with the pinned keys where they were; the weights do the rest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[tuple[int, int]] = []
        self.b2: list[tuple[int, int]] = []

    @staticmethod
    def of(ghosts: list[tuple[int, int]]) -> int:
        return sum(weight for _, weight in ghosts)

    @staticmethod
    def has(ghosts: list[tuple[int, int]], key: int | None) -> bool:
        return any(ghost == key for ghost, _ in ghosts)

    def hit(self, key: int) -> None:
        (self.t1 if key in self.t1 else self.t2).remove(key)
        self.t2.append(key)

    def refresh(self, key: int) -> None:
        home = self.t1 if key in self.t1 else self.t2
        home.remove(key)
        home.append(key)

    def unpin(self, key: int) -> None:
        super().unpin(key)
        self.refresh(key)

    def forget(self, key: int) -> None:
        super().forget(key)
        (self.t1 if key in self.t1 else self.t2).remove(key)

    def announce(self, key: int, weight: int) -> None:
        b1, b2 = self.of(self.b1), self.of(self.b2)
        if self.has(self.b1, key):
            self.p = min(float(self.capacity), self.p + weight * (b2 / b1 if b2 > b1 else 1.0))
        if self.has(self.b2, key):
            self.p = max(0.0, self.p - weight * (b1 / b2 if b1 > b2 else 1.0))

    def evict(self, key: int | None, weight: int) -> int | None:
        size = self.total(self.t1)
        prefers_t1 = size > self.p or (size == self.p and self.has(self.b2, key))
        victims = [self.first_free(self.t1), self.first_free(self.t2)]
        victim = victims[not prefers_t1]
        if victim is None:
            victim = victims[prefers_t1]
        if victim is not None:
            (self.b1 if victim in self.t1 else self.b2).append((victim, self.weight[victim]))
            self.forget(victim)
        return victim

    def enter(self, key: int) -> None:
        ghost = self.has(self.b1, key) or self.has(self.b2, key)
        self.b1 = [entry for entry in self.b1 if entry[0] != key]
        self.b2 = [entry for entry in self.b2 if entry[0] != key]
        (self.t2 if ghost else self.t1).append(key)
        while self.b1 and self.total(self.t1) + self.of(self.b1) > self.capacity:
            del self.b1[0]
        while self.b2 and self.used() + self.of(self.b1) + self.of(self.b2) > 2 * self.capacity:
            del self.b2[0]

    def ghosts(self) -> int:
        return len(self.b1) + len(self.b2)


TWINS: dict[str, type[Twin]] = {
    "lru": TwinLRU,
    "lfu": TwinLFU,
    "fifo": TwinFIFO,
    "s3fifo": TwinS3FIFO,
    "arc": TwinARC,
}

names = pytest.mark.parametrize("name", list(POLICIES))
keys = st.integers(0, 11)
runs = st.lists(keys, max_size=300)
capacities = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 10, 11, 15])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("access"), keys, st.integers(1, 6)),
        st.tuples(st.just("access"), keys, st.just(1)),
        st.tuples(
            st.sampled_from(["pin", "unpin", "remove", "refresh", "evict"]), keys, st.just(1)
        ),
    ),
    max_size=120,
)


def test_the_registry_knows_five_names() -> None:
    assert list(POLICIES) == ["lru", "lfu", "fifo", "s3fifo", "arc"]
    for name, policy in POLICIES.items():
        made = make_policy(name, 7, max_ghosts=3)
        assert (type(made), made.name) == (policy, name)
        assert (made.capacity, made.max_ghosts) == (7, 3)


def test_an_unknown_name_and_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy 'clock', known are lru, lfu, fifo, s3f"):
        make_policy("clock", 1)
    for name in POLICIES:
        with pytest.raises(ValueError, match="capacity must not be negative, got -1"):
            make_policy(name, -1)
        with pytest.raises(ValueError, match="ghosts must not be negative, got -2"):
            make_policy(name, 1, max_ghosts=-2)


def residents(policy: EvictionPolicy[int]) -> list[int]:
    found = sorted(policy.keys())
    assert len(found) == len(policy) == len(set(found))
    assert all(key in policy for key in found)
    return found


@names
@given(ids=runs, capacity=capacities)
@settings(deadline=None)
def test_unit_weights_equal_the_twin_at_every_access(
    name: str, ids: list[int], capacity: int
) -> None:
    policy, twin = make_policy(name, capacity), TWINS[name](capacity)
    for key in ids:
        before = set(policy.keys())
        hit, evicted = twin.access(key, 1)
        assert policy.access(key) is hit
        assert before - set(policy.keys()) == set(evicted)
        assert (policy.used, policy.ghosts) == (twin.used(), twin.ghosts())
    assert residents(policy) == sorted(twin.weight)


@names
@given(ids=runs, capacity=capacities, cut=st.integers(1, 40))
@settings(deadline=None)
def test_a_run_equals_single_accesses(name: str, ids: list[int], capacity: int, cut: int) -> None:
    policy, single = make_policy(name, capacity), make_policy(name, capacity)
    for start in range(0, len(ids), cut):
        run = ids[start : start + cut]
        assert policy.resident_run(run) == next(
            (index for index, key in enumerate(run) if key not in single), len(run)
        )
        assert policy.access_run(run) == sum([single.access(key) for key in run])
        assert (policy.moves, policy.used, policy.ghosts) == (
            single.moves, single.used, single.ghosts,
        )  # fmt: skip
    assert list(policy.keys()) == list(single.keys())
    assert list(policy.victims()) == list(single.victims())


@names
@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 30])
def test_long_streams_equal_the_twin_one_by_one_and_in_runs(name: str, capacity: int) -> None:
    chance = random.Random(capacity)
    for universe in (capacity + 1, 2 * capacity, 5 * capacity):
        ids = [int(chance.paretovariate(1)) % universe for _ in range(700)]
        ids += [chance.randrange(universe) for _ in range(700)]
        single, run, twin = (
            make_policy(name, capacity),
            make_policy(name, capacity),
            TWINS[name](capacity),
        )
        for start in range(0, len(ids), 7):
            part = ids[start : start + 7]
            hits = [single.access(key) for key in part]
            assert hits == [twin.access(key, 1)[0] for key in part]
            assert run.access_run(part) == sum(hits)
            assert list(run.keys()) == list(single.keys())
            assert (run.moves, run.ghosts) == (single.moves, single.ghosts)
            assert (single.used, single.ghosts) == (twin.used(), twin.ghosts())
            assert residents(single) == sorted(twin.weight)


@names
@given(steps=steps, capacity=st.sampled_from([0, 1, 3, 8, 10, 16, 25]))
@settings(max_examples=300, deadline=None)
def test_weights_and_pins_equal_the_twin(
    name: str, steps: list[tuple[str, int, int]], capacity: int
) -> None:
    policy, twin = make_policy(name, capacity), TWINS[name](capacity)
    for step, key, weight in steps:
        pinned = key in twin.pinned
        before = set(policy.keys())
        gone: Iterable[int] = ()
        if step == "access":
            hit, gone = twin.access(key, weight)
            assert policy.access(key, weight) is hit
        elif step == "evict":
            victim = twin.evict(None, 1)
            assert policy.evict() == victim
            gone = () if victim is None else (victim,)
        elif key in twin.weight and (
            step != "unpin" if not pinned else step in ("unpin", "remove")
        ):
            getattr(policy, step)(key)
            getattr(twin, step)(key)
            gone = (key,) if step == "remove" else ()
        assert before - set(policy.keys()) == set(gone)
        assert residents(policy) == sorted(twin.weight)
        assert (policy.used, policy.ghosts) == (twin.used(), twin.ghosts())
        assert policy.used <= capacity
        assert_victims_predict_evictions(policy, twin)


def assert_victims_predict_evictions(policy: EvictionPolicy[int], twin: Twin) -> None:
    predicted = list(policy.victims())
    assert sorted(predicted) == sorted(twin.weight.keys() - twin.pinned)
    copied = copy.deepcopy(policy)
    assert [copied.evict() for _ in predicted] == predicted
    assert copied.evict() is None
    assert sorted(copied.keys()) == sorted(twin.pinned)


@names
def test_keys_restore_the_order(name: str) -> None:
    """A tier that comes back after a restart admits what it finds in the order of `keys`."""
    policy = make_policy(name, 100)
    for key in [*range(20), 3, 3, 7]:
        policy.access(key)
    restored: Any = make_policy(name, 100)
    for key in policy.keys():  # noqa: SIM118 (not a mapping)
        restored.prepare(key, 1)
        restored.admit(key, 1)
    assert list(restored.keys()) == list(policy.keys())
    if name != "s3fifo":  # which forgets who was hit
        assert list(restored.victims()) == list(policy.victims())
