"""The half of the client that saves; `client.Client` inherits it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ..proto.keys import Key
from ..proto.vocabulary import SaveReason, Tier
from .results import SaveOutcome
from .saves import Reservation, SaveItem, Writer
from .wire.transport import ReserveItem, SaveTerms

if TYPE_CHECKING:
    from ..proto.keys import Tokens
    from .buffers import Payload


class Saves(ABC):
    """Saving payloads, at once, in their turn, or after having reserved the right to."""

    _writer: Writer

    @abstractmethod
    def _check_usable(self) -> None:
        """Raises CallerError if the client can't be used (any more)."""

    def save(
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
        """Save one payload, and wait until it is published; see `save_many` and `SaveItem`."""
        item = SaveItem(key, payload, token_count, layer_count, token_ids)
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save([item], terms, deadline_ms)[0]

    def save_async(
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
    ) -> Future[SaveOutcome]:
        """Save one payload in its turn; see `save_many_async` and `SaveItem`."""
        item = SaveItem(key, payload, token_count, layer_count, token_ids)
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save_one_async(item, terms, deadline_ms)

    def save_many(
        self,
        items: Sequence[SaveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """Save payloads to one tier, in one rpc, and wait until they are published, at most
        `save_timeout_ms` (or `deadline_ms`); of a chain: root first. Returns how each ended.

        `reason`: why, for those who look at the cache. `ancestors`: the blocks before the first
        item, root first; they are used by this save. `wait_ms`: how long to wait for others that
        save the same keys.

        More items than one call takes, or than a session may have reserved in a tier at once, go
        in several calls, and a key that is named twice in two.
        Raises InvalidKey, InvalidSize, UnknownTier, UnknownReason; what the daemon refuses, such
        as a tier that it does not have, is an outcome.
        """
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save(items, terms, deadline_ms)

    def save_many_async(
        self,
        items: Sequence[SaveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Future[list[SaveOutcome]]:
        """`save_many` in its turn, by another thread: never blocks, and the future holds how each
        item ended.

        Calls are worked off in their order (by several `savers`: begun in it). Beyond
        `max_pending_saves` of them, or `max_pending_bytes` of payload, they are dropped and
        counted; `would_drop` tells before the work is done. Payloads are referenced, not copied:
        don't change them until then.
        """
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save_async(items, terms, deadline_ms)

    def would_drop(self, payload_bytes: int = 0) -> bool:
        """Would an asynchronous save of `payload_bytes` be dropped at this moment? Ask before the
        payload is made. What is larger than `max_pending_bytes` is taken when nothing waits."""
        self._check_usable()
        return self._writer.would_drop(payload_bytes)

    @property
    def pending_saves(self) -> int:
        """Asynchronous saves that wait or are under way."""
        return self._writer.pending[0]

    @property
    def pending_save_bytes(self) -> int:
        """The payload of those, which the caller may not change yet."""
        return self._writer.pending[1]

    def reserve(
        self,
        items: Sequence[ReserveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        ttl_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[Reservation]:
        """Ask for the exclusive right to save keys, and for their room, before computing them.

        Of several clients that miss the same key one is granted it and computes; the others
        learn who that is, or with `wait_ms` wait until it is PRESENT. `ttl_ms`: how long a
        reservation lasts, 0: as long as the daemon says. One rpc. Raises as `save_many`.
        """
        terms = self._terms(tier, reason, ancestors, wait_ms, ttl_ms)
        return self._writer.reserve(items, terms, deadline_ms)

    def write(
        self,
        writes: Sequence[tuple[Reservation, Payload]],
        *,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """Save the payloads of granted reservations, in one rpc; see `Reservation.write`."""
        self._check_usable()
        return self._writer.write(writes, deadline_ms)

    def cancel(
        self, reservations: Sequence[Reservation], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """Give reservations back, in one rpc; see `Reservation.cancel`."""
        self._check_usable()
        return self._writer.cancel(reservations, deadline_ms)

    def flush(self, *, deadline_ms: int | None = None) -> bool:
        """Wait for the asynchronous saves so far. False: that took longer.

        Also allowed in the done-callback of a save, where it does those that wait itself."""
        self._check_usable()
        return self._writer.flush(deadline_ms)

    def _terms(
        self,
        tier: Tier,
        reason: SaveReason,
        ancestors: Sequence[Key],
        wait_ms: int,
        ttl_ms: int = 0,
    ) -> SaveTerms:
        self._check_usable()
        return SaveTerms(tier, reason, ancestors, wait_ms, ttl_ms)
