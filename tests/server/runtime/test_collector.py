"""The cycle collector is kept away from what lives long, and not from what is young."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from prefixd.server.core.counters import TierCounters
from prefixd.server.runtime import collector
from prefixd.server.runtime.collector import Freezer


@pytest.fixture
def thawed() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.unfreeze()
    yield
    # As the suite has it, see `tests/conftest.py`.
    gc.freeze()
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("thawed")
def test_what_is_alive_is_frozen_once_enough_was_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "_MAX_WATCHED_ENTRIES", 100)
    freezer = Freezer()
    freezer.published([TierCounters(saves=99)])
    assert gc.get_freeze_count() == 0
    freezer.published([TierCounters(saves=60), TierCounters(recovered_entries=40)])
    frozen = gc.get_freeze_count()
    assert frozen > 0
    # Counted from there: not with every entry after the hundredth.
    gc.unfreeze()
    freezer.published([TierCounters(saves=199)])
    assert gc.get_freeze_count() == 0
    freezer.published([TierCounters(saves=200)])
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
    Freezer().published([TierCounters(saves=1)])
    assert gone == ["cycle"]


@pytest.mark.usefixtures("thawed")
def test_what_a_start_made_is_not_looked_at_again_and_a_batch_is_not_often() -> None:
    collector.begin()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] >= 8192


@pytest.mark.usefixtures("thawed")
def test_what_is_large_is_not_looked_at_even_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_MAX_WATCHED_ENTRIES", 100)
    passes: list[str] = []

    def look(phase: str, _info: dict[str, int]) -> None:
        passes.append(phase)

    gc.callbacks.append(look)
    try:
        Freezer().expect(99)
        assert gc.get_freeze_count() == 0
        Freezer().expect(100)
    finally:
        gc.callbacks.remove(look)
    assert gc.get_freeze_count() > 0
    assert not passes
