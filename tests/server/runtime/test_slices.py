"""Long work leaves room for everything else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from prefixd.server.runtime import slices
from prefixd.server.runtime.slices import Slices


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice is over at once."""
    monkeypatch.setattr(slices, "SLICE_NS", 0)
    monkeypatch.setattr(slices, "_SORTED_AT_ONCE", 3)


def test_others_come_between_any_two_slices(tiny: None) -> None:  # noqa: ARG001 (a fixture)
    seen: list[str] = []

    def steps() -> Iterator[None]:
        for number in range(3):
            seen.append(f"step {number}")
            yield

    async def other() -> None:
        for number in range(3):
            seen.append(f"other {number}")
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(Slices().through(steps()), other())

    asyncio.run(both())
    assert seen == ["step 0", "other 0", "step 1", "other 1", "step 2", "other 2"]


def test_within_a_slice_nothing_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_NS", 10**15)
    seen: list[int] = []

    async def both() -> None:
        asyncio.get_running_loop().call_soon(seen.append, 7)
        await Slices().through(iter(range(100)))
        assert seen == []

    asyncio.run(both())


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_items_come_in_order(tiny: None, count: int) -> None:  # noqa: ARG001 (a fixture)
    items = [(number, str(number)) for number in range(count)]
    shuffled = random.Random(count).sample(items, count)

    async def ordered() -> list[tuple[int, str]]:
        return list(await Slices().in_order(shuffled, lambda item: item[0]))

    assert asyncio.run(ordered()) == items
