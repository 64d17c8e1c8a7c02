"""What a session pins, few entries and many."""

from __future__ import annotations

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server.core import sessions as module
from prefixd.server.core.checking import Recount
from prefixd.server.core.sessions import Claim, Pins
from prefixd.server.core.transition import Transition

from ...support.state_driver import Driver

NAMES = "a b c d e f g h"


@pytest.fixture
def split_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_AT", 4)


@pytest.mark.usefixtures("split_early")
def test_a_session_that_holds_much_has_it_in_parts() -> None:
    driver = Driver(stamp_ns=0)
    session = driver.tables.sessions[driver.open()]
    driver.save(session.session, NAMES)
    entries = [driver.entry(name) for name in NAMES.split()]
    transition, pins = Transition(driver.tables, 10), session.pins
    transition.pin(session, Claim(1, session.session, tuple(entries[:3]), 0, 100))
    assert (len(pins.parts), len(pins)) == (1, 3)
    transition.pin(session, Claim(2, session.session, tuple(entries[2:6]), 0, 100))
    assert len(pins.parts) > 1
    transition.pin(session, Claim(3, session.session, tuple(entries[5:]), 0, 100))
    assert set(pins) == set(entries)
    assert len(pins) == len(entries)
    assert all(entry in pins for entry in entries)
    assert session.pinned_bytes == {Tier.RAM: len(entries)}, "each is charged once"
    transition.unpin(1, session, entries[:3])
    assert set(pins) == set(entries[2:])


@pytest.mark.usefixtures("split_early")
def test_what_it_is_charged_is_recounted_unless_it_changes_meanwhile() -> None:
    driver = Driver(stamp_ns=0)
    session = driver.tables.sessions[driver.open()]
    driver.save(session.session, NAMES)
    driver.claim(session.session, NAMES)
    assert session.pins.mask
    assert driver.state.check() == []
    session.pinned_bytes[Tier.RAM] += 1
    (problem,) = driver.state.check()
    assert problem.endswith("is charged 9 pinned bytes, and holds others")
    recount = Recount(driver.tables, 1)
    for _ in recount.steps():
        session.pins.changes += 1
    assert recount.problems == []


def test_little_is_one_dict() -> None:
    pins = Pins()
    pins.changed()
    assert (len(pins.parts), len(pins), list(pins)) == (1, 0, [])
