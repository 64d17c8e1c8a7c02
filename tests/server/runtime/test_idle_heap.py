"""Memory that was free for a minute is given back; what comes and goes, and is much while somebody
is served, is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixd.server.runtime import idle_heap
from prefixd.server.runtime.idle_heap import IdleHeap, give_back_idle_heap
from tests.support.running import in_loop

MIB = 2**20


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was given back, by the amount that was free then; `free` says how much that is."""
    given: list[int] = []
    monkeypatch.setattr(idle_heap, "give_back_free_heap", lambda: given.append(1))
    return given


def looks(monkeypatch: pytest.MonkeyPatch, *free_mib: int, calm: bool = True) -> list[int]:
    heap, left = IdleHeap(), list(free_mib)
    monkeypatch.setattr(idle_heap, "free_heap_bytes", lambda: left.pop(0) * MIB)
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
    """It takes as long as others may have to wait."""
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
    monkeypatch.setattr(idle_heap, "LOOK_S", 0.0)
    monkeypatch.setattr(idle_heap, "free_heap_bytes", lambda: 500 * MIB)
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
    """Once: nothing becomes garbage where nothing happens."""
    monkeypatch.setattr(idle_heap, "LOOK_S", 0.0)
    monkeypatch.setattr(idle_heap, "free_heap_bytes", lambda: 500 * MIB)
    collections: list[int] = []
    monkeypatch.setattr(idle_heap.gc, "collect", lambda: collections.append(len(given_back)))
    await until_given_back(given_back, lambda: "nothing")
    assert collections == [0]
