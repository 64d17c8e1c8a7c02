"""Idle heap is given back, and the cycle collector does not see what lives long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixd.server.core.counters import TierCounters
from prefixd.server.runtime import process_memory
from prefixd.server.runtime.process_memory import Freezer, IdleHeap, give_back_idle_heap
from tests.support.event_loop import in_loop

MIB = 2**20


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an element for each time that free heap was given back."""
    given: list[int] = []
    monkeypatch.setattr(process_memory, "give_back_free_heap", lambda: given.append(1))
    return given


def looks(monkeypatch: pytest.MonkeyPatch, *free_mib: int, calm: bool = True) -> list[int]:
    heap, left = IdleHeap(), list(free_mib)
    monkeypatch.setattr(process_memory, "free_heap_bytes", lambda: left.pop(0) * MIB)
    return [heap.look(calm=calm) // MIB for _ in free_mib]


def test_what_was_free_all_the_time_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch, given_back: list[int]
) -> None:
    assert looks(monkeypatch, 9, 8, 7, 9, 9, 9, 9, 3) == [0, 0, 0, 7, 0, 0, 0, 3]
    assert len(given_back) == 2


def test_what_comes_and_goes_is_kept(
    monkeypatch: pytest.MonkeyPatch, given_back: list[int]
) -> None:
    assert not any(looks(monkeypatch, *[50, 40, 1, 60] * 5))
    assert not given_back


def test_much_is_given_back_when_nobody_is_served(
    monkeypatch: pytest.MonkeyPatch, given_back: list[int]
) -> None:
    """Giving back much delays calls."""
    assert not any(looks(monkeypatch, *[500] * 10, calm=False))
    assert not given_back
    assert looks(monkeypatch, 500, 500, 500, 500) == [0, 0, 0, 500]


async def until_given_back(given_back: list[int], served: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as executor:
        looking = asyncio.ensure_future(give_back_idle_heap(executor, served))
        while not given_back:
            await asyncio.sleep(0)
        looking.cancel()


@in_loop
async def test_it_is_calm_where_nothing_was_served(
    monkeypatch: pytest.MonkeyPatch, given_back: list[int]
) -> None:
    monkeypatch.setattr(process_memory, "LOOK_S", 0.0)
    monkeypatch.setattr(process_memory, "free_heap_bytes", lambda: 500 * MIB)
    seen: list[int] = []

    def served() -> int:
        seen.append(len(given_back))
        return min(len(seen), 20)

    await until_given_back(given_back, served)
    assert seen[:20] == [0] * 20


@in_loop
async def test_cycles_are_collected_where_nothing_was_served(
    monkeypatch: pytest.MonkeyPatch, given_back: list[int]
) -> None:
    """Only once: while nothing happens, there is no new garbage."""
    monkeypatch.setattr(process_memory, "LOOK_S", 0.0)
    monkeypatch.setattr(process_memory, "free_heap_bytes", lambda: 500 * MIB)
    collections: list[int] = []
    monkeypatch.setattr(process_memory.gc, "collect", lambda: collections.append(len(given_back)))
    await until_given_back(given_back, lambda: "nothing")
    assert collections == [0]


# ---- the cycle collector


@pytest.fixture
def thawed() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.unfreeze()
    yield
    # The settings of the suite, see `tests/conftest.py`.
    gc.freeze()
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("thawed")
def test_what_is_alive_is_frozen_once_enough_was_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "_MAX_WATCHED_ENTRIES", 100)
    freezer = Freezer()
    freezer.published([TierCounters(saves=99)])
    assert gc.get_freeze_count() == 0
    freezer.published([TierCounters(saves=60), TierCounters(recovered_entries=40)])
    frozen = gc.get_freeze_count()
    assert frozen > 0
    # The count begins anew: it does not freeze with every entry after the hundredth.
    gc.unfreeze()
    freezer.published([TierCounters(saves=199)])
    assert gc.get_freeze_count() == 0
    freezer.published([TierCounters(saves=200)])
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_young_cycles_do_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_MAX_WATCHED_ENTRIES", 1)
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
    process_memory.begin()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] >= 8192


@pytest.mark.usefixtures("thawed")
def test_what_is_large_is_not_looked_at_even_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_MAX_WATCHED_ENTRIES", 100)
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
