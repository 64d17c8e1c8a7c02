"""A client that sends many small requests ahead on the local socket delays no others, and loses no
request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.server.api import connections as module
from prefixd.server.api.local_socket import _Connection
from tests.support.bare import bare, frame, served
from tests.support.running import in_loop, key, payload, running

DATA = payload(1)
LOOKUP = pb.LookupRequest(keys=[key(1)])


@pytest.mark.parametrize("kind", ["give_back", "attach", "lookup"])
@in_loop
async def test_one_that_sends_ahead_takes_turns_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whether a callback answers, or the task, or there is no answer."""
    monkeypatch.setattr(module, "AT_ONCE", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        happened: list[str] = []

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any) -> Any:
                happened.append("taken")
                return function(*args)

            return noted

        server = daemon.local_server
        server.at_once["give_back"] = noting(server.at_once["give_back"])
        server.methods["lookup"] = noting(server.methods["lookup"])
        monkeypatch.setattr(_Connection, "_attach", noting(_Connection._attach))

        async def others() -> None:
            while True:
                happened.append("others")
                await asyncio.sleep(0)

        asked: dict[str, Any] = {
            "give_back": pb.ReleaseRequest(session=session.ref, claim_ids=[1]),
            "attach": session.ref,
            "lookup": LOOKUP,
        }
        last = frame(lookup=pb.LookupRequest(keys=[key(1), key(2), key(3)]))
        with bare(daemon) as connection:
            ticking = asyncio.ensure_future(others())
            await connection.send(frame(**{kind: asked[kind]}) * 100 + last)
            while len((await connection.response()).lookup.results) != 3:
                pass
            ticking.cancel()
            assert served(daemon)._transport.is_reading()
        turns = "".join("t" if each == "taken" else " " for each in happened).split()
        assert sum(map(len, turns)) == 101
        # The task also answers the requests that were taken in the turn before.
        assert max(map(len, turns)) <= (4 if kind == "lookup" else 2)


@in_loop
async def test_who_gives_back_much_and_hangs_up_has_given_back_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA})
        claims = [(await session.claim([key(1)])).claim_id for _ in range(9)]
        requests = [pb.ReleaseRequest(session=session.ref, claim_ids=[each]) for each in claims]
        with bare(daemon) as connection:
            await connection.send(b"".join(frame(give_back=request) for request in requests))
        await daemon.until(lambda: not daemon.tables.claims)
        await daemon.until(lambda: not daemon.local_server.connections)


@in_loop
async def test_a_connection_that_ends_within_what_it_sent_ahead_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        with bare(daemon) as connection:
            request = pb.ReleaseRequest(session=session.ref, claim_ids=[1])
            await connection.send(frame(give_back=request) * 1_000)
            connections = daemon.local_server.connections
            await daemon.until(lambda: any(each._turn.over for each in connections))
            theirs = served(daemon)
            await theirs.hang_up()
            await daemon.until(lambda: not daemon.local_server.connections)
            assert not theirs._turn.over
            assert daemon.local_server.buffered_bytes == 0
