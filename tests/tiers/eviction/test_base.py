"""What every policy keeps: its name, the protocol, runs that equal single accesses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction import POLICIES, make_policy

names = pytest.mark.parametrize("name", list(POLICIES))


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


@names
@given(
    ids=st.lists(st.integers(0, 11), max_size=300),
    capacity=st.integers(0, 15),
    cut=st.integers(1, 40),
)
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
