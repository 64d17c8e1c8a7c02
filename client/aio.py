"""The asyncio client: the methods of the client as coroutines, and no logic of its own.

Each call runs on the synchronous client, in one of a few threads. That is no detour: gRPC's
asyncio stack takes as long for a call as its synchronous one, most of a call is waiting, which
leaves other threads alone (bytes are copied a chunk of 1 MiB at a time), and one implementation
can't disagree with itself. Asynchronous saves need no thread of these: they have their own.

Calls that wait (with `wait_ms`, for a synchronous save, for `flush`) have threads of their own,
64 at most, so that they hold up no others. A call whose task is cancelled raises CancelledError at
once; in its thread it goes on to its end, at the latest its deadline, and what it then has claimed
or reserved is given back. Nothing here blocks the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Final

from ..proto.keys import Key, Namespace
from ..proto.limits import DEFAULT_BLOCK_TOKENS
from .aio_calls import Asynchronous, Runner, awaited, coroutine, same
from .benefit import LoadSpeeds
from .client import Client
from .counters import Snapshot
from .hits import Hit
from .owner import Owner
from .pins import HitFacts
from .policy import SavePolicy
from .results import ReserveStatus, RestoreResult, SaveOutcome
from .saves import Reservation
from .search import BlockChain
from .wire.transport import ReserveItem

if TYPE_CHECKING:
    from ..proto.keys import Tokens
    from .buffers import Payload

DEFAULT_MAX_CONCURRENCY: Final = 8


class AsyncHit(HitFacts, Asynchronous):
    """`Hit` with coroutines. Release it with `async with`, or with `release`."""

    def __init__(self, hit: Hit, runner: Runner) -> None:
        """Made by the client."""
        Asynchronous.__init__(self, hit, runner)
        HitFacts.__init__(self, hit._pins, hit.entries, hit.token_counts, hit.positions, hit.miss)
        self.hit = hit

    buffers: list[memoryview] | None = same("buffers")
    #: When it is cancelled, it may go on writing into the buffers until its deadline.
    restore_into = coroutine(Hit.restore_into)
    read = coroutine(Hit.read)
    views = coroutine(Hit.views)
    prefault = coroutine(Hit.prefault)
    layer = coroutine(Hit.layer)
    token_ids = coroutine(Hit.token_ids)
    release_some = coroutine(Hit.release_some)
    release = coroutine(Hit.release)

    async def __aenter__(self) -> AsyncHit:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncReservation(Asynchronous):
    """`Reservation` with coroutines; cancelled by the end of an `async with`."""

    item: ReserveItem = same("item")
    key: Key = same("key")
    status: ReserveStatus = same("status")
    owner: str = same("owner")
    age_ms: int = same("age_ms")
    message: str = same("message")
    granted: bool = same("granted")
    lost: bool = same("lost")

    def __init__(self, reservation: Reservation, runner: Runner) -> None:
        """Made by the client."""
        super().__init__(reservation, runner)
        self.reservation = reservation

    def __repr__(self) -> str:
        return f"<Async{repr(self.reservation)[1:]}"

    write = coroutine(Reservation.write)
    cancel = coroutine(Reservation.cancel)

    async def __aenter__(self) -> AsyncReservation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()


def _maybe_hit(hit: Hit | None, runner: Runner) -> AsyncHit | None:
    return None if hit is None else AsyncHit(hit, runner)


def _reservations(granted: list[Reservation], runner: Runner) -> list[AsyncReservation]:
    return [AsyncReservation(each, runner) for each in granted]


class AsyncClient(Asynchronous):
    """A `Client` with coroutines. Close it with `async with`, or with `close`."""

    def __init__(self, client: Client, *, max_concurrency: int = DEFAULT_MAX_CONCURRENCY) -> None:
        """`client` belongs to this one from now on, which closes it; its own methods stay usable.
        `max_concurrency`: calls under way at a time, beside those that wait (see the module);
        others wait their turn, within their deadline. Raises InvalidSize for none."""
        super().__init__(client, Runner(max_concurrency, client.deadline_ms, Owner()))
        self.client = client

    # ---- looking for state

    longest_prefix = coroutine(Client.longest_prefix, _maybe_hit)
    resume = coroutine(Client.resume, _maybe_hit, waits=True)
    longest_run = coroutine(Client.longest_run, AsyncHit)
    claim = coroutine(Client.claim, AsyncHit)
    probe = coroutine(Client.probe)
    #: When it is cancelled, it may go on writing into the buffers until its deadline.
    restore_keys = coroutine(Client.restore_keys)
    exists = coroutine(Client.exists)
    exists_one = coroutine(Client.exists_one)
    leading_run = coroutine(Client.leading_run)
    touch = coroutine(Client.touch)
    delete = coroutine(Client.delete)

    def chain(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        *,
        include_partial: bool = False,
    ) -> BlockChain:
        """`Client.chain`; no coroutine, for it makes no call."""
        return self.client.chain(namespace, tokens, block_tokens, include_partial=include_partial)

    # ---- restoring it

    async def restore_into(
        self,
        hit: AsyncHit,
        buffers: Sequence[Payload],
        *,
        indices: Sequence[int] | None = None,
        deadline_ms: int | None = None,
    ) -> RestoreResult:
        """`Client.restore_into`."""
        return await hit.restore_into(buffers, indices=indices, deadline_ms=deadline_ms)

    async def release_many(
        self, hits: Sequence[AsyncHit], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """`Client.release_many`."""
        released = [hit.hit for hit in hits]
        return await self._runner.run(self.client.release_many, released, deadline_ms=deadline_ms)

    # ---- saving it

    save = coroutine(Client.save, saves=True)
    save_async = awaited(Client.save_async)
    save_many = coroutine(Client.save_many, saves=True)
    save_many_async = awaited(Client.save_many_async)
    reserve = coroutine(Client.reserve, _reservations)
    flush = coroutine(Client.flush, waits=True)

    def would_drop(self, payload_bytes: int = 0) -> bool:
        """`Client.would_drop`; no coroutine, for it makes no call."""
        return self.client.would_drop(payload_bytes)

    async def write(
        self,
        writes: Sequence[tuple[AsyncReservation, Payload]],
        *,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """`Client.write`."""
        payloads = [(each.reservation, payload) for each, payload in writes]
        return await self._runner.run(self.client.write, payloads, deadline_ms=deadline_ms)

    async def cancel(
        self, reservations: Sequence[AsyncReservation], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """`Client.cancel`."""
        ended = [each.reservation for each in reservations]
        return await self._runner.run(self.client.cancel, ended, deadline_ms=deadline_ms)

    # ---- this client

    in_place: bool = same("in_place")
    pending_saves: int = same("pending_saves")
    pending_save_bytes: int = same("pending_save_bytes")
    policy: SavePolicy = same("policy")
    speeds: LoadSpeeds = same("speeds")
    deadline_ms: int = same("deadline_ms")
    save_timeout_ms: int = same("save_timeout_ms")
    counters: Snapshot = same("counters")
    connected: bool = same("connected")
    under_pressure: bool = same("under_pressure")
    wait_connected = coroutine(Client.wait_connected, waits=True)

    async def close(self, *, deadline_ms: int | None = None) -> None:
        """`Client.close`. Calls under way end as misses."""
        closed: Future[None] = Future()
        closed.set_running_or_notify_cancel()  # begun: a cancelled task no longer stops it
        # Not one of the threads of the calls: those may all be waiting for the daemon.
        threading.Thread(
            target=self._close, args=(closed, deadline_ms), name="prefixd-aio-close", daemon=True
        ).start()
        await asyncio.wrap_future(closed)

    def _close(self, closed: Future[None], deadline_ms: int | None) -> None:
        until_s = monotonic() + (self.deadline_ms if deadline_ms is None else deadline_ms) / 1e3
        try:
            self.client.close(deadline_ms=deadline_ms)
            self._runner.close(max(0.0, until_s - monotonic()))
        except BaseException as problem:
            closed.set_exception(problem)
        else:
            closed.set_result(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
