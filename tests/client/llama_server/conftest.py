"""A daemon for the tests of a folder, and the proxy between a client and a fake llama-server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web

from prefixd.client import AsyncClient, Client
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.llama_server.folder import SlotFolder
from prefixd.client.llama_server.gateway import Gateway, Settings
from prefixd.client.llama_server.upstream import Upstream
from prefixd.client.policy import SavePolicy
from tests.support.daemon import private_daemon
from tests.support.fake_llama import FakeLlama

#: Generous, for a loaded machine: only a failing test waits this long.
PATIENCE_S = 20.0
#: Prompts of the tests are short.
POLICY = SavePolicy(
    min_tokens=64,
    cold_min_tokens=64,
    boundary_align_tokens=128,
    continued_interval_tokens=512,
)


@pytest.fixture(scope="session")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="32MiB", shm="32MiB", disk="0") as daemon:
        yield daemon


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


class Proxy:
    """A gateway that runs, and a client of it."""

    def __init__(self, folder: Path, llama: Any, address: str, settings: Settings) -> None:
        self.folder = folder
        self.llama = llama
        self._address = address
        self._settings = settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        llama = web.AppRunner(
            self.llama.application(), handler_cancellation=True, shutdown_timeout=0
        )
        await enter(_served(llama, self.folder.parent / "llama.sock"))
        slots = SlotFolder(self.folder)
        self._stack.callback(slots.close)
        client = Client(self._address, name="test", deadline_ms=5_000)
        self.cache = await enter(AsyncClient(client))
        await self.cache.wait_connected()
        upstream = Upstream("http://localhost", str(self.folder.parent / "llama.sock"))
        self._stack.push_async_callback(upstream.close)
        self.gateway = Gateway(upstream, self.cache, slots, self._settings)
        self.listens = self.folder.parent / "gateway.sock"
        await enter(_served(self.gateway.runner(), self.listens))
        connector = aiohttp.UnixConnector(str(self.listens))
        self.session = await enter(aiohttp.ClientSession("http://localhost", connector=connector))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, prompt: Any, wanted: int = 4, **more: Any) -> str:
        """The text of a completion."""
        body = {"prompt": prompt, "n_predict": wanted, **more}
        headers = more.pop("headers", None)
        body.pop("headers", None)
        async with self.session.post("/completion", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        if not more.get("stream"):
            return str(json.loads(text)["content"])
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        return "".join(event["content"] for event in events)

    async def evaluated(self, work: Awaitable[Any]) -> tuple[Any, int]:
        """The result, and how many tokens the server evaluated for it."""
        before = self.llama.evaluated
        result = await work
        return result, self.llama.evaluated - before

    async def settled(self) -> None:
        """Wait until everything is saved that will be."""
        while tasks := list(self.gateway._background):
            await asyncio.wait(tasks)
        await self.cache.flush()

    def count(self, name: str, label: str) -> int:
        return self.gateway.counts.get(name, label)

    async def forget(self) -> None:
        """A new process of the server."""
        await self.settled()
        self.llama.start()


Run = Callable[[FakeLlama, Callable[[Proxy], Awaitable[None]]], None]


@asynccontextmanager
async def _served(runner: web.AppRunner, path: Path) -> AsyncIterator[None]:
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)


@pytest.fixture
def through(daemon: PrivateDaemon, folder: Path) -> Callable[..., None]:
    """Run a test against a fake server behind a proxy: `through(test, **of_the_fake)`."""

    def run(
        test: Callable[[Proxy], Awaitable[None]],
        *,
        address: str | None = None,
        settings: dict[str, Any] | None = None,
        **of_the_fake: Any,
    ) -> None:
        async def main() -> None:
            llama = FakeLlama(folder, **of_the_fake)
            chosen = Settings(**{"policy": POLICY, "idle_s": 0.0, **(settings or {})})
            async with Proxy(folder, llama, address or daemon.address, chosen) as proxy:
                await test(proxy)

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    return run
