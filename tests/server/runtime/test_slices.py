"""Long work leaves room for everything else; a recount is exact while clients work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server.core import checking
from prefixd.server.runtime import rounds
from prefixd.server.runtime.rounds import Slices, recount
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, key, payload, running


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of no time."""
    monkeypatch.setattr(rounds, "SLICE_NS", 0)


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
    monkeypatch.setattr(rounds, "SLICE_NS", 10**15)
    seen: list[int] = []

    async def both() -> None:
        asyncio.get_running_loop().call_soon(seen.append, 7)
        await Slices().through(iter(range(100)))
        assert seen == []

    asyncio.run(both())


# ---- the recount


async def work(session: OpenSession, first: int) -> None:
    for number in range(first, first + 30):
        tier = list(Tier)[number % 3]
        await session.save({key(number): payload(number)}, tier)
        claimed = await session.claim([key(number)])
        await session.save({key(number + 1_000): payload(1)}, tier)
        await session.release(claimed.claim_id)


@in_loop
async def test_nothing_is_wrong_while_clients_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SLICE_NS", 0)
    async with running(tmp_path, "--ram.budget=64KiB") as daemon:
        sessions = [await daemon.open() for _ in range(3)]
        working = asyncio.gather(*(work(one, 100 * n) for n, one in enumerate(sessions)))
        counted = 0
        while not working.done():
            assert await recount(daemon.core.state) == ([], 0)
            counted += 1
        await working
        assert counted > 1
        await daemon.assert_sound()


@in_loop
async def test_a_recount_that_fails_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as daemon:

        def fail(_: object) -> None:
            raise KeyError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(checking.Recount, "_compare", fail)
            problems, count = await recount(daemon.core.state)
        assert problems == ["the recount failed: KeyError('a bug')"]
        assert count == 1
        assert daemon.tables.recounts == []
