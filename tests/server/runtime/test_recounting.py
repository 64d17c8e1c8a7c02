"""A recount of a running daemon: exact while clients work, and no exception of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prefixd.proto.vocabulary import Tier
from prefixd.server.core import checking
from prefixd.server.runtime import slices
from prefixd.server.runtime.recounting import recount
from tests.support.running import OpenSession, in_loop, key, payload, running


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
    monkeypatch.setattr(slices, "SLICE_NS", 0)
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
