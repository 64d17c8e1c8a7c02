"""The asyncio twin of the client: the same methods as coroutines, and no logic of its own.

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
from types import TracebackType
from typing import TYPE_CHECKING, Final

from ..proto.keys import Key, Namespace
from ..proto.limits import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_DEADLINE_MS,
    DEFAULT_SAVE_TIMEOUT_MS,
    DEFAULT_SHARED_WAIT_MS,
)
from ..proto.vocabulary import SaveReason, Tier
from .aio_hit import AsyncHit, AsyncReservation, Runner
from .benefit import LoadSpeeds
from .client import DEFAULT_MAX_PENDING_BYTES, DEFAULT_MAX_PENDING_SAVES, Client
from .counters import Counters, Snapshot
from .owner import Owner
from .policy import SavePolicy
from .restores import Verify
from .results import ClaimMode, DeleteStatus, Found, RestoreResult, SaveOutcome
from .saves import SaveItem
from .search import BlockChain
from .wire.session import DEFAULT_CONNECT_TIMEOUT_MS
from .wire.transport import ReserveItem, Transport

if TYPE_CHECKING:
    from ..proto.keys import Tokens
    from .buffers import Payload

DEFAULT_MAX_CONCURRENCY: Final = 8


class AsyncClient:
    """`client.Client` with coroutines. Close it with `async with`, or with `close`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str | None = None,
        label: str | None = None,
        deadline_ms: int = DEFAULT_DEADLINE_MS,
        connect_timeout_ms: int = DEFAULT_CONNECT_TIMEOUT_MS,
        save_timeout_ms: int = DEFAULT_SAVE_TIMEOUT_MS,
        lease_ms: int = 0,
        policy: SavePolicy | None = None,
        verify: Verify = "always",
        prefill_tokens_per_s: float | None = None,
        min_benefit_ms: float = 0.0,
        shared_wait_ms: int = DEFAULT_SHARED_WAIT_MS,
        max_pending_saves: int = DEFAULT_MAX_PENDING_SAVES,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
        savers: int = 1,
        local: bool = True,
        transport: Transport | None = None,
        counters: Counters | None = None,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
    ) -> None:
        """As `Client`. `max_concurrency`: calls under way at a time, beside those that wait (see
        the module); others wait their turn, within their deadline."""
        self._runner = Runner(max_concurrency, deadline_ms, Owner())
        self._client = Client(
            address,
            name=name,
            label=label,
            deadline_ms=deadline_ms,
            connect_timeout_ms=connect_timeout_ms,
            save_timeout_ms=save_timeout_ms,
            lease_ms=lease_ms,
            policy=policy,
            verify=verify,
            prefill_tokens_per_s=prefill_tokens_per_s,
            min_benefit_ms=min_benefit_ms,
            shared_wait_ms=shared_wait_ms,
            max_pending_saves=max_pending_saves,
            max_pending_bytes=max_pending_bytes,
            savers=savers,
            local=local,
            transport=transport,
            counters=counters,
        )

    # ---- looking for state

    async def longest_prefix(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        claim: bool = True,
        exact_end: bool = False,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> AsyncHit | None:
        """`Client.longest_prefix`."""
        hit = await self._runner.run(
            self._client.longest_prefix,
            namespace,
            tokens,
            claim=claim,
            exact_end=exact_end,
            wait_ms=wait_ms,
            deadline_ms=deadline_ms,
        )
        return None if hit is None else AsyncHit(hit, self._runner)

    async def resume(
        self,
        parent_key: Key,
        tokens: Tokens,
        wait_ms: int | None = None,
        *,
        namespace: Namespace,
        exact_end: bool = False,
        deadline_ms: int | None = None,
    ) -> AsyncHit | None:
        """`Client.resume`."""
        hit = await self._runner.run_waiting(
            self._client.resume,
            parent_key,
            tokens,
            wait_ms,
            namespace=namespace,
            exact_end=exact_end,
            deadline_ms=deadline_ms,
        )
        return None if hit is None else AsyncHit(hit, self._runner)

    def chain(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        *,
        include_partial: bool = False,
    ) -> BlockChain:
        """`Client.chain`; no coroutine, for it asks nobody."""
        return self._client.chain(namespace, tokens, block_tokens, include_partial=include_partial)

    async def longest_run(
        self,
        keys: BlockChain | Sequence[Key],
        *,
        claim: bool = True,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
    ) -> AsyncHit:
        """`Client.longest_run`."""
        hit = await self._runner.run(
            self._client.longest_run,
            keys,
            claim=claim,
            wait_ms=wait_ms,
            deadline_ms=deadline_ms,
            prompt_tokens=prompt_tokens,
        )
        return AsyncHit(hit, self._runner)

    async def claim(
        self,
        keys: Sequence[Key],
        *,
        mode: ClaimMode = ClaimMode.ANY,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> AsyncHit:
        """`Client.claim`."""
        hit = await self._runner.run(
            self._client.claim, keys, mode=mode, wait_ms=wait_ms, deadline_ms=deadline_ms
        )
        return AsyncHit(hit, self._runner)

    async def probe(
        self, keys: Sequence[Key], *, wait_ms: int = 0, deadline_ms: int | None = None
    ) -> list[Found]:
        """`Client.probe`."""
        return await self._runner.run(
            self._client.probe, keys, wait_ms=wait_ms, deadline_ms=deadline_ms
        )

    async def exists(
        self,
        keys: Sequence[Key],
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
    ) -> list[bool]:
        """`Client.exists`. With `in_place_only` no thread is asked."""
        if in_place_only:
            return self._client.exists(keys, in_place_only=True)
        return await self._runner.run(self._client.exists, keys, deadline_ms=deadline_ms)

    async def exists_one(
        self, key: Key, *, in_place_only: bool = False, deadline_ms: int | None = None
    ) -> bool:
        """`Client.exists_one`. With `in_place_only` no thread is asked."""
        if in_place_only:
            return self._client.exists_one(key, in_place_only=True)
        return await self._runner.run(self._client.exists_one, key, deadline_ms=deadline_ms)

    async def leading_run(
        self,
        keys: BlockChain | Sequence[Key],
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
    ) -> int:
        """`Client.leading_run`. With `in_place_only` no thread is asked."""
        if in_place_only:
            return self._client.leading_run(keys, in_place_only=True)
        return await self._runner.run(self._client.leading_run, keys, deadline_ms=deadline_ms)

    async def touch(self, keys: Sequence[Key]) -> None:
        """`Client.touch`."""
        await self._runner.run(self._client.touch, keys)

    async def delete(
        self, keys: Sequence[Key], *, deadline_ms: int | None = None
    ) -> list[DeleteStatus]:
        """`Client.delete`."""
        return await self._runner.run(self._client.delete, keys, deadline_ms=deadline_ms)

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
        return await self._runner.run(
            self._client.restore_into, hit.hit, buffers, indices=indices, deadline_ms=deadline_ms
        )

    async def release_many(
        self, hits: Sequence[AsyncHit], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """`Client.release_many`."""
        return await self._runner.run(
            self._client.release_many, [hit.hit for hit in hits], deadline_ms=deadline_ms
        )

    # ---- saving it

    async def save(
        self,
        key: Key,
        payload: Payload,
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        token_count: int | None = None,
        layer_count: int = 0,
        token_ids: Tokens | bytes | None = None,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> SaveOutcome:
        """`Client.save`."""
        item = SaveItem(key, payload, token_count, layer_count, token_ids)
        outcomes = await self.save_many(
            [item],
            tier=tier,
            reason=reason,
            ancestors=ancestors,
            wait_ms=wait_ms,
            deadline_ms=deadline_ms,
        )
        return outcomes[0]

    async def save_async(
        self,
        key: Key,
        payload: Payload,
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        token_count: int | None = None,
        layer_count: int = 0,
        token_ids: Tokens | bytes | None = None,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> SaveOutcome:
        """`Client.save_async`, to be awaited: it takes its place in the queue when its task
        starts. What is cancelled before its turn is not done."""
        saving = self._client.save_async(
            key,
            payload,
            token_count=token_count,
            layer_count=layer_count,
            token_ids=token_ids,
            tier=tier,
            reason=reason,
            ancestors=ancestors,
            wait_ms=wait_ms,
            deadline_ms=deadline_ms,
        )
        return await asyncio.wrap_future(saving)

    async def save_many(
        self,
        items: Sequence[SaveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """`Client.save_many`."""
        return await self._runner.run_waiting(
            self._client.save_many,
            items,
            tier=tier,
            reason=reason,
            ancestors=ancestors,
            wait_ms=wait_ms,
            deadline_ms=self._client.save_timeout_ms if deadline_ms is None else deadline_ms,
        )

    async def save_many_async(
        self,
        items: Sequence[SaveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """`Client.save_many_async`, to be awaited as `save_async` is."""
        saving = self._client.save_many_async(
            items,
            tier=tier,
            reason=reason,
            ancestors=ancestors,
            wait_ms=wait_ms,
            deadline_ms=deadline_ms,
        )
        return await asyncio.wrap_future(saving)

    def would_drop(self, payload_bytes: int = 0) -> bool:
        """`Client.would_drop`; no coroutine, for it asks nobody."""
        return self._client.would_drop(payload_bytes)

    async def reserve(
        self,
        items: Sequence[ReserveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        ttl_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[AsyncReservation]:
        """`Client.reserve`."""
        reservations = await self._runner.run(
            self._client.reserve,
            items,
            tier=tier,
            reason=reason,
            ancestors=ancestors,
            wait_ms=wait_ms,
            ttl_ms=ttl_ms,
            deadline_ms=deadline_ms,
        )
        return [AsyncReservation(each, self._runner) for each in reservations]

    async def write(
        self,
        writes: Sequence[tuple[AsyncReservation, Payload]],
        *,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """`Client.write`."""
        return await self._runner.run(
            self._client.write,
            [(each.reservation, payload) for each, payload in writes],
            deadline_ms=deadline_ms,
        )

    async def cancel(
        self, reservations: Sequence[AsyncReservation], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """`Client.cancel`."""
        return await self._runner.run(
            self._client.cancel,
            [each.reservation for each in reservations],
            deadline_ms=deadline_ms,
        )

    async def flush(self, *, deadline_ms: int | None = None) -> bool:
        """`Client.flush`."""
        return await self._runner.run_waiting(self._client.flush, deadline_ms=deadline_ms)

    # ---- this client

    @property
    def in_place(self) -> bool:
        """`Client.in_place`."""
        return self._client.in_place

    @property
    def pending_saves(self) -> int:
        """`Client.pending_saves`."""
        return self._client.pending_saves

    @property
    def pending_save_bytes(self) -> int:
        return self._client.pending_save_bytes

    @property
    def policy(self) -> SavePolicy:
        return self._client.policy

    @property
    def speeds(self) -> LoadSpeeds:
        return self._client.speeds

    @property
    def deadline_ms(self) -> int:
        return self._client.deadline_ms

    @property
    def save_timeout_ms(self) -> int:
        return self._client.save_timeout_ms

    @property
    def counters(self) -> Snapshot:
        """`Client.counters`."""
        return self._client.counters

    @property
    def connected(self) -> bool:
        """`Client.connected`."""
        return self._client.connected

    @property
    def under_pressure(self) -> bool:
        return self._client.under_pressure

    async def wait_connected(self, *, deadline_ms: int | None = None) -> bool:
        """`Client.wait_connected`."""
        return await self._runner.run_waiting(self._client.wait_connected, deadline_ms=deadline_ms)

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
            self._client.close(deadline_ms=deadline_ms)
            self._runner.close(max(0.0, until_s - monotonic()))
        except BaseException as problem:
            closed.set_exception(problem)
        else:
            closed.set_result(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
