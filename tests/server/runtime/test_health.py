"""Conditions last until they are over, faults for a while."""

from __future__ import annotations

from prefixd.server.runtime.health import FAULT_SHOWN_NS, Health
from tests.support.running import ManualClock


def test_a_fault_is_shown_for_a_while_after_it_happened_last() -> None:
    clock = ManualClock()
    health = Health(clock)
    assert health.unhealthy() == {}
    health.fault("effects", "it failed")
    clock.forward(FAULT_SHOWN_NS / 2e9)
    health.fault("effects", "it failed again")
    clock.forward(FAULT_SHOWN_NS / 2e9)
    assert health.unhealthy() == {"effects": "it failed again"}
    clock.forward(FAULT_SHOWN_NS / 2e9)
    assert health.unhealthy() == {}


def test_what_works_again_is_no_fault() -> None:
    health = Health(ManualClock())
    health.fault("disk reads", "EIO")
    health.succeeded("shm reads")
    assert health.unhealthy() == {"disk reads": "EIO"}
    health.succeeded("disk reads")
    assert health.unhealthy() == {}


def test_a_condition_lasts() -> None:
    clock = ManualClock()
    health = Health(clock)
    health.conditions["shm arena"] = "no room"
    clock.forward(2 * FAULT_SHOWN_NS / 1e9)
    assert health.unhealthy() == {"shm arena": "no room"}
    del health.conditions["shm arena"]
    assert health.unhealthy() == {}
