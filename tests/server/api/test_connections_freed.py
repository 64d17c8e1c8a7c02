"""A closed connection is freed by reference counting alone.

The cycle collector does not look at what was alive when the daemon hid its entries from it. So a
connection that refers to itself would stay for ever, if it was open at that moment.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.proto import prefixd_pb2 as pb
from tests.support.columns import Item
from tests.support.data_client import Refused, data_connection
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Running, in_ram, key

CONNECTIONS = 3
DATA = b"x" * 1000


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def all_gone(daemon: Running, made: list[weakref.ref[object]]) -> None:
    await daemon.until(lambda: not any(each() is not None for each in made))


@in_loop
async def test_local_connections(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        server = daemon.front.local
        lines = [await daemon.connect_locally() for _ in range(CONNECTIONS)]
        for line in lines:
            await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))
        made = [weakref.ref(each) for each in server.connections]
        assert len(made) == CONNECTIONS
        for line in lines:
            line.close()
        await all_gone(daemon, [*made])


async def read_something(daemon: Running, session: OpenSession) -> None:
    async with data_connection(daemon, session) as line:
        lookup = pb.LookupRequest(keys=[key(1)])
        await line.ask(lookup=lookup)
        (made,) = map(weakref.ref, daemon.front.data.connections)
    await all_gone(daemon, [made])


@in_loop
async def test_data_connections(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        await read_something(daemon, session)
        # One that ends with an error.
        async with data_connection(daemon, session) as line:
            await line.ask(lookup=pb.LookupRequest(keys=[key(1)]))
            (made,) = map(weakref.ref, daemon.front.data.connections)
            await line.send_bytes(b"\xff" * 100)
            with pytest.raises((Refused, EOFError, ConnectionError)):
                await line.response()
        await all_gone(daemon, [made])


@in_loop
async def test_what_waited_for_a_save(tmp_path: Path) -> None:
    """A connection that was lost while its request waited."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open()
        (token,) = await session.granted([Item(key=key(5), payload_bytes=9)])
        line = await daemon.connect_locally()
        claim = pb.ClaimRequest(
            session=session.ref, keys=[key(5)], wait_ms=60_000, mode=pb.CLAIM_MODE_RUN
        )
        await line.send(claim=claim)
        await daemon.until(lambda: daemon.tables.waiting)
        made = [weakref.ref(each) for each in daemon.front.local.connections]
        line.close()
        await all_gone(daemon, made)
        await session.close()
        assert token
        await asyncio.sleep(0)
