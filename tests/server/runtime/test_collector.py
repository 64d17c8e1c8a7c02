"""The cycle collector is kept away from what lives long, and not from what is young."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from prefixd.server.runtime import collector
from prefixd.server.runtime.collector import Freezer, look_seldom


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_is_alive_is_frozen_once_enough_was_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_MAX_WATCHED_ENTRIES", 100)
    freezer = Freezer()
    freezer.published(99)
    assert gc.get_freeze_count() == 0
    freezer.published(100)
    frozen = gc.get_freeze_count()
    assert frozen > 0
    # Counted from there: not with every entry after the hundredth.
    gc.unfreeze()
    freezer.published(199)
    assert gc.get_freeze_count() == 0
    freezer.published(200)
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_young_cycles_do_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_MAX_WATCHED_ENTRIES", 1)
    gone: list[str] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            gone.append("cycle")

    Cycle()
    Freezer().published(1)
    assert gone == ["cycle"]


def test_many_objects_that_are_gone_by_themselves_are_not_looked_for() -> None:
    before = gc.get_threshold()
    try:
        look_seldom()
        assert gc.get_threshold()[0] == collector._NEW_OBJECTS
    finally:
        gc.set_threshold(*before)
