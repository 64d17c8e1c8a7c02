"""Every eviction policy against its slow twin, hit by hit and eviction by eviction."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction import POLICIES, EvictionPolicy, make_policy
from tests.model.eviction_twins import TWINS, Twin
from tests.support.lengths import times

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
@settings(max_examples=times(50, 1_000), deadline=None)
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
